"""Commands that act on a run: what they ask before."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from atropos_common.control import Recipe
from atropos_tui.cli import main
from atropos_tui.errors import Exit
from atropos_tui.supervisor.client import ControlClient
from tests.ui.run_maker import make_run


@pytest.mark.parametrize(("end", "code"), [(EOFError, Exit.DONE), (KeyboardInterrupt, Exit.INTERRUPTED)])
def test_a_question_that_is_not_answered_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException], code: Exit
) -> None:
    """^D and ^C at `go on?`: the input has to be of the main thread, or ^C waits for Enter."""
    run, asked = make_run(tmp_path / "run"), []

    async def recipe(*_: object) -> Recipe:
        return Recipe(action="restart", component="vllm", stop=["vllm"], start=["vllm"])

    def unanswered(question: str = "") -> str:
        asked.append(threading.current_thread() is threading.main_thread())
        raise end

    monkeypatch.setattr(ControlClient, "recipe", recipe)
    monkeypatch.setattr(ControlClient, "command", lambda *_: pytest.fail("it was carried out"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", unanswered)
    assert main.run(["restart", "vllm", "--run-dir", str(run.root)]) == code
    assert asked == [True]
