"""`/lora/*`: what this server can say about adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from vllm_server.generate import error_response

_NOT_HERE = (
    "adapters are loaded by vLLM's own POST /v1/load_lora_adapter (start with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1); this route does not exist yet"
)


def make_router(engine: Any) -> APIRouter:
    """Status tells the truth; load and unload answer 501 with the way out."""
    router = APIRouter()

    @router.get("/lora/status")
    async def status() -> dict[str, Any]:
        lora_config = engine.vllm_config.lora_config
        if lora_config is None:
            return {"enabled": False, "adapters": [], "reason": "started without --enable-lora"}
        return {
            "enabled": True,
            "adapters": sorted(await engine.list_loras()),
            "max_lora_rank": lora_config.max_lora_rank,
            "max_loras": lora_config.max_loras,
        }

    @router.post("/lora/load")
    async def load() -> Any:
        return error_response(501, _NOT_HERE)

    @router.post("/lora/unload")
    async def unload() -> Any:
        return error_response(501, _NOT_HERE)

    return router
