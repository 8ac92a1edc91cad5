"""Products, with a calculator as a tool. A rollout has up to three turns.

The score is 1 for the right number in the last answer. Another answer gets a half if the rollout
used the calculator without an error.
"""

import asyncio
import json
import operator
import random
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

TURNS = 3
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of one operation on two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(expression: str) -> str:
    found = re.fullmatch(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*", expression)
    if not found:
        raise ValueError("write two whole numbers with +, - or * between them")
    return str(OPERATORS[found[2]](int(found[1]), int(found[3])))


def use(call: dict) -> tuple[str, bool]:
    """Result of a tool call for the model, and success. A model may write anything."""
    try:
        if call["function"]["name"] != "calculator":
            raise ValueError("the only tool is calculator")
        return calculator(json.loads(call["function"]["arguments"])["expression"]), True
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"error: {error}", False


class ToolEnv(BaseEnv):
    name = "tools"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=8, max_token_length=512), [APIServerConfig()]

    async def setup(self):
        self.rng = random.Random(0)
        self.server.tool_parser = "hermes"  # the form in which the model writes calls

    async def get_next_item(self):
        return self.rng.randrange(4), self.rng.randrange(4)

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        played = await asyncio.gather(*(self.play(item) for _ in range(self.config.group_size)))
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, score in played:
            group["scores"].append(score)
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
        return group, []

    async def play(self, item):
        """Play one conversation; its last node has the tokens of all turns and their mask."""
        messages = [{"role": "user", "content": f"What is {item[0]}*{item[1]}?"}]
        used = False
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(TURNS):
                answer = await managed.chat_completion(
                    messages=messages, tools=TOOLS, n=1, max_tokens=96, temperature=1.0
                )
                text = answer.choices[0].message.content or ""
                calls = answer.choices[0].message.tool_calls or []
                messages.append({"role": "assistant", "content": text, "tool_calls": calls})
                if not calls:
                    break
                for call in calls:
                    result, worked = use(call)
                    used = used or worked
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            node = managed.get_state()["nodes"][-1]
        numbers = re.findall(r"\d+", text)
        right = not calls and numbers[-1:] == [str(item[0] * item[1])]
        return node, 1.0 if right else 0.5 if used else 0.0


if __name__ == "__main__":
    ToolEnv.cli()
