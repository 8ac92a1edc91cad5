"""A model whose chat template ends an answer with a token at which vLLM does not stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_tui.cli import main
from atropos_tui.profile.checks.turns import special_tokens, stop_tokens, turn_end
from tests.e2e.live_stack import free_ports

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)
IDS = {"<|endoftext|>": 7, "<|im_start|>": 8, "<|im_end|>": 9}


def folder_of(folder: Path, *, eos: Any = 7, template: Any = CHATML, old: bool = False) -> Path:
    """A model's folder, as transformers 5 writes it, or before (`old`)."""
    folder.mkdir(exist_ok=True)
    tokens = [{"id": number, "content": text, "special": True} for text, number in IDS.items()]
    settings: dict[str, Any] = {"eos_token": "<|endoftext|>"}
    if old:
        settings |= {
            "chat_template": template,
            "added_tokens_decoder": {str(each["id"]): each for each in tokens},
        }
    else:
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    )
    return folder


@pytest.mark.parametrize("old", [False, True])
def test_the_end_of_an_answer_and_the_stop_tokens(tmp_path: Path, old: bool) -> None:
    folder = folder_of(tmp_path / "m", old=old)
    known = special_tokens(folder)
    assert known == IDS
    assert turn_end(folder, known) == ("<|im_end|>", 9)
    assert stop_tokens(folder, known) == {7}
    folder_of(folder, eos=[7, 9], old=old)
    assert stop_tokens(folder, known) == {7, 9}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"added_tokens": [3, {"content": "x"}, {"id": 1}, {"id": "a b"}]}),
        ("tokenizer.json", {"added_tokens": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": 2, "x": {"content": "x"}}}),
    ],
)
def test_files_of_another_form_tell_nothing(tmp_path: Path, name: str, content: Any) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert special_tokens(tmp_path) == {}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # plain text
        "{{ raise_exception('no') }}",
        "{% broken",
        "{{ messages[0].content.nothing.at.all }}",
        "",
    ],
)
def test_templates_that_tell_nothing(tmp_path: Path, template: str) -> None:
    assert turn_end(folder_of(tmp_path / "m", template=template), IDS) is None
    nowhere = tmp_path / "nowhere"
    assert turn_end(nowhere, special_tokens(nowhere)) is None and stop_tokens(nowhere, {}) == set()


def test_validate_warns_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").touch()
    Path("tasks.jsonl").write_text('{"prompt": "?"}\n')
    Path("score.py").write_text("def score(task, episode):\n    return 0.0\n")
    api, engine = free_ports(2)
    text = (
        f'name = "p"\nmode = "none"\nmodel = "m"\n[api]\nport = {api}\n[vllm]\nport = {engine}\n'
        '[env]\nagent = ["python", "agent.py"]\ntasks = "tasks.jsonl"\nscorer = "score:score"\n'
        '[trainer]\ndevice = "cpu"\ndtype = "float32"\n'
    )
    Path("p.toml").write_text(text)

    def said() -> str:
        main.run(["validate", "p.toml"])
        shown = capsys.readouterr()
        return shown.out + shown.err

    folder_of(tmp_path / "m")
    warning = "its chat template ends an answer with <|im_end|>, and generation stops only at token"
    text = said()
    assert f"{warning} 7" in text and "Add 9 to eos_token_id" in text
    folder_of(tmp_path / "m", eos=[9])
    assert "its chat template" not in said()
