"""The test clusters themselves: three nodes each, at addresses of their own, and nothing left after
them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.processes import HOSTS, named
from tests.cluster.slurm_nodes import SlurmNodes
from tests.cluster.ssh_nodes import SshNodes

pytestmark = pytest.mark.cluster


def test_steps_of_one_job_overlap_on_three_nodes(slurm: SlurmNodes) -> None:
    """And a step has the GPUs that it was given alone."""
    script = slurm.folder / "job.sh"
    inner = "; ".join(
        f"srun --overlap -N1 -n1 -w {node} sh -c 'echo $SLURMD_NODENAME'" for node in HOSTS
    )
    script.write_text(
        f"#!/bin/sh\n{inner}; srun --overlap -N1 -n1 -w n2 --gpus-per-node=1 env | grep CUDA\n"
    )
    out = slurm.folder / "job.out"
    slurm.run("sbatch", "--wait", "-N3", "--gpus-per-node=2", "-o", str(out), str(script))
    assert out.read_text().split() == [*HOSTS, "CUDA_VISIBLE_DEVICES=0"]
    assert slurm.jobs() == {}


def test_each_host_answers_at_its_address_by_its_own_key(ssh: SshNodes) -> None:
    for node, address in HOSTS.items():
        command = ["ssh", "-F", str(ssh.config), node, "echo $SSH_CONNECTION"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        assert done.stdout.split()[2] == address
    ssh.know("n2", "host_n3")
    done = subprocess.run(
        ["ssh", "-F", str(ssh.config), "n2", "true"], capture_output=True, text=True, check=False
    )
    ssh.know("n2")
    assert done.returncode == 255 and "IDENTIFICATION HAS CHANGED" in done.stderr


def test_nothing_is_left_of_a_cluster_with_a_running_job(tmp_path: Path) -> None:
    with SlurmNodes(tmp_path) as nodes:
        nodes.run("sbatch", "-N2", "-o", "/dev/null", "--wrap", f"srun sleep 600 # {tmp_path}")
        began = time.monotonic()
        while len(nodes.steps()) < 1:
            assert time.monotonic() - began < 10
            time.sleep(0.1)
    assert named(str(tmp_path)) == []
