"""Imports and pydantic models of a supervisor, prepared before the fork: three quarters of a short
one's cost."""

from __future__ import annotations

import importlib

from pydantic import BaseModel

for name in (
    "atropos_tui.supervisor.__main__",
    "atropos_tui.supervisor.runner",
    "anyio._backends._asyncio",
    "h11",
    "httpcore",
    "tests.support.nursery",
    "uvicorn.lifespan.off",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
):
    importlib.import_module(name)


def build(model: type[BaseModel]) -> None:
    """It and all that are derived from it and ours; pydantic would build each when it is first
    used."""
    for each in model.__subclasses__():
        if each.__module__.startswith("atropos_"):
            each.model_rebuild()
        build(each)


build(BaseModel)
