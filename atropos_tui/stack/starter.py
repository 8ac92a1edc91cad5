"""The text of a new profile, from a few answers: for `init`. Pure; whoever writes it validates it first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tomli_w

from atropos_tui.stack.modes import TRAITS
from atropos_tui.stack.profile import Mode

SCHEMA_FILE = "profile.schema.json"
"""Lies beside the profile, which points at it in its first line."""
TINY_MODEL = "${ATROPOS_CACHE}/arithmetic-seed${ATROPOS_SEED}"
"""The demo's model, which a prepare step makes."""
GPU_TINY_MODEL = "${ATROPOS_CACHE}/arithmetic-rows128-seed${ATROPOS_SEED}"
"""The same with as many rows as vLLM needs for adapters on a GPU; profile `demo-gpu` has it too."""

EnvKind = Literal["gsm8k", "arithmetic", "math-zero", "script"]


@dataclass(frozen=True)
class Recipe:
    """What fits an environment: its data decide lengths, its model the rest."""

    model: str
    module: str
    args: Mapping[str, Any]
    max_model_len: int
    trainer: Mapping[str, Any]


_LARGE = {
    "training_steps": 200, "batch_size": 8, "gradient_accumulation_steps": 8, "optimizer": "adamw", "lr": 1e-6,
    "warmup_steps": 5, "checkpoint_interval": 50,
}  # fmt: skip
_ONE_AHEAD = {"env.max_batches_offpolicy": 1}

RECIPES: dict[EnvKind, Recipe] = {
    "gsm8k": Recipe(
        "Qwen/Qwen3-1.7B",
        "atropos_envs.gsm8k_server",
        {"env.group_size": 8, "env.max_token_length": 2048, "env.steps_per_eval": 50} | _ONE_AHEAD,
        4096,
        _LARGE | {"seq_len": 4096},
    ),
    "math-zero": Recipe(
        "Qwen/Qwen3-1.7B-Base",
        "atropos_envs.math_zero_server",
        {"env.group_size": 8, "env.max_token_length": 4096, "env.steps_per_eval": 50} | _ONE_AHEAD,
        5120,
        _LARGE | {"seq_len": 5120},
    ),
    "arithmetic": Recipe(
        TINY_MODEL,
        "atropos_envs.arithmetic_server",
        {"env.group_size": 8, "env.seed": "${ATROPOS_SEED}"} | _ONE_AHEAD,
        64,
        {
            "training_steps": 60, "batch_size": 128, "gradient_accumulation_steps": 1, "optimizer": "adamw",
            "weight_decay": 0.0, "lr": 2e-4, "warmup_steps": 5, "checkpoint_interval": 20,
        },
    ),
    "script": Recipe("Qwen/Qwen3-1.7B", "", {"env.group_size": 8} | _ONE_AHEAD, 4096, _LARGE | {"seq_len": 4096}),
}  # fmt: skip


@dataclass(frozen=True)
class Answers:
    """What `init` asks; GPUs by index, none of them means a run on the CPU."""

    name: str
    env: EnvKind
    script: str
    mode: Mode
    model: str
    vllm_gpus: list[int]
    trainer_gpus: list[int]
    api_port: int
    vllm_port: int


def profile_text(answers: Answers, *, file: str) -> str:
    """A whole profile with comments; `file` is how its own head names it."""
    recipe = RECIPES[answers.env]
    tiny = answers.model == TINY_MODEL
    model = GPU_TINY_MODEL if tiny and answers.vllm_gpus else answers.model
    parts = [
        f"#:schema ./{SCHEMA_FILE}",
        "# Written by `atropos-tui init`. What each key means: docs/profiles.md, and by the line above your editor.",
        f"#   atropos-tui up {file}",
        _lines({"name": answers.name}),
        _lines({"mode": answers.mode}, "how weights reach vLLM"),
        _lines({"model": model}, "a directory or a hub id; one place, handed to every component"),
        _lines({"seed": 42}),
    ]
    if tiny:
        parts.append(_prepare(model))
    parts += [_api(answers), _env(answers, recipe), _vllm(answers, recipe), _trainer(answers, recipe)]
    return "\n".join(parts)


def _lines(values: Mapping[str, Any], comment: str = "") -> str:
    """`key = value` lines; dotted flags stay bare dotted keys, as TOML reads them."""
    note = f"  # {comment}" if comment else ""
    return "\n".join(f"{key} = {_value(value)}{note}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def _prepare(model: str) -> str:
    command = ["python", "-m", "atropos_envs.warm_start", "--output", model, "--seed", "${ATROPOS_SEED}"]
    if model == GPU_TINY_MODEL:
        command += ["--vocab-rows", "128"]
    made = _lines({"name": "warm-start", "command": command, "creates": model})
    return f"\n[[prepare]]  # makes the tiny model once, about 20 s\n{made}"


def _api(answers: Answers) -> str:
    return f"\n[api]  # run-api, between environments and trainer\n{_lines({'port': answers.api_port})}"


def _env(answers: Answers, recipe: Recipe) -> str:
    name = answers.env if answers.env != "script" else "env"
    program = {"script": answers.script} if answers.env == "script" else {"module": recipe.module}
    head = "\n[env]  # for several, write [[env]] and give each a name"
    flags = _lines(recipe.args)
    return f"{head}\n{_lines({'name': name} | program)}\n\n[env.args]  # flags of the environment\n{flags}"


def _vllm(answers: Answers, recipe: Recipe) -> str:
    own: dict[str, Any] = {"port": answers.vllm_port}
    args: dict[str, Any] = {"max-num-seqs": 128} if answers.env == "arithmetic" else {}
    if answers.vllm_gpus:
        own["gpus"] = answers.vllm_gpus
        if len(answers.vllm_gpus) > 1 and not TRAITS[answers.mode].shares_memory:
            own["tensor_parallel"] = len(answers.vllm_gpus)
        if answers.env == "arithmetic":
            args["kv-cache-memory-bytes"] = 2**30
        else:
            alone = answers.trainer_gpus and not set(answers.vllm_gpus) & set(answers.trainer_gpus)
            own["gpu_memory_utilization"] = 0.85 if alone else 0.45
    else:
        cache = 2**26 if answers.env == "arithmetic" else 2**32
        args |= {"enforce-eager": True, "kv-cache-memory-bytes": cache, "block-size": 32}
    parts = [f"\n[vllm]\n{_lines(own | {'max_model_len': recipe.max_model_len})}"]
    if _few_threads(answers):
        threads = _lines({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
        parts.append(f"[vllm.env]  # threads that spin while they wait would starve the other processes\n{threads}")
    if args:
        parts.append(f"[vllm.args]  # any flag of vLLM\n{_lines(args)}")
    return "\n\n".join(parts)


def _trainer(answers: Answers, recipe: Recipe) -> str:
    own: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    if answers.vllm_gpus:
        own = {"gpus": answers.trainer_gpus or answers.vllm_gpus, "dtype": "bfloat16"}
    own |= recipe.trainer
    text = f"\n[trainer]  # batch_size x gradient_accumulation_steps: sequences of a step\n{_lines(own)}\n"
    if _few_threads(answers):
        text += f"\n[trainer.env]\n{_lines({'OMP_NUM_THREADS': '1'})}\n"
    return text


def _few_threads(answers: Answers) -> bool:
    """The tiny model on a CPU: one thread is faster than several that wait for one another."""
    return answers.env == "arithmetic" and not answers.vllm_gpus
