"""A server over several machines: its nodes, the flags of each part, refusals, and the server's own
side."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atropos_common.system.run_dir import ENV_NODE_ADDRESS, ENV_TRAINER_HOSTS
from atropos_tui.cluster.machines import Hosts
from atropos_tui.profile import ports
from atropos_tui.profile.budget.inventory import Hardware
from atropos_tui.profile.checks.consistency import check_profile
from atropos_tui.profile.checks.preflight import lacks
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import Profile, parse_profile
from atropos_tui.profile.site import make_site
from atropos_tui.profile.spec import ComponentSpec, StageCheck
from tests.atropos_tui.cluster.test_machines import HEAD, RUN_DIR, SSH, flag, parts, problems, where
from vllm_server.__main__ import main
from vllm_server.config import prepare_network

BIG = {
    "name": "big",
    "count": 4,
    "gpus": 8,
    "hosts": ["b1", "b2", "b3", "b4"],
    "addresses": ["10.0.1.1", "10.0.1.2", "10.0.1.3", "10.0.1.4"],
}
TRAIN = {"name": "train", "gpus": 8, "hosts": ["t1"]}
CPU = {"name": "cpu", "count": 2, "hosts": ["c1", "c2"]}


def profile(vllm: dict[str, Any] | list[dict[str, Any]], **changes: Any) -> Profile:
    data: dict[str, Any] = {
        "name": "p",
        "mode": "broadcast",
        "model": "/models/m",
        "cluster": SSH,
        "node": [HEAD, BIG, TRAIN, CPU],
        "env": {"module": "atropos_envs.arithmetic_server", "args": {"env.group_size": 8}},
        "vllm": vllm,
        "trainer": {"node": "train", "batch_size": 16},
    }
    return parse_profile(data | changes, "p.toml")


def engines(chosen: Profile, hosts: Hosts | None = None) -> dict[str, ComponentSpec]:
    return {name: spec for name, spec in parts(chosen, hosts).items() if name.startswith("vllm")}


def test_an_engine_larger_than_a_machine_has_a_part_on_as_many_as_it_needs() -> None:
    chosen = profile({"node": "big", "tensor_parallel": 8, "args": {"pipeline-parallel-size": 2}})
    assert problems(chosen) == []
    planned = engines(chosen)
    every = list(range(8))
    assert {name: where(spec) for name, spec in planned.items()} == {
        "vllm": ("big", every),
        "vllm-node2": ("big-2", every),
    }
    first, second = planned.values()
    for rank, spec in enumerate((first, second)):
        told = {
            name: flag(spec, name) for name in ("nnodes", "node-rank", "master-addr", "master-port")
        }
        assert told == {
            "nnodes": "2",
            "node-rank": f"{rank}",
            "master-addr": "10.0.1.1",
            "master-port": "29501",
        }
        assert (
            flag(spec, "tensor-parallel-size") == "8"
            and flag(spec, "pipeline-parallel-size") == "2"
        )
        assert spec.env[ENV_NODE_ADDRESS] == f"10.0.1.{rank + 1}"
        assert spec.env["ATROPOS_WEIGHT_UPDATES"] == "1" and spec.env[ENV_TRAINER_HOSTS] == "t1"
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert [spec.command.count("--headless") for spec in (first, second)] == [0, 1]


def test_the_parts_have_one_fate_and_the_first_alone_serves() -> None:
    first, second, third, fourth = engines(profile({"node": "big", "tensor_parallel": 32})).values()
    assert first.restart_with == ["vllm-node2", "vllm-node3", "vllm-node4"]
    assert [spec.restart_with for spec in (second, third, fourth)] == [["vllm"]] * 3
    assert (first.port, second.port) == (9001, None) and first.probes.readiness is not None
    assert (
        second.probes.readiness is None
        and second.probes.liveness is None
        and second.probes.startup is not None
    )
    (check,) = second.probes.startup.checks
    assert isinstance(check, StageCheck) and second.restart.policy == "always"
    assert (
        parts(profile({"node": "big", "tensor_parallel": 32}))["env"]
        .env["ATROPOS_ENGINE_URLS"]
        .count("http")
        == 1
    )


def test_several_such_engines_have_machines_ports_and_meeting_places_of_their_own() -> None:
    chosen = profile({"node": "big", "tensor_parallel": 16, "replicas": 2})
    assert problems(chosen) == []
    planned = engines(chosen)
    assert {name: where(spec)[0] for name, spec in planned.items()} == {
        "vllm-0": "big",
        "vllm-0-node2": "big-2",
        "vllm-1": "big-3",
        "vllm-1-node2": "big-4",
    }
    meet = {
        name: (flag(spec, "master-addr"), flag(spec, "master-port"))
        for name, spec in planned.items()
    }
    assert meet["vllm-0"] == meet["vllm-0-node2"] == ("10.0.1.1", "29501")
    assert meet["vllm-1"] == meet["vllm-1-node2"] == ("10.0.1.3", "29502")
    assert chosen.section_of("vllm-1-node2") == "vllm.0"


@pytest.mark.parametrize(
    ("nodes", "keys"), [([HEAD, BIG, TRAIN], []), ([BIG, TRAIN], ["vllm.args.master-port"])]
)
def test_the_port_at_which_parts_meet_is_asked_for_on_its_own_machine(
    nodes: list[dict[str, Any]], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = profile({"node": "big", "tensor_parallel": 16}, node=nodes)
    site = make_site(chosen, RUN_DIR, run_id="r")
    monkeypatch.setattr(ports, "is_free", lambda port: port != 29501)
    monkeypatch.setattr(ports, "holder", lambda port: None)
    found = lacks(site, stack_of(site), Hardware((), None))
    assert [problem.key for problem in found if "is taken" in problem.reason] == keys


def test_a_part_of_each_machine_may_be_named() -> None:
    """Two servers of eight GPUs, each over two machines; the trainer has what is left."""
    wanted = {
        "node": "big",
        "tensor_parallel": 8,
        "machines": 2,
        "gpus": [0, 1, 2, 3],
        "args": {"master-port": 4000},
    }
    chosen = profile(wanted, trainer={"node": "train", "batch_size": 16})
    assert problems(chosen) == []
    planned = engines(chosen)
    assert {name: where(spec) for name, spec in planned.items()} == {
        "vllm-0": ("big", [0, 1, 2, 3]),
        "vllm-0-node2": ("big-2", [0, 1, 2, 3]),
        "vllm-1": ("big-3", [0, 1, 2, 3]),
        "vllm-1-node2": ("big-4", [0, 1, 2, 3]),
    }
    assert {flag(spec, "master-port") for spec in planned.values()} == {"4000", "4001"}


def test_without_gpus_an_engine_stays_on_one_machine_unless_it_is_told() -> None:
    assert list(engines(profile({"node": "cpu", "tensor_parallel": 2}))) == ["vllm"]
    planned = engines(profile({"node": "cpu", "tensor_parallel": 2, "machines": 2}))
    assert {name: where(spec) for name, spec in planned.items()} == {
        "vllm": ("cpu", []),
        "vllm-node2": ("cpu-2", []),
    }


def test_an_engine_that_fits_a_machine_is_what_it_was() -> None:
    (spec,) = engines(profile({"node": "big", "tensor_parallel": 8})).values()
    assert (
        "--nnodes" not in spec.command
        and ENV_NODE_ADDRESS not in spec.env
        and spec.restart_with == []
    )


@pytest.mark.parametrize(
    ("vllm", "changes", "key", "reason", "fix"),
    [
        (
            {"machines": 3, "tensor_parallel": 8},
            {},
            "vllm.machines",
            "8 workers cannot be divided evenly among 3",
            "2 or 4 or 8",
        ),
        (
            {"machines": 2},
            {},
            "vllm.machines",
            "1 worker cannot be divided",
            "raise tensor_parallel",
        ),
        (
            {"machines": 8, "tensor_parallel": 8},
            {},
            "vllm.machines",
            "over 8 machines, and [[node]] big has 4",
            "raise count of [[node]] big",
        ),
        (
            {"tensor_parallel": 64},
            {},
            "vllm.node",
            "vllm needs 64 GPUs, and 8 are left",
            "raise count or gpus",
        ),
        (
            {"tensor_parallel": 16, "replicas": 3},
            {},
            "vllm.node",
            "needs 16 GPUs, and none",
            "lower vllm.replicas",
        ),
        (
            {"tensor_parallel": 16},
            {"mode": "shared_vllm", "trainer": {"node": "big", "batch_size": 16}},
            "vllm.tensor_parallel",
            "single copy needs every worker",
            'use mode = "broadcast"',
        ),
        (
            {"tensor_parallel": 8, "machines": 2},
            {"mode": "shared_vllm", "trainer": {"node": "big", "batch_size": 16}},
            "vllm.machines",
            "spread over 2 machines",
            'use mode = "broadcast"',
        ),
        (
            {"tensor_parallel": 8, "args": {"data_parallel_size": 2}},
            {},
            "vllm.args.data_parallel_size",
            "several copies of the weights in one server",
            "set vllm.replicas",
        ),
        (
            {"tensor_parallel": 16, "args": {"nnodes": 2}},
            {},
            "vllm.args.nnodes",
            "is set by atropos-tui",
            "vllm.machines",
        ),
        (
            {"tensor_parallel": 16, "args": {"headless": True}},
            {},
            "vllm.args.headless",
            "is set by atropos-tui",
            "remove it",
        ),
        (
            {"tensor_parallel": 16, "args": {"master-port": 9001}},
            {},
            "vllm.args.master-port",
            "port 9001 is also",
            "distinct ports",
        ),
        (
            [
                {"node": "big", "tensor_parallel": 16},
                {"name": "vllm-node2", "port": 9100, "node": "cpu"},
            ],
            {},
            "vllm.1.name",
            "'vllm-node2' is used 2 times",
            "its own name",
        ),
    ],
)
def test_what_is_refused(
    vllm: Any, changes: dict[str, Any], key: str, reason: str, fix: str
) -> None:
    wanted = {"node": "big"} | vllm if isinstance(vllm, dict) else vllm
    found = check_profile(make_site(profile(wanted, **changes), RUN_DIR, run_id="r"))
    (problem,) = [each for each in found if reason in each.reason]
    assert problem.key == key or problem.key.replace("vllm.0.", "vllm.") == key
    assert fix in problem.fix, problem.fix


def test_machines_without_a_cluster_are_refused() -> None:
    chosen = profile(
        {"machines": 2, "tensor_parallel": 2}, cluster=None, node=[], trainer={"batch_size": 16}
    )
    assert any("over 2 machines" in reason for _, reason in problems(chosen))


def test_sixty_four_machines_with_an_engine_over_every_two_are_planned_at_once() -> None:
    many = {"name": "big", "count": 62, "gpus": 8, "hosts": [f"b{number}" for number in range(62)]}
    chosen = profile(
        {"node": "big", "tensor_parallel": 16, "replicas": 31}, node=[HEAD, many, TRAIN]
    )
    began = time.process_time()
    site = make_site(chosen, RUN_DIR, run_id="r")
    assert check_profile(site) == []
    assert len([spec for spec in stack_of(site).components if "--nnodes" in spec.command]) == 62
    assert time.process_time() - began < 2


def test_a_part_takes_the_interface_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, str] = {}
    prepare_network(env)
    assert env == {}
    monkeypatch.setenv(ENV_NODE_ADDRESS, "127.0.0.7")
    env = {ENV_NODE_ADDRESS: "127.0.0.7", "NCCL_SOCKET_IFNAME": "ib0"}
    prepare_network(env)
    assert env["VLLM_HOST_IP"] == "127.0.0.7" and env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["NCCL_SOCKET_IFNAME"] == "ib0"


def test_an_address_of_another_machine_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENV_NODE_ADDRESS, "192.0.2.77")
    assert main(["--model", "owner/name", "--headless"]) == 2
    said = capsys.readouterr().err
    assert "no network interface here has the address 192.0.2.77" in said and said.count("\n") == 1
