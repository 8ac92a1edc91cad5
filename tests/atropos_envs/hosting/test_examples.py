"""The environments of `examples/`, against an engine that answers by rule."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig

from atropos_envs.hosting import runner
from atropos_envs.hosting.runner import hosted
from atropos_envs.tiny_model import make_tokenizer
from tests.atropos_envs.hosting.test_tools import TEMPLATE
from tests.atropos_envs.support import Answer, Engine, decode, encode, text_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


async def _group(file: str, folder: Path, tokenizer: Any, item: Any, answer: Answer) -> Any:
    """The group that the example's environment makes of `item`."""
    runner.accept_older_names()
    found = runpy.run_path(str(EXAMPLES / file))
    (environment,) = (
        each
        for each in found.values()
        if isinstance(each, type) and each.__module__ == "<run_path>" and hasattr(each, "cli")
    )
    tokenizer.save_pretrained(folder)
    engine = Engine(answer)
    async with engine.running() as url:
        config, _ = environment.config_init()
        config = config.model_copy(
            update={"tokenizer_name": str(folder), "use_wandb": False, "wandb_name": "x"}
        )
        server = APIServerConfig(
            base_url=url, model_name=str(folder), api_key="x", server_type="vllm"
        )
        env = hosted(environment)(config, [server])
        await env.setup()
        await env.setup_wandb()
        group, backlog = await env.collect_trajectories(item)
        await env._close_servers()
    assert backlog == [] and len(group["scores"]) == config.group_size
    for tokens, mask, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert len(tokens) == len(mask) == len(logprobs)
    return group


async def test_the_own_environment_scores_sums(tmp_path: Path) -> None:
    right = await _group(
        "own_environment/my_env.py", tmp_path, make_tokenizer(), (7, 8), lambda *_: [3, 7, 1]
    )
    assert right["scores"] == [1.0] * 8
    wrong = await _group(
        "own_environment/my_env.py", tmp_path, make_tokenizer(), (7, 8), lambda *_: [2, 1]
    )
    assert wrong["scores"] == [0.0] * 8


def _call(name: str, **arguments: str) -> str:
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


@pytest.mark.parametrize(
    ("call", "last", "result", "score"),
    [
        (_call("calculator", expression="2*3"), "It is 6.", "<tool>6", 1.0),
        (_call("calculator", expression="2*3"), "It is 7.", "<tool>6", 0.5),
        (_call("calculator", expression="9**9"), "It is 7.", "<tool>error: write two", 0.0),
        (_call("shell", command="ls"), "6?", "<tool>error: the only tool", 1.0),
    ],
)
async def test_the_tool_example_answers_calls_and_scores(
    call: str, last: str, result: str, score: float, tmp_path: Path
) -> None:
    prompts: list[str] = []

    def answer(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        prompts.append(decode(prompt))
        return encode(last if "<tool>" in prompts[-1] else call)

    tokenizer = text_tokenizer()
    tokenizer.chat_template = TEMPLATE
    group = await _group("tool_use/tool_env.py", tmp_path, tokenizer, (2, 3), answer)
    assert group["scores"] == [score] * 8
    assert any(result in prompt for prompt in prompts), prompts[-1]
    assert len(prompts) == 16
