"""Components in pods: a stand-in for kubectl takes kubectl's options and runs the command here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import State
from atropos_tui.cluster.doctor import Target, examine
from atropos_tui.cluster.machines import prefix_of
from atropos_tui.profile.sections import ClusterSection
from atropos_tui.profile.spec import Node, Place
from tests.support.harness import part, python

KUBECTL = """#!{python}
import os, sys
mark = sys.argv.index("--")
words, command = sys.argv[1:mark], sys.argv[mark + 1:]
if words[:2] != ["-n", "training"] or words[2:4] != ["exec", "-i"]:
    sys.exit("error: unknown command " + " ".join(words))
if words[4] != "infer-0":
    sys.exit(f'Error from server (NotFound): pods "{{words[4]}}" not found')
os.execvp(command[0], command)
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Place]:
    """Makes the place of a pod, reached by the stand-in."""
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    cluster = ClusterSection(launcher="kubernetes", kubectl=["-n", "training"])

    def place(pod: str) -> Place:
        node = Node(name="infer", host=pod, address="127.0.0.1")
        return Place(node="infer", host=pod, address="127.0.0.1", prefix=prefix_of(cluster, node))

    return place


async def test_a_component_in_a_pod(
    launch: Callable[..., Any], kubectl: Callable[[str], Place]
) -> None:
    job = part("one", python("import os; print('in', os.environ['ATROPOS_COMPONENT'])")).model_copy(
        update={"place": kubectl("infer-0")}
    )
    async with launch(job) as running:
        await running.until("one", State.COMPLETED)
        assert "in one" in running.run.log("one", 1).read_text()
        assert (await running.client.status()).components[0].node == "infer"


async def test_what_kubectl_says_is_explained(
    kubectl: Callable[[str], Place], tmp_path: Path
) -> None:
    node = Node(name="infer", host="infer-9", address="127.0.0.1")
    (check,) = await examine([Target(node, kubectl("infer-9"))], tmp_path, collectives=False)
    assert check.verdict == "fail" and "kubectl cannot run a command in the pod" in check.found
    assert "kubectl get pods" in check.fix
    (check,) = await examine([Target(node, kubectl("infer-0"))], tmp_path, collectives=False)
    assert check.verdict == "ok"
