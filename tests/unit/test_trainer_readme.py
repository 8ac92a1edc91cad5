"""The example of `trainer_core/README.md` runs as it stands."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "trainer_core" / "README.md"


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 30
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "rollouts.jsonl holds no more rollouts" in lines[-1]
    ratios = ast.literal_eval(lines[-1][lines[-1].index("[") :])
    assert len(ratios) == 8 and max(ratios) > 1.05, "the second minibatch sees what the first has changed"
    assert (tmp_path / "trained_model_checkpoints" / "final_model" / "model.safetensors").is_file()
