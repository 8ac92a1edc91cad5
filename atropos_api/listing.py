"""`GET /envs`: who is registered, which run-api itself tells nobody."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI


def add_listing(app: FastAPI) -> None:
    """Give atroposlib's application this route."""

    @app.get("/envs")
    async def envs() -> dict[str, list[dict[str, Any]]]:
        """Every environment since the trainer's registration; `registered_at` in Unix seconds."""
        known = getattr(app.state, "envs", [])
        return {
            "envs": [
                {"name": env["desired_name"], "connected": env["connected"], "registered_at": env["last_update"]}
                for env in known
            ]
        }
