"""Plans: commands, order, gates, recipes and checks, all without a process."""

from __future__ import annotations

import json
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from atropos_tui.cli.run_files import _profile_data
from atropos_tui.stack.checks import check_graph, check_profile, preflight
from atropos_tui.stack.components import Site
from atropos_tui.stack.plan import build_stack, make_site, redacted
from atropos_tui.stack.profile import Profile, load_profile, parse_profile
from atropos_tui.stack.recipes import recipe
from atropos_tui.stack.redact import hide_command, hide_tree
from atropos_tui.stack.spec import StackSpec


def profile(**changes: Any) -> Profile:
    data: dict[str, Any] = {
        "name": "p", "model": "/models/m", "env": {"module": "json", "args": {"env.group_size": 8}},
        "trainer": {"batch_size": 16, "gradient_accumulation_steps": 1},
    }  # fmt: skip
    return parse_profile(data | changes, "p.toml")


def site(chosen: Profile) -> Site:
    return make_site(chosen, Path("/runs/r"), run_id="r")


def stack(chosen: Profile) -> StackSpec:
    return build_stack(chosen, Path("/runs/r"), run_id="r")


def flags(command: list[str]) -> dict[str, str]:
    return {a.removeprefix("--"): b for a, b in pairwise(command) if a.startswith("--")}


def test_start_order_and_gates() -> None:
    demo = stack(load_profile("demo")[0])
    assert [c.name for c in demo.components] == ["warm-start", "api", "vllm", "arithmetic", "trainer"]
    gates = {c.name: c.depends_on for c in demo.components}
    assert gates["api"] == gates["vllm"] == {"warm-start": "completed"}
    assert gates["arithmetic"] == gates["trainer"] == {"api": "healthy", "warm-start": "completed"}
    assert [c.name for c in demo.components if c.ends_run] == ["trainer"]


def test_derived_values_agree() -> None:
    chosen = profile(api={"port": 8123}, vllm={"port": 9123, "max_model_len": 99}, seed=7)
    parts = {c.role.value: c for c in stack(chosen).components}
    env, trainer, engine = (flags(parts[role].command) for role in ("env", "trainer", "engine"))
    assert env["env.rollout_server_url"] == trainer["atropos-url"] == "http://127.0.0.1:8123"
    assert env["openai.base_url"] == "http://127.0.0.1:9123/v1" and trainer["vllm-port"] == engine["port"] == "9123"
    assert (
        env["openai.model_name"] == env["env.tokenizer_name"] == trainer["model-name"] == engine["model"] == "/models/m"
    )
    assert env["openai.server_type"] == "vllm"
    assert trainer["seed"] == engine["seed"] == "7"
    assert trainer["max-model-len"] == engine["max-model-len"] == "99"
    assert trainer["vllm-config-path"] in parts["engine"].clears
    assert parts["engine"].env["ATROPOS_HOLD_GENERATION"] == "1"
    assert parts["api"].command[-4:] == ["--host", "127.0.0.1", "--port", "8123"]


def test_gpus_reach_the_processes() -> None:
    parts = {c.role.value: c for c in stack(profile(vllm={"gpus": [2]})).components}
    assert parts["engine"].env["CUDA_VISIBLE_DEVICES"] == parts["trainer"].env["CUDA_VISIBLE_DEVICES"] == "2"


def test_profile_overrides_defaults_of_a_role() -> None:
    chosen = profile(vllm={"restart": {"policy": "never"}, "start_timeout_s": 5, "env": {"X": "${HOME}"}})
    engine = next(c for c in stack(chosen).components if c.role == "engine")
    assert engine.restart.policy == "never" and engine.start_timeout_s == 5
    assert engine.env["X"] == "${HOME}", "references are looked up when the process starts"
    assert engine.probes.readiness is not None


def test_nothing_secret_is_written() -> None:
    chosen = profile(
        trainer={"env": {"WANDB_API_KEY": "abc123", "HF_TOKEN": "${HF_TOKEN}", "AWS_SECRET_ACCESS_KEY": "abc124"}},
        vllm={"args": {"api-key": "abc125"}},
        env={"module": "json", "args": {"openai.api_key": "abc126", "env.max_token_length": 2048}},
        component={"x": {"command": ["serve", "--password", "abc127", "--token=abc128", "--name", "shown"]}},
    )
    for text in (json.dumps(redacted(stack(chosen))), tomli_w.dumps(hide_tree(_profile_data(chosen)))):
        assert "abc12" not in text, text
        assert "${HF_TOKEN}" in text and "/models/m" in text and "2048" in text and "shown" in text
    argv = ["up", "p", "--set", "trainer.env.HF_TOKEN=abc129", "--set", "trainer.lr=1e-4"]
    assert hide_command(argv) == ["up", "p", "--set", "trainer.env.HF_TOKEN=(redacted)", "--set", "trainer.lr=1e-4"]


@pytest.mark.parametrize(
    ("action", "component", "initiator", "stops", "starts"),
    [
        ("restart", "vllm", "user", ["trainer", "vllm"], ["vllm", "trainer"]),
        ("restart", "vllm", "trainer", ["vllm"], ["vllm"]),
        ("restart", "api", "user", ["env", "api"], ["api", "env"]),
        ("restart", "trainer", "user", ["trainer"], ["trainer"]),
        ("stop", "vllm", "user", ["vllm"], []),
        ("start", "env", "user", [], ["env"]),
        ("down", None, "user", ["trainer", "env", "vllm", "api"], []),
    ],
)
def test_recipes(action: Any, component: str | None, initiator: str, stops: list[str], starts: list[str]) -> None:
    result = recipe(stack(profile()), action, component, initiator=initiator)
    assert (result.stop, result.start) == (stops, starts)


def test_recipe_of_an_unknown_component() -> None:
    with pytest.raises(KeyError):
        recipe(stack(profile()), "restart", "nobody")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": "lora_only"}, "not run by this version"),
        ({"trainer": {"batch_size": 12, "gradient_accumulation_steps": 1}}, "no multiple of"),
        ({"api": {"port": 9001}}, "port 9001 is also"),
        ({"api": {"host": "0.0.0.0"}}, "no authentication"),
        ({"env": {"module": "json", "args": {"openai.server_type": "openai"}}}, "no logprobs"),
        ({"env": {"module": "json", "name": "api"}}, "used 2 times"),
        ({"vllm": {"tensor_parallel": 2}}, "tensor-parallel"),
        ({"vllm": {"args": {"port": 9999}}}, "is derived"),
        ({"vllm": {"args": {"host": "0.0.0.0"}}}, "is derived"),
        ({"env": {"module": "json", "args": {"openai.base_url": "http://x"}}}, "is derived"),
        ({"api": {"host": "::1"}}, "no authentication"),
        ({"vllm": {"gpus": [0]}, "trainer": {"gpus": [1]}}, "same GPU"),
    ],
)
def test_contradictions_are_found(changes: dict[str, Any], expected: str) -> None:
    found = check_profile(site(profile(**changes)), "p.toml")
    assert any(expected in problem.reason for problem in found), found
    assert all(problem.file == "p.toml" for problem in found)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [({"depends_on": {"nobody": "healthy"}}, "nobody"), ({"depends_on": {"trainer": "healthy"}}, "circular")],
)
def test_impossible_orders_are_found(trainer: dict[str, Any], expected: str) -> None:
    found = check_graph(
        stack(profile(trainer={"batch_size": 16, "gradient_accumulation_steps": 1} | trainer)), "p.toml"
    )
    assert [problem.key for problem in found] == ["depends_on"] and expected in found[0].reason


def test_stopping_the_engine_says_what_is_lost() -> None:
    assert "trainer cannot go on without it" in recipe(stack(profile()), "stop", "vllm").note


def test_demo_has_no_contradiction() -> None:
    assert check_profile(site(load_profile("demo")[0]), "demo.toml") == []


def test_preflight_names_the_process_on_a_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        chosen = profile(api={"port": taken.getsockname()[1]}, model=str(tmp_path))
        found = preflight(site(chosen), stack(chosen), "p.toml")
    port = next(problem for problem in found if problem.key == "api.port")
    assert "python" in port.reason and "pid" in port.reason and "--set api.port=" in port.fix
    assert any("config.json" in problem.reason for problem in found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "/no/such/model"}, "no such model directory"),
        ({"env": {"module": "no_such_module_x"}}, "no module"),
        ({"env": {"script": "/no/such.py"}}, "no such file"),
        ({"vllm": {"gpus": [63]}, "trainer": {"gpus": [63]}}, "GPU 63 does not exist"),
        ({"component": {"x": {"command": ["no-such-program-x"]}}}, "no such program"),
    ],
)
def test_preflight_finds_what_is_missing(changes: dict[str, Any], expected: str) -> None:
    chosen = profile(**changes)
    found = preflight(site(chosen), stack(chosen), "p.toml")
    assert any(expected in problem.reason for problem in found), found


def test_hub_ids_and_prepared_models_are_not_looked_for(tmp_path: Path) -> None:
    for changes in (
        {"model": "Qwen/Qwen3-1.7B"},
        {"model": "/made", "prepare": {"command": ["true"], "creates": "/made"}},
    ):
        chosen = profile(**changes)
        assert not [p for p in preflight(site(chosen), stack(chosen), "p.toml") if p.key == "model"]
