"""Code that the four programs share: stream records, run directory, control messages, tensor
manifest, model arithmetic.

This package imports nothing else of the project. Its modules need pydantic and psutil; a few also
need httpx, starlette, uvicorn or torch.
"""
