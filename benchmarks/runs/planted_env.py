"""The demo's environment with a trouble that the file `PLANT` switches on while it runs.

It requests each completion twice, which keeps engine and trainer of the demo equally busy. The
troubles: slow: a rollout takes two seconds beside the engine. busy: many requests for each
completion. once: one request for each. flat: every completion scores the same. top_p: requests
have a parameter that the server refuses. hub: the next start needs a data set of an unreachable
hub, and creates the file `PLANT`.asked with its request. few: one group at a time, four requests
for each completion. refused: groups have messages that run-api refuses. none: rollouts return None.
For `benchmarks/situations.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_envs.arithmetic import Sum
from atropos_envs.arithmetic_server import ArithmeticEnv
from atropos_envs.hosting.base import run
from atropos_envs.hosting.engine_client import EngineClient, Generation

SLOW_S = 2.0
ASKED_AGAIN = {"busy": 11, "few": 3, "once": 0}
"""Requests for a completion beside the first, by what is switched on."""


def planted() -> str:
    """Return the active trouble; empty for none."""
    path = Path(os.environ["PLANT"])
    return path.read_text().strip() if path.exists() else ""


class Client(EngineClient):
    async def generate(
        self, prompt_ids: Sequence[int], *, wait: bool = True, **sampling: Any
    ) -> Generation:
        now = planted()
        more = {"top_p": 0.9} if now == "top_p" else {}
        for _ in range(ASKED_AGAIN.get(now, 1)):
            await super().generate(prompt_ids, wait=wait, **more, **sampling)
        return await super().generate(prompt_ids, wait=wait, **more, **sampling)


class Planted(ArithmeticEnv):
    server_cls = Client

    async def setup(self) -> None:
        if planted() == "hub":
            from huggingface_hub import hf_hub_download

            Path(f"{os.environ['PLANT']}.asked").touch()
            await asyncio.to_thread(
                hf_hub_download, "openai/gsm8k", "README.md", repo_type="dataset"
            )
        await super().setup()

    async def env_step_checks(self) -> None:
        self.max_num_workers = 1 if planted() == "few" else self.config.max_num_workers
        await super().env_step_checks()

    async def rollout(self, item: Sum) -> dict[str, Any]:
        if planted() == "slow":
            await asyncio.sleep(SLOW_S)
        group = await super().rollout(item)
        if planted() == "refused":
            group["messages"] = [[{"role": "user"}]] * len(group["tokens"])
        return None if planted() == "none" else group  # type: ignore[return-value]

    def _reward(self, question: Sum, completion: Sequence[int]) -> float:
        return 0.0 if planted() == "flat" else super()._reward(question, completion)


if __name__ == "__main__":
    run(Planted)
