"""Plans: commands, order, gates, recipes and checks, without a process."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from atropos_tui.cli.start.up import _profile_data
from atropos_tui.errors import UserError
from atropos_tui.profile.budget.memory import take_inventory
from atropos_tui.profile.checks.consistency import (
    check_commands,
    check_curriculum,
    check_graph,
    check_notes,
    check_profile,
)
from atropos_tui.profile.checks.preflight import preflight
from atropos_tui.profile.plan import redacted, stack_of
from atropos_tui.profile.profile import Profile, load_profile, parse_profile
from atropos_tui.profile.redact import hide_command, hide_tree
from atropos_tui.profile.site import Site, engine_model, make_site
from atropos_tui.profile.spec import ComponentSpec, RestartPolicy, StackSpec, StopPolicy, recipe


def profile(**changes: Any) -> Profile:
    data: dict[str, Any] = {
        "name": "p",
        "model": "/models/m",
        "env": {"module": "json", "args": {"env.group_size": 8}},
        "trainer": {"batch_size": 16, "gradient_accumulation_steps": 1},
    }
    return parse_profile(data | changes, "p.toml")


def site(chosen: Profile) -> Site:
    return make_site(chosen, Path("/runs/r"), run_id="r")


def stack(chosen: Profile) -> StackSpec:
    return stack_of(make_site(chosen, Path("/runs/r"), run_id="r"))


def flags(command: list[str]) -> dict[str, str]:
    return {a.removeprefix("--"): b for a, b in pairwise(command) if a.startswith("--")}


def test_start_order_and_gates() -> None:
    demo = stack(load_profile("demo")[0])
    assert [c.name for c in demo.components] == [
        "warm-start",
        "api",
        "vllm",
        "arithmetic",
        "trainer",
    ]
    gates = {c.name: c.depends_on for c in demo.components}
    assert gates["api"] == gates["vllm"] == {"warm-start": "completed"}
    assert gates["arithmetic"] == gates["trainer"] == {"api": "healthy", "warm-start": "completed"}
    assert [c.name for c in demo.components if c.ends_run] == ["trainer"]


def test_derived_values_agree() -> None:
    chosen = profile(api={"port": 8123}, vllm={"port": 9123, "max_model_len": 99}, seed=7)
    parts = {c.role.value: c for c in stack(chosen).components}
    env, trainer, engine = (flags(parts[role].command) for role in ("env", "trainer", "engine"))
    assert env["env.rollout_server_url"] == trainer["atropos-url"] == "http://127.0.0.1:8123"
    assert (
        env["openai.base_url"] == "http://127.0.0.1:9123/v1"
        and trainer["vllm-port"] == engine["port"] == "9123"
    )
    assert (
        env["openai.model_name"]
        == env["env.tokenizer_name"]
        == trainer["model-name"]
        == engine["model"]
        == "/models/m"
    )
    assert env["openai.server_type"] == "vllm"
    assert trainer["seed"] == engine["seed"] == "7"
    assert trainer["max-model-len"] == engine["max-model-len"] == "99"
    assert trainer["vllm-config-path"] in parts["engine"].clears
    assert parts["engine"].env["ATROPOS_HOLD_GENERATION"] == "1"
    assert parts["api"].command[-4:] == ["--host", "127.0.0.1", "--port", "8123"]


def test_a_model_may_be_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`MODEL=DIR`, as with the trainer of before: who plans has to know which model that is."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("MODEL", str(tmp_path))
    chosen = profile(
        model="${MODEL}",
        vllm=[{"name": "vllm"}, {"name": "judge", "model": "${JUDGE}/x", "port": 9002}],
    )
    site = make_site(
        chosen, Path("/runs/r"), run_id="r", dotenv={"MODEL": "not this", "JUDGE": "org"}
    )
    assert site.model == str(tmp_path) and engine_model(site, chosen.vllm[1]) == "org/x"
    assert flags(stack_of(site).component("trainer").command)["model-name"] == str(tmp_path)
    found = preflight(site, stack_of(site), take_inventory(site))
    assert not [problem for problem in found if problem.key.endswith("model")]


def test_each_program_of_the_stack_has_a_temporary_folder_that_goes_with_it() -> None:
    """wandb left two folders in /tmp for each run-api, environment or trainer that was killed."""
    parts = stack(profile()).components
    assert len(parts) == 4 and all(part.scratch for part in parts)


def test_the_seed_reaches_environments_of_ours_and_no_others() -> None:
    assert flags(stack(load_profile("demo")[0]).component("arithmetic").command)["env.seed"] == "0"
    ours = profile(seed=7, env={"module": "atropos_envs.sums_server", "args": {}})
    assert flags(stack(ours).component("env").command)["env.seed"] == "7"
    chosen = profile(seed=7, env={"module": "atropos_envs.sums_server", "args": {"env.seed": 3}})
    assert flags(stack(chosen).component("env").command)["env.seed"] == "3"
    assert "env.seed" not in flags(stack(profile(seed=7)).component("env").command)


def test_all_attempts_are_one_run_of_wandb_and_all_components_one_group() -> None:
    asked = stack(profile(trainer={"batch_size": 16, "use_wandb": True}))
    trainer, env = asked.component("trainer"), asked.component("env")
    assert (trainer.env["WANDB_RUN_ID"], env.env["WANDB_RUN_ID"]) == ("r", "r-env")
    for part in (trainer, env):
        said = {name: part.env[f"WANDB_{name}"] for name in ("RESUME", "RUN_GROUP", "DIR")}
        assert said == {"RESUME": "allow", "RUN_GROUP": "r", "DIR": "/runs/r"}
    assert flags(trainer.command)["wandb-group"] == "r", "run-api hands it on to environments"
    named = stack(profile(trainer={"batch_size": 16, "use_wandb": True, "wandb_group": "g"}))
    assert named.component("env").env["WANDB_RUN_GROUP"] == "g"
    unasked = stack(profile())
    assert not [
        name for part in unasked.components for name in part.env if name.startswith("WANDB")
    ]


def test_gpus_reach_the_processes() -> None:
    parts = {c.role.value: c for c in stack(profile(vllm={"gpus": [2]})).components}
    assert (
        parts["engine"].env["CUDA_VISIBLE_DEVICES"]
        == parts["trainer"].env["CUDA_VISIBLE_DEVICES"]
        == "2"
    )


def test_a_trainer_on_several_gpus_has_no_adafactor() -> None:
    several: dict[str, Any] = {"mode": "broadcast", "vllm": {"gpus": [0]}}
    refused = profile(**several, trainer={"gpus": [1, 2], "optimizer": "adafactor"})
    assert any("adafactor" in p.reason for p in check_profile(site(refused)))
    taken = profile(**several, trainer={"gpus": [1, 2], "optimizer": "adamw"})
    assert not any("adafactor" in p.reason for p in check_profile(site(taken)))


@pytest.mark.parametrize(
    ("section", "policy", "grace_s"), [("vllm", "always", 15), ("trainer", "on-failure", 600)]
)
def test_of_a_policy_only_what_the_profile_says_is_replaced(
    section: str, policy: str, grace_s: float
) -> None:
    said = {"restart": {"max_restarts": 7}, "stop": {"signal": "INT"}}
    chosen = stack(profile(**{section: said})).component(section)
    assert chosen and chosen.restart == RestartPolicy(policy=policy, max_restarts=7)
    assert chosen.stop == StopPolicy(signal="INT", grace_s=grace_s)


def test_profile_overrides_defaults_of_a_role() -> None:
    chosen = profile(
        vllm={"restart": {"policy": "never"}, "start_timeout_s": 5, "env": {"X": "${HOME}"}}
    )
    engine = next(c for c in stack(chosen).components if c.role == "engine")
    assert engine.restart.policy == "never" and engine.start_timeout_s == 5
    assert engine.env["X"] == "${HOME}", "references are looked up when the process starts"
    assert engine.probes.readiness is not None


def test_nothing_secret_is_written() -> None:
    chosen = profile(
        trainer={
            "env": {
                "WANDB_API_KEY": "abc123",
                "HF_TOKEN": "${HF_TOKEN}",
                "AWS_SECRET_ACCESS_KEY": "abc124",
            }
        },
        vllm={"args": {"api-key": "abc125"}},
        env={"module": "json", "args": {"openai.api_key": "abc126", "env.max_token_length": 2048}},
        component={
            "x": {"command": ["serve", "--password", "abc127", "--token=abc128", "--name", "shown"]}
        },
    )
    for text in (
        json.dumps(redacted(stack(chosen))),
        tomli_w.dumps(hide_tree(_profile_data(chosen))),
    ):
        assert "abc12" not in text, text
        assert "${HF_TOKEN}" in text and "/models/m" in text and "2048" in text and "shown" in text
    argv = ["up", "p", "--set", "trainer.env.HF_TOKEN=abc129", "--set", "trainer.lr=1e-4"]
    assert hide_command(argv) == [
        "up",
        "p",
        "--set",
        "trainer.env.HF_TOKEN=(redacted)",
        "--set",
        "trainer.lr=1e-4",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-H", "Authorization: Bearer ab/cdefg=="], ["-H", "Authorization: Bearer (redacted)"]),
        (["-H", "Bearer abcdwxyz"], ["-H", "Bearer (redacted)"]),
        (["send", "Bearer", "abcdwxyz"], ["send", "Bearer", "(redacted)"]),
        (
            ["""{"Authorization": "Basic abcdefgh"}"""],
            ["""{"Authorization": "Basic (redacted)"}"""],
        ),
        (
            ["sh", "curl -H 'authorization:bearer abc12345' x"],
            ["sh", "curl -H 'authorization:bearer (redacted)' x"],
        ),
        (["-H", "Authorization: Bearer ${TOKEN}"], None),
        (["h = {'Authorization': f'Bearer {value}'}"[4:], "the bearer of responsibilities"], None),
    ],
)
def test_a_token_that_a_command_sends_is_not_written(
    words: list[str], expected: list[str] | None
) -> None:
    assert hide_tree({"command": words}) == {"command": expected or words}


@pytest.mark.parametrize(
    ("action", "component", "initiator", "stops", "starts"),
    [
        ("restart", "vllm", "user", ["trainer", "vllm"], ["vllm", "trainer"]),
        ("restart", "vllm", "trainer", ["vllm"], ["vllm"]),
        ("restart", "api", "user", ["env", "api"], ["api", "env"]),
        ("restart", "trainer", "user", ["trainer"], ["trainer"]),
        ("stop", "vllm", "user", ["trainer", "vllm"], []),
        ("stop", "api", "user", ["env", "api"], []),
        ("start", "api", "user", [], ["api", "env"]),
        ("kill", "api", "user", ["api", "env"], ["api", "env"]),
        ("kill", "vllm", "user", ["vllm", "trainer"], ["vllm", "trainer"]),
        ("start", "env", "user", [], ["env"]),
        ("down", None, "user", ["trainer", "env", "vllm", "api"], []),
    ],
)
def test_recipes(
    action: Any, component: str | None, initiator: str, stops: list[str], starts: list[str]
) -> None:
    result = recipe(stack(profile()), action, component, initiator=initiator)
    assert (result.stop, result.start) == (stops, starts)


def test_notes_of_recipes_agree_with_how_many_they_speak_of() -> None:
    one = stack(profile())
    assert recipe(one, "restart", "vllm").note.startswith("trainer restarts too: ")
    assert "trainer keeps running without it" in recipe(one, "stop", "api").note
    two = stack(profile(env=[{"name": "a", "module": "json"}, {"name": "b", "module": "json"}]))
    assert recipe(two, "restart", "api").note.startswith("a, b restart too: ")
    assert "a, b cannot run without it and stop first" in recipe(two, "stop", "api").note


def test_a_kill_without_restarts_ends_the_run() -> None:
    found = recipe(stack(profile(api={"restart": {"policy": "never"}})), "kill", "api")
    assert (found.stop, found.start) == (["api", "trainer", "env", "vllm"], [])
    assert "policy is never: the run ends with code 3" in found.note
    assert "The run ends at 4 crashes within 600 s" in recipe(stack(profile()), "kill", "api").note


def test_recipe_of_an_unknown_component() -> None:
    with pytest.raises(KeyError):
        recipe(stack(profile()), "restart", "nobody")


TWO_ENGINES = [{"name": "a", "port": 9001}, {"name": "b", "port": 9002}]
SEVERAL = {"batch_size": 16, "gradient_accumulation_steps": 1}
LORA = {"mode": "lora_only"}
REPLAY: dict[str, Any] = {"trainer": {"routing_replay": True}}
ONE_COPY = LORA | {"trainer": {"single_copy": True}}


def lengths(
    first: int, second: int | None, seq_len: int | None = None, **of_second: Any
) -> dict[str, Any]:
    """Two engines in a mode that feeds both, and an environment that asks for 2,000 tokens where
    the rows allow it."""
    rows = {"seq_len": seq_len} if seq_len else env(**{"env.max_token_length": 2000})
    both = [
        {"name": "a", "max_model_len": first},
        {"name": "b", "port": 9101, "max_model_len": second, **of_second},
    ]
    return {"mode": "none", "vllm": both} | ({"trainer": SEVERAL | rows} if seq_len else rows)


def engines(**changes: Any) -> dict[str, Any]:
    return {"vllm": [TWO_ENGINES[0], TWO_ENGINES[1] | changes]}


def env(**changes: Any) -> dict[str, Any]:
    return {"env": {"module": "json", "args": {"env.group_size": 8} | changes}}


def program(*command: str, **variables: str) -> dict[str, Any]:
    return {"component": {"x": {"command": list(command), "env": variables}}}


@pytest.mark.parametrize(
    ("changes", "key", "reason", "fix"),
    [
        (
            {"trainer": SEVERAL | {"gpus": [0, 0]}},
            "trainer.gpus",
            "named twice",
            "every rank needs its own GPU",
        ),
        (
            {
                "mode": "broadcast",
                "vllm": {"gpus": [0]},
                "trainer": SEVERAL | {"gpus": [2, 3], "processes": 3},
            },
            "trainer.processes",
            "3 ranks and 2 GPUs",
            "to 2, or leave",
        ),
        (
            {"trainer": {"processes": 2}},
            "trainer.processes",
            "2 ranks for 1 worker",
            "set it to 1, or leave it out",
        ),
        (
            {"trainer": SEVERAL | {"num_inference_nodes": 2}},
            "trainer.num_inference_nodes",
            "feeds 1 of",
            "leave",
        ),
        # Sizes
        (
            {"trainer": {"batch_size": 12, "gradient_accumulation_steps": 1}},
            "env.0.args.env.group_size",
            "is not a multiple of",
            "trainer.batch_size = 8 or 16",
        ),
        (
            {"trainer": {"batch_size": 2, "gradient_accumulation_steps": 5}},
            "env.0.args.env.group_size",
            "steps 5 = 10 is not",
            "trainer.gradient_accumulation_steps = 4 or 8",
        ),
        (
            {
                "env": [
                    {"name": "a", "module": "json", "args": {"env.group_size": 8}},
                    {"name": "b", "module": "json", "args": {"env.group_size": 3}},
                ]
            },
            "env.1.args.env.group_size",
            "the group size 3",
            "env.group_size",
        ),
        # Recorded rollouts
        (
            {"trainer": {"rollouts": "r.jsonl"}, "mode": "none"},
            "trainer.rollouts",
            "generates rollouts",
            "trainer_core --model-name ... --rollouts r.jsonl",
        ),
        # Names, ports, addresses
        (env() | {"api": {"port": 9001}}, "vllm.0.port", "port 9001 is also api.port", "distinct"),
        (engines(port=9001), "vllm.1.port", "port 9001 is also vllm.0.port", "distinct"),
        ({"api": {"host": "0.0.0.0"}}, "api.host", "open to the network", "127.0.0.1"),
        ({"api": {"host": "::1"}}, "api.host", "open to the network", "127.0.0.1"),
        ({"env": {"module": "json", "name": "api"}}, "env.0.name", "used 2 times", "its own"),
        (
            {"env": {"command": ["x", "--env.rollout_server_url", "http://localhost:8001"]}},
            "env.0.command",
            "port 8001, but run-api has port 8000",
            "http://127.0.0.1:8000",
        ),
        (
            program("x", "--atropos-url=http://127.0.0.1:8002"),
            "component.x.command",
            "port 8002",
            "api.port = 8002",
        ),
        (
            program("x", "--openai.base_url", "http://127.0.0.1:9009/v1"),
            "component.x.command",
            "port 9009, where no server",
            "http://127.0.0.1:9001/v1",
        ),
        (
            program("x", OPENAI_BASE_URL="http://[::1]:9009/v1"),
            "component.x.env.OPENAI_BASE_URL",
            "9009",
            "vllm.port",
        ),
        # What is derived
        (
            {"vllm": {"args": {"port": 9999}}},
            "vllm.0.args.port",
            "is set by atropos-tui",
            "set vllm.port",
        ),
        (
            {"vllm": {"args": {"host": "0.0.0.0"}}},
            "vllm.0.args.host",
            "is set by atropos-tui",
            "remove it",
        ),
        (
            {"vllm": {"args": {"max_model_len": 9}}},
            "vllm.0.args.max_model_len",
            "is set by atropos-tui",
            "vllm.max_model_len",
        ),
        (
            env(**{"openai.base_url": "http://x"}),
            "env.0.args.openai.base_url",
            "is set by atropos-tui",
            "set vllm.port",
        ),
        (
            env(**{"openai.server_type": "openai"}),
            "env.0.args.openai.server_type",
            "no logprobs",
            '"vllm"',
        ),
        # Several engines
        (
            engines() | {"env": {"module": "json", "engine": "c"}},
            "env.0.engine",
            "no engine is called 'c'",
            "a, b",
        ),
        (
            engines() | {"mode": "lora_restart", "env": {"module": "json", "engine": "b"}},
            "env.0.engine",
            "with weights that never change",
            'mode = "broadcast"',
        ),
        ({"vllm": {"model": "/other"}}, "vllm.0.model", "serves the stack's model", "at the top"),
        # GPUs and shares of them
        ({"vllm": {"gpus": [0, 0]}}, "vllm.0.gpus", "twice", "once"),
        (
            {"mode": "lora_restart", "vllm": {"gpus": [0, 1]}},
            "vllm.0.gpus",
            "an engine that takes 1",
            "vllm.tensor_parallel = 2",
        ),
        (
            {"vllm": {"gpus": [0], "tensor_parallel": 2}},
            "vllm.0.gpus",
            "1 GPU for an engine that takes 2",
            "name 2",
        ),
        (
            {"vllm": {"gpus": [0, 1], "args": {"data_parallel_size": 4}}},
            "vllm.0.gpus",
            "that takes 4",
            "name 4",
        ),
        (
            {
                "vllm": [
                    {"name": "a", "port": 1, "gpus": [0], "gpu_memory_utilization": 0.6},
                    {"name": "b", "port": 2, "gpus": [0], "gpu_memory_utilization": 0.5},
                ]
            },
            "vllm.1.gpu_memory_utilization",
            "take 1.10 of its memory (a 0.6 + b 0.5)",
            "0.45 each",
        ),
        (
            {
                "vllm": [
                    {"name": "a", "port": 1, "gpus": [0], "gpu_memory_utilization": 0.5},
                    {"name": "b", "port": 2, "gpus": [0]},
                ]
            },
            "vllm.1.gpu_memory_utilization",
            "b 0.92",
            "a sum below 1",
        ),
        # Single copy
        (
            {"vllm": {"gpus": [0]}, "trainer": SEVERAL | {"gpus": [1]}},
            "trainer.gpus",
            "same GPU",
            "trainer.gpus = [0]",
        ),
        ({"trainer": SEVERAL | {"gpus": [1]}}, "trainer.gpus", "same GPU", "vllm.gpus = [1]"),
        (
            {"vllm": {"gpus": [0]}, "trainer": SEVERAL | {"device": "cpu"}},
            "trainer.device",
            "on GPU [0]",
            "auto",
        ),
        ({"vllm": {"dtype": "half"}}, "vllm.0.dtype", "trainer.dtype is bfloat16", "'bfloat16'"),
        (
            {"vllm": {"args": {"quantization": "fp8"}}},
            "vllm.0.args.quantization",
            "quantized",
            "remove it",
        ),
        (
            {"vllm": {"args": {"enable_sleep_mode": True}}},
            "vllm.0.args.enable_sleep_mode",
            "sleeping",
            "remove it",
        ),
        (
            {"vllm": {"args": {"enable-lora": True}}},
            "vllm.0.args.enable-lora",
            "adapters wrap",
            "remove it",
        ),
        (
            {"vllm": {"args": {"pipeline-parallel-size": 2}}},
            "vllm.0.args.pipeline-parallel-size",
            "one process",
            "1",
        ),
        (
            {"vllm": {"args": {"data-parallel-size": 2}}},
            "vllm.0.args.data-parallel-size",
            "one process",
            "1",
        ),
        (
            {"vllm": {"args": {"cpu-offload-gb": 4}}},
            "vllm.0.args.cpu-offload-gb",
            "on the host",
            "remove it",
        ),
        (
            {"vllm": {"args": {"load-format": "dummy"}}},
            "vllm.0.args.load-format",
            "'dummy'",
            "safetensors",
        ),
        (
            {"vllm": {"args": {"logprobs-mode": "raw_logprobs"}}},
            "vllm.0.args.logprobs-mode",
            "sampling",
            "leave",
        ),
        # Broadcast
        (
            {
                "mode": "broadcast",
                "vllm": {"gpus": [0, 1], "tensor_parallel": 2},
                "trainer": SEVERAL | {"gpus": [1]},
            },
            "vllm.0.gpus",
            "trainer and engine share GPU 1",
            "its own",
        ),
        (
            {"mode": "broadcast", "vllm": {"gpus": [0]}},
            "trainer.gpus",
            "section must name its own",
            "name its GPUs",
        ),
        # Lengths
        (
            {"vllm": {"max_model_len": 1024}, "trainer": SEVERAL | {"seq_len": 2048}},
            "trainer.seq_len",
            "cannot come from an engine with max_model_len = 1024",
            "trainer.seq_len = 1024",
        ),
        (
            {"vllm": {"max_model_len": 1024}} | env(**{"env.max_token_length": 1025}),
            "env.0.args.env.max_token_length",
            "refuses them",
            "set it to 1024",
        ),
        (
            lengths(4096, 1024),
            "env.0.args.env.max_token_length",
            "max_model_len = 1024 refuses",
            "set it to 1024",
        ),
        (
            lengths(512, 1024, seq_len=2048),
            "trainer.seq_len",
            "with max_model_len = 1024",
            "trainer.seq_len = 1024",
        ),
        # Adapters
        (
            LORA | {"vllm": {"args": {"max-lora-rank": 8}}},
            "vllm.0.args.max-lora-rank",
            "rank 16",
            "set it to 16",
        ),
        (
            LORA | {"vllm": {"args": {"max-lora-rank": 24}}},
            "vllm.0.args.max-lora-rank",
            "not accept rank 24",
            "16, 32",
        ),
        (
            LORA | {"vllm": {"args": {"enable-lora": False}}},
            "vllm.0.args.enable-lora",
            "serves adapters",
            "remove it",
        ),
        (
            LORA | {"trainer": SEVERAL | {"lora_r": 600}},
            "trainer.lora_r",
            "up to rank 512",
            "lower it",
        ),
        # Adapters over the one copy
        (
            REPLAY | {"vllm": {"args": {"enable-return-routed-experts": False}}},
            "vllm.0.args.enable-return-routed-experts",
            "expert choices",
            "remove it",
        ),
        (
            REPLAY | {"vllm": {"args": {"pipeline-parallel-size": 2}}},
            "vllm.0.args.pipeline-parallel-size",
            "over 2 pipeline stages",
            "tensor_parallel",
        ),
        *(
            (
                REPLAY | {"vllm": {"args": {key: value}}},
                f"vllm.0.args.{key}",
                *("only with its prefix cache", "routing_replay"),
            )
            for key, value in (("enable_prefix_caching", False), ("no-enable-prefix-caching", True))
        ),
        (
            ONE_COPY | {"vllm": {"tensor_parallel": 2}},
            "vllm.0.tensor_parallel",
            "whole model on one GPU",
            "= 1",
        ),
        (
            ONE_COPY | {"vllm": {"args": {"quantization": "fp8"}}},
            "vllm.0.args.quantization",
            "quantized",
            "remove it",
        ),
        (
            ONE_COPY | {"vllm": {"gpus": [1]}, "trainer": {"single_copy": True, "gpus": [0]}},
            "trainer.gpus",
            "same GPU",
            "trainer.gpus = [1]",
        ),
    ],
)
def test_contradictions_are_found(changes: dict[str, Any], key: str, reason: str, fix: str) -> None:
    found = check_profile(site(profile(**changes)))
    assert all(problem.key and problem.fix for problem in found), found
    matching = [problem for problem in found if problem.key == key and reason in problem.reason]
    assert matching and fix in matching[0].fix, found


@pytest.mark.parametrize(
    ("mode", "trainer", "flags"),
    [
        ("none", {"routing_replay": True}, {"enable-return-routed-experts": False}),
        ("none", {}, {"logprobs-mode": "raw_logprobs"}),
        ("lora_only", {}, {"max-lora-rank": 24}),
    ],
)
def test_flags_of_each_engine_that_is_fed_are_judged_once(
    mode: str, trainer: dict[str, Any], flags: dict[str, Any]
) -> None:
    more = {"name": "b", "port": 9101, "replicas": 2, "args": flags}
    judge = {"name": "judge", "port": 9201, "model": "/judge", "args": flags}
    chosen = profile(mode=mode, trainer=SEVERAL | trainer, vllm=[{"name": "a"}, more, judge])
    assert [problem.key for problem in check_profile(site(chosen))] == [
        f"vllm.1.args.{name}" for name in flags
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm": {"gpus": [0], "gpu_memory_utilization": 0.9}},
        {"vllm": {"gpus": [3]}, "trainer": SEVERAL | {"gpus": [3]}},
        {
            "vllm": {
                "dtype": "bfloat16",
                "args": {"load-format": "safetensors", "enforce-eager": True},
            }
        },
        {"vllm": {"max_model_len": 64}},
        {"vllm": {"max_model_len": 64}, "trainer": SEVERAL | {"seq_len": 64}},
        lengths(512, 2048, seq_len=2048),
        lengths(2048, None, seq_len=4096),
        lengths(2048, 64, model="/judge"),
        {
            "vllm": [
                {"name": "a", "port": 1, "gpus": [0], "gpu_memory_utilization": 0.4},
                {
                    "name": "b",
                    "port": 2,
                    "gpus": [0, 1],
                    "tensor_parallel": 2,
                    "gpu_memory_utilization": 0.4,
                    "model": "/judge",
                    "args": {"quantization": "fp8"},
                },
            ]
        },
        program(
            "serve", "--base-url=http://127.0.0.1:9001/v1", "--atropos-url", "http://localhost:8000"
        ),
        program("serve", "--base-url=https://example.org:1/v1", "--atropos-url"),
        program("serve", "--base-url=http://127.0.0.1:99999/v1"),
    ],
)
def test_what_fits_is_left_alone(changes: dict[str, Any]) -> None:
    assert check_profile(site(profile(**changes))) == []


@pytest.mark.parametrize("gpus", [[], [0], [0, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("processes", [None, 1, 2, 4])
@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("own", [[], [0], [0, 1]])
@pytest.mark.parametrize("leave_out", [False, True])
def test_fixes_about_gpus_and_ranks_lead_to_a_profile_that_is_valid(
    gpus: list[int], processes: int | None, parallel: int, own: list[int], leave_out: bool
) -> None:
    """Following the first fix again and again ends, whichever alternative is taken."""
    values: dict[str, Any] = {
        "vllm.gpus": gpus,
        "vllm.tensor_parallel": parallel,
        "trainer.gpus": own,
    }
    values["trainer.processes"] = processes
    for _ in range(4):
        sections: dict[str, dict[str, Any]] = {"vllm": {}, "trainer": SEVERAL | {"batch_size": 64}}
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections[section] = sections[section] | ({} if value is None else {name: value})
        found = check_profile(site(profile(**sections)))
        if not found:
            return
        key, fix = found[0].key.replace("vllm.0.", "vllm."), found[0].fix
        if leave_out and "leave it out" in fix:
            values[key] = None
        elif assignments := re.findall(r"([a-z.]+\.[a-z_]+) = (\[[\d, ]*\]|\d+)", fix):
            values |= {name: json.loads(value) for name, value in assignments}
        elif number := re.match(r"set it to (\d+)", fix):
            values[key] = int(number[1])
        elif names := re.match(r"name (\d+)", fix):
            values[key] = list(range(int(names[1])))
        else:
            raise AssertionError(f"no value in {fix!r}")
    raise AssertionError(f"still {found}")


def test_a_batch_that_never_fills_is_told_once() -> None:
    chosen = profile(trainer={"batch_size": 12, "gradient_accumulation_steps": 1})
    assert [problem.key for problem in check_profile(site(chosen))] == ["env.0.args.env.group_size"]


def test_a_variable_that_does_nothing_is_said_and_accepted() -> None:
    chosen = profile(vllm={"env": {"VLLM_USE_V1": "0"}})
    assert check_profile(site(chosen)) == []
    (note,) = check_notes(site(chosen))
    assert note == "vllm.0.env.VLLM_USE_V1 is ignored: vLLM has only its V1 engine"
    assert check_notes(site(profile())) == []


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 makes it reachable for everybody on that network"),
        (["--host=::"], "--host :: makes it reachable for everybody"),
        (["--middleware", "mine.Spy"], "--middleware mine.Spy runs code that sees every request"),
        (["--trust-remote-code"], "--trust-remote-code runs Python code of the model's author"),
        (["--api-key", "abcdef123456"], "the value of --api-key is in its command line"),
        (["--key=${MY_TOKEN}"], "${MY_TOKEN} is in its command line"),
    ],
)
def test_a_command_line_that_opens_a_port_is_noted(words: list[str], note: str) -> None:
    quiet = ComponentSpec(
        name="quiet", command=["serve", "--host", "127.0.0.1", "--max-tokens", "7", "${HOME}"]
    )
    loud = ComponentSpec(name="loud", command=["serve", *words, "--port", "1"])
    stack = StackSpec(run_id="r", name="n", mode="none", run_dir="/r", components=[quiet, loud])
    (line,) = check_commands(stack)
    assert line.startswith("WARNING loud: ") and note in line
    assert "abcdef123456" not in line


def test_the_trainer_feeds_the_first_engine_alone() -> None:
    plan = stack(
        profile(vllm=[*TWO_ENGINES[:1], TWO_ENGINES[1] | {"model": "/judge", "gpus": [1]}])
    )
    fed, judge = (part for part in plan.components if part.role == "engine")
    assert flags(fed.command)["model"] == "/models/m" and flags(judge.command)["model"] == "/judge"
    assert fed.restart_with == ["trainer"] and judge.restart_with == []
    assert fed.env["ATROPOS_HOLD_GENERATION"] == fed.env["VLLM_ENABLE_SHARED_WEIGHTS"] == "1"
    assert (
        "ATROPOS_HOLD_GENERATION" not in judge.env and "VLLM_ENABLE_SHARED_WEIGHTS" not in judge.env
    )
    assert judge.clears == [] and judge.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert judge.env["LOGDIR"] != fed.env["LOGDIR"]
    parts = {part.role.value: flags(part.command) for part in plan.components}
    assert (
        parts["trainer"]["vllm-port"] == "9001"
        and parts["env"]["openai.base_url"] == "http://127.0.0.1:9001/v1"
    )


def test_an_environment_may_name_its_engine() -> None:
    chosen = profile(vllm=TWO_ENGINES, env={"module": "json", "engine": "b"})
    parts = {part.role.value: flags(part.command) for part in stack(chosen).components}
    assert parts["env"]["openai.base_url"] == "http://127.0.0.1:9002/v1"


def test_a_foreign_environment_has_what_the_engine_computes_under_way(tmp_path: Path) -> None:
    """Shared by those of one engine; who sets a number of workers has chosen."""
    script = tmp_path / "e.py"
    script.write_text("import atroposlib")

    def planned(envs: list[dict[str, Any]], **engine: Any) -> list[str | None]:
        chosen = profile(env=envs, vllm={"port": 9001, **engine})
        parts = [part for part in stack(chosen).components if part.role == "env"]
        return [part.env.get("ATROPOS_SEQUENCES_IN_FLIGHT") for part in parts]

    one = {"name": "a", "script": str(script)}
    assert planned([one]) == ["1024"] and planned([one, one | {"name": "b"}]) == ["512", "512"]
    assert planned([one], args={"max-num-seqs": 32}) == ["32"]
    assert planned([one | {"args": {"env.max_num_workers": 3}}]) == [None]
    assert planned([{"name": "ours", "module": "atropos_envs.arithmetic_server"}]) == [None]


OUR_ENV = {"name": "ours", "module": "atropos_envs.arithmetic_server"}


@pytest.mark.parametrize(
    ("env", "more", "variables"),
    [
        ({}, {}, ("auto", "8", "1")),
        ({"concurrency": 300}, {}, ("300", "8", "1")),
        ({"args": {"env.max_batches_offpolicy": 3}}, {}, ("auto", "3", "1")),
        ({}, {"trainer": {"max_policy_lag": 4}}, ("auto", "2", "1")),
        ({"args": {"env.max_batches_offpolicy": 1}}, {}, None),
        ({"args": {"env.max_num_workers": 16}}, {}, None),
        ({"args": {"env.min_batch_allocation": 0.5}}, {}, None),
        ({"refill": False}, {}, None),
        ({}, {"trainer": {"max_policy_lag": 0}}, None),
        ({}, {"mode": "lora_restart"}, None),
    ],
)
def test_sequences_in_flight_follow_the_engine_unless_something_is_set_by_hand(
    env: dict[str, Any], more: dict[str, Any], variables: tuple[str, str, str] | None
) -> None:
    (part,) = (p for p in stack(profile(env=OUR_ENV | env, **more)).components if p.role == "env")
    names = "ATROPOS_CONCURRENCY", "ATROPOS_BATCHES_AHEAD", "ATROPOS_ENGINE_SHARE"
    assert tuple(part.env.get(name) for name in names) == (variables or (None, None, None))


def test_environments_of_one_engine_share_its_knee_and_a_yaml_file_counts_too(
    tmp_path: Path,
) -> None:
    file = tmp_path / "waves.yaml"
    file.write_text("env:\n  max_batches_offpolicy: 1\n")
    both = profile(env=[OUR_ENV, OUR_ENV | {"name": "waves", "config": str(file)}])
    one, waves = (part.env for part in stack(both).components if part.role == "env")
    assert one["ATROPOS_ENGINE_SHARE"] == "0.5"
    assert "ATROPOS_CONCURRENCY" not in waves


def test_an_environment_s_temporary_files_go_with_it() -> None:
    for env in ({"module": "json"}, {"command": ["sleep", "1"]}):
        assert [
            part.scratch for part in stack(profile(env=env)).components if part.role == "env"
        ] == [True]


def test_an_environment_is_told_not_to_refill() -> None:
    for refill, told in ((True, None), (False, "0")):
        parts = stack(profile(env={"module": "json", "refill": refill})).components
        assert [part.env.get("ATROPOS_REFILL") for part in parts if part.role == "env"] == [told]


def test_an_environment_chooses_by_pass_rate_only_in_our_host() -> None:
    ours = {"module": "atropos_envs.arithmetic_server"}
    for env, given, problems in (
        (ours, None, 0),
        (ours | {"curriculum": "pass_rate"}, "pass_rate", 0),
        ({"command": ["sleep", "1"], "curriculum": "pass_rate"}, "pass_rate", 1),
    ):
        planned = stack(chosen := profile(env=env))
        part = next(part for part in planned.components if part.role == "env")
        assert part.env.get("ATROPOS_CURRICULUM") == given
        found = check_curriculum(chosen, planned)
        assert len(found) == problems
        assert all(each.key == "env.0.curriculum" and "module" in each.fix for each in found)


def test_replay_lets_every_engine_that_is_fed_record_its_experts() -> None:
    for trainer, recorded in ((REPLAY["trainer"], True), ({}, False)):
        parts = stack(profile(trainer=trainer)).components
        (command,) = (part.command for part in parts if part.role == "engine")
        assert ("--enable-return-routed-experts" in command) is recorded


@pytest.mark.parametrize(("rank", "derived"), [(1, "1"), (16, "16"), (17, "32"), (512, "512")])
def test_adapter_modes_derive_the_server_s_flags(rank: int, derived: str) -> None:
    chosen = profile(mode="lora_only", trainer={"lora_r": rank, "batch_size": 16})
    command = next(part.command for part in stack(chosen).components if part.role == "engine")
    assert "--enable-lora" in command and flags(command)["max-lora-rank"] == derived
    assert flags(command)["max-loras"] == "2", "one for completions in flight, one for the newest"
    plain = next(part.command for part in stack(profile()).components if part.role == "engine")
    assert "--enable-lora" not in plain and "--max-lora-rank" not in plain


@pytest.mark.parametrize("gpus", [[], [3]])
def test_adapters_over_the_one_copy(gpus: list[int]) -> None:
    """The engine exports its weights and serves adapters; on a GPU its restart takes the trainer
    along."""
    chosen = profile(**ONE_COPY, vllm={"gpus": gpus, "args": {"enable-lora": True}})
    assert check_profile(site(chosen)) == []
    engine, trainer = (p for p in stack(chosen).components if p.role in ("engine", "trainer"))
    assert engine.env["VLLM_ENABLE_SHARED_WEIGHTS"] == "1" and "--enable-lora" in engine.command
    assert engine.restart_with == (["trainer"] if gpus else []) and trainer.gpus == gpus
    told = flags(trainer.command)
    assert told["single-copy"] == "true" and told["weight-bridge-mode"] == "lora_only"
    assert told["vllm-config-path"] == "/runs/r/bridge/vllm/vllm_bridge_config.json"


@pytest.mark.parametrize(
    ("mode", "settings", "reason"),
    [
        (
            "lora_restart",
            {"single_copy": True},
            "single_copy needs weight_bridge_mode shared_vllm or lora_only",
        ),
        (
            "broadcast",
            {"single_copy": True},
            "single_copy and use_shared_memory exclude each other",
        ),
        ("lora_only", {"lora_use_dora": True}, "vLLM does not serve DoRA"),
        (
            "lora_only",
            {"lora_modules_to_save": ["lm_head"]},
            "vLLM does not serve adapters with whole layers",
        ),
        ("shared_vllm", {"lora_merged_export": True}, "lora_merged_export is for adapters"),
    ],
)
def test_what_a_mode_does_not_do_is_refused(
    mode: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        profile(mode=mode, trainer=settings)


def test_settings_are_judged_in_their_own_mode() -> None:
    """A lag below `vllm_restart_interval` is wrong only where the server gets weights that
    seldom."""
    assert check_profile(site(profile(trainer={"max_policy_lag": 1}))) == []
    with pytest.raises(UserError, match="max_policy_lag 1 leaves out all"):
        profile(mode="none", trainer={"max_policy_lag": 1})


@pytest.mark.parametrize(
    ("mode", "lr", "warned"),
    [("lora_only", 1e-5, True), ("lora_restart", 1e-4, False), ("shared_vllm", 1e-6, False)],
)
def test_a_learning_rate_that_teaches_an_adapter_nothing_is_said(
    mode: str, lr: float, warned: bool
) -> None:
    notes = check_notes(site(profile(mode=mode, trainer={"lr": lr})))
    assert [note.startswith("WARNING trainer.lr = 1e-05") for note in notes] == [True] * warned


def graph_sizes(**engine: Any) -> list[int]:
    """Sizes that the plan of `lora_restart` gives to vLLM; none: vLLM's own."""
    chosen = profile(mode="lora_restart", vllm={"port": 9001, **engine})
    command = next(part.command for part in stack(chosen).components if part.role == "engine")
    if "--cudagraph-capture-sizes" not in command:
        return []
    after = command[command.index("--cudagraph-capture-sizes") + 1 :]
    return [int(value) for value in takewhile(str.isdecimal, after)]


def test_an_engine_that_is_restarted_often_captures_fewer_graphs() -> None:
    usual = graph_sizes()
    assert usual[0] == 1 and usual[-1] == 512 and len(usual) == 15 and usual == sorted(set(usual))
    assert all(after <= 2 * before for before, after in pairwise(usual)), (
        "padding at most doubles a batch"
    )
    assert graph_sizes(args={"max-num-seqs": 20})[-3:] == [24, 32, 40], (
        "up to vLLM's own limit, and that itself"
    )
    assert graph_sizes(args={"max-num-seqs": 1}) == [1, 2]
    for chosen in (
        {"enforce-eager": True},
        {"max_cudagraph_capture_size": 64},
        {"compilation-config": "{}"},
    ):
        assert graph_sizes(args=chosen) == [], "whoever chose has chosen"
    assert graph_sizes(args={"cudagraph-capture-sizes": 8}) == [8]
    other = next(
        part.command
        for part in stack(profile(mode="lora_only")).components
        if part.role == "engine"
    )
    assert "--cudagraph-capture-sizes" not in other, "one start is not worth it"


def test_stages_are_records_of_our_programs_or_lines_of_others() -> None:
    stages = {part.role.value: part.stages for part in stack(profile()).components}
    printed = {
        "engine": [
            "(MainProcess pid=23652) INFO 11-23 02:34:08 [api_utils.py:286] non-default "
            "args: {'host': '127.0.0.1'}",
            "(EngineCore pid=23970) INFO 11-23 02:34:09 [default_loader.py:501] Loading "
            "weights took 0.04 seconds",
            "(EngineCore pid=23970) INFO 11-23 02:34:10 [kv_cache_utils.py:2327] CPU KV "
            "cache size: 32,768 tokens",
            "(EngineCore pid=1) INFO 11-23 02:34:10 [gpu_model_runner.py:1] Graph capturing "
            "finished in 5 secs",
            "INFO:     Application startup complete.",
        ],
        "env": ["2026-11-21 12:00:00,000 INFO atroposlib.envs.base: Initialized env with id 0"],
    }
    for role, lines in printed.items():
        assert len(stages[role]) == len(lines)
        for stage, line in zip(stages[role], lines, strict=True):
            assert [bool(re.search(other.pattern, line)) for other in stages[role]].count(True) == 1
            assert re.search(stage.pattern, line) and stage.usually
    assert [(stage.name, stage.pattern) for stage in stages["trainer"]] == [
        ("registered", ""),
        ("attached", ""),
        ("first batch", ""),
    ]
    assert stages["api"] == []


def test_no_health_check_of_ours_reads_what_is_printed() -> None:
    parts = stack(profile(mode="broadcast")).components
    checks = {
        part.name: [
            check
            for probe in (part.probes.startup, part.probes.readiness, part.probes.liveness)
            if probe
            for check in probe.checks
        ]
        for part in parts
    }
    assert not [
        name for name, found in checks.items() if any(check.kind == "log" for check in found)
    ]
    assert [(check.kind, check.stage) for check in checks["trainer"] if check.kind == "stage"] == [
        ("stage", "attached")
    ]


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"depends_on": {"nobody": "healthy"}}, "nobody"),
        ({"depends_on": {"trainer": "healthy"}}, "circular"),
    ],
)
def test_impossible_orders_are_found(trainer: dict[str, Any], expected: str) -> None:
    chosen = profile(trainer={"batch_size": 16, "gradient_accumulation_steps": 1} | trainer)
    found = check_graph(chosen, stack(chosen))
    assert [problem.key for problem in found] == ["trainer.depends_on"] and expected in found[
        0
    ].reason


def test_stopping_the_engine_says_what_is_lost() -> None:
    assert "trainer cannot run without it" in recipe(stack(profile()), "stop", "vllm").note


def test_python_is_one_interpreter_in_every_command() -> None:
    command = ["python", "-m", "json.tool"]
    probe = {"checks": [{"kind": "exec", "command": command}]}
    chosen = profile(
        mode="none",
        api={"command": command, "readiness": probe},
        env={"command": command},
        trainer={"command": command},
        prepare={"command": command},
        component={"x": {"command": ["python3", "x.py"]}},
        notify={"command": command},
    )
    made = stack(chosen)
    first = {part.name: part.command[0] for part in made.components}
    assert set(first.values()) == {sys.executable} and len(first) == 6
    assert made.component("api").command == [sys.executable, "-m", "json.tool"]
    assert made.component("api").probes.readiness.checks[0].command[0] == sys.executable  # type: ignore[union-attr]
    assert made.notify.command[0] == sys.executable


def test_demo_has_no_contradiction() -> None:
    assert check_profile(site(load_profile("demo")[0])) == []


def test_what_speaks_of_atroposlib_is_hosted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text("from atroposlib.envs.base import BaseEnv")
    Path("other.py").write_text("print()")

    def words(**env: str) -> list[str]:
        stack = stack_of(make_site(profile(env={"name": "e", **env}), tmp_path / "run", run_id="r"))
        return next(part for part in stack.components if part.name == "e").command[1:5]

    assert words(script="theirs.py")[:4] == ["-P", "-m", "atropos_envs.hosting.runner", "theirs.py"]
    assert words(script="theirs.py:MyEnv")[2:4] == [
        "atropos_envs.hosting.runner",
        "theirs.py:MyEnv",
    ]
    assert words(module="theirs")[2:4] == ["atropos_envs.hosting.runner", "theirs"]
    assert words(script="other.py")[:2] == ["other.py", "serve"]
    assert words(module="other")[:3] == ["-m", "other", "serve"]
    assert words(module="atropos_envs.gsm8k_server")[:3] == [
        "-P",
        "-m",
        "atropos_envs.gsm8k_server",
    ]
