"""The ranks of a trainer on two nodes, each with its own address: they meet, train, and end
together."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from atropos_common.broadcast.transfer import meeting_place
from atropos_common.net.ports import interface_of
from atropos_common.system.run_dir import ENV_NODE_ADDRESS, ENV_RANKS_DIR
from benchmarks.support.nursery import ForkedProcess
from tests.support.nursery import TRAINER, forked
from tests.trainer_core.offline_runs import STEPS, group_of, offline_config, write_lines
from trainer_core import train
from trainer_core.__main__ import main
from trainer_core.errors import UsageError
from trainer_core.ranks import launch
from trainer_core.ranks.world import (
    ENV_FIRST_RANK,
    ENV_MEETING,
    ENV_RANKS,
    keep_master,
    meet_nodes,
    node_address,
    restore_master,
)

LIMIT_S = 10.0
"""In this time the end of a rank has ended those of the other node."""


@pytest.fixture
def folder(demo_base: Path, tmp_path: Path) -> Path:
    (tmp_path / "tiny").symlink_to(demo_base)
    return tmp_path


def launched(node: int, flags: list[str], folder: Path, *, forks: bool = True) -> ForkedProcess:
    """The launcher of one of two nodes, with one rank, forked from a process that has imported
    torch. A launcher that gets a signal to stop needs torchrun's own start (not `forks`): it does
    not report how a forked rank ended."""
    (folder / f"tmp{node}").mkdir(exist_ok=True)
    environment = os.environ | {
        "TMPDIR": str(folder / f"tmp{node}"),
        "OMP_NUM_THREADS": "1",
        ENV_RANKS_DIR: str(folder / "meet"),
        ENV_NODE_ADDRESS: f"127.0.0.{11 + node}",
    }
    words = ["--nnodes", "2", "--node-rank", str(node), "1", *flags]
    call = (
        "tests.trainer_core.ranks.test_nodes:be_launcher"
        if forks
        else "trainer_core.ranks.launch:main"
    )
    return forked(TRAINER, call, words, folder / f"output.{node}", env=environment)


def be_launcher(words: list[str]) -> int:
    """The program, whose torchrun forks the ranks."""

    def forking(config: LaunchConfig, _: str) -> Callable[..., Any]:
        return elastic_launch(dataclasses.replace(config, start_method="fork"), be_rank)

    launch.elastic_launch = forking
    return launch.main(words)


def be_rank(*words: str) -> int:
    """Run `-m trainer_core`."""
    code = main(list(words[2:]))
    if code:
        sys.stdout.flush()
        os._exit(code)
    return code


def said(folder: Path, node: int) -> str:
    return (folder / f"output.{node}").read_text()


def test_two_nodes_train_what_one_rank_does(folder: Path) -> None:
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1, size=3)]} for i in range(2)]
    rollouts = write_lines(folder / "rollouts.jsonl", lines)
    config = offline_config(folder / "tiny", folder, rollouts=str(rollouts), training_steps=2)
    nodes = [
        launched(node, config.to_args(), folder) for node in (1, 0)
    ]  # the second one comes first
    one = train(config.model_copy(update={"save_path": str(folder / "one")}))
    assert [process.wait(120) for process in nodes] == [0, 0], said(folder, 0) + said(folder, 1)
    assert len(one.history) == 2 and said(folder, 0).count("Training finished: 2 steps") == 1
    first, second = (
        load_file(path / "final_model" / "model.safetensors")
        for path in (folder / "one", Path(config.save_path))
    )
    for name, tensor in first.items():
        assert (second[name] - tensor).abs().max() <= 1e-5 * float(tensor.abs().max()), name


@pytest.mark.parametrize(
    "how",
    [
        "rank killed",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("stopped", "stopped there")),
    ],
)
def test_an_end_on_one_node_is_one_of_all(folder: Path, how: str) -> None:
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(STEPS)] * 500
    rollouts = write_lines(folder / "rollouts.jsonl", lines)
    config = offline_config(folder / "tiny", folder, rollouts=str(rollouts), training_steps=2000)
    first, second = (
        launched(node, config.to_args(), folder, forks=how == "rank killed") for node in range(2)
    )
    until = time.monotonic() + 60
    while "\nstep 1/" not in said(folder, 0):
        assert first.poll() is None and time.monotonic() < until, said(folder, 0) + said(folder, 1)
        time.sleep(0.02)
    began = time.monotonic()
    if how == "stopped":
        first.send_signal(signal.SIGTERM)
        assert (first.wait(60), second.wait(60)) == (143, 0), said(folder, 0) + said(folder, 1)
        assert (
            "Stopped after step" in said(folder, 0)
            and len(list((folder / "offline").glob("step_*"))) == 1
        )
        return
    if how == "stopped there":
        second.send_signal(signal.SIGTERM)
        assert (first.wait(60), second.wait(60)) == (143, 143), said(folder, 0) + said(folder, 1)
        assert "Stopped after step" in said(folder, 0)
        assert "\nReady to train beside rank 0" in said(folder, 1)
        return
    (rank,) = psutil.Process(second.pid).children()
    rank.kill()
    assert (first.wait(60), second.wait(60)) == (1, 1), said(folder, 0) + said(folder, 1)
    assert time.monotonic() - began < LIMIT_S
    assert said(folder, 1).splitlines()[-1] == "error: rank 1 was killed by SIGKILL"
    assert "rank 1 has ended: was killed by SIGKILL" in said(folder, 0)


def test_nodes_of_this_start_meet_whatever_an_earlier_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "meet"
    folder.mkdir(mode=0o700)
    (folder / "nodes").write_text("aaaa 1\nbbbb 1")
    (folder / "node.1").write_text("bbbb 1")
    (folder / "aaaa").mkdir()
    monkeypatch.setenv(ENV_RANKS_DIR, str(folder))
    found: dict[int, tuple[str, ...]] = {}
    names = (ENV_MEETING, ENV_FIRST_RANK, ENV_RANKS)
    program = (
        "import os, sys; from trainer_core.ranks.world import meet_nodes; meet_nodes(1, 2, 3); "
    )
    program += f"print(*(os.environ[name] for name in {names}))"
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    def first() -> None:
        meet_nodes(0, 2, 2)
        found[0] = tuple(os.environ.pop(name) for name in names)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    thread.join(30)
    theirs = other.communicate(timeout=30)[0].split()
    assert found[0][0] == theirs[0] and Path(theirs[0]).is_dir()
    assert (found[0][1:], theirs[1:]) == (("0", "5"), ["2", "5"]), (
        "ranks 0, 1 here and 2, 3, 4 there"
    )
    assert not (folder / "aaaa").exists()


def test_what_nodes_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_RANKS_DIR, raising=False)
    with pytest.raises(UsageError, match=ENV_RANKS_DIR):
        meet_nodes(0, 2, 1)
    refused = {
        "192.0.2.1": "no network interface here has",
        "no-such-host.invalid": "not a known address",
    }
    for named, words in refused.items():
        monkeypatch.setenv(ENV_NODE_ADDRESS, named)
        with pytest.raises(UsageError, match=words):
            node_address()


def test_a_node_that_is_named_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a batch system: what others dial is a name, which Debian gives the loopback on the
    machine itself."""
    own = {
        each.address
        for ends in psutil.net_if_addrs().values()
        for each in ends
        if each.family == socket.AF_INET
    }
    (beyond, *_) = [address for address in own if not address.startswith("127.")] or pytest.skip(
        "no network here"
    )
    monkeypatch.setenv(ENV_NODE_ADDRESS, "node7")
    for answer in (beyond, "127.0.1.1"):
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda *_, a=answer: [(socket.AF_INET, 1, 6, "", (a, 0))]
        )
        assert node_address() in own and not node_address().startswith("127.")
        assert interface_of(node_address()) != "lo"
    monkeypatch.undo()
    monkeypatch.setenv(ENV_NODE_ADDRESS, "127.0.0.12")
    assert (node_address(), interface_of("127.0.0.12")) == ("127.0.0.12", "lo")


def test_torchrun_does_not_move_where_a_broadcast_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    keep_master()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # torchrun
    monkeypatch.setenv("MASTER_PORT", "29500")
    restore_master()
    assert meeting_place("env://", os.environ) == ("10.0.0.7", "0")
