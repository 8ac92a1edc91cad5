"""atroposlib's run-api behind an auth middleware, with batches of our own.

python -m atropos_api --host 127.0.0.1 --port 8000
"""
