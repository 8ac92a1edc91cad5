"""The clusters of `make test-cluster`: one of each kind for a session, in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import RayNodes
from tests.cluster.slurm_nodes import SlurmNodes
from tests.cluster.ssh_nodes import SshNodes
from tests.cluster.stacks import User
from tests.cluster.table import Table


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNodes]:
    """Three nodes by SLURM."""
    with SlurmNodes(tmp_path_factory.mktemp("slurm")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Three hosts by ssh."""
    with SshNodes(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def ray() -> Iterator[RayNodes]:
    """Three nodes by Ray."""
    with RayNodes() as nodes:
        yield nodes


@pytest.fixture
def user(tmp_path: Path) -> User:
    """Somebody on the first node."""
    return User(tmp_path)


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """The table of faults."""
    rows = Table()
    yield rows
    rows.write()
