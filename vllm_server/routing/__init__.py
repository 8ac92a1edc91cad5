"""Which experts of a mixture the engine took for each token, kept for the trainer that takes the same ones."""
