"""The profiles of `examples/` on the real stack: they train, and learn."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.live_stack import LiveStack, prepare_demo

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("name", "gain"), [("own_environment", 0.2), ("tool_use", 0.1)])
def test_an_example_learns(
    name: str, gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where the profiles look for their scripts
    prepare_demo()
    run = LiveStack(tmp_path / "run", profile=str(ROOT / "examples" / name / "run.toml")).up()
    try:
        code, output = run.wait(500)
        assert code == 0, output[-4000:]
        rewards = [step.reward_mean for step in run.steps()]
        assert len(rewards) == 40
        assert mean(rewards[-5:]) > mean(rewards[:5]) + gain, rewards
        run.assert_nothing_left()
    finally:
        run.close()
