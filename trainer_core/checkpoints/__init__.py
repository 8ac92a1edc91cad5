"""Checkpoints: what they hold, how they are written, resumed and resharded."""
