"""An environment with groups of one, as games and long tasks have, and atroposlib's default of
dropping flat groups."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class AloneEnv(BaseEnv):
    name = "alone"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(tokenizer_name="a", group_size=1), [APIServerConfig(model_name="a")]

    async def setup(self):
        self.rng = random.Random(4)

    async def get_next_item(self):
        return self.rng.randint(0, 9), self.rng.randint(0, 9)

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectory(self, item):
        before, (tokens,), (logprobs,), _ = await self.server.tokens_and_logprobs_completion(
            prompt=f"{item[0]}+{item[1]}=", n=1, max_tokens=4, temperature=1.0
        )
        right = self.tokenizer.decode(tokens).strip().startswith(str(sum(item)))
        return ScoredDataItem(
            tokens=before + tokens,
            masks=[-100] * len(before) + tokens,
            scores=float(right),
            inference_logprobs=[1.0] * len(before) + logprobs,
            overrides={"color": "blue"},
        ), []


if __name__ == "__main__":
    AloneEnv.cli()
