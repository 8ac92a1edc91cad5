"""Commands that act on a run: their questions before they act."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from atropos_common.protocol.control import Recipe, WaitResult
from atropos_tui.cli import main
from atropos_tui.cli.manage.control import print_end
from atropos_tui.errors import Exit
from atropos_tui.supervisor.client import ControlClient
from tests.support.run_maker import make_run


@pytest.mark.parametrize(
    ("end", "code"), [(EOFError, Exit.DONE), (KeyboardInterrupt, Exit.INTERRUPTED)]
)
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


def test_to_wait_for_what_an_ended_run_never_had_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was 5, "no such run"."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ended = make_run(tmp_path / "ended").root
    (ended / "result.json").write_text('{"exit_code": 0, "reason": "trainer completed"}')
    assert main.run(["wait", str(ended), "--for", "vlm"]) == 2
    said = capsys.readouterr().err
    assert "no component 'vlm'" in said and "did you mean vllm?" in said
    assert main.run(["wait", str(ended), "--for", "vllm"]) == 5
    assert main.run(["wait", str(ended), "--for", "done"]) == 0


@pytest.mark.parametrize(
    ("outcome", "code"), [("impossible", Exit.COMPONENT_FAILED), ("reached", Exit.DONE)]
)
def test_waiting_for_a_run_that_leaves_no_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: Literal["impossible", "reached"],
    code: Exit,
) -> None:
    """Its folder was deleted meanwhile: the exit code was 0."""

    async def answered(*_: object) -> WaitResult:
        return WaitResult(outcome=outcome, detail="the run ends: exit code 3")

    monkeypatch.setattr(ControlClient, "wait", answered)
    monkeypatch.setattr("atropos_tui.cli.manage.control.POLL_S", 0.001)
    run = make_run(tmp_path / "run").root
    assert main.run(["wait", str(run), "--for", "done"]) == code
    assert ("impossible: the run ends" in capsys.readouterr().err) == (code != Exit.DONE)


@pytest.mark.parametrize(
    ("result", "said"), [(True, "the run has ended"), (False, "detached; the run goes on")]
)
def test_what_is_said_when_a_signal_ends_the_screen(
    result: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from atropos_tui.cli.manage.control import open_screen
    from atropos_tui.ui.home import session

    ended = make_run(tmp_path / "ended")
    if result:
        ended.result_json.write_text('{"exit_code": 0, "reason": "trainer completed"}')
    monkeypatch.setattr(session, "run_cockpit", lambda *_, **__: "detach")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS", raising=False)
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "__all__")
    assert open_screen(ended) == 0
    assert said in capsys.readouterr().out


def test_the_last_words_are_about_the_run_whose_screen_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from atropos_tui.cli.manage.control import open_screen
    from atropos_tui.ui.home import session

    ended, live = make_run(tmp_path / "ended"), make_run(tmp_path / "live")
    ended.result_json.write_text('{"exit_code": 0, "reason": "trainer completed"}')
    monkeypatch.setattr(session, "run_session", lambda *_, **__: (live.root, "detach"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "__all__")
    assert open_screen(ended) == 0
    assert f"detached; the run goes on: {live.root}" in capsys.readouterr().out


def test_the_end_of_a_run_whose_folder_was_deleted_advises_no_command_that_needs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    run.result_json.write_text('{"exit_code": 0, "reason": "trainer completed"}')
    assert print_end(run) == Exit.DONE
    assert "next: atropos-tui report" in capsys.readouterr().out
    run.run_json.unlink()
    assert print_end(run) == Exit.DONE
    said = capsys.readouterr().out
    assert "next:" not in said and "run.json is missing" in said
