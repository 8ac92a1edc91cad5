"""Every shipped profile plans and fits its budget; a layout that cannot run is refused."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atropos_tui.cli.main import run
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.inventory import Gpu, Hardware, Model, model_shapes
from atropos_tui.profile.budget.memory import Inventory, make_budget
from atropos_tui.profile.checks.consistency import check_graph, check_profile
from atropos_tui.profile.checks.preflight import preflight
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import load_profile
from atropos_tui.profile.site import make_site, training_config

GIB = 1024**3
QWEN3_1_7B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}

QWEN25_14B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
QWEN25_32B = QWEN25_14B | {"num_hidden_layers": 64, "intermediate_size": 27_648}
QWEN25_72B = QWEN25_14B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 29_568,
    "num_attention_heads": 64,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "broadcast": ("2xH100", QWEN3_1_7B),
    "two-cards": ("2xH100", QWEN3_1_7B),
    "none": ("2xH100", QWEN3_1_7B),
    "lora": ("2xH100", QWEN3_1_7B),
    "lora-restart": ("1xH100", QWEN3_1_7B),
    "nodes": ("4xH100", QWEN3_1_7B),
    "tp2": ("3xH100", QWEN25_14B),
    "single-copy-tp2": ("2xH100", QWEN25_14B),
    "32b": ("8xH100", QWEN25_32B),
    "72b": ("8xH200", QWEN25_72B),
    "72b-lora": ("8xH100", QWEN25_72B),
}
"""Profiles of each environment, with the machine and the model that each is for."""
RUNS = set(LAYOUTS)
ON_CPU = {"demo", "demo-lora"}
PLANNED = (
    ON_CPU
    | {"demo-gpu", "arithmetic-gpu", "gsm8k", "math-zero"}
    | {f"{env}-{x}" for env in ("gsm8k", "math-zero") for x in RUNS}
)
SPREAD = {"demo-cluster", "gsm8k-cluster"}
"""Over several machines: `test_machines.py` has what is their own."""
EXTENDING = sorted(name for name in PLANNED if name.startswith(("gsm8k-", "math-zero-")))
RUN_DIR = Path("/runs/r")


def test_every_shipped_profile_is_in_these_tables() -> None:
    assert set(shipped_profiles()) == PLANNED | SPREAD


@pytest.mark.parametrize(
    "name", sorted({f"{env}-{x}" for env in ("gsm8k", "math-zero") for x in LAYOUTS})
)
def test_each_layout_fits_the_machine_that_it_is_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, config = LAYOUTS[name.removeprefix("gsm8k-").removeprefix("math-zero-")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = run(["plan", name, "--set", f"model={tmp_path}", "--gpus", machine, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == 0 and data["problems"] == [] and data["advice"] == []
    gpus = [device for device in data["budget"]["devices"] if device["name"] != "host"]
    assert len(gpus) == int(machine.partition("x")[0]) and all(
        gpu["wanted"] <= gpu["total"] for gpu in gpus
    )
    parts = data["budget"]["by_component"]
    profile, _ = load_profile(name)
    assert set(parts) == {"trainer", *(engine.name for engine in profile.engines)}
    for gpu in gpus:
        assert gpu["wanted"] == sum(sizes.get(gpu["name"], 0) for sizes in parts.values())


@pytest.mark.parametrize(
    ("name", "machine", "said"),
    [
        ("gsm8k-72b", "8xH100", "The trainer alone needs H100 GPUs: 12 as it is\n"),
        (
            "gsm8k-72b",
            "8xH100",
            "GPUs 2-7 each: 90.6 GiB are needed without activations, but only 79.6 GiB exist",
        ),
        ("gsm8k-72b-lora", "8xL4", "The trainer alone needs L4 GPUs: more than 64 as it is\n"),
        (
            "gsm8k-72b --set trainer.optimizer=adamw --set trainer.master_weights=fp32 --set "
            "trainer.memory=speed",
            "8xH100",
            "needs H100 GPUs: 24 as it is, 12 with trainer.gradient_checkpointing",
        ),
        ("gsm8k-32b", "4xH200", "GPU 4, 5, 6, 7 does not exist: that machine has GPUs 0-3"),
    ],
)
def test_a_layout_that_does_not_run_is_refused_with_its_reasons(
    name: str, machine: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *sets = name.split()
    (tmp_path / "config.json").write_text(json.dumps(LAYOUTS[name.removeprefix("gsm8k-")][1]))
    assert run(["plan", name, *sets, "--set", f"model={tmp_path}", "--gpus", machine]) == 2
    shown = capsys.readouterr()
    assert said in shown.out + shown.err, shown.out + shown.err


def test_of_a_layout_that_is_too_small_the_nearest_that_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guides' own for 72B: four GPUs for vLLM, two for the trainer. Two more are idle."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_72B))
    layout = [
        "vllm.gpus=[0,1,2,3]",
        "vllm.tensor_parallel=4",
        "trainer.gpus=[4,5]",
        f"model={tmp_path}",
    ]
    sets = [word for each in layout for word in ("--set", each)]
    assert run(["plan", "gsm8k-broadcast", *sets, "--gpus", "8xH200"]) == 2
    shown = capsys.readouterr().out
    assert "GPUs 4-5 each lack " in shown and "# on 4 GPUs; " in shown
    assert "gpus = [4, 5, 6, 7]\n" in shown and "optimizer_offload = true" in shown


@pytest.mark.parametrize("name", sorted(PLANNED | SPREAD))
def test_a_layout_that_runs_is_planned_without_a_problem(name: str) -> None:
    profile, _ = load_profile(name)
    site = make_site(profile, RUN_DIR, run_id="r")
    assert check_profile(site) == []
    stack = stack_of(make_site(profile, RUN_DIR, run_id="r"))
    assert check_graph(profile, stack) == []
    assert {"api", "env", "engine", "trainer"} <= {part.role.value for part in stack.components}


@pytest.mark.parametrize("name", ["gsm8k", "math-zero"])
def test_the_gpu_layouts_fit_on_80_gib_by_their_budget(name: str) -> None:
    profile, _ = load_profile(name)
    site = make_site(profile, RUN_DIR, run_id="r")
    model = Model(QWEN3_1_7B, model_shapes(QWEN3_1_7B) or {}, "config.json")
    machine = Hardware((Gpu("NVIDIA H100", 80 * GIB),), 512 * GIB)
    budget = make_budget(profile, training_config(site), {"vllm": model}, machine)
    assert budget.warnings == [] and budget.devices[0].wanted > 60 * GIB
    stack = stack_of(make_site(profile, RUN_DIR, run_id="r"))
    found = preflight(site, stack, Inventory(machine, {"vllm": model}))
    assert [
        problem for problem in found if "port" not in problem.key and "optimizer" not in problem.key
    ] == []
    smaller = Hardware((Gpu("NVIDIA L40S", 48 * GIB),), 512 * GIB)
    assert make_budget(profile, training_config(site), {"vllm": model}, smaller).warnings


@pytest.mark.parametrize("name", EXTENDING)
def test_a_layout_says_only_what_differs(name: str) -> None:
    """So that a change of the base reaches all of them; and each fits where GPUs are counted."""
    text = tomllib.loads(shipped_profiles()[name].read_text())
    base = "math-zero" if name.startswith("math-zero") else "gsm8k"
    assert (
        text["extends"] == base and text["name"] == name and "env" not in text and "api" not in text
    )
    profile, _ = load_profile(name)
    parent, _ = load_profile(base)
    assert profile.env == parent.env and profile.api == parent.api
    engine = profile.vllm[0]
    assert len(engine.gpus) == engine.tensor_parallel * (3 if name.endswith("nodes") else 1)
    shared = set(engine.gpus) & set(profile.trainer.gpus)
    assert bool(shared) == name.endswith(("-lora-restart", "-single-copy-tp2", "-two-cards"))


def test_the_layouts_of_the_guides_that_run_are_all_there() -> None:
    """GPUs and ranks as the guides name them, for both environments."""
    for base in ("gsm8k", "math-zero"):
        placed = {
            name.removeprefix(f"{base}-"): (
                p.vllm[0].gpus,
                p.vllm[0].tensor_parallel,
                p.trainer.gpus,
            )
            for name in EXTENDING
            if name.startswith(f"{base}-")
            for p in [load_profile(name)[0]]
        }
        assert placed["tp2"] == ([0, 1], 2, [2])
        assert placed["single-copy-tp2"] == ([0, 1], 2, [0, 1])
        assert placed["broadcast"] == placed["lora"] == ([0], 1, [1])
        assert placed["lora-restart"] == ([0], 1, [0])
        modes = {load_profile(name)[0].mode for name in EXTENDING if name.startswith(base)}
        assert modes | {load_profile(base)[0].mode} == {
            "none",
            "shared_vllm",
            "broadcast",
            "lora_only",
            "lora_restart",
        }


def test_math_zero_is_given_its_yaml_and_a_base_model() -> None:
    profile, _ = load_profile("math-zero")
    stack = stack_of(make_site(profile, RUN_DIR, run_id="r"))
    (env,) = [part for part in stack.components if part.role == "env"]
    flags = {a: b for a, b in pairwise(env.command) if a.startswith("--")}
    assert Path(flags["--config"]).is_file() and flags["--config"].endswith("math-zero.yaml")
    assert flags["--openai.model_name"] == flags["--env.tokenizer_name"] == "Qwen/Qwen3-1.7B-Base"


@pytest.mark.parametrize("name", sorted(PLANNED))
def test_plan_says_when_this_machine_cannot_run_a_layout(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "read_machine", lambda: Hardware((), 400 * GIB))
    wanted = 0 if name in ON_CPU else 2
    assert run(["plan", name]) == wanted
    shown = capsys.readouterr()
    profile, _ = load_profile(name)
    engines = [profile.short_key(f"vllm.{index}.gpus") for index in range(len(profile.vllm))]
    assert f"{name}: mode {profile.mode}," in shown.out
    assert all(key in shown.err for key in engines) == (wanted == 2)
    assert run(["plan", name, "--json"]) == wanted
    keys = [problem["key"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    if len(engines) > 1:
        engines = [
            f'{key} ([[vllm]] "{section.name}")'
            for key, section in zip(engines, profile.vllm, strict=True)
        ]
    assert keys == ([*engines, "trainer.gpus"] if wanted else [])


def test_a_kv_cache_that_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_1_7B))
    text = (
        f'name = "p"\nmodel = "{tmp_path}"\n[env]\nmodule = '
        f'"json"\n[vllm]\nargs.kv-cache-memory-bytes = "900G"\n'
        '[trainer]\ndevice = "cpu"\ndtype = "float32"\n'
    )
    (tmp_path / "p.toml").write_text(text)
    monkeypatch.setattr(memory, "read_machine", lambda: Hardware((), 400 * GIB))
    assert run(["plan", str(tmp_path / "p.toml")]) == 2
    shown = capsys.readouterr().err
    assert "vllm.args.kv-cache-memory-bytes: host: " in shown
    assert "fix: lower vllm.args.kv-cache-memory-bytes;" in shown


def test_plan_prints_the_budget_and_validate_its_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_1_7B))
    text = (
        f'name = "p"\nmodel = "{tmp_path}"\n[env]\nmodule = "json"\n[vllm]\nport = '
        f"1\nargs.kv-cache-memory-bytes = 1\n"
        '[vllm.env]\nVLLM_USE_V1 = "0"\n[trainer]\ndevice = "cpu"\ndtype = "float32"\n'
    )
    (tmp_path / "p.toml").write_text(text)
    monkeypatch.setattr(memory, "read_machine", lambda: Hardware((), 400 * GIB))
    assert run(["plan", str(tmp_path / "p.toml")]) == 0
    shown = capsys.readouterr().out
    assert "memory (1,720,574,976 parameters, from config.json" in shown
    assert "optimizer state      12.8 GiB  adamw" in shown
    assert "WARNING vllm: the KV cache on host holds 0 tokens" in shown
    assert "VLLM_USE_V1 is ignored" in shown
    assert run(["plan", str(tmp_path / "p.toml"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["budget"]["devices"][0]["name"] == "host" and len(data["budget"]["warnings"]) == 1
    assert "VLLM_USE_V1" in data["notes"][0]
