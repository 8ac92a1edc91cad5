"""Pre-flight: missing ports, packages, programs, models and GPUs, each with key, reason and fix."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from atropos_common.models.model_math import why_refused
from atropos_tui.errors import Problem
from atropos_tui.profile.budget.inventory import Gpu, Hardware, Model, model_shapes
from atropos_tui.profile.budget.memory import Inventory
from atropos_tui.profile.builders.environment import config_file
from atropos_tui.profile.checks.preflight import made_for_gpus, preflight
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.site import make_site
from atropos_tui.profile.source import is_hostable
from tests.atropos_tui.profile.test_plan import profile, site
from trainer_core.errors import UsageError
from trainer_core.policy.load import load_config
from trainer_core.policy.sharding import load_for
from trainer_core.ranks.world import World

GIB = 1024**3
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def found(chosen: Profile, gpus: int = 0, config: dict[str, Any] | None = None) -> list[Problem]:
    """Return the problems on a machine with `gpus` GPUs of 80 GiB; `config` is the model's, unknown
    when left out."""
    model: Model | str = "model not on this machine"
    if config is not None:
        model = Model(config, model_shapes(config) or {"a": (1,)}, "config.json")
    machine = Hardware((Gpu("NVIDIA H100", 80 * GIB),) * gpus, 64 * GIB)
    survey = Inventory(machine, {engine.name: model for engine in chosen.vllm})
    return preflight(site(chosen), stack_of(make_site(chosen, Path("/runs/r"), run_id="r")), survey)


def one(problems: list[Problem], key: str) -> Problem:
    (problem,) = [problem for problem in problems if problem.key == key]
    assert problem.key and problem.fix
    return problem


@pytest.mark.parametrize(
    ("changes", "key", "flag"),
    [
        (lambda port: {"api": {"port": port}}, "api.port", "--set api.port="),
        (lambda port: {"vllm": {"port": port}}, "vllm.port", "--set vllm.port="),
        (
            lambda port: {"vllm": [{"name": "a"}, {"name": "b", "port": port}]},
            "vllm.1.port",
            "--set vllm.1.port=",
        ),
        (
            lambda port: {"component": {"x": {"command": ["sh"], "port": port}}},
            "component.x.port",
            "--set component.x",
        ),
    ],
)
def test_a_taken_port_names_its_process(changes: Any, key: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        problem = one(found(profile(**changes(taken.getsockname()[1]))), key)
    assert (
        psutil.Process().name() in problem.reason
        and f"pid {os.getpid()}" in problem.reason
        and flag in problem.fix
    )


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"model": "/no/such/model"}, "model", "no such model directory"),
        (
            {
                "vllm": [{"name": "a"}, {"name": "b", "port": 9002, "model": "/no/judge"}],
                "model": "a/b",
            },
            "vllm.1.model",
            "no such model directory: /no/judge",
        ),
        ({"env": {"module": "no_such_module_x"}}, "env.0.module", "no module"),
        ({"env": {"script": "/no/such.py"}}, "env.0.script", "no such file"),
        ({"env": {"module": "json", "config": "/no/such.yaml"}}, "env.0.config", "no such file"),
        (
            {"component": {"x": {"command": ["no-such-program-x"]}}},
            "component.x.command",
            "no such program",
        ),
        ({"env": {"command": ["no-such-program-x"]}}, "env.0.command", "no such program"),
        ({"api": {"command": ["./no-such-program-x"]}}, "api.command", "no such program"),
        (
            {"trainer": {"loss": "no_such_module_x:f"}},
            "trainer.loss",
            "no module 'no_such_module_x'",
        ),
        (
            {"trainer": {"loss": "tests.trainer_core.objective.my_losses:nothing"}},
            "trainer.loss",
            "my_losses.py has no function",
        ),
    ],
)
def test_what_is_missing(changes: dict[str, Any], key: str, expected: str) -> None:
    assert expected in one(found(profile(**changes)), key).reason


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "file" / "cache"))
    made = {"name": "warm-start", "command": ["true"], "creates": "${ATROPOS_CACHE}/model"}
    problem = one(found(profile(prepare=[made])), "prepare.0.creates")
    assert problem.reason.endswith(f"cannot be created: {tmp_path / 'file'} is not writable")
    assert problem.fix == "set ATROPOS_CACHE to a writable folder"


def test_a_loss_function_of_ones_own_is_found(tmp_path: Path) -> None:
    """Where the trainer runs, or on its PYTHONPATH."""
    (tmp_path / "my_loss.py").write_text(
        "def mine(logprobs, rollout_logprobs, advantages, sequences): ...\n"
    )
    for place in ({"cwd": str(tmp_path)}, {"env": {"PYTHONPATH": str(tmp_path)}}):
        assert not [
            p for p in found(profile(trainer={"loss": "my_loss:mine", **place})) if "loss" in p.key
        ]
        problem = one(found(profile(trainer={"loss": "my_loss:other", **place})), "trainer.loss")
        assert problem.fix == "it has: mine"


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "config.json" in one(found(profile(model=str(tmp_path))), "model").reason


def test_hub_ids_and_prepared_models_are_not_looked_for() -> None:
    for changes in (
        {"model": "Qwen/Qwen3-1.7B"},
        {"model": "/made", "prepare": {"command": ["true"], "creates": "/made"}},
    ):
        assert not [problem for problem in found(profile(**changes)) if problem.key == "model"]


def test_without_a_gpu_each_key_is_named_with_the_ways_on() -> None:
    problems = found(profile(vllm={"gpus": [0]}, trainer={"gpus": [0]}))
    for key in ("vllm.0.gpus", "trainer.gpus"):
        problem = one(problems, key)
        assert problem.reason == "GPU 0 does not exist: no NVIDIA driver answers on this machine"
        assert "machine with GPUs" in problem.fix and 'trainer.device = "cpu"' in problem.fix


def test_a_gpu_too_many_is_named() -> None:
    problem = one(
        found(profile(vllm={"gpus": [1, 2, 5], "tensor_parallel": 3}), gpus=2), "vllm.0.gpus"
    )
    assert (
        problem.reason == "GPU 2, 5 does not exist: this machine has GPUs 0-1"
        and problem.fix == "use GPUs 0-1"
    )
    assert not [p for p in found(profile(vllm={"gpus": [1]}), gpus=2) if "gpus" in p.key]


def test_a_gpu_that_the_shell_hides_is_named_with_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    problem = one(found(profile(vllm={"gpus": [3]}), gpus=1), "vllm.0.gpus")
    assert problem.reason == "GPU 3 does not exist: CUDA_VISIBLE_DEVICES=3 has GPU 0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = one(found(profile(vllm={"gpus": [3]}), gpus=0), "vllm.0.gpus")
    assert problem.reason == "GPU 3 does not exist: CUDA_VISIBLE_DEVICES is set, and shows no GPU"
    assert problem.fix.startswith("unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("parallel", "fits"), [(1, True), (2, True), (4, True), (8, True), (3, False), (16, False)]
)
def test_tensor_parallel_divides_the_heads(parallel: int, fits: bool) -> None:
    problems = found(profile(vllm={"tensor_parallel": parallel}), config=LLAMA)
    if fits:
        assert not [problem for problem in problems if "heads" in problem.reason]
    else:
        problem = one(problems, "vllm.0.tensor_parallel")
        assert (
            "8 attention heads with 2 key/value heads" in problem.reason
            and problem.fix == "use one of: 1, 2, 4, 8"
        )


REFUSED = {
    "an architecture": (
        {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron"},
        "NemotronForCausalLM does",
    ),
    "one that sees": (
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 1}},
        "has vision layers",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        r"rotary embeddings \(dynamic\)",
    ),
    "longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                **dict.fromkeys(("long_factor", "short_factor"), [1.0] * 4),
            }
        },
        r"rotary embeddings \(longrope\)",
    ),
}


@pytest.mark.parametrize("mode", ["shared_vllm", "broadcast", "lora_only", "lora_restart", "none"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_trainer_refuses(tmp_path: Path, name: str, mode: str) -> None:
    """In every mode, and in the trainer's own words."""
    changes, words = REFUSED[name]
    problem = one(found(profile(model="a/b", mode=mode), config=LLAMA | changes, gpus=2), "model")
    assert re.search(words, problem.reason) and problem.fix.startswith("use a")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama"} | changes))
    with pytest.raises(UsageError, match=words):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "trainer", "words"),
    [
        ("shared_vllm", {}, "train adapters over it: mode = lora_only"),
        ("none", {}, "train adapters over it: mode = lora_only"),
        ("lora_only", {"single_copy": True}, "set trainer.single_copy = false"),
        ("lora_only", {}, None),
        ("lora_restart", {}, None),
    ],
)
def test_a_quantized_model_is_a_base_for_adapters_alone(
    mode: str, trainer: dict[str, Any], words: str | None
) -> None:
    quantized = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    problems = found(profile(model="a/b", mode=mode, trainer=trainer), config=quantized, gpus=2)
    said = [problem.fix for problem in problems if problem.key == "model"]
    assert len(said) == bool(words) and all(words in fix for fix in said if words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "LlamaForCausalLM has no experts"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
            },
            None,
        ),
        ({"model_type": "jamba", "num_experts": 8, "num_experts_per_tok": 2}, "not among those"),
    ],
)
def test_a_model_whose_routing_cannot_be_replayed(
    changes: dict[str, Any], words: str | None
) -> None:
    """The model's configuration is enough: nothing starts."""
    chosen = profile(model="a/b", mode="lora_only", trainer={"routing_replay": True})
    said = [
        problem
        for problem in found(chosen, config=LLAMA | changes, gpus=2)
        if "routing" in problem.key
    ]
    assert len(said) == bool(words) and all(words in problem.reason for problem in said if words)


def test_a_model_that_several_ranks_refuse(tmp_path: Path) -> None:
    """In the trainer's own words, and on several ranks alone."""
    config = LLAMA | {"layer_types": ["linear_attention", "full_attention"] * 2}
    for trainer, refused in (([1, 2], True), ([1], False)):
        chosen = profile(
            model="a/b", mode="broadcast", vllm={"gpus": [0]}, trainer={"gpus": trainer}
        )
        said = [
            problem for problem in found(chosen, config=config, gpus=3) if problem.key == "model"
        ]
        assert bool(said) is refused
        if said:
            assert "carry a state" in said[0].reason and said[0].fix == "train it on one GPU"
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"})
    )
    world = World()
    world.size = 2
    with pytest.raises(UsageError, match=r"carry a state.*: train it on one GPU"):
        load_for(world, tmp_path, torch.float32, torch.device("cpu"))


def test_a_model_that_nobody_tried_is_left_to_the_proof() -> None:
    """As a mixture of experts, and by a name that nobody knows."""
    for kind in (
        {"model_type": "olmoe", "num_experts": 8},
        {"model_type": "new", "architectures": ["NewForCausalLM"]},
    ):
        assert why_refused(LLAMA | kind) is None


def test_rotary_embeddings_that_stay_as_they_are_train() -> None:
    for rotary in (
        {"rope_type": "llama3"},
        {"type": "yarn", "factor": 2.0},
        {"rope_type": "default"},
        None,
    ):
        assert why_refused(LLAMA | {"rope_scaling": rotary}) is None


def test_tensor_parallel_divides_the_heads_for_keys_too() -> None:
    config = LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
    problem = one(
        found(profile(vllm={"tensor_parallel": 3}), config=config), "vllm.0.tensor_parallel"
    )
    assert (
        "12 attention heads with 4 key/value heads" in problem.reason
        and problem.fix == "use one of: 1, 2, 4, 12"
    )


def test_a_context_beyond_the_model_s() -> None:
    problem = one(found(profile(vllm={"max_model_len": 129}), config=LLAMA), "vllm.0.max_model_len")
    assert "128 tokens" in problem.reason
    assert not [
        p
        for p in found(profile(vllm={"max_model_len": 128}), config=LLAMA)
        if "max_model_len" in p.key
    ]


def test_layers_that_the_model_does_not_have() -> None:
    trainer = {"batch_size": 8, "train_layer_indices": "2-5"}
    problem = one(found(profile(trainer=trainer), config=LLAMA), "trainer.train_layer_indices")
    assert problem.reason == "the model has layers 0-3, but no 4, 5" and "up to 3" in problem.fix


def test_the_eight_bit_optimizer_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else real(name)
    )
    chosen = profile(vllm={"gpus": [0]})
    problem = one(found(chosen, gpus=1), "trainer.optimizer")
    assert "bitsandbytes" in problem.reason and '"adamw"' in problem.fix
    cpu = profile(trainer={"device": "cpu", "batch_size": 8})
    assert not [p for p in found(cpu) if p.key == "trainer.optimizer"], (
        "the default falls back there"
    )
    asked = profile(trainer={"device": "cpu", "batch_size": 8, "optimizer": "adamw_8bit"})
    assert one(found(asked), "trainer.optimizer")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("env:\n  group_size: 8\n", None),
        ("", "has no `env:`"),
        ("env:\n  group_size: 5\n", "is not a multiple of the group size 5"),
        ("openai:\n- {base_url: a}\n- {base_url: b}\n", "lists 2 servers"),
        ("openai:\n- {base_url: a}\n", None),
        ("- 1\n", "has no `env:`"),
        ("env: 3\n", "has no `env:`"),
        ("a: [", "is not YAML"),
        ("\x00", "is not YAML"),
        ("[" * 5000, "is not YAML"),
    ],
)
def test_an_environment_s_yaml_is_read_before_the_start(
    tmp_path: Path, text: str, expected: str | None
) -> None:
    (tmp_path / "env.yaml").write_text(text)
    chosen = profile(env={"module": "json", "config": str(tmp_path / "env.yaml")})
    problems = [problem for problem in found(chosen) if problem.key == "env.0.config"]
    assert [expected in problem.reason for problem in problems] == ([True] if expected else [])


def test_a_flag_wins_over_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("env:\n  group_size: 5\n")
    chosen = profile(
        env={"module": "json", "config": str(tmp_path / "env.yaml"), "args": {"env.group_size": 8}}
    )
    assert not [problem for problem in found(chosen) if problem.key == "env.0.config"]


def test_a_yaml_file_lies_at_its_path_or_beside_the_shipped_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = config_file("math-zero.yaml")
    assert shipped.is_file() and shipped.parent.name == "profiles"
    (tmp_path / "math-zero.yaml").write_text(json.dumps({}))
    assert config_file("math-zero.yaml").read_text() == "{}"
    assert config_file("none.yaml") == Path("none.yaml")


def test_looking_for_a_module_runs_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`validate` in somebody's folder imported the package around the module that his profile
    names."""
    package = tmp_path / "evil"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (package / "sub.py").touch()
    with_path = {"module": "evil.sub", "env": {"PYTHONPATH": str(tmp_path)}}
    assert "env.0.module" in {problem.key for problem in found(profile(env={"module": "evil.sub"}))}
    assert "env.0.module" not in {problem.key for problem in found(profile(env=with_path))}
    monkeypatch.syspath_prepend(tmp_path)
    assert "env.0.module" not in {
        problem.key for problem in found(profile(env={"module": "evil.sub"}))
    }
    assert "env.0.module" in {
        problem.key for problem in found(profile(env={"module": "evil.no_such"}))
    }
    assert not (tmp_path / "ran").exists()


def test_a_class_that_the_file_does_not_have(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import atroposlib\nfrom helper import Other\n\nclass Mine: ...\n")
    (tmp_path / "helper.py").write_text("Other = 1\n")
    problem = one(found(profile(env={"script": f"{script}:Mien"})), "env.0.script")
    assert "no class 'Mien'" in problem.reason and "Mine, Other" in problem.fix
    for named in ("Mine", "Other"):
        assert not [
            p
            for p in found(profile(env={"script": f"{script}:{named}"}))
            if p.key == "env.0.script"
        ]


def test_what_a_file_imports_from_beside_it_counts(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("import atroposlib\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from ..base import x\nfrom . import loop\n")
    (tmp_path / "package" / "loop.py").write_text("import package\n")
    for text, hosted in (
        ("from base import Env", True),
        ("import package", True),
        ("from atropos_envs.hosting.base import StackEnv, run", True),
        ("import json", False),
        ("x =", False),
    ):
        script = tmp_path / "mine.py"
        script.write_text(text)
        assert is_hostable(script) is hosted, text


def test_a_profile_for_gpus_is_a_warning_where_there_is_none() -> None:
    def warned(gpus: int, **trainer: Any) -> list[str]:
        machine = Hardware((Gpu("NVIDIA H100", 80 * GIB),) * gpus, 64 * GIB)
        return made_for_gpus(site(profile(trainer=trainer)), machine)

    (words,) = warned(0)
    assert "compute in bfloat16 on the CPU. atropos-tui init writes a profile for it" in words
    assert not warned(1) and not warned(0, device="cpu", dtype="float32")
