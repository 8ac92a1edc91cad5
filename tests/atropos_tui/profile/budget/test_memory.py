"""The memory budget: sizes against real allocations, warnings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.optimization import Adafactor

from atropos_common.models import model_math
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.fit import nearest
from atropos_tui.profile.budget.inventory import Gpu, Hardware, Model
from atropos_tui.profile.budget.memory import (
    HOST,
    Budget,
    Device,
    Inventory,
    as_data,
    as_lines,
    make_budget,
    size_text,
    take_inventory,
)
from atropos_tui.profile.checks.preflight import preflight
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import Profile, parse_profile
from atropos_tui.profile.sections import EngineSection
from atropos_tui.profile.site import make_site, training_config
from tests.support.small_models import CONFIGS, SMALL, build, saved, sizes_of
from trainer_core.config import TrainingConfig, sharding_contradictions
from trainer_core.optimization.optimizers import Stepper
from trainer_core.policy.attention import register
from trainer_core.policy.load import train_only
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.rollouts.packing import PackedRow

GIB = 1024**3

# What the trainer allocates


@pytest.mark.parametrize("layers", [None, [1, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "masters"),
    [("adamw", "fp32"), ("adafactor", "fp32"), ("adamw", "kahan"), ("adafactor", "stochastic")],
)
def test_gradients_masters_and_optimizer_are_what_the_stepper_allocates(
    tmp_path: Path, dtype: torch.dtype, layers: list[int] | None, optimizer: str, masters: str
) -> None:
    model = build(CONFIGS["qwen3"], dtype)
    train_only(model, layers)
    stepper = Stepper(
        model, TrainingConfig(model_name="m", optimizer=optimizer, master_weights=masters)
    )
    for param in stepper.params:
        param.sum().backward()
    gradients = sum(m.grad.nbytes for m in stepper.masters if m.grad is not None)
    stepper.compute()
    stepper.write()
    copies = [m for m, p in zip(stepper.masters, stepper.params, strict=True) if m is not p]
    kept = sum(m.untyped_storage().nbytes() for m in copies) + sum(
        t.nbytes for t in getattr(stepper.half, "lost", [])
    )
    tensors = [
        t
        for state in stepper.optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]
    state = sum(tensor.nbytes for tensor in tensors if tensor.ndim)

    shapes = saved(CONFIGS["qwen3"], tmp_path).trained(layers)
    assert gradients == 4 * memory.count(shapes)
    assert kept == (
        model_math.MASTER_BYTES[masters] * memory.count(shapes) if dtype == torch.bfloat16 else 0
    )
    assert state == model_math.optimizer_bytes(shapes.values(), optimizer)


def test_eight_bit_state_is_two_bytes_and_two_scales_a_block() -> None:
    assert model_math.optimizer_bytes([(64, 64)], "adamw_8bit") == 2 * 4096 + 2 * 4 * 16
    assert model_math.optimizer_bytes([(4095,)], "adamw_8bit") == 8 * 4095, (
        "bitsandbytes keeps small tensors in float32"
    )


def test_the_adafactor_here_has_no_momentum() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = Adafactor([parameter], lr=1e-3, relative_step=False, scale_parameter=False)
    parameter.sum().backward()
    optimizer.step()
    assert "exp_avg" not in optimizer.state[parameter]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2 tied"])
def test_the_activation_estimate_is_near_what_autograd_keeps(name: str, tmp_path: Path) -> None:
    """Storage that autograd saves in one pass of our own forward, parameters left out."""
    config = CONFIGS[name].__class__(
        **SMALL | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 80}
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=register()
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    tokens = 512
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        row_logprobs(model, a_row(tokens, config.vocab_size))
    shape = Model(config.to_dict(), sizes_of(config), "")
    # Twice the tokens less once: what grows with tokens, which the largest gradient does not. The
    # logits of a tiny vocabulary hardly count.
    estimate = model_math.activation_bytes(shape.dimensions, 2 * tokens, width=2, on_gpu=True).total
    estimate -= model_math.activation_bytes(shape.dimensions, tokens, width=2, on_gpu=True).total
    assert 0.8 < estimate / sum(kept.values()) < 1.5, (estimate, sum(kept.values()))


def a_row(tokens: int, vocab: int) -> PackedRow:
    flat = torch.arange(tokens) % vocab
    predict = torch.arange(tokens - 1)
    nothing = torch.zeros(len(predict))
    return PackedRow(
        tokens=flat,
        positions=torch.arange(tokens),
        lengths=(tokens,),
        predict=predict,
        labels=flat[predict + 1],
        logprobs=nothing,
        advantages=nothing,
        temperatures=torch.ones(len(predict)),
    )


# The whole budget

H200 = Gpu("NVIDIA H200", 141 * GIB)
QWEN = Qwen3Config(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
    max_position_embeddings=40_960,
)
PARAMETERS = 1_720_574_976


def profile(**changes: Any) -> Profile:
    data: dict[str, Any] = {
        "name": "p",
        "model": "/models/m",
        "env": {"module": "json"},
        "vllm": {"gpus": [0], "max_model_len": 4096},
        "trainer": {"optimizer": "adamw"},
    }
    return parse_profile(data | changes, "p.toml")


def budget_of(
    chosen: Profile, *gpus: Gpu, host: int = 64 * GIB, model: Model | str | None = None
) -> Budget:
    model = model or Model(QWEN.to_dict(), sizes_of(QWEN), "config.json")
    settings = training_config(make_site(chosen, Path("/runs/r"), run_id="r"))
    return make_budget(
        chosen, settings, {engine.name: model for engine in chosen.vllm}, Hardware(gpus, host)
    )


def items(budget: Budget, name: str) -> dict[str, int | None]:
    (device,) = [device for device in budget.devices if device.name == name]
    return {f"{item.component} {item.what}": item.bytes for item in device.items}


def test_single_copy_counts_the_weights_once_on_the_engine() -> None:
    chosen = profile(vllm={"gpus": [0], "gpu_memory_utilization": 0.4, "max_model_len": 4096})
    found = items(budget_of(chosen, H200), "GPU 0")
    assert found["vllm weights"] == 2 * PARAMETERS and "trainer weights" not in found
    assert found["trainer gradients"] == found["trainer master weights"] == 4 * PARAMETERS
    assert found["trainer optimizer state"] == 8 * PARAMETERS
    engine = sum(size or 0 for key, size in found.items() if key.startswith("vllm"))
    assert engine == int(0.4 * 141 * GIB), "weights, working memory and KV cache fill vLLM's share"


def test_the_kv_cache_is_told_in_tokens() -> None:
    budget = budget_of(
        profile(vllm={"gpus": [0], "gpu_memory_utilization": 0.4, "max_model_len": 4096}), H200
    )
    (item,) = [item for item in budget.devices[0].items if item.what == "KV cache"]
    tokens = (item.bytes or 0) // (2 * 28 * 8 * 128 * 2)
    assert item.note.startswith(f"{tokens:,} tokens = {tokens / 4096:,.1f} sequences of 4,096")


def test_other_modes_have_a_copy_of_their_own_on_their_gpu() -> None:
    chosen = profile(
        mode="broadcast", vllm={"gpus": [0, 1], "tensor_parallel": 2}, trainer={"gpus": [2]}
    )
    budget = budget_of(chosen, H200, H200, H200)
    assert (
        items(budget, "GPU 0")["vllm weights"]
        == items(budget, "GPU 1")["vllm weights"]
        == PARAMETERS
    )
    assert items(budget, "GPU 2")["trainer weights"] == 2 * PARAMETERS
    assert [device.name for device in budget.devices] == ["GPU 0", "GPU 1", "GPU 2"]


def test_lora_trains_adapters_alone() -> None:
    chosen = profile(mode="lora_only", trainer={"gpus": [0], "lora_r": 8, "optimizer": "adamw"})
    found = items(budget_of(chosen, H200), "GPU 0")
    adapters = 28 * 8 * ((2048 + 2048) + (2048 + 1024))
    assert found["trainer adapters"] == found["trainer gradients"] == 4 * adapters
    assert found["trainer optimizer state"] == 8 * adapters
    assert "trainer master weights" not in found and found["trainer weights"] == 2 * PARAMETERS
    assert 0 < (found["vllm adapters"] or 0) < PARAMETERS


def test_quantized_layers_are_counted_by_their_bits() -> None:
    """In the engine's memory alone: what is no matrix of a layer stays as it is, and the trainer
    has plain weights."""
    sizes, quantized = sizes_of(QWEN), {"quantization_config": {"quant_method": "mxfp4"}}
    layers = sum(
        math.prod(size) for name, size in sizes.items() if ".layers." in name and len(size) == 2
    )
    chosen = profile(mode="lora_only", trainer={"gpus": [0], "optimizer": "adamw"})
    found = items(
        budget_of(chosen, H200, model=Model(QWEN.to_dict() | quantized, sizes, "")), "GPU 0"
    )
    assert found["vllm weights"] == 2 * (PARAMETERS - layers) + int(layers * 4.25 / 8)
    assert found["trainer weights"] == 2 * PARAMETERS


def test_adapters_over_the_one_copy_need_no_weights_of_their_own() -> None:
    settings = {
        "single_copy": True,
        "lora_r": 8,
        "optimizer": "adamw",
        "lora_target_modules": ["all-linear"],
    }
    found = items(budget_of(profile(mode="lora_only", trainer=settings), H200), "GPU 0")
    a_layer = (2048 + 2048) * 2 + (2048 + 1024) * 2 + (2048 + 6144) * 3
    assert found["trainer adapters"] == 4 * 28 * 8 * a_layer
    assert found["vllm weights"] == 2 * PARAMETERS and "trainer weights" not in found


def test_adapters_that_are_advised_need_no_second_copy() -> None:
    """On 9 GiB the model in training fits in no way without loss; one copy of it and an adapter do,
    two would not."""
    chosen = profile(vllm={"gpus": [0], "max_model_len": 2048}, trainer={"optimizer": "adamw"})
    model = Model(QWEN.to_dict(), sizes_of(QWEN), "config.json")
    inventory = Inventory(Hardware((Gpu("small", 9 * GIB),), 64 * GIB), {"vllm": model})
    advised = nearest(make_site(chosen, Path("/runs/r"), run_id="r"), inventory)[-1]
    assert (
        advised.settings["mode"] == "lora_only" and advised.settings["trainer.single_copy"] is True
    )
    assert "trainer weights" not in items(advised.budget, "GPU 0")


def test_a_frozen_reference_is_a_copy_but_for_adapters() -> None:
    full = items(budget_of(profile(trainer={"ref_kl_coef": 0.1}), H200), "GPU 0")
    assert full["trainer frozen reference"] == 2 * PARAMETERS
    adapted = items(
        budget_of(profile(mode="lora_only", trainer={"ref_kl_coef": 0.1}), H200), "GPU 0"
    )
    assert "trainer frozen reference" not in adapted and "trainer frozen reference" not in items(
        budget_of(profile(), H200), "GPU 0"
    )


def test_trained_layers_alone_need_gradients() -> None:
    chosen = profile(trainer={"optimizer": "adamw", "train_layer_indices": [26, 27]})
    layer = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    found = items(budget_of(chosen, H200), "GPU 0")
    assert found["trainer gradients"] == 2 * layer * 4


@pytest.mark.parametrize(("masters", "width"), [("fp32", 4), ("kahan", 2), ("stochastic", None)])
def test_what_is_kept_beside_the_weights(masters: str, width: int | None) -> None:
    found = items(
        budget_of(profile(trainer={"optimizer": "adamw", "master_weights": masters}), H200), "GPU 0"
    )
    assert found.get("trainer master weights") == (width and width * PARAMETERS)


def test_float32_has_no_master_weights_and_the_cpu_default_is_adamw() -> None:
    chosen = profile(
        vllm={"args": {"kv-cache-memory-bytes": "2G"}},
        trainer={"dtype": "float32", "device": "cpu"},
    )
    found = items(budget_of(chosen), HOST)
    assert found["vllm weights"] == 4 * PARAMETERS and found["vllm KV cache"] == 2 * GIB
    assert "trainer master weights" not in found and "trainer CUDA context" not in found
    assert found["trainer optimizer state"] == 8 * PARAMETERS


def test_a_device_that_is_too_small_is_warned_about_with_the_five_ways_out() -> None:
    chosen = profile(
        vllm={"gpus": [0], "gpu_memory_utilization": 0.9, "max_model_len": 4096},
        trainer={
            "optimizer": "adamw",
            "batch_size": 3,
            "gradient_accumulation_steps": 5,
            "seq_len": 1234,
        },
    )
    (warning,) = budget_of(chosen, H200).warnings
    assert warning.startswith("GPU 0: ") and "141.0 GiB exist" in warning
    for way in (
        "vllm.gpu_memory_utilization (now 0.9)",
        "trainer.batch_size (now 3)",
        "trainer.gradient_accumulation_steps as much (now 5)",
        "trainer.seq_len (now 1234)",
        'trainer.optimizer = "adafactor" (now adamw)',
    ):
        assert way in warning
    packed = chosen.model_copy(update={"trainer": profile(trainer={"pack_tokens": 99_999}).trainer})
    assert "trainer.pack_tokens (now 99999)" in budget_of(packed, H200).warnings[0]
    assert (
        budget_of(profile(vllm={"gpus": [0], "gpu_memory_utilization": 0.3}), H200).warnings == []
    )
    assert (
        "host" in budget_of(profile(vllm={}, trainer={"device": "cpu"}), host=8 * GIB).warnings[-1]
    )


@pytest.mark.parametrize(("single_copy", "shares"), [(False, True), (True, False)])
def test_rows_are_shared_by_ranks_only_where_they_may_be(single_copy: bool, shares: bool) -> None:
    """Adapters over the one copy: the trainer refuses `context_parallel` there."""
    trainer = {"gpus": [0, 1], "seq_len": 32_768, "batch_size": 64, "single_copy": single_copy}
    chosen = profile(mode="lora_only", vllm={"gpus": [0, 1], "tensor_parallel": 2}, trainer=trainer)
    settings = training_config(make_site(chosen, Path("/runs/r"), run_id="r"))
    device = memory.Device("GPU 0", items=[memory.Item("trainer", "activations", GIB)])
    advised = any("context_parallel" in way for way in memory.ways_out(device, chosen, settings))
    accepted = not sharding_contradictions(settings.model_copy(update={"context_parallel": 2}), 2)
    assert (advised, accepted) == (shares, shares)


def test_an_engine_without_room_for_one_sequence_is_warned_about() -> None:
    (warning,) = budget_of(
        profile(vllm={"gpus": [0], "args": {"kv-cache-memory-bytes": 1_000_000}}), H200
    ).warnings
    assert "8 tokens" in warning and "40,960" in warning and "will not start" in warning


def test_a_gpu_that_is_not_here_has_numbers_and_no_warning() -> None:
    budget = budget_of(profile())
    assert (
        items(budget, "GPU 0")["vllm weights"] == 2 * PARAMETERS
        and items(budget, "GPU 0")["vllm KV cache"] is None
    )
    assert budget.warnings == [] and budget.devices[0].total is None
    text = "\n".join(as_lines(budget))
    assert (
        "this machine has no such GPU" in text and "unknown" in text and "114,688 B a token" in text
    )


def test_a_model_that_is_not_here_is_said() -> None:
    budget = budget_of(profile(), H200, model="model not on this machine")
    assert budget.devices == [] and budget.notes == ["vllm: unknown: model not on this machine"]
    assert as_lines(budget) == ["memory (vllm: unknown: model not on this machine)"]


def test_the_budget_is_json() -> None:
    data = json.loads(json.dumps(as_data(budget_of(profile(), H200))))
    (device,) = data["devices"]
    assert device["name"] == "GPU 0" and device["wanted"] == sum(
        item["bytes"] for item in device["items"]
    )


def test_the_longest_sequences_bound_a_pass() -> None:
    settings = TrainingConfig(
        model_name="m", batch_size=128, gradient_accumulation_steps=1, seq_len=2048
    )
    assert memory.tokens_per_pass(settings, 64) == 128 * 64
    assert memory.tokens_per_pass(settings, None) == 128 * 2048
    assert memory.tokens_per_pass(settings.model_copy(update={"pack_tokens": 500}), 64) == 500
    assert memory.tokens_per_pass(settings.model_copy(update={"pack_tokens": 500}), None) == 2048, (
        "one always passes"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        ("7", 7),
        ("1k", 1000),
        ("1K", 1024),
        ("2G", 2 * GIB),
        ("1.5M", 1536 * 1024),
        ("many", 3),
        (True, 3),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(value: Any, expected: int) -> None:
    assert EngineSection(args={"max_num_seqs": value}).flag_number("max-num-seqs", 3) == expected


def test_sizes_are_text() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 3 * 1024**2, 5 * GIB)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


# On this machine


def test_preflight_refuses_what_cannot_fit_even_without_activations(tmp_path: Path) -> None:
    chosen = profile(model=str(tmp_path), vllm={}, trainer={"device": "cpu", "optimizer": "adamw"})
    model = saved(CONFIGS["qwen3"], tmp_path)
    site = make_site(chosen, Path("/runs/r"), run_id="r")
    stack = stack_of(make_site(chosen, Path("/runs/r"), run_id="r"))
    for host, refused in ((10**4, True), (10**9, False)):
        found = preflight(site, stack, Inventory(Hardware((), host), {"vllm": model}))
        assert (
            any("needed without activations" in problem.reason for problem in found) is refused
        ), found


def test_certain_means_without_the_trainer_s_estimates() -> None:
    budget = budget_of(profile(vllm={"gpus": [0], "gpu_memory_utilization": 0.5}), H200)
    device: Device = budget.devices[0]
    estimated = sum(
        item.bytes or 0 for item in device.items if item.estimate and item.component == "trainer"
    )
    assert estimated > 0 and device.certain == device.wanted - estimated


def test_a_prepared_model_is_told_from_a_missing_one(tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    chosen = profile(model=made, prepare={"name": "warm", "command": ["true"], "creates": made})
    assert take_inventory(make_site(chosen, tmp_path, run_id="r")).models == {
        "vllm": "warm makes the model when the run starts"
    }
    saved(CONFIGS["llama"], tmp_path / "made")
    assert isinstance(take_inventory(make_site(chosen, tmp_path, run_id="r")).models["vllm"], Model)


# A trainer on several GPUs


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"optimizer": "adamw"}, 16.0),
        ({"optimizer": "adamw_8bit"}, 10.03),
        ({"optimizer": "adamw_8bit", "master_weights": "kahan"}, 10.03),
        (
            {"optimizer": "adamw_8bit", "master_weights": "kahan", "gradient_dtype": "bfloat16"},
            8.03,
        ),
        (
            {
                "optimizer": "adamw_8bit",
                "master_weights": "stochastic",
                "gradient_dtype": "bfloat16",
            },
            6.03,
        ),
    ],
)
def test_ranks_divide_the_state_of_the_trainer(settings: dict[str, Any], each: float) -> None:
    """Bytes a parameter of weights, gradients, masters and optimizer, all ranks together: float32
    rows are the masters themselves. What is gathered, computed and CUDA's own each rank has for
    itself."""
    config = CONFIGS["qwen3"].__class__(
        **SMALL | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096}
    )
    model = Model(config.to_dict(), sizes_of(config), "")
    found = {}
    for ranks in (2, 4):
        data = {
            "name": "p",
            "mode": "broadcast",
            "model": "/m",
            "env": {"module": "json"},
            "vllm": {"gpus": [0]},
            "trainer": {"gpus": list(range(1, ranks + 1)), "seq_len": 64, **settings},
        }
        profile = parse_profile(data, "p.toml")
        made = training_config(make_site(profile, Path("/runs/r"), run_id="r"))
        budget = make_budget(
            profile, made, {"vllm": model}, Hardware((Gpu("H100", 80 * GIB),) * 8, None)
        )
        gpus = [device for device in budget.devices if device.items[0].component == "trainer"]
        assert [gpu.name for gpu in gpus] == [f"GPU {index}" for index in range(1, ranks + 1)]
        items = {item.what: item.bytes or 0 for item in gpus[0].items}
        own = {what: items.pop(what) for what in ("CUDA context", "gathered layers", "activations")}
        found[ranks] = (ranks * sum(items.values()) / model.parameters, own)
    assert found[2][0] == pytest.approx(each, abs=0.02) and found[4][0] == pytest.approx(
        each, abs=0.02
    )
    assert found[2][1] == found[4][1]


def test_adapters_are_whole_on_every_rank_and_the_base_is_divided() -> None:
    config = CONFIGS["qwen3"].__class__(
        **SMALL | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 800}
    )
    model = Model(config.to_dict(), sizes_of(config), "")
    sizes = {}
    for gpus in ([1], [1, 2]):
        data = {
            "name": "p",
            "mode": "lora_only",
            "model": "/m",
            "env": {"module": "json"},
            "vllm": {"gpus": [0]},
            "trainer": {"gpus": gpus, "seq_len": 64},
        }
        profile = parse_profile(data, "p.toml")
        made = training_config(make_site(profile, Path("/runs/r"), run_id="r"))
        budget = make_budget(
            profile, made, {"vllm": model}, Hardware((Gpu("H100", 80 * GIB),) * 8, None)
        )
        (gpu,) = [device for device in budget.devices if device.name == "GPU 1"]
        sizes[len(gpus)] = {item.what: item.bytes or 0 for item in gpu.items}
    assert sizes[2]["weights"] == pytest.approx(sizes[1]["weights"] / 2, abs=1)
    for what in ("adapters", "gradients", "optimizer state"):
        assert sizes[2][what] == sizes[1][what] > 0
