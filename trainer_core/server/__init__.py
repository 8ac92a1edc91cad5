"""The inference server from the trainer's side."""
