"""Ray: the bridge carries bytes, exits and errors; a run over three of its nodes ends as on one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.profiles import light, ray_tables
from tests.cluster.ray_nodes import RayNodes
from tests.cluster.stacks import Observed, User

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_the_bridge_carries_bytes_both_ways_and_the_end(ray: RayNodes) -> None:
    bridge = [
        sys.executable,
        "-P",
        "-m",
        "atropos_tui.cluster.ray_bridge",
        "--address",
        ray.address,
    ]
    sent = b"a line\n" * 100_000
    command = [*bridge, "n2", "sh", "-c", "cat; echo bad >&2; exit 3"]
    done = subprocess.run(command, input=sent, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, sent, b"bad\n")
    done = subprocess.run(
        [*bridge, "n9", "true"], capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 255 and b"no living node n9: it has n1, n2, n3" in done.stderr


def test_a_run_over_three_nodes(ray: RayNodes, user: User) -> None:
    profile = light(user.folder, ray_tables(ray.address), steps=5)
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run", timeout_s=200)
    assert done.returncode == 0 and "trainer finished" in done.stdout, done.stdout + done.stderr
    seen = Observed(user.folder / "run")
    assert seen.steps() == [1, 2, 3, 4, 5]
    seen.until_nothing_is_left()
