"""Start test clusters by hand: `python -m tests.cluster.up [slurm] [ssh]` prints how to use them;
^C ends them."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.cluster.processes import Missing
from tests.cluster.slurm_nodes import SlurmNodes
from tests.cluster.ssh_nodes import SshNodes


def main() -> int:
    """Start the requested clusters (by default all), wait for a signal, and stop them."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.up", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="slurm, ssh (default: both)")
    kinds = parser.parse_args().kinds or ["slurm", "ssh"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    with (
        tempfile.TemporaryDirectory(prefix="atropos-cluster-") as folder,
        contextlib.ExitStack() as nodes,
    ):
        if "slurm" in kinds:
            (place := Path(folder) / "slurm").mkdir()
            slurm = nodes.enter_context(SlurmNodes(place))
            print(f"three nodes by SLURM:\n  export SLURM_CONF={slurm.conf}\n  srun -N3 hostname")
        if "ssh" in kinds:
            (place := Path(folder) / "ssh").mkdir()
            ssh = nodes.enter_context(SshNodes(place))
            print(f"three hosts by ssh:\n  ssh -F {ssh.config} n2 true")
            print(f'  [cluster] ssh = ["-F", "{ssh.config}"]')
        print("^C ends them", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Missing as missing:
        raise SystemExit(str(missing)) from None
