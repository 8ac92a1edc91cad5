"""SLURM without a cluster: the batch script of a profile, and the notice before a job's time
limit."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from atropos_common.protocol.control import Phase, RunStatus, State
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli.main import run
from atropos_tui.cli.manage import inspect
from atropos_tui.cli.manage.runs import RunEntry, read_run
from atropos_tui.cluster import slurm
from atropos_tui.cluster.slurm import lead_s, limit_s, script
from atropos_tui.errors import UserError
from atropos_tui.monitor.run.run_files import is_crashed
from atropos_tui.profile.profile import load_profile

NODES = '[[node]]\nname = "first"\n[[node]]\nname = "train"\ncount = 2\n'


def script_of(folder: Path, cluster: str = "", nodes: str = NODES) -> list[str]:
    file = folder / "p.toml"
    file.write_text(f'extends = "demo"\n[cluster]\nlauncher = "slurm"\n{cluster}\n{nodes}')
    profile, _ = load_profile(str(file), [])
    text = script(profile, RunDir(folder / "a run"), "p-1")
    (folder / "job.sh").write_text(text)
    assert subprocess.run(["sh", "-n", str(folder / "job.sh")], check=False).returncode == 0
    return text.splitlines()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("04:00:00", 14400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(limit: str, seconds: int) -> None:
    assert limit_s(limit) == seconds


def test_a_run_has_time_to_save_and_a_short_one_is_not_told_at_once() -> None:
    assert [lead_s(limit) for limit in ("04:00:00", "00:10:00", "2", None, "UNLIMITED")] == [
        300,
        150,
        60,
        300,
        300,
    ]


def test_nodes_that_are_alike_are_one_component_that_takes_them_whole(tmp_path: Path) -> None:
    lines = script_of(
        tmp_path, 'time = "04:00:00"\npartition = "gpu"\naccount = "rl"\nsbatch = ["--qos=high"]'
    )
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--exclusive", "--mem=0", "--requeue", "--signal=B:USR1@300"} <= set(
        options
    )
    assert {"--time=04:00:00", "--partition=gpu", "--account=rl", "--qos=high"} <= set(options)
    assert "hetjob" not in options and lines[-1].endswith(
        f"up --headless --resume '{tmp_path}/a run'"
    )


def test_who_says_how_many_processors_shares_a_node(tmp_path: Path) -> None:
    nodes = '[[node]]\nname = "all"\ncount = 2\ngpus = 8\n'
    lines = script_of(
        tmp_path, 'requeue = false\nsbatch = ["--cpus-per-gpu=8", "--mem-per-gpu=64G"]', nodes
    )
    assert not [line for line in lines if "--exclusive" in line or "--mem=0" in line]
    assert "#SBATCH --no-requeue" in lines


def test_nodes_that_differ_are_a_component_each(tmp_path: Path) -> None:
    lines = script_of(tmp_path, nodes=NODES + 'gpus = 8\npartition = "h100"\nconstraint = "sxm"\n')
    first, second = lines[: (cut := lines.index("#SBATCH hetjob"))], lines[cut:]
    assert "#SBATCH --nodes=1" in first and "#SBATCH --nodes=2" in second
    assert {
        "#SBATCH --partition=h100",
        "#SBATCH --constraint=sxm",
        "#SBATCH --gpus-per-node=8",
    } <= set(second)
    assert any("--signal" in line for line in first) and not any(
        "--signal" in line for line in second
    )


def test_a_folder_of_any_name_stays_one_word_of_one_option(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "mine" $(id) #100%j'
    folder.mkdir()
    line = next(line for line in script_of(folder, 'account = "a b\'c"') if "--output" in line)
    assert shlex.split(line) == ["#SBATCH", f"--output={folder}/a run/slurm.log".replace("%", "%%")]
    assert "#SBATCH '--account=a b'\"'\"'c'" in script_of(folder, 'account = "a b\'c"')


@pytest.mark.parametrize(
    "value",
    [
        'account = "a\\ntouch x"',
        'partition = "a\\ntouch x"',
        'time = "1\\ntouch x"',
        'sbatch = ["-q a\\ntouch x"]',
    ],
)
def test_no_option_becomes_a_line_of_its_own(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError) as refused:
        script_of(tmp_path, value)
    assert "control characters" in str(refused.value.problems[0])


def test_dry_run_prints_the_script_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    script_of(tmp_path)
    assert run(["up", "p.toml", "--dry-run"]) == 0
    assert (
        capsys.readouterr().out.startswith("#!/bin/sh\n#SBATCH --job-name=demo-")
        and not (tmp_path / "runs").exists()
    )


def squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A stand-in for SLURM's program."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/squeue").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=":")
    monkeypatch.setattr(slurm, "POLL_S", 0.01)


def test_a_controller_that_does_not_answer_is_no_end_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.slurm_job.write_text("7")
    squeue(
        tmp_path,
        monkeypatch,
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    with pytest.raises(UserError, match="SLURM does not answer"):
        slurm.find_job("7")
    assert slurm.runs_elsewhere(run_dir), "for all that is known"
    squeue(
        tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert slurm.find_job("7") is None and not slurm.runs_elsewhere(run_dir)


def test_of_a_job_in_parts_the_first_has_the_batch_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(tmp_path, monkeypatch, "echo '7+1|RUNNING|cpu1|None'; echo '7+0|RUNNING|gpu1|None'")
    assert slurm.find_job("7") == slurm.Job("7", "RUNNING", "gpu1", "None")


def test_a_secret_in_the_profile_is_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job reads a copy in which it does not stand, hours later."""
    squeue(tmp_path, monkeypatch, "exit 0")
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\ntouch submitted\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    env = '[env.env]\nOPENAI_API_KEY = "sk-not-for-anybody-1234567890"\n'
    (tmp_path / "p.toml").write_text(
        f'extends = "demo"\nmode = "broadcast"\n[cluster]\nlauncher = '
        f'"slurm"\n{NODES}[trainer]\nnode = "train"\n{env}'
    )
    assert run(["up", "p.toml", "--run-dir", "run"]) == 2
    said = capsys.readouterr().err
    assert "the profile holds a secret" in said and not (tmp_path / "submitted").exists(), said


@pytest.fixture
def handed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEntry:
    """A run that was handed in from this machine, as job 7; its first turn may have ended."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path / "runs/p-1")
    run_dir.create()
    run_dir.slurm_job.write_text("7")
    run_dir.run_json.write_text(json.dumps({"run_id": "p-1", "name": "p", "mode": "none"}))
    run_dir.plan_json.write_text(
        json.dumps({"components": [{"name": "trainer", "role": "trainer"}]})
    )
    entry = read_run(run_dir.root)
    assert entry is not None
    return entry


@pytest.mark.parametrize("ended", [None, 130])
def test_a_run_in_the_queue_waits_and_has_not_crashed(
    handed_in: RunEntry, ended: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ended:
        handed_in.dir.result_json.write_text(json.dumps({"exit_code": ended, "reason": "stopped"}))
    squeue(tmp_path, monkeypatch, "echo '7|PENDING|n/a|Resources'")
    row = inspect.run_row(handed_in)
    assert (row.state, row.reason) == ("waits", "SLURM's job 7 is PENDING (Resources)")
    status = asyncio.run(inspect.status_of(handed_in))
    assert (status.phase, status.reason, status.exit_code) == (Phase.STARTING, row.reason, None)
    assert [part.state for part in status.components] == [State.PENDING]
    assert not is_crashed(status)


@pytest.mark.parametrize("called", ["", "my thesis", "\x1b]0;evil\x07"])
def test_a_job_of_another_name_is_not_taken_out_of_the_queue(
    handed_in: RunEntry, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording, or a cluster that was set up again, may hold the number of another job of this
    user."""
    name = called or handed_in.run_id
    squeue(
        tmp_path,
        monkeypatch,
        f"case \"$*\" in *%j*) echo '{name}';; *) echo '7|PENDING|n/a|Resources';; esac",
    )
    (tmp_path / "bin/scancel").write_text(f"#!/bin/sh\ntouch {tmp_path}/cancelled\n")
    (tmp_path / "bin/scancel").chmod(0o755)
    if called:
        with pytest.raises(UserError) as refused:
            slurm.cancel_pending(handed_in.dir, handed_in.run_id)
        assert "scancel 7" in str(refused.value) and "\x1b" not in str(refused.value)
    else:
        assert slurm.cancel_pending(handed_in.dir, handed_in.run_id)
    assert (tmp_path / "cancelled").exists() is not bool(called)


def test_a_run_on_another_node_is_asked_there(
    handed_in: RunEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`report`, `bundle` and the tools of `mcp` have it from there, as `ps` has."""
    squeue(tmp_path, monkeypatch, "echo '7|RUNNING|n1|None'")
    there = RunStatus(
        run_id="p-1",
        name="p",
        mode="none",
        run_dir="r",
        phase=Phase.RUNNING,
        started_at=1,
        seq=9,
        components=[],
    )
    (tmp_path / "said").write_text(there.model_dump_json())
    srun = tmp_path / "bin/srun"
    srun.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat {tmp_path}/said\n')
    srun.chmod(0o755)
    assert inspect.run_row(handed_in).state == "live"
    assert asyncio.run(inspect.status_of(handed_in)) == there
    assert (tmp_path / "words").read_text().endswith(f"ps {handed_in.dir.root} --json\n")
    assert (
        (tmp_path / "words").read_text().startswith("-Q --jobid=7 --overlap --mem=0 -N1 -n1 -w n1 ")
    )
    srun.write_text("#!/bin/sh\nexit 1\n")
    status = asyncio.run(inspect.status_of(handed_in))
    assert status.phase is Phase.RUNNING and "it runs on n1 but does not answer" in status.reason


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_has_ended_is_not_asked_about(
    handed_in: RunEntry, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM keeps a job in its list for minutes, and every list of runs would ask it for each."""
    squeue(tmp_path, monkeypatch, f"touch {tmp_path}/asked; echo '7|COMPLETING|n1|None'")
    handed_in.dir.result_json.write_text(
        json.dumps({"exit_code": code, "reason": "trainer finished"})
    )
    assert inspect.run_row(handed_in).state == f"ended {code}"
    assert asyncio.run(inspect.status_of(handed_in)).exit_code == code
    assert not (tmp_path / "asked").exists()


def test_a_down_that_loses_the_race_with_the_time_limit_says_so(
    handed_in: RunEntry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ended with 143 and SLURM's word about a cancelled step, and the job ran again."""
    gone = tmp_path / "gone"
    squeue(
        tmp_path,
        monkeypatch,
        f"[ -e {gone} ] && echo '7|PENDING|n/a|BeginTime' || echo '7|RUNNING|n1|None'",
    )
    (tmp_path / "bin/srun").write_text(f"#!/bin/sh\ntouch {gone}\nexit 143\n")
    (tmp_path / "bin/srun").chmod(0o755)
    assert run(["down", str(handed_in.dir.root)]) == 4
    said = capsys.readouterr().err
    assert "the job is queued again" in said and "run it again: atropos-tui down" in said


@pytest.mark.parametrize("ended_by", ["command", "signal"])
def test_a_run_that_was_stopped_is_not_live_where_slurm_does_not_answer(
    handed_in: RunEntry, ended_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_in.dir.result_json.write_text(
        json.dumps({"exit_code": 130, "reason": "stopped", "ended_by": ended_by})
    )
    squeue(tmp_path, monkeypatch, "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert inspect.run_row(handed_in).state == "ended 130"
    assert asyncio.run(inspect.status_of(handed_in)).phase is Phase.ENDED


def test_options_about_gpus_are_for_nodes_that_have_some(tmp_path: Path) -> None:
    """The options that docs/slurm.md recommends made SLURM refuse every job whose first node has no
    GPU."""
    nodes = (
        '[[node]]\nname = "head"\nsbatch = ["--cpus-per-task=4"]\n[[node]]\nname = '
        '"train"\ncount = 2\ngpus = 2\n'
    )
    lines = script_of(
        tmp_path, 'sbatch = ["--cpus-per-gpu=8", "--mem-per-gpu=64G", "--qos=high"]', nodes
    )
    first, second = lines[: (cut := lines.index("#SBATCH hetjob"))], lines[cut:]
    assert not [line for line in first if "-gpu" in line]
    assert {"#SBATCH --cpus-per-task=4", "#SBATCH --mem=0", "#SBATCH --qos=high"} <= set(first)
    assert {
        "#SBATCH --cpus-per-gpu=8",
        "#SBATCH --mem-per-gpu=64G",
        "#SBATCH --gpus-per-node=2",
    } <= set(second)
    assert (
        not {"#SBATCH --exclusive", "#SBATCH --mem=0"} & set(second)
        and "#SBATCH --exclusive" not in first
    )


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--comment=two words", ["--comment=two words"]),
        ("--comment two words", ["--comment=two words"]),
        ("--comment='two words'", ["--comment=two words"]),
        ("--comment=$(id) `id` #x", ["--comment=$(id) `id` #x"]),
        ("-q high", ["-qhigh"]),
        ("-H", ["-H"]),
        ("--contiguous", ["--contiguous"]),
    ],
)
def test_an_option_is_one_word_of_the_script(option: str, line: list[str], tmp_path: Path) -> None:
    """A value with a space was two words: `Invalid directive found in batch script: run`."""
    written = script_of(tmp_path, f"sbatch = [{json.dumps(option)}]")
    assert ["#SBATCH", *line] in [shlex.split(text, comments=False) for text in written]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--job-name=my run", "atropos-tui sets --job-name itself"),
        ('--job-name="my run"', "finds the job by the run's name"),
        ("-J x", "atropos-tui sets --job-name itself"),
        ("--time=4", "set [cluster] time"),
        ("-t 4", "set [cluster] time"),
        ("--signal=B:TERM@60", "atropos-tui sets --signal itself"),
        ("--output=x.log", "slurm.log"),
        ("--mail-user=a@b.c --mail-type=END", "two options in one"),
        ("qos=high", "not an sbatch option"),
    ],
)
def test_an_option_that_the_script_sets_itself_is_refused(
    option: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        script_of(tmp_path, f"sbatch = [{json.dumps(option)}]")
    assert said in str(refused.value) and "cluster.sbatch" in str(refused.value)
