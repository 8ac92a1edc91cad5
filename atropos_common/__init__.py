"""What the four programs share: stream records, run directory, control messages, tensor manifest, model arithmetic.

A leaf: nothing of ours is imported, and beside pydantic only httpx (`http`) and torch (`group`), so that every program
(trainer, vLLM server, supervisor, screen) can share it.
"""
