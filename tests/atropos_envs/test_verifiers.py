"""Environments of verifiers, played against an engine that answers by rule."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import EnvMetricsRecord, EvalRecord, parse_line
from atropos_envs import EnvFault
from tests.atropos_envs.support import Engine, decode, encode, make_env, text_tokenizer

pytest.importorskip("verifiers", reason="make test-verifiers installs it")

from atropos_envs.verifiers.environment import VerifiersEnv
from atropos_envs.verifiers.sequences import RolloutFailed

ENVIRONMENTS = Path(__file__).parents[2] / "examples" / "verifiers"
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# The answers of an odd model: no chat template renders them like this again.
ODD = " {0}  {1}\n"
CALL = '<tool_call>{ "arguments":{"left": 2, "right":3},"name": "calc_add"}</tool_call>'
EOS = 1


def text_of(ids: list[int]) -> str:
    return decode([token for token in ids if token > EOS])


@asynccontextmanager
async def playing(
    folder: Path, name: str, answer: Callable[[str], str], **fields: Any
) -> AsyncIterator[tuple[Any, Engine]]:
    """Yield the environment `name`, set up, and the engine that it asks."""
    tokenizer = text_tokenizer()
    tokenizer.chat_template = fields.pop("template", TEMPLATE)
    tokenizer.save_pretrained(folder / "model")
    engine = Engine(lambda prompt, body, index: encode(answer(text_of(prompt))))
    arguments = json.dumps(fields.pop("arguments", {}))
    fields = {"max_token_length": 1000, "eval_size": 4} | fields
    async with engine.running() as url:
        env = make_env(VerifiersEnv, folder, url, verifiers=name, arguments=arguments, **fields)
        env.eval_log._path = folder / "eval.jsonl"
        try:
            await env.setup()
            yield env, engine
        finally:
            await env._close_servers()


def records(folder: Path) -> list[Record]:
    return [parse_line(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def masked(group: dict[str, Any], row: int) -> list[list[int]]:
    """The trained ids of a sequence, turn by turn."""
    turns: list[list[int]] = [[]]
    for mask in group["masks"][row]:
        if mask != -100:
            turns[-1].append(mask)
        elif turns[-1]:
            turns.append([])
    return [turn for turn in turns if turn]


async def test_reward_functions_and_metrics_have_their_names_in_the_records(tmp_path: Path) -> None:
    numbers = count()
    answers = {0: "no number", 1: "7"}
    name = str(ENVIRONMENTS / "sums_vf")
    async with playing(tmp_path, name, lambda _: answers[next(numbers) % 2]) as (env, _):
        group = await env.rollout(3)
        await env.create_rollout_table({})
    assert sorted(group["scores"]) == [0.0, 0.0, 0.2, 0.2]
    assert all(len(group[key]) == 4 for key in ("tokens", "masks", "inference_logprobs"))
    [record] = records(tmp_path)
    assert isinstance(record, EnvMetricsRecord)
    expected = {"reward": 0.1, "reward/is_number": 0.5, "reward/correct": 0.0, "metric/length": 5.0}
    assert {name: record.metrics[f"train/{name}"] for name in expected} == pytest.approx(expected)


async def test_its_own_split_is_the_held_out_one(tmp_path: Path) -> None:
    name = str(ENVIRONMENTS / "sums_vf")
    settings = {"num_tasks": 40}

    def right(prompt: str) -> str:
        left, right = prompt.rpartition("[user]")[2].partition(" =")[0].split(" + ")
        return str(int(left) + int(right))

    async with playing(tmp_path, name, right, arguments=settings) as (env, engine):
        assert len(env._tasks) == 40  # none of them is held out
        await env.evaluate()
    asked = [text_of(body["prompt"]["prompt_token_ids"]) for body in engine.bodies]
    lefts = [int(text.rpartition("[user]")[2].split(" + ")[0]) for text in asked]
    assert len(lefts) == 4 and min(lefts) >= 50  # of the test split
    assert {body["temperature"] for body in engine.bodies} == {0.0}
    accuracy = next(record for record in records(tmp_path) if isinstance(record, EvalRecord))
    assert (accuracy.split, accuracy.correct, accuracy.questions) == ("held_out", 4, 4)


async def test_every_turn_begins_with_the_ids_of_the_turns_before(tmp_path: Path) -> None:
    """Only the environment's own words are encoded."""
    numbers = count()
    name = str(ENVIRONMENTS / "guess_vf")
    odd = lambda _: ODD.format("no", next(numbers))  # noqa: E731
    async with playing(tmp_path, name, odd, group_size=2) as (env, engine):
        group = await env.rollout(0)
    prompts = [body["prompt"]["prompt_token_ids"] for body in engine.bodies]
    assert len(prompts) == 8
    for row in range(2):
        tokens, turns = group["tokens"][row], masked(group, row)
        assert len(turns) == 4
        # The engine's prompts of this conversation are beginnings of the sequence that trains.
        own = sorted((p for p in prompts if tokens[: len(p)] == p and text_of(p)), key=len)
        assert len({len(prompt) for prompt in own}) == 4
        for turn, prompt in zip(
            turns, sorted({len(p): p for p in own}.values(), key=len), strict=True
        ):
            assert tokens[len(prompt) : len(prompt) + len(turn)] == turn
            assert turn[-1] == EOS and text_of(turn).startswith(" no  ")
        # Whitespace that a chat template would have removed.
        assert "\n" in text_of(turns[0])
    spans = [[p for p in row if p != 1.0] for row in group["inference_logprobs"]]
    assert all(-0.25 in row for row in spans)


async def test_a_tool_is_called_and_its_result_is_in_the_next_prompt(tmp_path: Path) -> None:
    name = str(ENVIRONMENTS / "calc_vf")
    said = lambda prompt: "It is 5." if "[tool]5" in prompt else f"Let me see. {CALL}"  # noqa: E731
    async with playing(tmp_path, name, said, group_size=1) as (env, engine):
        group = await env.rollout(0)
        await env.create_rollout_table({})
    first, second = (body["prompt"]["prompt_token_ids"] for body in engine.bodies)
    assert "calc_add" in text_of(first)
    sampled = encode(f"Let me see. {CALL}")
    # Spaces and the order of keys are those of the model.
    assert second[: len(first) + len(sampled)] == [*first, *sampled]
    assert masked(group, 0) == [sampled, encode("It is 5.")]
    [record] = records(tmp_path)
    assert isinstance(record, EnvMetricsRecord)
    assert record.metrics["train/metric/calls"] == record.metrics["train/tool_calls"] == 1.0


BROKEN = """
import verifiers.v1 as vf

class BrokenTask(vf.Task[vf.TaskData]):
    {body}

class BrokenTaskset(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    def load(self):
        {load}
        return [BrokenTask(vf.TaskData(prompt=f"{{n}}")) for n in range(20)]

__all__ = ["BrokenTaskset"]
"""
REWARD = "@vf.reward\n    async def right(self, trace: vf.Trace) -> float:\n        return {}"
SETUP = "async def setup(self, trace, runtime):\n        raise KeyError('no such room')"


def broken(folder: Path, name: str, body: str, load: str = "pass") -> str:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(BROKEN.format(body=body, load=load))
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("nan_env", REWARD.format("float('nan')"), "reward 'right' is nan"),
        ("raises_env", REWARD.format("1 / 0"), "TaskError: .*ZeroDivisionError"),
        ("setup_env", SETUP, "TaskError: .*no such room"),
    ],
)
async def test_a_rollout_without_a_reward_is_counted_by_its_reason(
    tmp_path: Path, name: str, body: str, reason: str
) -> None:
    folder = broken(tmp_path, name, body)
    async with playing(tmp_path, folder, lambda _: "x", group_size=2) as (env, _):
        with pytest.raises(RolloutFailed, match=reason):
            await env.rollout(0)
        # Two were replaced; the third one ended the group.
        assert env.tally.failures.total() == 2


async def test_one_failed_rollout_is_replaced(tmp_path: Path) -> None:
    numbers = count()
    folder = broken(tmp_path, "once_env", REWARD.format("1 / int(trace.last_reply)"))
    async with playing(tmp_path, folder, lambda _: str(next(numbers)), group_size=2) as (env, _):
        group = await env.rollout(0)
        assert sorted(group["scores"]) == [0.5, 1.0]
        assert env.tally.failures.total() == 1


async def test_a_load_that_raises_ends_the_environment_in_words(tmp_path: Path) -> None:
    folder = broken(tmp_path, "noload_env", "pass", "raise RuntimeError('no data')")
    with pytest.raises(EnvFault, match="setup failed: RuntimeError: no data"):
        async with playing(tmp_path, folder, lambda _: "x"):
            pass


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("no_such_environment", {}, "there is no environment 'no_such_environment'"),
        ("./no/folder", {}, "there is no folder ./no/folder"),
        (str(ENVIRONMENTS / "sums_vf"), {"num_taks": 3}, "does not accept 'taskset.num_taks'"),
    ],
)
async def test_a_wrong_name_or_setting_is_said_in_one_line(
    tmp_path: Path, name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvFault, match=words) as fault:
        async with playing(tmp_path, name, lambda _: "x", arguments=arguments):
            pass
    assert fault.value.exit_code == 2


async def test_a_package_that_the_environment_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "needy_env").mkdir()
    (tmp_path / "needy_env" / "__init__.py").write_text("import no_such_package.part\n")
    with pytest.raises(EnvFault, match="needs the Python package 'no_such_package'") as fault:
        async with playing(tmp_path, str(tmp_path / "needy_env"), lambda _: "x"):
            pass
    assert fault.value.exit_code == 2


async def test_an_environment_for_an_older_release_is_named(tmp_path: Path) -> None:
    (tmp_path / "older_env").mkdir()
    code = "import verifiers as vf\n\nclass Older(vf.MultiTurnEnv):\n    pass\n"
    (tmp_path / "older_env" / "__init__.py").write_text(code)
    with pytest.raises(EnvFault, match=r"'MultiTurnEnv'.* If it was made for verifiers"):
        async with playing(tmp_path, str(tmp_path / "older_env"), lambda _: "x"):
            pass


async def test_an_episode_of_many_turns_ends_at_the_longest_sequence(tmp_path: Path) -> None:
    """200 turns do not fit; what was played until then trains."""
    name = str(ENVIRONMENTS / "guess_vf")
    settings = {"guesses": 200}
    options: dict[str, Any] = {"arguments": settings, "group_size": 1, "max_token_length": 400}
    async with playing(tmp_path, name, lambda _: "no", **options) as (env, engine):
        group = await env.rollout(0)
    assert len(group["tokens"][0]) < 400
    assert 5 < len(masked(group, 0)) == len(engine.bodies) < 200


async def test_a_template_that_hides_the_end_of_an_answer_gives_branches(tmp_path: Path) -> None:
    """Nothing is encoded twice: each turn trains as sampled, in one of the branches."""
    scores = count()
    name = str(ENVIRONMENTS / "guess_vf")
    hidden = TEMPLATE.replace("{{ '<eos>' }}", "|")
    options: dict[str, Any] = {"template": hidden, "group_size": 2}
    answer = lambda text: "0" if "Lower" in text and not next(scores) else "no"  # noqa: E731
    async with playing(tmp_path, name, answer, **options) as (env, _):
        groups = await env.rollout(0)  # its number is 0
        turns, branches = env._numbers["turns"], env._numbers["branches"]
    assert sorted(branches) == sorted(turns) == [2.0, 4.0]
    first, *others = groups
    assert sorted(first["scores"]) == [0.0, 1.0]
    assert [len(masked(first, row)) for row in range(2)] == [1, 1]
    assert len(others) == 2  # four branches beside those of the first group
    assert all(len(group["advantages"]) == 2 for group in others)
