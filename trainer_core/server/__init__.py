"""The inference server as the trainer sees it."""
