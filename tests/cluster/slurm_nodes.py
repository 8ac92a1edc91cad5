"""A SLURM cluster of three nodes on this host: `with SlurmNodes(folder) as slurm:`, then commands
with `slurm.env`.

One slurmctld, a slurmd per node with an address, a port and a spool folder of its own, and a
private munged. Nothing of the system's own SLURM is read or written. Each node says that it has 8
CPUs and 2 GPUs: jobs are placed here, not fast.
"""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
from pathlib import Path
from types import TracebackType

from tests.cluster.processes import HOSTS, Daemons, free_port, named, program, wait_until

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A requeued job may not start again before its credential of before has run out.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobRequeue=1
ReturnToService=2
MpiDefault=none
# A node that says nothing is down after 10 s here, after 300 s by default.
SlurmdTimeout=10
KillWait=5
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=1
{nodes}
PartitionName=all Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=cpu Nodes=n1 MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=gpu Nodes=n2,n3 MaxTime=INFINITE DefaultTime=60 State=UP
"""


class SlurmNodes:
    """The cluster; `env` is what a user of it has in his environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self.daemons = Daemons(folder, self.env)

    def __enter__(self) -> SlurmNodes:
        self._write()
        munged = program("munged", "munge")
        slurmctld, slurmd = program("slurmctld", "slurm-wlm"), program("slurmd", "slurm-wlm")
        within = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        socket = f"--socket={self.folder}/munge.sock"
        try:
            self.daemons.start(
                "munged",
                munged,
                "--foreground",
                "--force",
                socket,
                f"--key-file={self.folder}/munge.key",
                *within,
            )
            wait_until((self.folder / "munge.sock").exists, "munged's socket")
            self.daemons.start("slurmctld", slurmctld, "-D", "-f", str(self.conf))
            for node in HOSTS:
                self.daemons.start(f"slurmd-{node}", slurmd, "-D", "-N", node, "-f", str(self.conf))
            wait_until(
                lambda: self.states() == dict.fromkeys(HOSTS, "idle"), "three idle nodes", 30
            )
        except BaseException as error:
            error.add_note(self.daemons.said())
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _write(self) -> None:
        for node in HOSTS:
            (self.folder / f"spool-{node}").mkdir(parents=True)
        (self.folder / "state").mkdir()
        nodes = [
            f"NodeName={node} NodeHostname={os.uname().nodename} NodeAddr={address} "
            f"Port={free_port(address)}"
            " CPUs=8 RealMemory=1000000 Gres=gpu:2 State=UNKNOWN"
            for node, address in HOSTS.items()
        ]
        self.conf.write_text(
            CONF.format(
                host=os.uname().nodename,
                port=free_port(),
                user=pwd.getpwuid(os.getuid()).pw_name,
                folder=self.folder,
                nodes="\n".join(nodes),
            )
        )
        # Any two character devices will do: they are counted and never opened.
        gpus = [
            f"NodeName={node} Name=gpu File=/dev/{device}\n"
            for node in HOSTS
            for device in ("null", "zero")
        ]
        (self.folder / "gres.conf").write_text("".join(gpus))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def run(self, *command: str, check: bool = True) -> str:
        """Return the output of a SLURM command."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def states(self) -> dict[str, str]:
        """State of each node."""
        lines = self.run("sinfo", "-h", "-N", "-p", "all", "-o", "%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def jobs(self) -> dict[str, str]:
        """State of each job that waits or runs, by its number."""
        lines = self.run("squeue", "-h", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def steps(self) -> list[str]:
        """The steps that run now, without the batch script's own."""
        lines = self.run("squeue", "-h", "-s", "-o", "%i %j %N").splitlines()
        return [line for line in lines if not line.split()[0].endswith((".batch", ".extern"))]

    def restart(self, node: str) -> None:
        """Bring back a slurmd that was killed."""
        name = f"slurmd-{node}"
        self.daemons.start(
            name, program("slurmd", "slurm-wlm"), "-D", "-N", node, "-f", str(self.conf)
        )
        wait_until(lambda: self.states()[node] == "idle", f"{node} idle again", 30)

    def _stop(self) -> None:
        if "slurmctld" in self.daemons.running:
            subprocess.run(
                ["scancel", "--quiet", "--full", "-u", str(os.getuid())], env=self.env, check=False
            )
            with_jobs = lambda: bool(self.run("squeue", "-h", check=False).strip())  # noqa: E731
            try:
                wait_until(lambda: not with_jobs(), "the end of all jobs", 15)
            except TimeoutError:
                print(self.run("squeue", check=False))
        self.daemons.stop()
        for process in named(str(self.folder)):  # slurmstepd outlives its slurmd
            if process.name() in ("slurmstepd", "slurmd", "srun", "sbatch"):
                process.kill()
