"""How every route of this server says that something is wrong."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse


def error_response(status: int, reason: str, **extra: Any) -> JSONResponse:
    """The one shape of our errors."""
    return JSONResponse({"error": reason, **extra}, status_code=status)
