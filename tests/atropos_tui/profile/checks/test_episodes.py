"""Checks of agents and OpenEnv servers before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atropos_tui.profile.checks.episodes import episode_files
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("agent.py", "tasks.jsonl"):
        Path(name).write_text("1\n")
    Path("scores.py").write_text("async def score(episode):\n    return 1\n")
    for folder, text in (("good", "import json\n"), ("bare", ""), ("lacks", "import not_there\n")):
        Path(folder, "server").mkdir(parents=True)
        if text:
            Path(folder, "server/app.py").write_text(f"{text}app = None\n")
    Path("empty").mkdir()


def problems(**env: Any) -> list[tuple[str, str, str]]:
    data = {"name": "p", "model": "m", "env": {"name": "e"} | env}
    site = make_site(parse_profile(data, "p.toml"), Path("r"), run_id="r")
    found = episode_files(site, site.profile.env[0], "env.0")
    return [(each.key or "", each.reason, each.fix) for each in found]


AGENT = {"agent": ["python", "agent.py"], "tasks": "tasks.jsonl"}


@pytest.mark.parametrize(
    ("changed", "key", "reason", "fix"),
    [
        ({"agent": ["python", "gone.py"]}, "agent", "no such file: gone.py", "are resolved from"),
        ({"agent": ["no-such-program"]}, "agent", "no program 'no-such-program'", "install it"),
        ({"tasks": "gone.jsonl"}, "tasks", "no such file or folder: gone.jsonl", "resolved from"),
        ({"tasks": "empty"}, "tasks", "empty has no train.jsonl", "as JSON"),
        ({"tasks": "gone:tasks"}, "tasks", "no module 'gone'", "PYTHONPATH"),
        ({"scorer": "scores:grade"}, "scorer", "defines no function 'grade'", "it has score"),
        ({"scorer": "score"}, "scorer", "'score' is no function", '["python", "score.py"]'),
        ({"scorer": ["python", "gone.py"]}, "scorer", "no such file: gone.py", "resolved from"),
    ],
)
def test_what_an_agent_lacks(changed: dict[str, Any], key: str, reason: str, fix: str) -> None:
    ((at, found, way_out),) = problems(**AGENT | changed)
    assert at == f"env.0.{key}"
    assert reason in found and fix in way_out


@pytest.mark.parametrize(
    ("openenv", "reason", "fix"),
    [
        ("bare", "bare has no server/app.py", "openenv init"),
        ("lacks", "app.py needs Python packages: 'not_there' (app.py, line 1)", "-m pip install"),
        ("gone", "no module 'gone.server.app' for the server of 'gone'", "install its package"),
    ],
)
def test_what_an_openenv_server_lacks(openenv: str, reason: str, fix: str) -> None:
    ((key, found, way_out),) = problems(openenv=openenv)
    assert key == "env.0.openenv"
    assert reason in found and fix in way_out


def test_what_is_complete_has_no_problem() -> None:
    assert problems(**AGENT | {"scorer": "scores:score"}) == []
    assert problems(openenv="good") == []
    assert problems(openenv="http://127.0.0.1:9") == [], "validate connects to no server"
    assert problems(**AGENT | {"tasks": "gone.jsonl", "cwd": "${SOMEWHERE}"}) == [], "not known yet"
