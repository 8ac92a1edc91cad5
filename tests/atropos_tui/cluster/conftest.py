"""Fixtures of the tests with other machines: hosts behind ssh, and the supervisor's `launch`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.atropos_tui.supervisor.conftest import (
    launch,
    no_inherited_run,
    prefix,
    pytest_generate_tests,
)
from tests.cluster.processes import Missing
from tests.cluster.ssh_nodes import SshNodes

__all__ = ["launch", "no_inherited_run", "prefix", "pytest_generate_tests"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Three hosts behind private sshds."""
    try:
        with SshNodes(tmp_path_factory.mktemp("ssh")) as nodes:
            yield nodes
    except Missing as error:
        pytest.skip(str(error))
