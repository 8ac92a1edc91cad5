"""SLURM: `up` outside a job submits itself, inside one it takes the allocation; commands go to the supervisor's node.

A submitted run is a run directory that `up` has written and a batch script which goes on with it, so that a requeued
job goes on with the same run. The batch script *is* the supervisor: its end gives the nodes back, and its exit code is
the job's. All that is known of a job is asked of SLURM; the run directory only has its number.
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

from atropos_common.files import open_regular, read_regular, write_private
from atropos_common.run_dir import RunDir
from atropos_tui.errors import Elsewhere, Exit, Problem, UserError
from atropos_tui.profile import sbatch

if TYPE_CHECKING:
    from atropos_tui.profile.sections import ClusterSection, NodeSection, Profile
    from atropos_tui.supervisor.store import RunResult

LEAD_S = 300
"""So long before the time limit a run is told to save and stop; of a short limit a quarter."""
ANSWER_S = 15.0
"""How long a command of SLURM may take."""
POLL_S = 1.0
TRIES = 3
JOB_ID = "SLURM_JOB_ID"
HERE = "SLURMD_NODENAME"
NODES = "SLURM_JOB_NODELIST"


@dataclass(frozen=True)
class Job:
    """A job that waits or runs."""

    id: str
    state: str
    """SLURM's word, such as PENDING, RUNNING or COMPLETING."""
    node: str
    """Where its batch script is; empty before it runs."""
    reason: str
    """Why it waits."""

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING"

    @property
    def is_ending(self) -> bool:
        return self.state == "COMPLETING"

    @property
    def is_here(self) -> bool:
        """Whether this process is in the job, and on the node of its batch script."""
        return os.environ.get(JOB_ID) == self.id and os.environ.get(HERE) == self.node

    def prefix(self, *, terminal: bool) -> list[str]:
        """The command that runs what follows it beside the batch script."""
        pty = ["--pty"] if terminal else []
        return ["srun", "-Q", f"--jobid={self.id}", "--overlap", "--mem=0", "-N1", "-n1", "-w", self.node, *pty]


def _ask(*command: str) -> subprocess.CompletedProcess[str] | None:
    """A command of SLURM; None where there is none, or no answer in time."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def find_job(job_id: str) -> Job | None:
    """A job that waits, runs or is ending; None once it is over.

    Raises:
        UserError: SLURM does not answer, so nobody knows.
    """
    if shutil.which("squeue") is None:
        return None
    for _ in range(TRIES):
        answer = _ask("squeue", "-h", "-j", job_id, "-o", "%i|%T|%B|%r")
        if answer and (answer.returncode == 0 or "Invalid job id" in answer.stderr):
            break
        time.sleep(POLL_S)
    else:
        said = answer.stderr.strip().splitlines()[-1] if answer and answer.stderr.strip() else f"in {ANSWER_S:g} s"
        raise UserError(
            "SLURM does not answer", [Problem(f"squeue -j {job_id}: {said}", "try again; see scontrol ping")]
        )
    lines = sorted(answer.stdout.splitlines(), key=lambda line: not line.partition("|")[0].endswith("+0"))
    if not lines:
        return None
    _, state, node, reason = (*lines[0].split("|"), "", "", "")[:4]
    return Job(job_id, state, "" if node == "n/a" else node, reason)


def job_of(run: RunDir) -> Job | None:
    """The job that a run was submitted as or runs in; None: none, or it is over."""
    job_id = number(run)
    return find_job(job_id) if job_id else None


def number(run: RunDir) -> str:
    """The number of a run's newest job; empty where it had none."""
    try:
        job_id = read_regular(run.slurm_job).strip()
    except (OSError, ValueError):
        return ""
    return job_id if job_id.isascii() and job_id.isdecimal() else ""


def elsewhere(run: RunDir) -> Job | None:
    """The job in which a run goes on, or waits to, on another machine than this one; None where it does not.

    All commands have it from here. A run that was stopped may be queued again, but not after `down`; one that ended
    otherwise is not.

    Raises:
        UserError: SLURM does not answer, so nobody knows.
    """
    if not (job_id := number(run)):
        return None
    if (result := _result(run)) and (result.exit_code != Exit.INTERRUPTED or result.ended_by == "command"):
        return None
    job = find_job(job_id)
    return None if job is None or job.is_here else job


def runs_elsewhere(run: RunDir) -> bool:
    """Whether the run's supervisor lives on a node of its job that is not this one."""
    try:
        job = elsewhere(run)
    except UserError:
        return _result(run) is None  # without a result it runs, for all that is known
    return job is not None and job.runs


def _result(run: RunDir) -> RunResult | None:
    from atropos_tui.supervisor.store import RunResult  # costs most commands nothing

    return RunResult.load(run.result_json)


def go_there(run: RunDir) -> None:
    """Return where the run's supervisor is, or where none is.

    Raises:
        Elsewhere: it is on another node of its job.
        UserError: exit code 5, the job waits for its nodes.
    """
    job = elsewhere(run)
    if job is None:
        return
    if job.runs:
        raise Elsewhere(job.prefix(terminal=sys.stdin.isatty() and sys.stdout.isatty()))
    raise UserError(f"{run.root.name} does not run now", [Problem(*waits(job))], Exit.NO_RUN)


def stop_there(run: RunDir, timeout_s: float | None) -> int | None:
    """Give `down` on the node of the run's supervisor; its exit code, or None where the run is not in another place.

    Raises:
        UserError: the job waits for its nodes; or the run's time limit was faster, and the job is queued again.
    """
    try:
        go_there(run)
    except Elsewhere as there:
        there.words = ["down", str(run.root), *([] if timeout_s is None else [f"--timeout={timeout_s:g}"])]
        code = there.run([])
    else:
        return None
    job = job_of(run) if code else None
    if job is None or job.runs:
        return code
    problem = Problem(waits(job)[0], f"give it again: atropos-tui down {shlex.quote(str(run.root))}")
    raise UserError("the time limit came first, and the job is queued again", [problem], Exit.TIMEOUT)


def ask_there(job: Job, *words: str) -> str:
    """What a command of ours prints beside the batch script of a job that runs; nothing where it does not get there."""
    answer = _ask(*job.prefix(terminal=False), sys.executable, "-P", "-m", "atropos_tui", *words)
    return answer.stdout if answer and answer.returncode == 0 else ""


def waits(job: Job) -> tuple[str, str]:
    """In words how a job stands that does not run, and the way out."""
    if job.is_ending:
        return f"SLURM's job {job.id} is ending", f"squeue -j {job.id} lists it until it is over"
    reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
    return f"SLURM's job {job.id} is {job.state}{reason}", f"squeue -j {job.id}; `atropos-tui down` takes it back"


def queued(run: RunDir) -> str:
    """In words, how the job stands in which a run waits; empty where none does."""
    try:
        job = elsewhere(run)
    except UserError:
        return ""
    return "" if job is None or job.runs or job.is_ending else waits(job)[0]


def take_back(run: RunDir, run_id: str | None = None) -> bool:
    """Take a job that waits out of the queue; False where none waits.

    Args:
        run_id: what the job has to be called, where its number is known from the run's folder alone.

    Raises:
        UserError: it is not called as the run: the number is another cluster's, or that of a recording's sender.
    """
    job = job_of(run)
    if job is None or job.state != "PENDING":
        return False
    answer = _ask("squeue", "-h", "-j", job.id, "-o", "%j") if run_id else None
    names = answer.stdout.splitlines() if answer else []
    if run_id and set(names) != {run_id}:
        called = ", ".join(map(repr, names)) or "something that SLURM does not say"
        what = f"{run.slurm_job} names job {job.id}, which is called {called} and not {run_id}"
        raise UserError("not this run's job", [Problem(what, f"if it is the run's all the same: scancel {job.id}")])
    _ask("scancel", job.id)
    print(f"job {job.id} is out of the queue; atropos-tui up --resume {run.root} submits it again")
    return True


# --- inside a job -------------------------------------------------------------------------------------------------


def wanted(profile: Profile) -> bool:
    """Whether a profile is for SLURM."""
    return profile.cluster is not None and profile.cluster.launcher == "slurm"


def in_job() -> bool:
    """Whether this process has an allocation."""
    return JOB_ID in os.environ


def enter(*, headless: bool) -> None:
    """Return on the first node of this process's allocation, where the supervisor is to be.

    Raises:
        Elsewhere: this is another machine, such as the one where `salloc` was called.
        UserError: the job is over; or the run would end with this command, which is not to wait for it.
    """
    job_id = os.environ[JOB_ID]
    if "SLURM_STEP_ID" in os.environ and (answer := _ask("squeue", "-h", "-j", job_id, "-o", "%N")):
        os.environ[NODES] = answer.stdout.strip()  # a step knows its own nodes alone
    component = os.environ.get(f"{NODES}_HET_GROUP_0")
    answer = _ask("scontrol", "show", "hostnames", component or os.environ.get(NODES, ""))
    first = next(iter(answer.stdout.split()), "") if answer else ""
    if first and os.environ.get(HERE) == first:
        return
    job = find_job(job_id)
    if job is None or not job.runs:
        what = f"SLURM_JOB_ID names job {job_id}, which does not run" + (f": it is {job.state}" if job else " any more")
        raise UserError("no allocation", [Problem(what, "unset SLURM_JOB_ID: then `atropos-tui up` submits a job")])
    if not headless:
        what = f"this is not {first}, the first node of job {job_id}, and what is started there ends with this command"
        fix = "stay with it: up --headless; or let `atropos-tui up` submit a job of its own: unset SLURM_JOB_ID"
        raise UserError("not a place to start from", [Problem(what, fix)])
    there = Job(job_id, job.state, first, "")
    raise Elsewhere(there.prefix(terminal=sys.stdin.isatty() and sys.stdout.isatty()))


def note_job(run: RunDir) -> None:
    """Write down which job the run is in."""
    write_private(run.slurm_job, os.environ[JOB_ID] + "\n")


def go_on_later(run: RunDir, steps: int) -> None:
    """Give the nodes back and wait for the next turn, after a run that its time limit has stopped.

    Args:
        steps: optimizer steps of this turn; with none the next turn would get no further, and the job ends.
    """
    job_id = os.environ[JOB_ID]
    if not steps:
        print(f"no step was done before the time limit: job {job_id} is not queued again. Give it more: [cluster] time")
        return
    print(f"job {job_id} is queued again and goes on from its checkpoint in {run.root}", flush=True)
    answer = _ask("scontrol", "requeue", job_id)
    if answer is None or answer.returncode:
        said = answer.stderr.strip() if answer else "scontrol gives no answer"
        print(f"it cannot be queued again ({said}): atropos-tui up --resume {run.root} submits it", flush=True)
        return
    time.sleep(ANSWER_S)  # the end of this process before SLURM's own would look like the job's


# --- outside a job ------------------------------------------------------------------------------------------------


def script(profile: Profile, run: RunDir, run_id: str) -> str:
    """The batch script of a run."""
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
        [cluster.python or sys.executable, "-P", "-m", "atropos_tui", "up", "--headless", "--resume", str(run.root)]
    )
    return "\n".join(["#!/bin/sh", "\n#SBATCH hetjob\n".join(components), f"exec {command}", ""])


def components_of(profile: Profile) -> list[list[NodeSection]]:
    """The [[node]]s of each component of the job: all in one, unless they differ in partition, options or in what they
    must have."""
    kinds = {(node.partition, node.constraint, node.gpus, *node.sbatch) for node in profile.node}
    return [profile.node] if len(kinds) == 1 else [[node] for node in profile.node]


def _once(cluster: ClusterSection, run: RunDir, run_id: str) -> Iterator[str]:
    """What belongs to the job as a whole."""
    yield f"--job-name={run_id}"
    yield shlex.quote(f"--output={run.slurm_log}".replace("%", "%%"))  # %j and the like are SLURM's own
    yield "--open-mode=append"
    yield "--requeue" if cluster.requeue else "--no-requeue"
    yield f"--signal=B:USR1@{lead_s(cluster.time)}"


def _each(cluster: ClusterSection, nodes: list[NodeSection]) -> Iterator[str]:
    """The options of a component of a job. It takes whole nodes, unless the profile says how many CPUs."""
    written = [option for text in (*cluster.sbatch, *nodes[0].sbatch) if (option := sbatch.parse(text))]
    options = [option for option in written if nodes[0].gpus or not option.needs_gpus]
    yield f"--nodes={sum(node.count for node in nodes)}"
    yield "--ntasks-per-node=1"
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
    """Seconds before a time limit at which the run is told: a quarter of it, at least a minute, at most `LEAD_S`."""
    seconds = limit_s(limit) if limit else None
    return LEAD_S if seconds is None else max(60, min(LEAD_S, seconds // 4))


def limit_s(limit: str) -> int | None:
    """Seconds of a time limit as SLURM writes them: MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN, D-H:MIN:SEC."""
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
    """Refuse to submit where that cannot be.

    Raises:
        UserError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        fix = "give the command on a login node of the cluster, or choose another [cluster] launcher (ssh, ray, local)"
        raise UserError("no SLURM here", [Problem("sbatch is not installed, or not in PATH", fix, key="cluster")])


def check_not_queued(run: RunDir) -> None:
    """Refuse to submit a run twice.

    Raises:
        UserError: its job waits or is ending.
    """
    job = job_of(run)
    if job is not None and os.environ.get(JOB_ID) != job.id:
        raise UserError("that run has a job already", [Problem(*waits(job))])


def submit(run: RunDir, text: str) -> Job:
    """Hand the batch script in.

    Raises:
        UserError: SLURM refuses it.
    """
    write_private(run.slurm_script, text)
    answer = _ask("sbatch", "--parsable", str(run.slurm_script))
    if answer is None or answer.returncode:
        said = answer.stderr.strip() if answer else f"no answer within {ANSWER_S:.0f} s: is slurmctld up? (sinfo)"
        reason = said.removeprefix("sbatch: error: ").replace("\nsbatch: error: ", "; ")
        fix = f"`sinfo` lists partitions and nodes; sbatch --test-only {shlex.quote(str(run.slurm_script))} tries again"
        raise UserError("SLURM does not take the job", [Problem(reason, fix, key="cluster")])
    job_id = answer.stdout.strip().partition(";")[0]
    write_private(run.slurm_job, job_id + "\n")
    return find_job(job_id) or Job(job_id, "PENDING", "", "")


def attach(run: RunDir, job: Job) -> None:
    """Wait for the run to begin, then open its screen there.

    Raises:
        Elsewhere: as soon as it has begun; always, but where the job ends before.
    """
    told = ""
    while (now := find_job(job.id)) is not None:
        if now.runs and run.control_sock.is_symlink():
            raise Elsewhere(now.prefix(terminal=True), ["attach", str(run.root)])
        if not (now.runs or now.is_ending) and (line := waits(now)[0]) != told:
            print(f"{line}; ^C leaves it in the queue", flush=True)
            told = line
        time.sleep(POLL_S)
    tell_log(run, 0)


def stay(run: RunDir, job: Job) -> None:
    """Print what the job prints until it is over; SIGINT and SIGTERM stop the run, or take it out of the queue."""

    def stop(*_: object) -> None:
        if not take_back(run):
            _ask("scancel", "--batch", "--signal=TERM", job.id)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        read, told = 0, ""
        while (now := find_job(job.id)) is not None:
            read = tell_log(run, read)
            if now.state == "PENDING" and (line := waits(now)[0]) != told:
                print(line, flush=True)
                told = line
            time.sleep(POLL_S)
        tell_log(run, read)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_log(run: RunDir, start: int) -> int:
    """Print what the batch script has written from byte `start` on; where that ends."""
    try:
        with open_regular(run.slurm_log) as file:
            file.seek(start)
            data = file.read()
    except OSError:
        return start
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(data)
