"""What the four programs share: stream records, run directory, control messages, tensor manifest, model arithmetic.

A leaf: nothing of ours is imported, and beside pydantic and psutil only httpx, starlette, uvicorn and torch, each where
it is needed, so that every program (trainer, vLLM server, supervisor, screen) can share it.
"""
