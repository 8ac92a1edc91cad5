"""An environment that scores a group in two seconds, as a sandbox or a judge does. If its name ends
in "flat", its scores never differ, and one second makes that known early."""

import asyncio
import random

from atroposlib.envs.base import BaseEnv, BaseEnvConfig


class SlowEnv(BaseEnv):
    name = "slow"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(tokenizer_name="a", group_size=4, steps_per_eval=0), []

    async def setup(self):
        self.rng, self.flat = random.Random(3), self.config.wandb_name.endswith("flat")

    async def get_next_item(self):
        return 1

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        before, completions, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt="1+2=", n=self.config.group_size, max_tokens=4, temperature=1.0
        )
        await asyncio.sleep(1 if self.flat else 2)
        return {
            "tokens": [before + tokens for tokens in completions],
            "masks": [[-100] * len(before) + tokens for tokens in completions],
            "scores": [0.0 if self.flat else self.rng.random() for _ in completions],
            "inference_logprobs": [[1.0] * len(before) + values for values in logprobs],
        }, []


if __name__ == "__main__":
    SlowEnv.cli()
