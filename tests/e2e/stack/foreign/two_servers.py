"""An environment with two server configs: it uses the second by number, one trajectory at a time,
with the engine's logprobs."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem


class SumsEnv(BaseEnv):
    name = None

    @classmethod
    def config_init(cls):
        servers = [
            APIServerConfig(model_name="a", base_url=f"http://localhost:{port}/v1")
            for port in (9004, 9005)
        ]
        return BaseEnvConfig(tokenizer_name="a", group_size=4, wandb_name="two"), servers

    async def setup(self):
        self.rng = random.Random(1)

    async def get_next_item(self):
        return self.rng.randint(0, 9), self.rng.randint(0, 9)

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectory(self, item):
        prompt = f"{item[0]}+{item[1]}="
        before, (tokens,), (logprobs,), _ = await self.server.servers[
            1
        ].tokens_and_logprobs_completion(prompt=prompt, n=1, max_tokens=4, temperature=1.0, top_k=3)
        right = self.tokenizer.decode(tokens).strip().startswith(str(sum(item)))
        return ScoredDataItem(
            tokens=before + tokens,
            masks=[-100] * len(before) + tokens,
            scores=float(right) + self.rng.random() / 10,
            inference_logprobs=[1.0] * len(before) + logprobs,
        ), []


if __name__ == "__main__":
    SumsEnv.cli()
