"""The examples of the trainer as a library run unchanged."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.nursery import TRAINER, forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss" / "train.py"
README = Path(__file__).parents[2] / "trainer_core" / "README.md"


def run(arguments: list[str]) -> None:
    """As a program of its own."""
    exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), {"__name__": "__main__"})


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 35
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    said = tmp_path / "said"
    code = forked(TRAINER, "tests.trainer_core.test_readme:run", ["example.py"], said).wait(100)
    assert code == 0, said.read_text()
    lines = said.read_text().splitlines()
    assert "rollouts.jsonl has no more rollouts" in lines[-1]
    ratios = ast.literal_eval(lines[-1][lines[-1].index("[") :])
    assert len(ratios) == 8 and max(ratios) > 1.05, (
        "the second minibatch sees what the first has changed"
    )
    assert (tmp_path / "trained_model_checkpoints" / "final_model" / "model.safetensors").is_file()


def test_the_example_of_a_custom_loss_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = tmp_path / "said"
    code = forked(TRAINER, "tests.trainer_core.test_readme:run", [str(EXAMPLE)], said).wait(100)
    assert code == 0, said.read_text()
    ratio, shares = said.read_text().splitlines()[-2:]
    assert float(ratio.split()[-1]) > 1.05
    before, after = map(float, re.findall(r"\d\.\d+", shares))
    assert after > before + 0.1, shares
