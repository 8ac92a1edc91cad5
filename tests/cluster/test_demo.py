"""The shipped demo over three nodes, by each launcher: real run-api, environment and vLLM, two
ranks on two nodes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.cluster.profiles import demo, demo_nodes
from tests.cluster.ray_nodes import RayNodes
from tests.cluster.slurm_nodes import SlurmNodes
from tests.cluster.ssh_nodes import SshNodes
from tests.cluster.stacks import Observed, User

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS = 20


def learns(user: User, profile: Path) -> Observed:
    """Run the profile to its end: all steps, one after another, a better reward, and nothing
    left."""
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run", timeout_s=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = Observed(user.folder / "run")
    rows = [json.loads(line) for line in seen.dir.telemetry_jsonl.read_text().splitlines()]
    rewards = {
        row["step"]: row["reward_mean"] for row in rows if row["kind"] == "step" and not row["rank"]
    }
    assert sorted(rewards) == list(range(1, STEPS + 1))
    assert mean([rewards[step] for step in range(STEPS - 4, STEPS + 1)]) > mean(
        [rewards[step] for step in range(1, 6)]
    )
    seen.until_nothing_is_left()
    return seen


def test_by_slurm(slurm: SlurmNodes, tmp_path: Path) -> None:
    seen = learns(User(tmp_path, slurm.env), demo(tmp_path, demo_nodes("slurm"), STEPS))
    seen.until_nothing_is_left(slurm)


def test_by_ssh(ssh: SshNodes, user: User) -> None:
    learns(user, demo(user.folder, demo_nodes("ssh", f'ssh = ["-F", "{ssh.config}"]'), STEPS))


def test_by_ray(ray: RayNodes, user: User) -> None:
    learns(user, demo(user.folder, demo_nodes("ray", f'address = "{ray.address}"'), STEPS))
