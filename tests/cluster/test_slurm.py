"""SLURM: a run is submitted, watched from the login node, and ends with its job; and faults, with
the seconds."""

from __future__ import annotations

import json
import os
import signal
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import wait_until
from tests.cluster.profiles import light, slurm_tables
from tests.cluster.slurm_nodes import SlurmNodes
from tests.cluster.stacks import Observed, User
from tests.cluster.table import Table

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture
def user(slurm: SlurmNodes, tmp_path: Path) -> User:
    """Somebody on the login node."""
    return User(tmp_path, slurm.env)


@pytest.fixture
def run(slurm: SlurmNodes, user: User) -> Iterator[Observed]:
    """A run of stand-ins whose components are all up."""
    profile = light(user.folder, slurm_tables())
    done = user.gives("up", str(profile), "--detach", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    seen = Observed(user.folder / "run")
    seen.until("trainer", "healthy")
    yield seen
    slurm.run("scancel", "--quiet", "-u", str(os.getuid()), check=False)
    seen.until_nothing_is_left(slurm)


def job(run: Observed) -> str:
    return run.dir.slurm_job.read_text().strip()


def test_a_run_is_handed_in_and_its_end_is_the_end_of_the_job(
    slurm: SlurmNodes, user: User
) -> None:
    profile = light(user.folder, slurm_tables(), steps=5)
    script = user.gives("up", str(profile), "--dry-run").stdout
    assert "#SBATCH --nodes=3" in script and "--signal=B:USR1@150" in script and not slurm.jobs()
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run")
    assert done.returncode == 0 and "trainer finished" in done.stdout, done.stdout + done.stderr
    seen = Observed(user.folder / "run")
    assert seen.result()["exit_code"] == 0 and seen.steps() == [1, 2, 3, 4, 5]
    seen.until_nothing_is_left(slurm)


def test_a_run_in_a_folder_whose_name_a_batch_script_could_misread(
    slurm: SlurmNodes, user: User
) -> None:
    profile = light(user.folder, slurm_tables(), steps=2)
    root = 'it\'s "mine" $(id) #100%j'
    done = user.gives("up", str(profile), "--headless", "--run-dir", root)
    assert done.returncode == 0 and "trainer finished" in done.stdout, done.stdout + done.stderr
    Observed(user.folder / root).until_nothing_is_left(slurm)


def test_a_bad_end_of_the_run_is_that_of_the_job(slurm: SlurmNodes, user: User) -> None:
    profile = light(user.folder, slurm_tables(), steps=5)
    bad = 'prepare.0.command=["false"]'
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run", "--set", bad)
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"ExitCode={done.returncode}:0" in slurm.run(
        "scontrol", "show", "job", job(Observed(user.folder / "run"))
    )


def test_the_login_node_watches_and_commands(slurm: SlurmNodes, user: User, run: Observed) -> None:
    assert "healthy" in user.gives("ps", "run").stdout
    assert "step" in user.gives("logs", "trainer", "--run-dir", "run", "-n", "3").stdout
    done = user.gives("restart", "arithmetic", "run", "--yes")
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    row = next(
        row for row in json.loads(user.gives("runs", "--json").stdout) if row["run"] == run.id
    )
    assert (row["state"], row["reason"]) == ("live", "")
    page = user.gives("report", "run", "-o", "page.html")
    assert (
        page.returncode == 0
        and "its supervisor is gone" not in (user.folder / "page.html").read_text()
    )
    assert user.gives("bundle", "run", "-o", "b.tar.gz").returncode == 0
    with tarfile.open(user.folder / "b.tar.gz") as packed:
        status = json.load(
            packed.extractfile(next(name for name in packed.getnames() if "status.json" in name))
        )
    assert status["phase"] == "running" and {part["state"] for part in status["components"]} == {
        "healthy",
        "completed",
    }
    assert "srun" not in user.gives("logs", "vllm", "--run-dir", "run").stdout, (
        "a log is the component's own"
    )
    assert user.gives("down", "run").returncode == 0
    run.until_nothing_is_left(slurm)
    assert run.result()["exit_code"] == 130


def test_a_run_that_waits_says_so_and_is_taken_back(
    slurm: SlurmNodes, user: User, run: Observed
) -> None:
    profile = light(user.folder, slurm_tables())
    assert user.gives("up", str(profile), "--detach", "--run-dir", "second").returncode == 0
    said = user.gives("ps", "second")
    assert said.returncode == 5 and "is PENDING" in said.stderr, said.stderr
    rows = {row["dir"]: row for row in json.loads(user.gives("runs", "--json").stdout)}
    row = rows[str(user.folder / "second")]
    assert row["state"] == "waits" and "is PENDING" in row["reason"]
    refused = user.gives("up", "--resume", "second", "--detach")
    assert refused.returncode == 2 and "has a job already" in refused.stderr
    assert user.gives("down", "second").returncode == 0
    assert list(slurm.jobs()) == [job(run)]


def test_nodes_of_different_partitions_are_one_heterogeneous_job(
    slurm: SlurmNodes, user: User
) -> None:
    nodes = (
        '[[node]]\nname = "first"\npartition = "cpu"\n[[node]]\nname = "second"\ncount = '
        '2\npartition = "gpu"\n'
    )
    profile = light(user.folder, slurm_tables(nodes=nodes), steps=5)
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run", timeout_s=90)
    assert (
        done.returncode == 0 and "#SBATCH hetjob" in (user.folder / "run" / "slurm.sh").read_text()
    ), done.stdout
    Observed(user.folder / "run").until_nothing_is_left(slurm)


def test_before_the_time_limit_it_saves_is_queued_again_and_goes_on(
    slurm: SlurmNodes, run: Observed, table: Table
) -> None:
    """The signal that SLURM sends before the limit is sent by hand: a limit is at least a
    minute."""
    wait_until(lambda: len(run.steps()) > 3, "some steps")
    slurm.run("scancel", "--batch", "--signal=USR1", job(run))
    wait_until(lambda: slurm.jobs().get(job(run)) == "PENDING", "the queue again", 30)
    kept = int((run.dir.checkpoints / "stand-in-step").read_text())
    assert run.result()["exit_code"] == 130
    began = time.monotonic()
    wait_until(lambda: slurm.jobs().get(job(run)) == "RUNNING", "the next turn", 60)
    wait_until(lambda: run.steps()[-1] > kept, "steps of the next turn", 60)
    assert run.steps() == list(range(1, run.steps()[-1] + 1)), "no step is lost or repeated"
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job(run))
    table.row(
        "time limit", "saves, queued again, goes on at the next step", time.monotonic() - began
    )


def test_scancel(slurm: SlurmNodes, run: Observed, table: Table) -> None:
    slurm.run("scancel", job(run))
    seconds = run.until_nothing_is_left(slurm)
    table.row("scancel", "every component ends, nodes idle", seconds)
    assert seconds < 10 and run.result()["exit_code"] == 130


def test_a_killed_supervisor(slurm: SlurmNodes, run: Observed, table: Table) -> None:
    run.supervisor().kill()
    seconds = run.until_nothing_is_left(slurm)
    table.row("SIGKILL of the supervisor", "every component ends, nodes idle", seconds)
    assert seconds < 15


def test_a_killed_srun(run: Observed, table: Table) -> None:
    step = next(p for p in run.processes() if "srun" in p.name())
    step.send_signal(signal.SIGKILL)
    seconds = run.until_said("n2")
    table.row("SIGKILL of srun", run.said()[-1], seconds)
    assert seconds < 10


def test_no_sbatch(user: User, tmp_path: Path) -> None:
    profile = light(user.folder, slurm_tables())
    user.env["PATH"] = str(tmp_path)
    done = user.gives("up", str(profile), "--detach", "--run-dir", "run")
    assert (
        done.returncode == 2
        and "sbatch is not installed" in done.stderr
        and not (user.folder / "run").exists()
    )


def test_a_partition_that_there_is_not(user: User) -> None:
    profile = light(user.folder, slurm_tables('partition = "nowhere"'))
    done = user.gives("up", str(profile), "--detach", "--run-dir", "run")
    assert done.returncode == 2 and "invalid partition" in done.stderr, done.stderr


def test_fewer_nodes_than_asked_for(slurm: SlurmNodes, user: User) -> None:
    profile = light(user.folder, slurm_tables())
    salloc = ("salloc", "-Q", "-N2", "--exclusive", "srun", "-N1", "-n1", "--overlap", "-w", "n1")
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run", before=salloc)
    assert done.returncode == 2 and "has 2 of the 3 machines" in done.stderr, done.stderr
    wait_until(lambda: not slurm.jobs(), "the end of the job")


def test_an_allocation_that_is_over(user: User) -> None:
    profile = light(user.folder, slurm_tables())
    user.env |= {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-3]"}
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run")
    assert done.returncode == 2 and "unset SLURM_JOB_ID" in done.stderr, done.stderr


def test_two_runs_in_one_allocation(user: User, run: Observed) -> None:
    profile = light(user.folder, slurm_tables())
    beside = ("srun", "-Q", f"--jobid={job(run)}", "--overlap", "-N1", "-n1", "-w", "n1")
    done = user.gives("up", str(profile), "--headless", "--run-dir", "other", before=beside)
    assert done.returncode == 2 and "another run has this allocation" in done.stderr, done.stderr


def test_a_killed_node_agent(run: Observed, table: Table) -> None:
    """SLURM sees the step end; the component must not outlive it."""
    far = run.main("vllm").parent()
    assert far is not None and "node_agent" in " ".join(far.cmdline())
    far.kill()
    seconds = run.until_said("was lost")
    table.row("SIGKILL of the node agent", run.said()[-1], seconds)
    assert seconds < 10
    run.until("vllm", "healthy")


def test_a_killed_slurmd(slurm: SlurmNodes, run: Observed, table: Table) -> None:
    """The node's processes go on; when SLURM takes the node for down, it queues the job again, and
    the job waits for it."""
    steps = len(run.steps())
    slurm.daemons.kill("slurmd-n2")
    try:
        wait_until(lambda: len(run.steps()) > steps + 5, "more steps")
        began = time.monotonic()
        wait_until(lambda: slurm.states()["n2"].startswith("down"), "a node that is down", 60)
        wait_until(lambda: slurm.jobs().get(job(run)) == "PENDING", "the queue again", 60)
        table.row(
            "SIGKILL of a slurmd",
            "the run goes on; once SLURM takes the node for down: queued again",
            time.monotonic() - began,
        )
    finally:
        slurm.restart("n2")
    kept = run.steps()[-1]
    wait_until(lambda: run.steps()[-1] > kept, "steps of the next turn", 60)
