"""Losses, and the comparison of trainer and engine logprobs: pure functions that return sums."""
