"""One optimizer step: minibatches, gradients, optimizers."""
