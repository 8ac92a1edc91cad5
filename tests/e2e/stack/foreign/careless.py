"""An environment with a baseline instead of server configs; every other rollout fails or is wrong.
It calls no cli()."""

import random

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import ServerBaseline


class CarelessEnv(BaseEnv):
    name = "careless"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(
            tokenizer_name="a", group_size=2, ensure_scores_are_not_same=False
        ), ServerBaseline()

    async def setup(self):
        self.rng, self.turn = random.Random(2), 0

    async def get_next_item(self):
        self.turn += 1
        return self.turn

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        before, completions, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt="1+2=", n=2, max_tokens=4, temperature=1.0
        )
        group = {
            "tokens": [before + tokens for tokens in completions],
            "masks": [[-100] * len(before) + tokens for tokens in completions],
            "scores": [self.rng.random() for _ in completions],
            "inference_logprobs": [[1.0] * len(before) + values for values in logprobs],
        }
        kind = item % 8
        if kind == 1:
            raise KeyError("answer")
        if kind == 2:
            group["scores"][0] = float("inf")
        if kind == 3:
            group["tokens"][1] = [999_999] * len(group["tokens"][1])
            group["masks"][1] = [-100] * len(before) + [999_999] * len(completions[1])
        if kind == 4:
            group["masks"][0] = group["masks"][0][:-1]
        if kind == 6:
            group["images"] = ["a picture", None]
        if kind == 5:
            return {name: rows[:1] for name, rows in group.items()}, []
        return group, []
