"""The demo's environment with one mistake: its rollouts request top_p=0.9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atropos_envs.arithmetic_server import ArithmeticEnv
from atropos_envs.hosting.base import run
from atropos_envs.hosting.engine_client import EngineClient, Generation


class Client(EngineClient):
    async def generate(
        self, prompt_ids: Sequence[int], *, wait: bool = True, **sampling: Any
    ) -> Generation:
        return await super().generate(prompt_ids, wait=wait, top_p=0.9, **sampling)


class Asks(ArithmeticEnv):
    server_cls = Client


if __name__ == "__main__":
    run(Asks)
