"""What the four programs share: stream records, run directory, control messages, tensor manifest, model arithmetic.

A leaf: it imports pydantic and the standard library, nothing of ours and no torch, so that every program
(trainer, vLLM server, supervisor, screen) can share it.
"""
