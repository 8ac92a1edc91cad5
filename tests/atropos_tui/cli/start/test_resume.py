"""`--resume` continues the run of RUN/profile.toml, or says what is different."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.start import up
from atropos_tui.cli.start.up import differences, write_run_files
from atropos_tui.errors import Exit, UserError
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.ports import free_port
from atropos_tui.profile.profile import Profile, load_profile
from atropos_tui.profile.site import make_site
from atropos_tui.supervisor.journal.store import RunResult

RICH = {
    "name": "rich",
    "model": "/models/ü\n\t\"'x",
    "seed": 3,
    "env": [
        {
            "name": "a",
            "module": "json",
            "weight": 2,
            "args": {"env": {"group_size": 8}, "x": ["a", 1, True, 0.5]},
        },
        {
            "name": "b",
            "script": "/x.py",
            "env": {"TOKEN": "${TOKEN}"},
            "restart": {"policy": "always", "backoff_s": 0},
        },
    ],
    "vllm": {
        "startup": {
            "checks": [
                {"kind": "http", "url": "http://x"},
                {"kind": "log", "pattern": "^\\d+ \x1b"},
            ]
        },
        "gpus": [0, 1],
        "args": {"a-flag": True, "number": 7, "share": 0.25},
        "depends_on": {},
    },
    "trainer": {
        "betas": [0.9, 0.95],
        "lora_layer_indices": "1-3",
        "lr": 1e-5,
        "env": {"A": ""},
        "gpus": [],
    },
    "component": {
        "a.b": {"role": "env", "command": ["echo", "${X} y", ""], "stop": {"signal": "INT"}}
    },
    "notify": {"webhook": "${HOOK}", "on": []},
    "logs": {"max_bytes": 5},
}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def written(tmp_path: Path, profile: Profile) -> Path:
    run = RunDir(tmp_path / "run")
    run.create()
    write_run_files(run, stack_of(make_site(profile, run.root, run_id="r")), profile)
    return run.profile_toml


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_survive_being_written(tmp_path: Path, name: str) -> None:
    profile, _ = load_profile(name, ["trainer.lr=3e-4"])
    again, _ = load_profile(str(written(tmp_path, profile)))
    assert again.model_dump() == profile.model_dump()


def test_every_kind_of_value_survives_being_written(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(tomli_w.dumps(RICH))
    (tmp_path / "p.toml").write_text('extends = "base.toml"\n[vllm.args]\nb-flag = 1\n')
    profile, _ = load_profile("p.toml", ["api.port=8123"])
    file = written(tmp_path, profile)
    again, _ = load_profile(str(file))
    assert "extends =" not in file.read_text()
    assert again.model_dump() == profile.model_dump()
    assert stack_of(make_site(again, tmp_path, run_id="r")) == stack_of(
        make_site(profile, tmp_path, run_id="r")
    )


def test_a_hidden_secret_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(
        tomli_w.dumps(RICH | {"vllm": {"args": {"api-key": "hunter2hunter2"}}})
    )
    file = written(tmp_path, load_profile("p.toml")[0])
    assert "hunter2" not in file.read_text()
    with pytest.raises(UserError) as caught:
        load_profile(str(file))
    (problem,) = caught.value.problems
    assert (
        problem.key == "vllm.args.api-key" and ".env" in problem.fix and "--resume" in problem.fix
    )


def failing_profile(tmp_path: Path, **trainer: Any) -> Path:
    """A stack that `up` starts and that ends at once with 3: its first step fails."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    data = {
        "name": "p",
        "model": str(tmp_path / "model"),
        "env": {"module": "json", "env": {"X": "${RESUME_TEST_X}"}},
        "api": {"port": free_port()},
        "vllm": {"port": free_port(), "args": {"api-key": "hunter2"}},
        "prepare": [
            {
                "name": "first",
                "command": ["sh", "-c", "echo got $Y; false"],
                "env": {"Y": "${RESUME_TEST_Y}"},
            }
        ],
        "trainer": {"device": "cpu"} | trainer,
    }
    (tmp_path / "place").mkdir()
    path = tmp_path / "place/p.toml"
    path.write_text(tomli_w.dumps(data))
    (tmp_path / "place/.env").write_text("RESUME_TEST_X=here\nRESUME_TEST_Y=from-dotenv\n")
    return path


def test_resume_tells_what_is_different(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = failing_profile(tmp_path, lr=1e-4)
    up = ["up", str(profile), "--headless"]
    assert main.run([*up, "--run-dir", "run"]) == Exit.COMPONENT_FAILED
    capfd.readouterr()
    sets = ["trainer.lr=2e-4", "vllm.max_model_len=99", "vllm.args.api-key=other-secret", "seed=0"]
    more = [word for item in sets for word in ("--set", item)]
    assert main.run([*up, "--resume", "run", *more]) == Exit.COMPONENT_FAILED
    out = capfd.readouterr().out
    assert "changed profile:\n" in out and "secret" not in out and "hunter2" not in out
    listed = [
        line
        for line in out.split("changed profile:\n")[1].splitlines()
        if "→" in line and line.startswith("  ")
    ]
    assert sorted(listed) == [
        "  trainer.lr: 0.0001 → 0.0002",
        "  vllm.max_model_len: (not set) → 99",
    ]


def test_resume_without_profile_takes_the_run_s_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESUME_TEST_Y", raising=False)
    profile = failing_profile(tmp_path)
    text = profile.read_text().replace("hunter2", "${RESUME_TEST_Y}")
    profile.write_text(text)
    sets = ["--set", "trainer.lr=0.25"]
    assert (
        main.run(["up", str(profile), "--headless", "--run-dir", "run", *sets])
        == Exit.COMPONENT_FAILED
    )
    profile.write_text("changed since, and no profile any more")
    capfd.readouterr()
    for _ in range(2):  # the second time from what the first resume wrote
        assert main.run(["up", "--resume", "run", "--headless"]) == Exit.COMPONENT_FAILED
        captured = capfd.readouterr()
        assert "changed profile" not in captured.out, captured.out
    assert json.loads(Path("run/run.json").read_text())["profile"] == str(profile)
    assert "got from-dotenv" in Path("run/logs/first/3.log").read_text(), (
        "the first profile's .env was not found"
    )
    assert load_profile("run/profile.toml")[0].trainer.settings["lr"] == 0.25


def test_resume_of_a_run_with_a_hidden_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = failing_profile(tmp_path)
    main.run(["up", str(profile), "--headless", "--run-dir", "run"])
    assert main.run(["up", "--resume", "run", "--headless"]) == Exit.USAGE
    error = capfd.readouterr().err
    assert (
        "vllm.args.api-key: was a secret" in error
        and "${NAME}" in error
        and "up PROFILE --resume RUN" in error
    )


def test_a_finished_run_is_not_resumed_for_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = failing_profile(tmp_path, training_steps=60)
    up = ["up", str(profile), "--headless"]
    assert main.run([*up, "--run-dir", "run"]) == Exit.COMPONENT_FAILED
    run = RunDir(Path("run"))
    step = {
        "v": 1,
        "run_id": "r",
        "time": 1.0,
        "seq": 1,
        "kind": "step",
        "attempt": 1,
        "rank": 0,
        "step": 60,
        "lr": 0,
    }
    step |= dict.fromkeys(
        ("loss", "reward_mean", "reward_std", "grad_norm", "ratio_mean", "clip_fraction"), 0
    )
    step |= {"tokens": 1, "sequences": 1, "weight_version": 60}
    run.telemetry_jsonl.write_text(json.dumps(step, separators=(",", ":")) + "\n")
    done = RunResult(exit_code=0, reason="done").model_dump_json()
    run.result_json.write_text(done)
    logs = sorted(run.root.rglob("*"))
    capfd.readouterr()
    for more in ([], ["--set", "trainer.training_steps=30"]):
        assert main.run([*up, "--resume", "run", *more]) == Exit.USAGE
        said = capfd.readouterr().err
        assert (
            f"already at 60 of {60 if not more else 30} steps" in said
            and "raise trainer.training_steps" in said
        )
    assert run.result_json.read_text() == done and sorted(run.root.rglob("*")) == logs, (
        "nothing is started or written"
    )
    assert (
        main.run([*up, "--resume", "run", "--set", "trainer.training_steps=61"])
        == Exit.COMPONENT_FAILED
    )
    run.result_json.write_text(RunResult(exit_code=130, reason="stopped").model_dump_json())
    assert main.run([*up, "--resume", "run"]) == Exit.COMPONENT_FAILED, (
        "it may still have to write its final model"
    )


def test_a_checkpoint_beyond_the_steps_is_refused_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = failing_profile(tmp_path, training_steps=60)
    up = ["up", str(profile), "--headless"]
    assert main.run([*up, "--run-dir", "run"]) == Exit.COMPONENT_FAILED
    for name in ("step_40", "step_60", "step_notes", "adapter_step_80"):
        (folder := RunDir(Path("run")).checkpoints / name).mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
    (RunDir(Path("run")).checkpoints / "step_70").mkdir()
    assert main.run([*up, "--resume", "run"]) == Exit.COMPONENT_FAILED
    result = RunDir(Path("run")).result_json.read_text()
    capfd.readouterr()
    assert main.run([*up, "--resume", "run", "--set", "trainer.training_steps=50"]) == Exit.USAGE
    said = capfd.readouterr().err
    assert "step_60 is beyond 50 steps" in said and "step_60 away" in said
    assert RunDir(Path("run")).result_json.read_text() == result


def test_no_profile_and_nothing_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["up"]) == Exit.USAGE
    assert "PROFILE is missing" in capsys.readouterr().err
    assert main.run(["up", "--resume", "nowhere"]) == Exit.NO_RUN
    run = RunDir(tmp_path / "run")
    run.create()
    run.run_json.write_text('{"run_id": "r"}')
    assert main.run(["up", "--resume", "run"]) == Exit.USAGE
    assert "name the profile: up PROFILE --resume run" in capsys.readouterr().err


def test_differences_read_like_the_profile() -> None:
    old = {
        "env": [{"name": "a"}, {"name": "b", "weight": 1}],
        "trainer": {"gpus": [0]},
        "x": {"k": "v"},
    }
    new = {
        "env": [{"name": "a"}, {"name": "b", "weight": 2}],
        "trainer": {"gpus": [0, 1]},
        "y": "a\nb",
    }
    assert differences(old, new) == [
        ('env.1.weight ([[env]] "b")', "1", "2"),
        ("trainer.gpus", "[0]", "[0, 1]"),
        ("x.k", '"v"', "(not set)"),
        ("y", "(not set)", '"a\\nb"'),
    ]


def test_a_run_whose_file_names_no_id_gets_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    profile, _ = load_profile("demo", [])
    root, run_id = up._choose_run(Namespace(resume=tmp_path, run_dir=None), profile)
    assert root == tmp_path and run_id.startswith("demo-")
