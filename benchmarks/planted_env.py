"""The demo's environment with a trouble that can be switched on while it runs: the file named by `PLANT` says which.

Each completion is asked for twice, which keeps engine and trainer of the demo alike busy. slow: a rollout takes two
seconds beside the engine; busy: each is asked for many times; once: each is asked for once; flat: every completion
scores the same; top_p: requests ask for what the server refuses; hub: the next start wants a data set of a hub that
cannot be reached, and when it asks a file `PLANT`.asked appears. For `benchmarks/situations.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_envs.arithmetic import Sum
from atropos_envs.arithmetic_server import ArithmeticEnv
from atropos_envs.base import run
from atropos_envs.engine_client import EngineClient, Generation

SLOW_S = 2.0
BUSY = 11


def planted() -> str:
    """What is switched on now; empty for nothing."""
    path = Path(os.environ["PLANT"])
    return path.read_text().strip() if path.exists() else ""


class Client(EngineClient):
    async def generate(self, prompt_ids: Sequence[int], *, wait: bool = True, **sampling: Any) -> Generation:
        now = planted()
        more = {"top_p": 0.9} if now == "top_p" else {}
        for _ in range({"busy": BUSY, "once": 0}.get(now, 1)):
            await super().generate(prompt_ids, wait=wait, **more, **sampling)
        return await super().generate(prompt_ids, wait=wait, **more, **sampling)


class Planted(ArithmeticEnv):
    server_cls = Client

    async def setup(self) -> None:
        if planted() == "hub":
            from huggingface_hub import hf_hub_download

            Path(f"{os.environ['PLANT']}.asked").touch()
            await asyncio.to_thread(hf_hub_download, "openai/gsm8k", "README.md", repo_type="dataset")
        await super().setup()

    async def rollout(self, item: Sum) -> dict[str, Any]:
        if planted() == "slow":
            await asyncio.sleep(SLOW_S)
        return await super().rollout(item)

    def _reward(self, question: Sum, completion: Sequence[int]) -> float:
        return 0.0 if planted() == "flat" else super()._reward(question, completion)


if __name__ == "__main__":
    run(Planted)
