"""Causes of a difference between two sets of logprobs of the same tokens, and their tests.

The trainer's gate and `atropos-tui audit` ask the same functions.
"""
