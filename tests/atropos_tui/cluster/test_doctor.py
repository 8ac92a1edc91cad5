"""`doctor --nodes`: the report of each node, and the errors of one that does not fit, with real
programs there."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from atropos_tui.cli.answers import Check
from atropos_tui.cli.main import run
from atropos_tui.cluster import doctor as nodes
from atropos_tui.cluster import node_connection
from atropos_tui.cluster.doctor import Target, examine, refuse_unfit
from atropos_tui.errors import UserError
from atropos_tui.profile.spec import ComponentSpec, Node, Place, StackSpec
from tests.cluster.processes import free_port
from tests.cluster.ssh_nodes import SshNodes

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
APART = ["unshare", "--user", "--map-root-user"]
"""A program with mounts or a network of its own, without being root."""


def target(
    name: str = "far",
    *prefix: str,
    address: str = "127.0.0.3",
    python: str = sys.executable,
    gpus: int = 0,
    ports: dict[int, str] | None = None,
) -> Target:
    place = Place(
        node=name, host=f"host-{name}", address=address, prefix=list(prefix), python=python
    )
    return Target(
        Node(name=name, host=place.host, address=address, gpus=gpus), place, ports=ports or {}
    )


HERE = target("here", address="127.0.0.2")


def checks(folder: Path, *targets: Target, collectives: bool = False) -> dict[str, Check]:
    found = asyncio.run(examine(targets, folder, collectives=collectives))
    assert not [*folder.glob(".atropos*")], "its files are removed"
    return {check.name: check for check in found}


def fails(found: dict[str, Check]) -> dict[str, str]:
    return {name: check.found for name, check in found.items() if check.verdict == "fail"}


def can(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )


def test_nodes_that_fit_and_a_collective_between_them(tmp_path: Path) -> None:
    port = free_port("127.0.0.3")
    found = checks(tmp_path, HERE, target("far", "env", ports={port: "vllm"}), collectives=True)
    assert list(found) == ["node here", "node far", "between 2 nodes (gloo)"]
    assert {check.verdict for check in found.values()} == {"ok"}
    assert re.search(
        rf"host-far, torch \S+, .*clock [+-]0\.\d+ s, folder shared, ports {port} free",
        found["node far"].found,
    )
    assert re.search(
        r"all-gather of 64 MiB \d+\.\d+ s .*reduce-scatter", found["between 2 nodes (gloo)"].found
    )


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")
@pytest.mark.parametrize(
    ("seconds", "verdict"), [("+600", "fail"), ("-600", "fail"), ("+3", "warn"), ("+0", "ok")]
)
def test_clocks_apart(tmp_path: Path, seconds: str, verdict: str) -> None:
    late = target("late", "env", f"LD_PRELOAD={FAKETIME}", f"FAKETIME={seconds}")
    found = checks(tmp_path, HERE, late)
    check = found.get("node late: clock", found.get("node late"))
    assert check is not None and check.verdict == verdict
    if verdict == "fail":
        assert re.match(
            r"(600\.\d|599\.\d) s " + ("ahead of" if seconds[0] == "+" else "behind"), check.found
        )


@pytest.mark.skipif(not can(*APART, "--mount", "true"), reason="no mounts of one's own here")
def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NEW_FILE_S", 0.3)
    over = f'mount -t tmpfs none {tmp_path} && exec "$@"'
    found = fails(checks(tmp_path, HERE, target("far", *APART, "--mount", "sh", "-c", over, "sh")))
    assert "is another folder there" in found["node far: shared folder"]
    gone = f'mount -t tmpfs none {tmp_path.parent} && exec "$@"'
    found = fails(checks(tmp_path, HERE, target("far", *APART, "--mount", "sh", "-c", gone, "sh")))
    assert "No such file" in found["node far: shared folder"]


def test_another_version_and_none_at_all(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    python = str(tmp_path / "other/bin/python")
    said = fails(checks(tmp_path, HERE, target("far", "env", python=python)))["node far: versions"]
    assert "atropos-tui missing there" in said and "torch missing there" in said
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site / "atropos_tui-0.0.9.dist-info").mkdir()
    (site / "atropos_tui-0.0.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: atropos-tui\nVersion: 0.0.9\n"
    )
    said = fails(checks(tmp_path, HERE, target("far", "env", python=python)))["node far: versions"]
    assert said.startswith("atropos-tui 0.0.9 there, ")


def test_the_same_version_of_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        nodes.node_probe, "_build", lambda: "0123456789ab"
    )  # here; the node agent has its own text
    assert re.match(
        r"atropos-tui \S+ with other source", fails(checks(tmp_path, HERE))["node here: versions"]
    )


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    found = checks(tmp_path, HERE, target("far", "env", python="/nowhere/bin/python"))
    assert "the interpreter is missing there" in fails(found)["node far"]
    assert "[cluster] python" in found["node far"].fix
    assert (
        "cannot be run here"
        in fails(checks(tmp_path, target("far", "no-such-launcher")))["node far"]
    )


def test_a_node_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "CALL_TIMEOUT_S", 1.0)
    silent = target("far", "sh", "-c", "echo busy >&2; exec sleep 1000")
    found = checks(tmp_path, silent)
    assert fails(found) == {"node far": "host-far: no answer within 1 s (last line: busy)"}
    assert "try it by hand: sh -c" in found["node far"].fix


def test_a_greeting_of_the_shell_there_is_no_answer(tmp_path: Path) -> None:
    greets = target("far", "sh", "-c", 'echo "Welcome to this cluster {}"; exec "$@"', "sh")
    assert not fails(checks(tmp_path, greets))


def test_ports_addresses_and_gpus_that_are_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        found = checks(tmp_path, HERE, target("far", "env", ports={port: "vllm"}, gpus=8))
    assert "vllm cannot use it: Address already in use" in fails(found)[f"node far: port {port}"]
    assert "but 8 are required" in fails(found)["node far: GPUs"]
    found = checks(tmp_path, HERE, target("far", "env", address="192.0.2.7"))
    assert "192.0.2.7 cannot be bound there" in fails(found)["node far: address"]


@pytest.mark.skipif(not can(*APART, "--net", "ip", "link"), reason="no network of one's own here")
def test_a_public_address_and_one_that_nobody_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = 'ip link set lo up && ip addr add 9.9.9.9/32 dev lo && exec "$@"'
    far = target("far", *APART, "--net", "sh", "-c", own, "sh", address="9.9.9.9")
    found = checks(tmp_path, far)
    assert (
        found["node far: address"].verdict == "warn"
        and "is public" in found["node far: address"].found
    )
    far = target("far", *APART, "--net", "sh", "-c", own, "sh", address="127.0.0.3")
    found = fails(checks(tmp_path, HERE, far))
    assert "127.0.0.3 does not answer from there" in found["node here: reaches far"]
    assert "127.0.0.2 does not answer from there" in found["node far: reaches here"]


def test_up_refuses_in_words_before_anything_starts(tmp_path: Path) -> None:
    spec = ComponentSpec(
        name="env", command=["true"], place=target("far", "env", python="/nowhere/python").place
    )
    node = Node(name="far", host="host-far", address="127.0.0.3")
    stack = StackSpec(
        run_id="r", name="r", mode="none", run_dir=str(tmp_path), components=[spec], nodes=[node]
    )
    with pytest.raises(UserError, match="its nodes cannot run it") as refused:
        refuse_unfit(stack, tmp_path)
    assert "the interpreter is missing there" in str(refused.value)
    here = spec.model_copy(update={"place": target("far").place})
    assert (
        refuse_unfit(stack.model_copy(update={"components": [here]}), tmp_path / "not looked at")
        == []
    )


# By ssh


def by_ssh(hosts: SshNodes, node: str) -> Target:
    return target(
        node,
        "ssh",
        "-T",
        "-F",
        str(hosts.config),
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=2",
        node,
    )


def test_over_ssh(tmp_path: Path, hosts: SshNodes) -> None:
    assert not fails(checks(tmp_path, by_ssh(hosts, "n2")))


def test_a_host_key_that_changed(tmp_path: Path, hosts: SshNodes) -> None:
    hosts.know("n2", key="host_n3")
    try:
        found = checks(tmp_path, by_ssh(hosts, "n2"))
    finally:
        hosts.know("n2")
    assert "the host key is not the one that ssh knows" in fails(found)["node n2"]
    assert "ssh-keygen -R host-n2" in found["node n2"].fix


def test_hosts_that_ssh_does_not_reach(tmp_path: Path, hosts: SshNodes) -> None:
    nowhere = target("far", "ssh", "-F", str(hosts.config), "-o", "BatchMode=yes", "-p", "1", "n3")
    assert "ssh does not reach the machine" in fails(checks(tmp_path, nowhere))["node far"]
    denied = target(
        "far", "ssh", "-F", str(hosts.config), "-o", "BatchMode=yes", "-l", "nobody", "n3"
    )
    assert "ssh cannot log in" in fails(checks(tmp_path, denied))["node far"]
    hosts.silence("n3")
    try:
        assert "banner exchange" in fails(checks(tmp_path, by_ssh(hosts, "n3")))["node n3"]
    finally:
        hosts.wake("n3")


# Collectives that do not come to an end

HANGS_UNLESS_BY_SOCKETS = """
import json, sys
print("@atropos-node {}", flush=True)
exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode().replace('__main__', 'unused'))
say({"host": "h"})
for line in sys.stdin:
    asked = json.loads(line)
    say({"stage": "imported"})
    if asked["env"].get("NCCL_NET") == "Socket" or not HANGS:
        say({"gather_s": 0.1, "scatter_s": 0.1, "right": True})
"""


@pytest.mark.parametrize("by", ["the transport", "everything"])
def test_a_transport_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """There is no second GPU here: a program that speaks the node agent's part stands for NCCL,
    which hangs."""
    monkeypatch.setattr(nodes, "COLLECTIVE_S", 1.0)
    program = tmp_path / "far.py"
    hangs = (
        HANGS_UNLESS_BY_SOCKETS
        if by == "the transport"
        else HANGS_UNLESS_BY_SOCKETS.replace('"Socket"', '"none"')
    )
    program.write_text(hangs.replace("HANGS", "True"))
    plays = ["sh", "-c", f"exec {sys.executable} {program}"]
    check = asyncio.run(
        nodes.between([target("a", *plays, gpus=1), target("b", *plays, gpus=1)], tmp_path)
    )
    assert check.verdict == "fail" and check.found.startswith(
        "not done after 1 s: a (imported), b (imported)"
    )
    if by == "the transport":
        assert (
            "NCCL's transport between the nodes is broken" in check.found
            and "NCCL_NET" in check.fix
        )
    else:
        assert "over plain sockets too" in check.found


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    """One has no torch."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    bare = target("bare", "env", python=str(tmp_path / "bare/bin/python"))
    check = asyncio.run(nodes.between([HERE, bare], tmp_path))
    assert (
        check.verdict == "fail"
        and "bare failed" in check.found
        and "No module named 'torch'" in check.found
    )


def test_a_profile_for_this_machine_alone_has_no_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--nodes", "demo"]) == 0
    assert "everything runs on this machine" in capsys.readouterr().out
    assert run(["doctor", "--nodes"]) == 2
    assert "atropos-tui doctor PROFILE --nodes" in capsys.readouterr().err


def test_a_login_shell_that_reads_its_input_takes_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ValueError: invalid literal for int()`, and a fix that worked by hand."""
    reads = ("bash", "-c", 'read -r -t 0.3 line; exec "$@"', "--")
    assert not fails(checks(tmp_path, HERE, target("far", *reads)))
    monkeypatch.setattr(node_connection, "CALL_TIMEOUT_S", 1.0)
    (said,) = fails(
        checks(tmp_path, target("far", "sh", "-c", "read line; read line; exec sleep 60"))
    ).values()
    assert "no answer within 1 s" in said
