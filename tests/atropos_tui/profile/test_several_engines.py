"""Several engines of one section: the profile, and their plan, checks and shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol import stages
from atropos_common.system.run_dir import (
    ENV_BESIDE_TRAINER,
    ENV_ENGINE_URLS,
    ENV_LOADS_AFTER,
    ENV_ON_ONE_GPU,
)
from atropos_tui.cli.main import run
from atropos_tui.errors import Problem
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.fit import nearest, split_gpus
from atropos_tui.profile.budget.inventory import Gpu, Hardware, named_machine
from atropos_tui.profile.builders.environment import sequences_in_flight
from atropos_tui.profile.checks.consistency import check_graph, check_notes, check_profile
from atropos_tui.profile.checks.preflight import separate, unfit
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import Profile, parse_profile
from atropos_tui.profile.site import env_engines, make_site, training_config
from atropos_tui.profile.spec import ComponentSpec
from tests.atropos_tui.profile.budget.test_fit import (
    LLAMA_8B,
    QWEN3_1_7B,
    QWEN25_14B,
    in_folder,
    inventory,
    site_of,
)

RUN_DIR = Path("/runs/r")
CPU = {"device": "cpu", "batch_size": 16}


def profile(vllm: Any, **changes: Any) -> Profile:
    data: dict[str, Any] = {
        "name": "p",
        "mode": "broadcast",
        "model": "/models/m",
        "vllm": vllm,
        "trainer": CPU,
        "env": {"module": "atropos_envs.arithmetic_server", "args": {"env.group_size": 8}},
    }
    return parse_profile(data | changes, "p.toml")


def parts(chosen: Profile) -> dict[str, ComponentSpec]:
    return {part.name: part for part in stack_of(make_site(chosen, RUN_DIR, run_id="r")).components}


def problems(chosen: Profile) -> list[tuple[str, str]]:
    return [
        (problem.key, problem.reason)
        for problem in check_profile(make_site(chosen, RUN_DIR, run_id="r"))
    ]


def flag(part: ComponentSpec, name: str) -> str:
    return part.command[part.command.index(f"--{name}") + 1]


@pytest.mark.parametrize(
    ("vllm", "gpus"),
    [
        ({"replicas": 3}, [[], [], []]),
        ({"gpus": [0, 1, 2]}, [[0], [1], [2]]),
        ({"gpus": [4, 5, 6, 7], "tensor_parallel": 2}, [[4, 5], [6, 7]]),
        (
            {"gpus": [0, 1, 2, 3], "args": {"pipeline-parallel-size": 2}, "replicas": 2},
            [[0, 1], [2, 3]],
        ),
    ],
)
def test_engines_are_components_of_their_own(vllm: dict[str, Any], gpus: list[list[int]]) -> None:
    trainer = CPU if not gpus[0] else {"gpus": [9], "batch_size": 16}
    chosen = profile(vllm | {"port": 9100}, trainer=trainer)
    assert problems(chosen) == []
    planned = parts(chosen)
    engines = [part for part in planned.values() if part.role == "engine"]
    assert [part.name for part in engines] == [f"vllm-{i}" for i in range(len(gpus))]
    assert [part.port for part in engines] == [9100 + i for i in range(len(gpus))]
    assert [part.gpus for part in engines] == gpus
    assert [flag(part, "port") for part in engines] == [str(part.port) for part in engines]
    assert len({part.env["LOGDIR"] for part in engines}) == len(gpus), "a folder each"
    assert {part.env["ATROPOS_HOLD_GENERATION"] for part in engines} == {"1"}
    urls = [f"http://127.0.0.1:{part.port}" for part in engines]
    assert training_config(make_site(chosen, RUN_DIR, run_id="r")).vllm_urls == urls
    assert planned["env"].env[ENV_ENGINE_URLS].split() == [f"{url}/v1" for url in urls]


def test_one_engine_keeps_its_name() -> None:
    for vllm in ({}, {"replicas": 1}, {"gpus": [0]}, {"gpus": [0, 1], "tensor_parallel": 2}):
        trainer = {"gpus": [7], "batch_size": 16} if vllm.get("gpus") else CPU
        assert "vllm" in parts(profile(vllm, trainer=trainer))


@pytest.mark.parametrize(("mode", "urls"), [("none", 2), ("lora_only", 2), ("broadcast", 2)])
def test_modes_that_feed_all_feed_each(mode: str, urls: int) -> None:
    chosen = profile({"replicas": 2}, mode=mode)
    assert problems(chosen) == []
    site = make_site(chosen, RUN_DIR, run_id="r")
    assert len(training_config(site).vllm_urls or []) == urls
    engines = [part for part in parts(chosen).values() if part.role == "engine"]
    assert all("ATROPOS_HOLD_GENERATION" in part.env for part in engines)
    assert all(("--enable-lora" in part.command) == (mode == "lora_only") for part in engines)


@pytest.mark.parametrize("gpus", [[], [0, 1]])
def test_single_copy_with_an_engine_beside_it(gpus: list[int]) -> None:
    """The first engine shares its memory and restarts with the trainer. The other one receives."""
    trainer = {"batch_size": 16} if gpus else CPU
    vllm = {"gpus": gpus} if gpus else {"replicas": 2}
    chosen = profile(vllm | {"port": 9100}, mode="shared_vllm", trainer=trainer)
    assert problems(chosen) == []
    planned = parts(chosen)
    first, second = planned["vllm-0"], planned["vllm-1"]
    assert first.env["VLLM_ENABLE_SHARED_WEIGHTS"] == "1"
    assert first.restart_with == ["trainer"] and first.clears
    assert "ATROPOS_WEIGHT_UPDATES" not in first.env
    assert second.env["ATROPOS_WEIGHT_UPDATES"] == "1" and second.env["ATROPOS_HOLD_GENERATION"]
    assert second.restart_with == [] == second.clears
    assert "VLLM_ENABLE_SHARED_WEIGHTS" not in second.env
    assert planned["trainer"].gpus == gpus[:1]
    settings = training_config(make_site(chosen, RUN_DIR, run_id="r"))
    assert settings.mode == "shared_vllm" and settings.sends_weights
    assert settings.engine_urls == ["http://127.0.0.1:9100", "http://127.0.0.1:9101"]
    assert settings.vllm_urls == settings.engine_urls[1:]
    assert str(settings.vllm_config_path).startswith(f"{RUN_DIR}/bridge/vllm-0/")
    urls = planned["env"].env[ENV_ENGINE_URLS].split()
    assert urls == [f"{url}/v1" for url in settings.engine_urls]
    beside = planned["env"].env[ENV_BESIDE_TRAINER].split()
    assert beside == settings.engine_urls[: 1 if gpus else 2], "all share the cores"
    assert planned["env"].env[ENV_ON_ONE_GPU] == ""


@pytest.mark.parametrize("gpus", [[], [1]])
def test_engines_on_the_trainers_gpu_get_copies(gpus: list[int]) -> None:
    trainer = {"batch_size": 16} if gpus else CPU
    vllm = {"gpus": gpus, "per_gpu": 3, "port": 9100, "gpu_memory_utilization": 0.6}
    chosen = profile(vllm, mode="shared_vllm", trainer=trainer)
    assert problems(chosen) == []
    planned = parts(chosen)
    names = ["vllm-0", "vllm-1", "vllm-2"]
    engines = [planned[name] for name in names]
    assert [engine.gpus for engine in engines] == [gpus] * 3
    assert planned["trainer"].gpus == gpus
    for name, engine in zip(names, engines, strict=True):
        assert engine.command[engine.command.index("--gpu-memory-utilization") + 1] == "0.2"
        assert engine.env["VLLM_ENABLE_SHARED_WEIGHTS"] == "1" and name in str(engine.clears)
        assert "ATROPOS_WEIGHT_UPDATES" not in engine.env
        assert engine.restart_with == ["trainer"], "its memory is mapped there"
    assert len({engine.env["ATROPOS_SHM_NAME"] for engine in engines}) == 3
    # vLLM measures free memory while it starts: all import it at once, and load one by one.
    assert [engine.depends_on for engine in engines] == [{}] * 3
    before = [None, "http://127.0.0.1:9100", "http://127.0.0.1:9101"]
    assert [engine.env.get(ENV_LOADS_AFTER) for engine in engines] == (
        before if gpus else [None] * 3
    )
    turns = [stage.usually for stage in engines[2].stages if stage.name == stages.GPU_TURN]
    assert turns == (
        ["engines of one GPU load one after another: see `logs vllm-1`"] if gpus else []
    )
    settings = training_config(make_site(chosen, RUN_DIR, run_id="r"))
    assert settings.vllm_urls is None and not settings.sends_weights
    manifests = [str(settings.vllm_config_path), *(settings.copy_config_paths or [])]
    assert [Path(each).parent.name for each in manifests] == names
    urls = planned["env"].env[ENV_ENGINE_URLS].split()
    assert len(urls) == 3
    beside = planned["env"].env[ENV_BESIDE_TRAINER].split()
    assert [f"{url}/v1" for url in beside] == urls, "all compute where the trainer does"
    assert planned["env"].env[ENV_ON_ONE_GPU] == ",".join(beside)


@pytest.mark.parametrize(
    ("mode", "vllm", "reason"),
    [
        ("broadcast", {"gpus": [0], "per_gpu": 2}, "NCCL takes one engine a GPU"),
        ("shared_vllm", {"gpus": [0, 1], "per_gpu": 2}, "vllm-2, vllm-3 would get the weights"),
        ("lora_restart", {"gpus": [0], "per_gpu": 2}, "2 engines"),
        (
            "shared_vllm",
            {"gpus": [0, 1], "tensor_parallel": 2, "per_gpu": 2, "gpu_memory_utilization": 0.4},
            "the whole model on the trainer's GPU",
        ),
    ],
)
def test_engines_on_the_same_gpus_that_cannot_be(
    mode: str, vllm: dict[str, Any], reason: str
) -> None:
    trainer = {"batch_size": 16, "gpus": [3]} if mode == "broadcast" else {"batch_size": 16}
    found = problems(profile(vllm, mode=mode, trainer=trainer))
    assert any(reason in text and key.startswith("vllm.0.") for key, text in found), found


def test_what_fits_suits_several_engines_on_the_trainers_gpu() -> None:
    site = site_of(vllm={"per_gpu": 2, "gpu_memory_utilization": 0.6})
    assert not any("tensor_parallel" in each.text for each in nearest(site, inventory("4xH100")))
    adapters = nearest(site, inventory("1xH100", QWEN25_14B))[-1].settings
    assert adapters["mode"] == "lora_only" and adapters["vllm.per_gpu"] == 1


@pytest.mark.parametrize(
    ("engines", "more"),
    [
        (2, {}),
        (2, {"trainer": {"gpus": [0]}}),
        (1, {"mode": "none"}),
        (1, {"mode": "broadcast", "trainer": {"gpus": [1]}}),
        (1, {"mode": "lora_only", "trainer": {"gpus": [1]}}),
        (1, {"vllm": {"gpus": []}}),
        (1, {"vllm": {"gpus": [0, 1], "tensor_parallel": 2}}),
        (1, {"vllm": {"args": {"data-parallel-size": 2}}}),
        (1, {"trainer": {"gpus": [1]}}),
        (1, {"cluster": {"launcher": "slurm"}}),
    ],
)
def test_auto_means_two_engines_in_single_copy_on_one_gpu(
    engines: int, more: dict[str, Any]
) -> None:
    vllm = {"gpus": [0], "per_gpu": "auto", "gpu_memory_utilization": 0.4}
    data: dict[str, Any] = {
        "name": "p",
        "model": "m",
        "env": {"command": ["python"]},
        **more,
        "vllm": vllm | more.get("vllm", {}),
    }
    found = Profile.model_validate(data)
    assert found.vllm[0].per_gpu == engines
    if not found.is_spread:
        shares = [engine.memory_share for engine in found.engines]
        assert shares == [0.4 / engines] * engines


def test_a_broadcast_on_a_cpu_has_replicas() -> None:
    chosen = make_site(profile({"per_gpu": 2}), RUN_DIR, run_id="r")
    (found,) = check_profile(chosen)
    assert found.key == "vllm.0.per_gpu" and "NCCL" not in found.reason
    assert found.fix == "set vllm.replicas = 2 instead"


def test_engines_of_one_table_start_in_turn_and_others_as_the_profile_says() -> None:
    vllm = {"gpus": [0], "per_gpu": 2, "gpu_memory_utilization": 0.2}
    judge = {"name": "judge", "model": "j", "gpus": [0], "port": 9101}
    first = vllm | {"depends_on": {"judge": "healthy"}}
    chosen = profile(
        [first, judge | {"gpu_memory_utilization": 0.2}],
        mode="shared_vllm",
        trainer={"batch_size": 16},
    )
    planned = parts(chosen)
    assert check_graph(chosen, stack_of(make_site(chosen, RUN_DIR, run_id="r"))) == []
    assert planned["judge"].depends_on == {}
    assert planned["vllm-0"].depends_on == {"judge": "healthy"}
    assert planned["vllm-1"].depends_on == {"judge": "healthy"}
    turns = {name: planned[name].env.get(ENV_LOADS_AFTER) for name in ("judge", "vllm-0", "vllm-1")}
    assert turns == {"judge": None, "vllm-0": None, "vllm-1": "http://127.0.0.1:9001"}


def test_the_start_limit_is_vllm_s_own_too() -> None:
    """vLLM gave up after its own 600 s, also where the profile said half an hour."""
    given = {"env": {"VLLM_ENGINE_READY_TIMEOUT_S": "77"}}
    for vllm, seconds in [({}, "1800"), ({"start_timeout_s": 90.5}, "91"), (given, "77")]:
        planned = parts(profile(vllm, trainer=CPU))["vllm"]
        assert planned.env["VLLM_ENGINE_READY_TIMEOUT_S"] == seconds


def test_plan_says_whose_weights_an_engine_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.toml"
    file.write_text('extends = "gsm8k"\nname = "p"\n')
    sets = ["--set", in_folder(tmp_path, QWEN3_1_7B)]
    assert run(["plan", str(file), *sets, "--gpus", "1xH100"]) == 0
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if line.startswith("weights   ")] == [
        "weights   the trainer's own, in this engine's memory",
        "weights   a copy, which the trainer updates",
    ]


@pytest.mark.parametrize(
    ("config", "gpus", "engines"),
    [
        (QWEN3_1_7B, "1xH100", 2),
        (LLAMA_8B, "1xH200", 1),
        (QWEN3_1_7B, "1xRTX-4090", 1),
        (None, "1xH100", 1),
    ],
)
def test_auto_means_one_engine_of_a_model_that_is_not_small(
    config: dict[str, Any] | None,
    gpus: str,
    engines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "model=no/such" if config is None else in_folder(tmp_path, config)
    run(["plan", "gsm8k", "--set", model, "--gpus", gpus, "--json"])
    said = capsys.readouterr()
    assert said.out.count('"role": "engine"') == engines, said


@pytest.mark.parametrize(
    ("config", "sets", "note"),
    [
        (LLAMA_8B, [], "per_gpu = auto: one engine (8.0 billion parameters)"),
        (LLAMA_8B, ["trainer.memory=speed", "trainer.optimizer_offload=true"], "per_gpu = auto: "),
        (None, [], "per_gpu = auto: one engine (model not on this machine)"),
        (QWEN3_1_7B, [], ""),
    ],
)
def test_validate_says_why_auto_is_one_engine(
    config: dict[str, Any] | None,
    sets: list[str],
    note: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = f"model={tmp_path}/none" if config is None else in_folder(tmp_path, config)
    given = [word for each in [model, *sets] for word in ("--set", each)]
    assert run(["validate", "gsm8k", *given, "--gpus", "1xH200", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert all(notes) and any(each.startswith(note) for each in notes) is bool(notes), notes
    assert bool(notes) is bool(note)


@pytest.mark.parametrize(
    ("config", "more", "reason"),
    [
        (LLAMA_8B, 'port = 9002\ndepends_on = { vllm = "healthy" }', ""),
        (QWEN3_1_7B, 'port = 9002\ndepends_on = { vllm = "healthy" }', "port 9002 is also vllm"),
        (LLAMA_8B, 'depends_on = { vllm-0 = "healthy" }', "depends on 'vllm-0', which is not in"),
        (QWEN3_1_7B, 'depends_on = { vllm-0 = "healthy" }', ""),
    ],
)
def test_the_checks_see_the_engines_that_auto_starts(
    config: dict[str, Any],
    more: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "p.toml"
    file.write_text(f'extends = "gsm8k"\nname = "p"\n[component.x]\ncommand = ["x"]\n{more}\n')
    sets = ["--set", in_folder(tmp_path, config)]
    assert run(["validate", str(file), *sets, "--gpus", "1xH100"]) == (2 if reason else 0)
    assert reason in capsys.readouterr().err


def test_what_waits_for_a_section_waits_for_each_of_its_servers() -> None:
    waits = {"command": ["x"], "depends_on": {"vllm": "healthy", "api": "started"}}
    for vllm, names in (({"replicas": 2}, ["vllm-0", "vllm-1"]), ({}, ["vllm"])):
        planned = parts(profile(vllm, component={"x": waits}))
        assert planned["x"].depends_on == dict.fromkeys(names, "healthy") | {"api": "started"}


def test_a_cache_of_a_given_size_is_what_to_lower() -> None:
    args = {"kv-cache-memory-bytes": 60 << 30}
    for engines in (1, 2):
        site = site_of(vllm={"per_gpu": engines, "args": args})
        (full,) = memory.site_budget(site, inventory("1xH100", QWEN3_1_7B)).warnings
        assert "Fixes: lower vllm.args.kv-cache-memory-bytes;" in full


@pytest.mark.parametrize(("value", "reason"), [("two", "unknown value"), (9, "out of range")])
def test_an_error_names_numbers_as_well_as_auto(
    value: object, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", "gsm8k", "--set", f"vllm.per_gpu={value}"]) == 2
    said = capsys.readouterr().err
    assert reason in said and "give a whole number from 1 to 8 or one of: auto" in said


def test_engines_on_the_same_gpu_by_reload() -> None:
    chosen = profile(
        {"gpus": [0], "per_gpu": 2, "gpu_memory_utilization": 0.3},
        mode="none",
        trainer={"batch_size": 16, "gpus": [1]},
    )
    assert problems(chosen) == []
    assert [part.gpus for name, part in parts(chosen).items() if "vllm" in name] == [[0], [0]]


@pytest.mark.parametrize(
    ("mode", "vllm", "more", "key", "reason"),
    [
        (
            "shared_vllm",
            {"gpus": [0, 1, 2, 3], "tensor_parallel": 2},
            {"device": "auto"},
            "vllm.0.tensor_parallel",
            "needs the whole model on the trainer's GPU",
        ),
        (
            "shared_vllm",
            {"gpus": [0, 1]},
            {"gpus": [1], "device": "auto"},
            "trainer.gpus",
            "the first engine, vllm-0, has GPU [0]",
        ),
        (
            "shared_vllm",
            [{"name": "a", "gpus": [0]}, {"name": "b", "port": 9002}],
            {"device": "auto"},
            "vllm.1.gpus",
            "b gets its weights by broadcast, so it needs a GPU of its own",
        ),
        (
            "shared_vllm",
            [
                {"name": "a", "gpus": [0], "gpu_memory_utilization": 0.4},
                {"name": "b", "port": 9002, "gpus": [0], "gpu_memory_utilization": 0.4},
            ],
            {"device": "auto"},
            "vllm.1.gpus",
            "trainer and engine share GPU 0",
        ),
        ("lora_restart", {"replicas": 2}, {}, "vllm.0.replicas", "feeds one in this mode"),
        (
            "lora_only",
            {"replicas": 2},
            {"single_copy": True},
            "vllm.0.replicas",
            "feeds one in this mode",
        ),
        (
            "none",
            {"gpus": [0, 1, 2], "tensor_parallel": 2},
            {},
            "vllm.0.gpus",
            "3 GPUs for an engine that takes 2",
        ),
        (
            "none",
            {"gpus": [0, 1, 2], "replicas": 2},
            {},
            "vllm.0.gpus",
            "3 GPUs for 2 engines that take 2",
        ),
        (
            "broadcast",
            {"replicas": 2, "port": 7999},
            {},
            "vllm.0.port",
            "port 8000 is also api.port",
        ),
        (
            "broadcast",
            {"replicas": 2},
            {"num_inference_nodes": 3},
            "trainer.num_inference_nodes",
            "feeds 2 of",
        ),
    ],
)
def test_what_does_not_go_together(mode: str, vllm: Any, more: Any, key: str, reason: str) -> None:
    found = problems(profile(vllm, mode=mode, trainer=CPU | more))
    assert [one for one in found if one[0] == key and reason in one[1]], found


def test_an_environment_asks_all_that_are_trained_or_those_that_it_names() -> None:
    judge = {"name": "judge", "port": 9500, "model": "/judge"}
    chosen = profile(
        [{"replicas": 2}, {"name": "more", "port": 9300}, judge],
        env=[
            {"name": name, "module": "json", "args": {"env.group_size": 8}}
            | ({"engine": engine} if engine else {})
            for name, engine in (("all", None), ("kind", "vllm"), ("one", "vllm-1"))
        ],
    )
    assert problems(chosen) == []
    asked = {env.name: [engine.name for engine in env_engines(chosen, env)] for env in chosen.env}
    assert asked == {
        "all": ["vllm-0", "vllm-1", "more"],
        "kind": ["vllm-0", "vllm-1"],
        "one": ["vllm-1"],
    }
    site = make_site(chosen, RUN_DIR, run_id="r")
    assert sequences_in_flight(site, chosen.env[0]) == 1024 // 2 + 1024 // 3 + 1024
    (idle,) = [
        note
        for note in check_notes(
            make_site(
                profile(
                    {"replicas": 2},
                    env={"module": "json", "engine": "vllm-1", "args": {"env.group_size": 8}},
                ),
                RUN_DIR,
                run_id="r",
            )
        )
        if "WARNING no environment uses" in note
    ]
    assert "uses vllm-0:" in idle
    wrong = profile([{"replicas": 2}, judge], env={"module": "json", "engine": "judge", "args": {}})
    assert [key for key, _ in problems(wrong)] == ["env.0.engine"]


def test_a_command_of_the_users_own_is_told_by_a_variable() -> None:
    chosen = profile({"replicas": 2, "port": 9100}, env={"command": ["mine"]})
    assert (
        parts(chosen)["env"].env[ENV_ENGINE_URLS]
        == "http://127.0.0.1:9100/v1 http://127.0.0.1:9101/v1"
    )


def test_several_engines_on_a_gpu_machine_need_gpus_by_name() -> None:
    chosen = profile({"replicas": 2}, mode="none", trainer={"batch_size": 16})
    site = make_site(chosen, RUN_DIR, run_id="r")
    found = unfit(site, memory.take_inventory(site, named_machine("4xH100")))
    assert [(p.key, p.fix) for p in found] == [("vllm.0.gpus", "name 2, such as [0, 1]")]
    on_cpu = make_site(profile({"replicas": 2}), RUN_DIR, run_id="r")
    assert unfit(on_cpu, memory.take_inventory(on_cpu, Hardware((), 64 * 1024**3))) == []


def test_a_stack_beside_another_moves_all_ports_of_its_engines() -> None:
    one = profile({"replicas": 3, "port": 9100}, api={"port": 8000})
    changes = separate({"a": one, "b": one}, 0, is_free=lambda port: port != 9104)
    assert changes.problems == []
    assert changes.sets["b"] == ["api.port=8001", "vllm.0.port=9105"], (
        "9103 to 9105 are not all free"
    )


# inference_gpus


def test_inference_gpus_divide_the_machine() -> None:
    chosen = profile({"tensor_parallel": 2}, trainer={"batch_size": 16}, inference_gpus=6)
    found = split_gpus(chosen, named_machine("8xH100"))
    assert isinstance(found, Profile)
    assert [engine.gpus for engine in found.engines] == [[0, 1], [2, 3], [4, 5]]
    assert (found.trainer.gpus, found.inference_gpus) == ([6, 7], None)


def test_a_stack_that_divides_the_machine_stands_beside_no_other() -> None:
    divides = profile({}, trainer={"batch_size": 16}, inference_gpus=2)
    other = profile({"gpus": [0]}, trainer={"gpus": [1], "batch_size": 16})
    for pair in ({"a": divides, "b": other}, {"a": other, "b": divides}):
        changes = separate(pair, 8, is_free=lambda port: True)
        assert "--sequential" in changes.problems[0].fix and not any(
            "gpus" in item for item in changes.sets["b"]
        )


@pytest.mark.parametrize(
    ("changes", "machine", "reason", "fix"),
    [
        (
            {"inference_gpus": 5},
            "8xH100",
            "5 of 8 GPUs cannot be divided into engines of 2 GPUs",
            "2, 4, 6",
        ),
        ({"inference_gpus": 8}, "8xH100", "with one left for the trainer", "2, 4, 6"),
        ({"inference_gpus": 2}, "1xH100", "2 of 1", "more GPUs"),
        ({"inference_gpus": 2}, None, "no NVIDIA GPU", "vllm.replicas"),
        (
            {"inference_gpus": 2, "mode": "shared_vllm"},
            "8xH100",
            "same GPUs in this mode",
            "broadcast",
        ),
        (
            {"inference_gpus": 2, "trainer": {"gpus": [7]}},
            "8xH100",
            "so do trainer.gpus",
            "remove one",
        ),
    ],
)
def test_what_cannot_be_divided(changes: Any, machine: str | None, reason: str, fix: str) -> None:
    chosen = profile({"tensor_parallel": 2}, **{"trainer": {"batch_size": 16}} | changes)
    found = split_gpus(chosen, named_machine(machine) if machine else Hardware((), 64 * 1024**3))
    assert isinstance(found, Problem) and reason in found.reason and fix in found.fix


def test_plan_divides_the_named_machine_and_up_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        'name = "p"\nmode = "broadcast"\nmodel = "/models/none"\ninference_gpus = 3\n'
        '[env]\nmodule = "json"\n[trainer]\nbatch_size = 16\n'
    )
    assert run(["plan", str(path), "--gpus", "4xH100"]) == 0
    shown = capsys.readouterr().out
    assert "inference_gpus = 3: 3 x engine on [0, 1, 2], the trainer on [3]" in shown
    assert "\nvllm-2 (engine)\n" in shown and "CUDA_VISIBLE_DEVICES=3" in shown
    monkeypatch.setattr(
        memory, "read_machine", lambda: Hardware((Gpu("H100", 80 * 1024**3),) * 2, 64 * 1024**3)
    )
    assert run(["validate", str(path)]) == 2
    assert "inference_gpus: 3 of 2 GPUs" in capsys.readouterr().err
