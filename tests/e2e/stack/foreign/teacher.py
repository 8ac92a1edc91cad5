"""An environment with a teacher: at each generated token the right one, nearly certain, and a wrong
one. It also sends logprobs of a reference, messages, and its own advantages."""

import math
import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class TaughtEnv(BaseEnv):
    name = "taught"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name="a",
            group_size=2,
            include_messages=True,
        )
        return config, [APIServerConfig(model_name="a")]

    async def setup(self):
        self.rng = random.Random(5)

    async def get_next_item(self):
        return self.rng.randint(0, 9), self.rng.randint(0, 9)

    async def evaluate(self, *args, **kwargs):
        pass

    def teach(self, tokens, start, right):
        """For each position the token that the right answer has there, and its last one ever
        after."""
        ids, logprobs = [[] for _ in tokens], [[] for _ in tokens]
        for place in range(start, len(tokens)):
            wanted = right[min(place - start, len(right) - 1)]
            ids[place] = [wanted, (wanted + 1) % 10]
            logprobs[place] = [math.log(0.97), math.log(0.01)]
        return ids, logprobs

    async def collect_trajectories(self, item):
        prompt = f"{item[0]}+{item[1]}="
        before, completions, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=prompt, n=2, max_tokens=4, temperature=1.0
        )
        right = self.tokenizer.encode(prompt + str(sum(item)))[len(before) :]
        group = ScoredDataGroup(
            tokens=[],
            masks=[],
            scores=[],
            inference_logprobs=[],
            advantages=[],
            ref_logprobs=[],
            distill_token_ids=[],
            distill_logprobs=[],
            group_overrides={"note": "mine"},
        )
        for tokens, values in zip(completions, logprobs, strict=True):
            ids, taught = self.teach(before + tokens, len(before), right)
            group["tokens"].append(before + tokens)
            group["masks"].append([-100] * len(before) + tokens)
            group["scores"].append(float(tokens[: len(right)] == right))
            group["inference_logprobs"].append([1.0] * len(before) + values)
            group["advantages"].append([0.0] * len(before + tokens))
            group["ref_logprobs"].append([1.0] * len(before) + [-1.0] * len(tokens))
            group["distill_token_ids"].append(ids)
            group["distill_logprobs"].append(taught)
        return group, []


if __name__ == "__main__":
    TaughtEnv.cli()
