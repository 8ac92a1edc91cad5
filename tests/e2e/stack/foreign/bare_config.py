"""A usual environment: a bare server config for a port that nobody serves, top-p, wandb on, text in
and out, no logprobs."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class SumsEnv(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name="nobody/nothing",
            group_size=4,
            max_token_length=512,
            use_wandb=True,
            wandb_name="sums",
            rollout_server_url="http://localhost:8000",
            total_steps=1,
            batch_size=12,
            steps_per_eval=3,
        )
        return config, APIServerConfig(
            model_name="nobody/nothing", base_url="http://localhost:9004/v1", api_key="x"
        )

    async def setup(self):
        self.rng = random.Random(0)

    async def get_next_item(self):
        return self.rng.randint(0, 9), self.rng.randint(0, 9)

    async def evaluate(self, *args, **kwargs):
        answers = [
            await self.server.completion(
                prompt=f"{a}+1=", n=1, max_tokens=4, temperature=0.0, split="eval"
            )
            for a in range(3)
        ]
        right = [
            answer.choices[0].text.strip().startswith(str(a + 1))
            for a, answer in enumerate(answers)
        ]
        await self.evaluate_log({"percent_correct": sum(right) / len(right)})

    async def collect_trajectories(self, item):
        prompt = f"{item[0]}+{item[1]}="
        answer = await self.server.completion(
            prompt=prompt,
            n=self.config.group_size,
            max_tokens=self.config.max_token_length,
            temperature=1.0,
            top_p=0.95,
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in answer.choices:
            before, after = self.tokenizer.encode(prompt), self.tokenizer.encode(choice.text)
            group["tokens"].append(before + after)
            group["masks"].append([-100] * len(before) + after)
            group["scores"].append(1.0 if choice.text.strip().startswith(str(sum(item))) else -1.0)
        return group, []


if __name__ == "__main__":
    SumsEnv.cli()
