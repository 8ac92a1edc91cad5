"""Sums of two numbers below 20. The reward is 1 for the right digits and the end token."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Sums(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=8, max_token_length=32), [APIServerConfig()]

    async def setup(self):
        self.rng = random.Random(0)

    async def get_next_item(self):
        return self.rng.randrange(20), self.rng.randrange(20)

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        prompt, size = f"{item[0]}+{item[1]}=", self.config.group_size
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=prompt, n=size, max_tokens=4, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        right = [*self.tokenizer.encode(str(sum(item))), self.tokenizer.eos_token_id]
        for node in nodes:
            generated = [token for token in node.masked_tokens if token != -100]
            group["scores"].append(float(generated == right))
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
        return group, []


if __name__ == "__main__":
    Sums.cli()
