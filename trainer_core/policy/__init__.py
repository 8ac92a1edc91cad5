"""The trained model: loading, attention over packed rows, logprobs."""
