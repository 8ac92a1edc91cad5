"""SLURM: outside a job `up` submits the run; inside, it uses the allocation.

A submitted run is a run directory plus a batch script that resumes it, so a requeued job continues
the run. The batch script *is* the supervisor: its end releases the nodes. The run directory stores
only the job's number.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos_common.system.files import open_regular, read_regular, write_private
from atropos_common.system.run_dir import RunDir
from atropos_tui.cluster import sbatch
from atropos_tui.errors import Elsewhere, Exit, Problem, UserError

if TYPE_CHECKING:
    from atropos_tui.profile.profile import Profile
    from atropos_tui.profile.sections import ClusterSection, NodeSection
    from atropos_tui.supervisor.journal.store import RunResult

LEAD_S = 300
"""Seconds between the signal to save and the time limit; see `lead_s`."""
COMMAND_TIMEOUT_S = 15.0
"""Seconds for a command of SLURM."""
POLL_S = 1.0
TRIES = 3
JOB_ID = "SLURM_JOB_ID"
HERE = "SLURMD_NODENAME"
NODES = "SLURM_JOB_NODELIST"


@dataclass(frozen=True)
class Job:
    id: str
    state: str
    """SLURM's word, such as PENDING."""
    node: str
    reason: str

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"

    @property
    def is_ending(self) -> bool:
        return self.state == "COMPLETING"

    @property
    def is_here(self) -> bool:
        """This process is in the job, on the node of its batch script."""
        return os.environ.get(JOB_ID) == self.id and os.environ.get(HERE) == self.node

    def prefix(self, *, terminal: bool) -> list[str]:
        """Command in front of another that runs it on the batch script's node."""
        pty = ["--pty"] if terminal else []
        return [
            "srun",
            "-Q",
            f"--jobid={self.id}",
            "--overlap",
            "--mem=0",
            "-N1",
            "-n1",
            "-w",
            self.node,
            *pty,
        ]


def _ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """None if SLURM is not installed or does not answer in time."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def find_job(job_id: str) -> Job | None:
    """None once the job is over.

    Raises:
        UserError: SLURM does not answer, so the state is unknown.
    """
    if shutil.which("squeue") is None:
        return None
    # A busy controller may fail now and then; an unknown id is an answer (the job is over).
    for _ in range(TRIES):
        answer = _ask("squeue", "-h", "-j", job_id, "-o", "%i|%T|%B|%r")
        if answer and (answer.returncode == 0 or "Invalid job id" in answer.stderr):
            break
        time.sleep(POLL_S)
    else:
        said = (
            answer.stderr.strip().splitlines()[-1]
            if answer and answer.stderr.strip()
            else f"in {COMMAND_TIMEOUT_S:g} s"
        )
        raise UserError(
            "SLURM does not answer",
            [Problem(f"squeue -j {job_id}: {said}", "try again; check with scontrol ping")],
        )
    # A heterogeneous job has a line per component (123+0, 123+1); the batch script runs in
    # component 0.
    lines = sorted(
        answer.stdout.splitlines(), key=lambda line: not line.partition("|")[0].endswith("+0")
    )
    if not lines:
        return None
    _, state, node, reason = (*lines[0].split("|"), "", "", "")[:4]
    return Job(job_id, state, "" if node == "n/a" else node, reason)


def job_of(run: RunDir) -> Job | None:
    """The job that a run was submitted as or runs in."""
    job_id = number(run)
    return find_job(job_id) if job_id else None


def number(run: RunDir) -> str:
    """Number of a run's newest job; empty if it had none."""
    try:
        job_id = read_regular(run.slurm_job).strip()
    except (OSError, ValueError):
        return ""
    return job_id if job_id.isascii() and job_id.isdecimal() else ""


def elsewhere(run: RunDir) -> Job | None:
    """The job in which a run goes on, or waits to, on another machine.

    A run that its time limit stopped may be queued again; one stopped by `down` is not.

    Raises:
        UserError: SLURM does not answer, so the state is unknown.
    """
    if not (job_id := number(run)):
        return None
    if (result := _result(run)) and (
        result.exit_code != Exit.INTERRUPTED or result.ended_by == "command"
    ):
        return None
    job = find_job(job_id)
    return None if job is None or job.is_here else job


def runs_elsewhere(run: RunDir) -> bool:
    """The run's supervisor runs on another node of its job."""
    try:
        job = elsewhere(run)
    except UserError:
        return _result(run) is None  # SLURM is silent: a run without a result counts as live
    return job is not None and job.runs


def _result(run: RunDir) -> RunResult | None:
    from atropos_tui.supervisor.journal.store import (
        RunResult,  # imported only by runs that SLURM started
    )

    return RunResult.load(run.result_json)


def require_here(run: RunDir) -> None:
    """Return if this is the supervisor's machine, or if there is no supervisor.

    Raises:
        Elsewhere: the supervisor is on another node of its job.
        UserError: exit code 5, the job waits for its nodes.
    """
    job = elsewhere(run)
    if job is None:
        return
    if job.runs:
        raise Elsewhere(job.prefix(terminal=sys.stdin.isatty() and sys.stdout.isatty()))
    raise UserError(f"{run.root.name} is not running yet", [Problem(*waits(job))], Exit.NO_RUN)


def stop_there(run: RunDir, timeout_s: float | None) -> int | None:
    """Run `down` on the supervisor's node; return its exit code, or None if the run is here.

    Raises:
        UserError: the job waits for its nodes, or is queued again after its time limit.
    """
    try:
        require_here(run)
    except Elsewhere as there:
        there.words = [
            "down",
            str(run.root),
            *([] if timeout_s is None else [f"--timeout={timeout_s:g}"]),
        ]
        code = there.run([])
    else:
        return None
    # A failed `down` may mean that the time limit stopped the run first, and SLURM queued the job
    # again.
    job = job_of(run) if code else None
    if job is None or job.runs:
        return code
    problem = Problem(waits(job)[0], f"run it again: atropos-tui down {shlex.quote(str(run.root))}")
    raise UserError(
        "the time limit came first, and the job is queued again", [problem], Exit.TIMEOUT
    )


def run_there(job: Job, *words: str) -> str:
    answer = _ask(*job.prefix(terminal=False), sys.executable, "-P", "-m", "atropos_tui", *words)
    return answer.stdout if answer and answer.returncode == 0 else ""


def waits(job: Job) -> tuple[str, str]:
    if job.is_ending:
        return f"SLURM's job {job.id} is ending", f"squeue -j {job.id} lists it until it is over"
    reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
    return (
        f"SLURM's job {job.id} is {job.state}{reason}",
        f"squeue -j {job.id}; `atropos-tui down` takes it back",
    )


def queued(run: RunDir) -> str:
    """Describe the job in which a run waits; empty if none does."""
    try:
        job = elsewhere(run)
    except UserError:
        return ""
    return "" if job is None or job.runs or job.is_ending else waits(job)[0]


def cancel_pending(run: RunDir, run_id: str | None = None) -> bool:
    """Remove a pending job from the queue; False if none is pending.

    Args:
        run_id: required name of the job: a copied run may carry the number of another's job.

    Raises:
        UserError: the job has another name.
    """
    job = job_of(run)
    if job is None or job.state != "PENDING":
        return False
    answer = _ask("squeue", "-h", "-j", job.id, "-o", "%j") if run_id else None
    names = answer.stdout.splitlines() if answer else []
    if run_id and set(names) != {run_id}:
        called = f"is called {', '.join(map(repr, names))}" if names else "has an unknown name"
        what = f"{run.slurm_job} names job {job.id}, which {called}, but this run is {run_id}"
        raise UserError(
            "not this run's job", [Problem(what, f"if the job is this run's: scancel {job.id}")]
        )
    _ask("scancel", job.id)
    print(
        f"job {job.id} was removed from the queue; atropos-tui up --resume {run.root} "
        f"submits it again"
    )
    return True


# --- inside a job
# -------------------------------------------------------------------------------------------------


def wanted(profile: Profile) -> bool:
    """The profile is for SLURM."""
    return profile.cluster is not None and profile.cluster.launcher == "slurm"


def in_job() -> bool:
    """This process has an allocation."""
    return JOB_ID in os.environ


def enter(*, headless: bool) -> None:
    """Return on the first node of the allocation, where the supervisor has to run.

    Raises:
        Elsewhere: this is another machine, such as the one where `salloc` was called.
        UserError: the job is over; or the run would end with this command.
    """
    job_id = os.environ[JOB_ID]
    if "SLURM_STEP_ID" in os.environ and (answer := _ask("squeue", "-h", "-j", job_id, "-o", "%N")):
        os.environ[NODES] = (
            answer.stdout.strip()
        )  # inside a step the variable lists the step's nodes only
    component = os.environ.get(
        f"{NODES}_HET_GROUP_0"
    )  # only in a heterogeneous job, for its first component
    answer = _ask("scontrol", "show", "hostnames", component or os.environ.get(NODES, ""))
    first = next(iter(answer.stdout.split()), "") if answer else ""
    if first and os.environ.get(HERE) == first:
        return
    job = find_job(job_id)
    if job is None or not job.runs:
        what = f"SLURM_JOB_ID names job {job_id}, which does not run" + (
            f": it is {job.state}" if job else " any more"
        )
        raise UserError(
            "no allocation",
            [Problem(what, "unset SLURM_JOB_ID, so that `atropos-tui up` submits a job")],
        )
    if not headless:
        what = (
            f"this is not {first}, the first node of job {job_id}, and a run started from here "
            f"ends with this command"
        )
        fix = (
            "use up --headless and keep it running; or unset SLURM_JOB_ID, so that `atropos-tui "
            "up` submits a job"
        )
        raise UserError("the run cannot be started from this machine", [Problem(what, fix)])
    there = Job(job_id, job.state, first, "")
    raise Elsewhere(there.prefix(terminal=sys.stdin.isatty() and sys.stdout.isatty()))


def note_job(run: RunDir) -> None:
    write_private(run.slurm_job, os.environ[JOB_ID] + "\n")


def go_on_later(run: RunDir, steps: int) -> None:
    """Requeue the job after the time limit stopped the run, and wait for its end.

    Args:
        steps: optimizer steps since the job's start; with none, the next start would get no
            further.
    """
    job_id = os.environ[JOB_ID]
    if not steps:
        print(
            f"no step finished before the time limit, so job {job_id} is not queued again: "
            f"raise [cluster] time"
        )
        return
    print(f"job {job_id} is queued again and goes on from its checkpoint in {run.root}", flush=True)
    answer = _ask("scontrol", "requeue", job_id)
    if answer is None or answer.returncode:
        said = answer.stderr.strip() if answer else "scontrol does not answer"
        print(
            f"it cannot be queued again ({said}): atropos-tui up --resume {run.root} submits it",
            flush=True,
        )
        return
    time.sleep(
        COMMAND_TIMEOUT_S
    )  # SLURM kills this process on requeue; an earlier exit would end the job


# --- outside a job
# ------------------------------------------------------------------------------------------------


def script(profile: Profile, run: RunDir, run_id: str) -> str:
    cluster = profile.cluster
    assert cluster is not None
    components = [
        "\n".join(f"#SBATCH {option}" for option in options)
        for options in (
            [*(_once(cluster, run, run_id) if not index else []), *_each(cluster, nodes)]
            for index, nodes in enumerate(components_of(profile))
        )
    ]
    command = shlex.join(
        [
            cluster.python or sys.executable,
            "-P",
            "-m",
            "atropos_tui",
            "up",
            "--headless",
            "--resume",
            str(run.root),
        ]
    )
    return "\n".join(["#!/bin/sh", "\n#SBATCH hetjob\n".join(components), f"exec {command}", ""])


def components_of(profile: Profile) -> list[list[NodeSection]]:
    """Group the [[node]]s into components of the job: one, unless they differ in partition,
    constraint, GPUs or options."""
    kinds = {(node.partition, node.constraint, node.gpus, *node.sbatch) for node in profile.node}
    return [profile.node] if len(kinds) == 1 else [[node] for node in profile.node]


def _once(cluster: ClusterSection, run: RunDir, run_id: str) -> Iterator[str]:
    yield f"--job-name={run_id}"
    yield shlex.quote(
        f"--output={run.slurm_log}".replace("%", "%%")
    )  # %j and similar are patterns of SLURM
    yield "--open-mode=append"
    yield "--requeue" if cluster.requeue else "--no-requeue"
    # B: to the batch script alone, which is the supervisor
    yield f"--signal=B:USR1@{lead_s(cluster.time)}"


def _each(cluster: ClusterSection, nodes: list[NodeSection]) -> Iterator[str]:
    """Options of one component. It takes whole nodes unless the profile sets a number of CPUs."""
    # The nodes of a component have the same options, so the first one speaks for all.
    written = [
        option for text in (*cluster.sbatch, *nodes[0].sbatch) if (option := sbatch.parse(text))
    ]
    options = [option for option in written if nodes[0].gpus or not option.needs_gpus]
    yield f"--nodes={sum(node.count for node in nodes)}"
    yield "--ntasks-per-node=1"  # one task a node: the supervisor starts the processes itself
    if nodes[0].gpus:
        yield f"--gpus-per-node={nodes[0].gpus}"
    if not any(option.shares_processors for option in options):
        yield "--exclusive"
    if not any(option.sets_memory for option in options):
        yield "--mem=0"
    partition = nodes[0].partition or cluster.partition
    asked = {"time": cluster.time, "account": cluster.account, "partition": partition}
    asked["constraint"] = nodes[0].constraint
    yield from (shlex.quote(f"--{name}={value}") for name, value in asked.items() if value)
    yield from (option.text for option in options)


def lead_s(limit: str | None) -> int:
    """Seconds before the time limit at which the run gets its signal: a quarter of the limit,
    from 60 to `LEAD_S`."""
    seconds = limit_s(limit) if limit else None
    return LEAD_S if seconds is None else max(60, min(LEAD_S, seconds // 4))


def limit_s(limit: str) -> int | None:
    """Seconds of MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN, D-H:MIN:SEC; None for other text."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)):
        return None
    days, *clock = found.groups()
    parts = [int(part) for part in clock if part is not None]
    if days is not None or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def check_sbatch() -> None:
    if shutil.which("sbatch") is None:
        fix = (
            "run the command on a login node of the cluster, or choose another [cluster] "
            "launcher (ssh, ray, local)"
        )
        raise UserError(
            "no SLURM here", [Problem("sbatch is not installed or not on PATH", fix, key="cluster")]
        )


def check_not_queued(run: RunDir) -> None:
    job = job_of(run)
    if job is not None and os.environ.get(JOB_ID) != job.id:
        raise UserError("that run has a job already", [Problem(*waits(job))])


def submit(run: RunDir, text: str) -> Job:
    """Raises:
    UserError: SLURM refuses the batch script.
    """
    write_private(run.slurm_script, text)
    answer = _ask("sbatch", "--parsable", str(run.slurm_script))
    if answer is None or answer.returncode:
        said = (
            answer.stderr.strip()
            if answer
            else f"no answer within {COMMAND_TIMEOUT_S:.0f} s: is slurmctld up? (sinfo)"
        )
        reason = said.removeprefix("sbatch: error: ").replace("\nsbatch: error: ", "; ")
        fix = (
            f"`sinfo` lists partitions and nodes; sbatch --test-only "
            f"{shlex.quote(str(run.slurm_script))} tries again"
        )
        raise UserError("SLURM refuses the job", [Problem(reason, fix, key="cluster")])
    job_id = answer.stdout.strip().partition(";")[0]  # --parsable prints ID, or ID;CLUSTER
    write_private(run.slurm_job, job_id + "\n")
    return find_job(job_id) or Job(job_id, "PENDING", "", "")


def attach(run: RunDir, job: Job) -> None:
    """Wait for the run to start, then open its screen on the job's node; return only if the job
    ends before.

    Raises:
        Elsewhere: the run has started.
    """
    shown = ""
    while (now := find_job(job.id)) is not None:
        # `is_symlink`: the link's target is on another machine, so `exists` would be false.
        if now.runs and run.control_sock.is_symlink():
            raise Elsewhere(now.prefix(terminal=True), ["attach", str(run.root)])
        if not (now.runs or now.is_ending) and (line := waits(now)[0]) != shown:
            print(f"{line}; ^C keeps it in the queue", flush=True)
            shown = line
        time.sleep(POLL_S)
    print_log(run, 0)


def stay(run: RunDir, job: Job) -> None:
    """Print the job's output until it is over; SIGINT and SIGTERM stop the run, or remove it
    from the queue."""

    def stop(*_: object) -> None:
        if not cancel_pending(run):
            # --batch: only the batch script gets the signal, and stops the stack in order.
            _ask("scancel", "--batch", "--signal=TERM", job.id)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        read, shown = 0, ""
        while (now := find_job(job.id)) is not None:
            read = print_log(run, read)
            if now.state == "PENDING" and (line := waits(now)[0]) != shown:
                print(line, flush=True)
                shown = line
            time.sleep(POLL_S)
        print_log(run, read)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_log(run: RunDir, start: int) -> int:
    """Print the batch script's output from byte `start`; return the end position."""
    try:
        with open_regular(run.slurm_log) as file:
            file.seek(start)
            data = file.read()
    except OSError:
        return start
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(data)
