"""Tool calls through atroposlib's ManagedServer with the parsers of the pinned vLLM."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from atropos_envs import EnvFault
from atropos_envs.hosting import hosted as hosted_module
from atropos_envs.hosting import runner
from atropos_envs.hosting.runner import hosted
from tests.atropos_envs.support import Engine, decode, encode, text_tokenizer

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "", "parameters": PARAMETERS},
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'


class Calculates(BaseEnv):
    """As docs/environments.md shows it."""

    async def setup(self) -> None:
        self.server.tool_parser = "hermes"

    async def get_next_item(self) -> int:
        return 0

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "3*4?"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=messages, tools=TOOLS, n=1, max_tokens=200
            )
            message = answer.choices[0].message
            calls = message.tool_calls or []  # dictionaries
            messages.append(
                {"role": "assistant", "content": message.content or "", "tool_calls": calls}
            )
            for call in calls:
                self.called = json.loads(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})
            last = await managed.chat_completion(
                messages=messages, tools=TOOLS, n=1, max_tokens=200
            )
            nodes = managed.get_state()["nodes"]
        self.said = last.choices[0].message.content
        return nodes, []


def _environment(folder: Path, url: str) -> Any:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    server = APIServerConfig(base_url=url, model_name=str(folder), api_key="x", server_type="vllm")
    config = BaseEnvConfig(
        tokenizer_name=str(folder), wandb_name="x", use_wandb=False, group_size=1
    )
    return hosted(Calculates)(config, [server])


async def test_tools_are_called_and_answered_under_the_pinned_vllm(tmp_path: Path) -> None:
    """atroposlib imports a module that this vLLM has no more, said that vLLM is not installed, and
    called no tool."""
    runner.accept_older_names()
    engine = Engine(
        lambda prompt, body, index: encode("12" if "<tool>12" in decode(prompt) else CALL)
    )
    async with engine.running() as url:
        env = _environment(tmp_path, url)
        await env.setup()
        await env.setup_wandb()
        nodes, _ = await env.collect_trajectories(0)
        await env._close_servers()
    assert env.called == {"expression": "3*4"} and env.said.startswith("12")
    prompts = [decode(body["prompt"]["prompt_token_ids"]) for body in engine.bodies]
    assert '"calculator"' in prompts[0], "the template shows the tools"
    assert CALL in prompts[1], "the call comes back as the model wrote it"
    assert all(node.logprobs for node in nodes)


async def test_tool_calls_that_cannot_be_read_end_the_environment_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.accept_older_names()
    env = _environment(tmp_path, "http://127.0.0.1:9/v1")
    await env.setup()
    env.server.tool_parser = "hermit"
    with pytest.raises(
        EnvFault, match=r"vLLM has no tool parser 'hermit'\. It has: .*hermes"
    ) as caught:
        await env.setup_wandb()
    assert caught.value.exit_code == 2
    translator = importlib.import_module(hosted_module.PARSER_TRANSLATOR)
    monkeypatch.setattr(translator, "VLLM_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    with pytest.raises(
        EnvFault, match=r"needs vLLM's tool parsers beside the environment \(.*vllm.tool_parsers"
    ):
        await env.setup_wandb()
    await env._close_servers()
