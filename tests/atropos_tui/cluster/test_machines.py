"""Several machines: placement, addresses, launchers, and the refusals of each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import (
    ENV_ENGINE_URLS,
    ENV_NODE_ADDRESS,
    ENV_RANKS_DIR,
    ENV_TRAINER_HOSTS,
)
from atropos_tui.cli.main import run
from atropos_tui.cluster.machines import Hosts, expand_hosts, hosts_of, lacking
from atropos_tui.cluster.node_agent import environment
from atropos_tui.gpu import gpus_within
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.inventory import named_machine
from atropos_tui.profile.checks.consistency import check_profile
from atropos_tui.profile.checks.preflight import is_this_machine, machines_of, unfit
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import Profile, load_profile, parse_profile
from atropos_tui.profile.site import make_site, trainer_placements, trainer_ranks
from atropos_tui.profile.spec import ComponentSpec, HttpCheck

RUN_DIR = Path("/runs/r")
SSH = {"launcher": "ssh"}
TRAIN = {"name": "train", "count": 2, "gpus": 2, "hosts": ["t1", "t2"]}
INFER = {
    "name": "infer",
    "count": 2,
    "gpus": 4,
    "hosts": ["me@i1", "me@i2"],
    "addresses": ["10.0.0.1", "10.0.0.2"],
}
HEAD = {"name": "head", "hosts": ["h"], "addresses": ["10.0.0.9"]}


def profile(**changes: Any) -> Profile:
    data: dict[str, Any] = {
        "name": "p",
        "mode": "broadcast",
        "model": "/models/m",
        "cluster": SSH,
        "node": [HEAD, INFER, TRAIN],
        "env": {"module": "atropos_envs.arithmetic_server", "args": {"env.group_size": 8}},
        "vllm": {"node": "infer", "replicas": 3, "tensor_parallel": 2},
        "trainer": {"node": "train", "batch_size": 16},
    }
    return parse_profile(data | changes, "p.toml")


def parts(chosen: Profile, hosts: Hosts | None = None) -> dict[str, ComponentSpec]:
    site = make_site(chosen, RUN_DIR, run_id="r", hosts=hosts)
    return {part.name: part for part in stack_of(site).components}


def problems(chosen: Profile) -> list[tuple[str, str]]:
    return [
        (found.key, found.reason) for found in check_profile(make_site(chosen, RUN_DIR, run_id="r"))
    ]


def flag(part: ComponentSpec, name: str) -> str:
    return part.command[part.command.index(f"--{name}") + 1]


def where(part: ComponentSpec) -> tuple[str, list[int]]:
    assert part.place is not None
    return part.place.node, part.gpus


def urls_of(part: ComponentSpec) -> set[str]:
    probes = filter(None, (part.probes.startup, part.probes.readiness, part.probes.liveness))
    return {
        check.url.rpartition("/")[0]
        for probe in probes
        for check in probe.checks
        if isinstance(check, HttpCheck)
    }


def test_everybody_has_a_machine_gpus_and_a_way_there() -> None:
    chosen = profile()
    assert problems(chosen) == []
    planned = parts(chosen)
    assert {name: where(part) for name, part in planned.items()} == {
        "api": ("head", []),
        "env": ("head", []),
        "vllm-0": ("infer", [0, 1]),
        "vllm-1": ("infer", [2, 3]),
        "vllm-2": ("infer-2", [0, 1]),
        "trainer": ("train", [0, 1]),
        "trainer-2": ("train-2", [0, 1]),
    }
    assert planned["vllm-1"].env["CUDA_VISIBLE_DEVICES"] == "2,3"
    places = {name: part.place for name, part in planned.items() if part.place}
    assert places["api"].prefix == []  # the supervisor is there
    assert (places["vllm-2"].prefix[0], places["vllm-2"].prefix[-1]) == ("ssh", "me@i2")
    assert places["vllm-2"].address == "10.0.0.2"
    stack = stack_of(make_site(chosen, RUN_DIR, run_id="r"))
    assert [(node.name, node.host, node.address, node.gpus) for node in stack.nodes][1:4] == [
        ("infer", "me@i1", "10.0.0.1", 4),
        ("infer-2", "me@i2", "10.0.0.2", 4),
        ("train", "t1", "t1", 2),
    ]
    assert stack.launcher == "ssh"


def test_what_is_dialled_from_elsewhere_is_at_the_address_of_its_machine() -> None:
    planned = parts(profile())
    assert flag(planned["api"], "host") == "10.0.0.9"
    assert urls_of(planned["api"]) == {"http://10.0.0.9:8000"}
    assert flag(planned["vllm-2"], "host") == "10.0.0.2"
    assert urls_of(planned["vllm-2"]) == {"http://10.0.0.2:9003"}
    assert planned["env"].env[ENV_ENGINE_URLS].split()[-1] == "http://10.0.0.2:9003/v1"
    assert flag(planned["env"], "env.rollout_server_url") == "http://10.0.0.9:8000"
    assert flag(planned["trainer"], "atropos-url") == "http://10.0.0.9:8000"
    assert flag(planned["trainer"], "vllm-urls").split(",")[2] == "http://10.0.0.2:9003"
    assert planned["trainer"].env["MASTER_ADDR"] == "t1"  # where the broadcast's group meets
    assert planned["vllm-0"].env[ENV_TRAINER_HOSTS] == "t1"
    assert not any(part.port_held for part in planned.values())


def test_those_who_share_a_machine_with_all_who_dial_stay_on_its_loopback() -> None:
    node = {"name": "one", "gpus": 4, "hosts": ["h"], "addresses": ["10.0.0.9"]}
    chosen = profile(node=[node], vllm={"gpus": [0, 1]}, trainer={"gpus": [2, 3], "batch_size": 16})
    planned = parts(chosen)
    assert problems(chosen) == []
    assert {flag(planned[name], "host") for name in ("api", "vllm-0", "vllm-1")} == {"127.0.0.1"}
    assert planned["api"].port_held
    assert "MASTER_ADDR" not in planned["trainer"].env
    assert all(part.place and not part.place.prefix for part in planned.values())


def test_a_trainer_on_several_machines_has_a_launcher_on_each_and_one_fate() -> None:
    planned = parts(profile())
    first, second = planned["trainer"], planned["trainer-2"]
    for number, part in enumerate((first, second)):
        at = part.command.index("trainer_core.ranks.launch")
        assert part.command[at + 1 : at + 6] == ["--nnodes", "2", "--node-rank", str(number), "2"]
        assert part.env[ENV_RANKS_DIR] == str(RUN_DIR / "ranks")
        assert part.env[ENV_NODE_ADDRESS] == f"t{number + 1}"
    assert (first.restart_with, second.restart_with) == (["trainer-2"], ["trainer"])
    assert (first.ends_run, second.ends_run) == (True, False)
    assert list(planned)[-2:] == ["trainer", "trainer-2"]


def test_gpus_by_name_are_of_each_machine_and_the_trainer_takes_the_rest() -> None:
    both = {"name": "n", "count": 2, "gpus": 8, "hosts": ["a", "b"]}
    chosen = profile(
        node=[both],
        vllm={"node": "n", "gpus": [0, 1, 2, 3], "tensor_parallel": 2},
        trainer={"node": "n", "batch_size": 16},
    )
    assert problems(chosen) == []
    assert [where(part) for name, part in parts(chosen).items() if name.startswith("vllm")] == [
        ("n", [0, 1]),
        ("n", [2, 3]),
        ("n-2", [0, 1]),
        ("n-2", [2, 3]),
    ]
    assert [list(placement) for placement in trainer_placements(chosen)] == [
        ["n", [4, 5, 6, 7]],
        ["n-2", [4, 5, 6, 7]],
    ]
    assert trainer_ranks(chosen) == 8


def test_environments_are_spread_over_their_machines() -> None:
    cpu = {"name": "cpu", "count": 2, "hosts": ["c1", "c2"]}
    envs = [
        {"name": name, "node": "cpu", "module": "atropos_envs.arithmetic_server"}
        for name in ("a", "b", "c")
    ]
    planned = parts(profile(node=[HEAD, INFER, TRAIN, cpu], env=envs))
    assert [where(planned[name])[0] for name in ("a", "b", "c")] == ["cpu", "cpu-2", "cpu"]


SLURM = {"launcher": "slurm"}
GROUPS = [{"name": "infer", "count": 2, "gpus": 4}, {"name": "train", "count": 2, "gpus": 2}]


def test_slurm_fills_in_the_hosts_of_the_allocation() -> None:
    chosen = profile(cluster=SLURM, node=GROUPS)
    over = {"SLURM_JOB_NODELIST": "gone[1-4]"}  # left by env -u SLURM_JOB_ID
    assert hosts_of(chosen, over) == hosts_of(chosen, {})
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[07-09],login",
        "SLURMD_NODENAME": "gpu07",
    }
    hosts = hosts_of(chosen, job, {"gpu07": "10.1.0.7"})
    assert [(node.name, node.host, node.address) for node in hosts.nodes] == [
        ("infer", "gpu07", "10.1.0.7"),
        ("infer-2", "gpu08", "gpu08"),
        ("train", "gpu09", "gpu09"),
        ("train-2", "login", "login"),
    ]
    planned = parts(chosen, hosts)
    assert planned["api"].place is not None
    assert planned["api"].place.prefix == []
    prefix = planned["trainer"].place.prefix if planned["trainer"].place else []
    assert prefix[prefix.index("-w") + 1] == "gpu09"
    assert {"--overlap", "--export=NONE", "--input=all", "--gpus-per-node=2"} <= {*prefix}
    assert not any(word.startswith("--het-group") for word in prefix)


@pytest.mark.parametrize(
    ("plugins", "free"),
    [("task/none", False), ("task/cgroup,task/affinity", True), ("(null)", False), (None, True)],
)
def test_a_step_is_told_not_to_be_bound_where_slurm_binds(
    plugins: str | None, free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, srun would say so in the log of each component."""
    scontrol = tmp_path / "scontrol"
    said = (
        "exit 1"
        if plugins is None
        else f'[ "$1" = show ] && echo "TaskPlugin              = {plugins}"; true'
    )
    scontrol.write_text(f"#!/bin/sh\n{said}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b,c,d")
    chosen = profile(cluster=SLURM, node=GROUPS)
    place = parts(chosen, machines_of(chosen))["trainer"].place
    assert place is not None
    assert ("--cpu-bind=none" in place.prefix) == free


def test_a_heterogeneous_job_has_a_component_for_each_kind() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b[5-6]",
        "SLURMD_NODENAME": "a1",
    }
    planned = parts(
        profile(cluster=SLURM, node=GROUPS), hosts_of(profile(cluster=SLURM, node=GROUPS), job)
    )
    place = planned["trainer-2"].place
    assert place is not None
    assert place.host == "b6"
    assert "--het-group=1" in place.prefix


def test_an_allocation_that_is_too_small_is_said() -> None:
    chosen = profile(cluster=SLURM, node=GROUPS)
    (found,) = lacking(
        chosen, hosts_of(chosen, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c"})
    )
    assert "3 of the 4 machines" in found.reason
    assert "train-2" in found.reason
    assert "sbatch -N 4" in found.fix
    assert lacking(chosen, hosts_of(chosen, {})) == []


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],login", ["n1", "n2", "n3", "n07", "login"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
    ],
)
def test_short_forms_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("launcher", "more", "first", "last"),
    [
        (
            "kubernetes",
            {"kubectl": ["-n", "rl"]},
            ["kubectl", "-n", "rl", "exec", "-i"],
            ["i2", "--"],
        ),
        ("ssh", {"ssh": ["-p", "2222"]}, ["ssh", "-T"], ["-p", "2222", "i2"]),
    ],
)
def test_prefixes(launcher: str, more: dict[str, Any], first: list[str], last: list[str]) -> None:
    nodes = [HEAD, {"name": "infer", "count": 2, "gpus": 4, "hosts": ["i1", "i2"]}, TRAIN]
    planned = parts(
        profile(cluster={"launcher": launcher, "python": "/opt/python"} | more, node=nodes)
    )
    part = planned["vllm-2"]
    assert part.place is not None
    assert (part.place.prefix[: len(first)], part.place.prefix[-len(last) :]) == (first, last)
    assert (part.place.python, part.command[0]) == ("/opt/python", "/opt/python")


def test_ray_is_reached_through_our_bridge() -> None:
    place = parts(profile(cluster={"launcher": "ray", "address": "10.0.0.9:6379"}))["vllm-0"].place
    assert place is not None
    assert place.prefix[2:] == [
        "-m",
        "atropos_tui.cluster.ray_bridge",
        "--address",
        "10.0.0.9:6379",
        "me@i1",
    ]


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"cluster": None}, "node.0", "machines without a launcher"),
        ({"cluster": None, "node": []}, "vllm.0.node", "has no [cluster]"),
        ({"node": []}, "cluster.launcher", "without machines"),
        (
            {"node": [HEAD, INFER, TRAIN, TRAIN | {"hosts": ["x", "y"]}]},
            "node.2.name",
            "are called 'train'",
        ),
        (
            {"node": [HEAD, INFER, TRAIN, {"name": "train-2", "hosts": ["x"]}]},
            "node.2.name",
            "are called 'train-2'",
        ),
        (
            {"node": [HEAD, INFER, {"name": "train", "count": 2}]},
            "node.2.hosts",
            "no hosts for count = 2",
        ),
        (
            {"node": [HEAD, INFER, TRAIN | {"hosts": ["t1"]}]},
            "node.2.hosts",
            "1 host for count = 2",
        ),
        (
            {"node": [HEAD, INFER, TRAIN | {"hosts": ["t1", "me@i1"]}]},
            "node.2.hosts",
            "belongs to infer",
        ),
        (
            {"node": [HEAD, INFER | {"addresses": ["x"]}, TRAIN]},
            "node.1.addresses",
            "1 addresses for 2",
        ),
        (
            {"node": [HEAD | {"addresses": ["0.0.0.0"]}, INFER, TRAIN]},
            "node.0.addresses",
            "every interface",
        ),
        (
            {"node": [HEAD | {"addresses": ["127.0.0.1"]}, INFER, TRAIN]},
            "node.0.addresses",
            "a loopback address",
        ),
        ({"cluster": SLURM}, "node.0.hosts", "SLURM chooses"),
        (
            {"trainer": {"node": "trian", "batch_size": 16}},
            "trainer.node",
            "no [[node]] is called 'trian'",
        ),
        (
            {"trainer": {"node": "train", "gpus": [2], "batch_size": 16}},
            "trainer.gpus",
            "GPU 2 does not exist",
        ),
        ({"vllm": {"node": "infer", "gpus": [7]}}, "vllm.0.gpus", "GPU 7 does not exist"),
        ({"vllm": {"node": "infer", "gpus": [1, 1]}}, "vllm.0.gpus", "names a GPU twice"),
        ({"vllm": {"node": "infer", "replicas": 9}}, "vllm.0.node", "none is left for it on infer"),
        ({"vllm": {"node": "infer", "tensor_parallel": 16}}, "vllm.0.node", "4 are left"),
        (
            {"vllm": {"node": "train", "replicas": 4}},
            "trainer.node",
            "no GPU is left for the trainer",
        ),
        (
            {
                "vllm": {"node": "train", "gpus": [0]},
                "trainer": {"node": "train", "gpus": [0], "batch_size": 16},
            },
            "vllm.0.gpus",
            "trainer and engine share GPU 0 of train",
        ),
        (
            {"trainer": {"node": "train", "processes": 3, "batch_size": 16}},
            "trainer.processes",
            "3 ranks and 4 GPUs",
        ),
        (
            {"mode": "shared_vllm", "vllm": {"node": "infer"}},
            "trainer.node",
            "engine on the same machine",
        ),
        ({"inference_gpus": 2}, "inference_gpus", "of one machine"),
        ({"api": {"host": "0.0.0.0", "node": "head"}}, "api.host", "cannot reach run-api at"),
        (
            {
                "component": {
                    "x": {
                        "command": ["true"],
                        "node": "infer",
                        "readiness": {
                            "checks": [
                                {"kind": "tcp", "port": 5},
                            ]
                        },
                    }
                }
            },
            "component.x.readiness",
            "is on another machine",
        ),
        (
            {"trainer": {"node": "train", "vllm_urls": ["http://far:1"], "batch_size": 16}},
            "trainer.vllm_urls",
            "answer no request before they have weights",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(
    changes: dict[str, Any], key: str, reason: str
) -> None:
    found = problems(profile(**changes))
    assert [each for each in found if each[0] == key and reason in each[1]], found


def test_engines_on_one_gpu_that_name_the_size_of_their_caches_need_no_shares() -> None:
    both = [
        {"name": name, "node": "infer", "gpus": [0], "port": port}
        for name, port in (("a", 9001), ("b", 9011))
    ]
    assert (
        problems(profile(vllm=[each | {"args": {"kv-cache-memory-bytes": "4G"}} for each in both]))
        == []
    )
    assert problems(profile(vllm=both)) == [
        (
            "vllm.1.gpu_memory_utilization",
            "the engines on GPU 0 of infer take 1.84 of its memory (a 0.92 + b 0.92)",
        ),
    ]


def test_0_machines_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        'extends = "demo"\nname = "p"\ncluster.launcher = "slurm"\n[[node]]\nname = '
        '"n"\ncount = 0\n'
    )
    assert run(["plan", str(file)]) == 2
    assert "node.count: out of range (got 0)" in capsys.readouterr().err


def test_an_address_is_this_machines_or_not() -> None:
    assert is_this_machine("127.0.0.3")
    assert not is_this_machine("192.0.2.1")  # of nobody: documentation


def test_a_cluster_profile_can_be_tried_on_one_machine() -> None:
    planned = parts(profile(cluster={"launcher": "local"}))
    assert {part.place for part in planned.values()} == {None}
    assert flag(planned["api"], "host") == "127.0.0.1"


def test_each_machine_has_a_budget_of_its_own(tmp_path: Path) -> None:
    config = (
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, '
        '"vocab_size": 500, '
    )
    config += (
        '"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, '
    )
    (tmp_path / "config.json").write_text(
        config + '"head_dim": 16, "max_position_embeddings": 512}'
    )
    chosen = profile(model=str(tmp_path))
    site = make_site(chosen, RUN_DIR, run_id="r")
    found = memory.take_inventory(site, named_machine("4xH100"))
    devices = {device.name: device for device in memory.site_budget(site, found).devices}
    assert [name for name in devices if "train" in name] == [
        "train GPU 0",
        "train GPU 1",
        "train-2 GPU 0",
        "train-2 GPU 1",
    ]
    assert devices["infer-2 GPU 1"].total == named_machine("1xH100").gpus[0].total
    assert {item.component for item in devices["infer-2 GPU 1"].items} == {"vllm-2"}
    (short,) = unfit(site, memory.take_inventory(site, named_machine("2xH100")))
    assert (short.key, short.reason) == (
        "node.1.gpus",
        "4 GPUs on each machine, but the given machine has 2",
    )
    unknown = memory.site_budget(site, memory.take_inventory(site))
    assert {device.total for device in unknown.devices} == {None}


def test_a_plan_of_64_machines_takes_less_than_2_s(tmp_path: Path) -> None:
    nodes = [{"name": "train", "count": 16, "gpus": 8}, {"name": "infer", "count": 48, "gpus": 8}]
    chosen = profile(
        cluster=SLURM,
        node=nodes,
        vllm={"node": "infer", "replicas": 384, "port": 20000},
        model=str(tmp_path),
    )
    began = time.process_time()
    site = make_site(chosen, RUN_DIR, run_id="r")
    assert check_profile(site) == []
    stack = stack_of(site)
    assert time.process_time() - began < 2.0
    assert len(stack.components) == 1 + 384 + 1 + 16
    assert len({(where(part)[0], gpu) for part in stack.components for gpu in part.gpus}) == 64 * 8


@pytest.mark.parametrize(
    ("named", "given", "seen"),
    [
        ("0,1", "4,5", "4,5"),  # the job has the node's last two
        ("1", "GPU-aa,GPU-bb", "GPU-bb"),
        ("0,1", None, "0,1"),  # no batch system
        ("2", "4,5", "2"),  # not as many as the plan asks for: the program will say so
    ],
)
def test_gpus_are_counted_among_those_that_the_job_was_given(
    named: str, given: str | None, seen: str
) -> None:
    assert gpus_within({"CUDA_VISIBLE_DEVICES": named, "A": "b"}, given) == {
        "CUDA_VISIBLE_DEVICES": seen,
        "A": "b",
    }
    job = {"role": "trainer", "path": "", "env": {"CUDA_VISIBLE_DEVICES": named}}
    here = {"CUDA_VISIBLE_DEVICES": given} if given else {}
    assert environment(job, here)["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("2001:db8::7", "2001:db8::7"),
        ("n2", "n2"),
    ],
)
def test_an_address_may_be_of_ipv6(written: str, address: str, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    node = f'[[node]]\nname = "a"\nhosts = ["me@box"]\naddresses = ["{written}"]\n'
    file.write_text(f'extends = "demo"\n[cluster]\nlauncher = "ssh"\n{node}')
    profile, _ = load_profile(str(file), [])
    assert profile.node[0].addresses == [address]
