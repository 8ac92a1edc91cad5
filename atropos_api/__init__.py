"""atroposlib's run-api, with auth middleware, limits and batches of our own in front of it.

    python -m atropos_api --host 127.0.0.1 --port 8000

Importing this package imports neither atroposlib nor FastAPI.
"""
