"""atroposlib's run-api behind a door: who calls, by which name, from what, and how much.

    python -m atropos_api --host 127.0.0.1 --port 8000

Importing this package imports neither atroposlib nor FastAPI.
"""
