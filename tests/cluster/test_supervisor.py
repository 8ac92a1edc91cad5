"""The supervisor's own tests with components on another node: by srun in an allocation, and by
ssh."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from atropos_tui.cluster.machines import prefix_of
from atropos_tui.profile.sections import ClusterSection
from atropos_tui.profile.spec import Node
from tests.cluster.slurm_nodes import SlurmNodes
from tests.cluster.ssh_nodes import SshNodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def passes_below(
    prefix: list[str], env: Mapping[str, str] | None = None, before: tuple[str, ...] = ()
) -> None:
    """Run the tests that are for every launcher below `prefix`."""
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "tests/atropos_tui/supervisor",
        "tests/atropos_tui/diagnoses",
        "tests/atropos_tui/cluster",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-k",
        "remote",
    ]
    done = subprocess.run(
        [*before, *tests, f"--launcher-prefix={shlex.join(prefix)}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout.splitlines()[-1], (
        done.stdout[-6000:] + done.stderr[-2000:]
    )


def test_below_srun(slurm: SlurmNodes) -> None:
    node = Node(name="second", host="n2", address="n2")
    passes_below(
        prefix_of(ClusterSection(launcher="slurm"), node, binds=False),
        slurm.env,
        ("salloc", "-Q", "-N3", "--exclusive"),
    )


def test_below_ssh(ssh: SshNodes) -> None:
    passes_below(["ssh", "-T", "-F", str(ssh.config), "n2"])
