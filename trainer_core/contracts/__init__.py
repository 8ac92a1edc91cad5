"""What the parts of the stack say to each other: stream records, run directory, control messages, tensor manifest.

A leaf: it imports pydantic and the standard library, nothing of ours and no torch, so that every program
(trainer, vLLM server, supervisor, screen) can share it.
"""
