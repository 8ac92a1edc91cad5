"""What every HTTP client of this project has in common."""

from __future__ import annotations

import httpx

LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
"""uvicorn, as run-api and a stock vLLM have it, closes a connection that was idle for five seconds. httpx's limit is
the same, and a request sent at that very moment is lost without an answer. A client with a transport of its own takes
no heed of its own `limits`: they are the transport's then."""
