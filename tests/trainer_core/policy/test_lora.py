"""Adapters in the trainer: no change at first, learning, files as peft reads them, exact resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.made_rollouts import rollouts_of
from tests.support.small_models import CONFIGS, build
from trainer_core.__main__ import parse_args
from trainer_core.checkpoints import checkpoint, state
from trainer_core.config import TrainingConfig, validate
from trainer_core.errors import UsageError
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy.load import load_config, load_model
from trainer_core.policy.logprobs import completions_logprobs, sequence_logprobs
from trainer_core.policy.lora import adapter_parameters, add_adapter, load_adapter, write_adapter
from trainer_core.policy.speed import use_checkpointing
from trainer_core.rollouts.packing import pack
from vllm_server.lora import linear_shapes, misfit

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "mistral tied", "qwen2", "qwen3 tied", "llama biases"]
PROMPT, COMPLETION = [3, 14, 15, 9], [26, 5, 35, 8, 9]


def config(base: Path | str = "m", **fields: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": str(base),
            "weight_bridge_mode": "lora_only",
            "dtype": "float32",
            "device": "cpu",
            "optimizer": "adamw",
            "lr": 1e-2,
            "lora_r": 4,
            "lora_alpha": 8,
            **fields,
        }
    )


@pytest.fixture(params=ARCHITECTURES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(7)
    build(CONFIGS[request.param]).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    torch.manual_seed(7)
    build(CONFIGS["qwen3"]).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, settings: TrainingConfig | None = None) -> nn.Module:
    torch.manual_seed(3)
    model = load_model(base, torch.float32, CPU)
    add_adapter(model, settings or config(base))
    return model


def scramble(model: nn.Module) -> None:
    """An adapter that does something, as after training."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.2)


def trained(model: nn.Module, settings: TrainingConfig, steps: int = 3) -> Stepper:
    torch.manual_seed(5)
    stepper = Stepper(model, settings)
    batch = rollouts_of(6)
    for step in range(1, steps + 1):
        accumulate(model, stepper, pack(batch, 64), Objective(settings), step)
        stepper.compute()
        stepper.write()
    return stepper


def test_a_new_adapter_changes_nothing_and_only_it_is_trained(base: Path) -> None:
    plain = load_model(base, torch.float32, CPU)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    settings = config(base, lora_target_modules=["all-linear"])
    model = adapted(base, settings)
    assert sequence_logprobs(model, PROMPT, COMPLETION) == pytest.approx(
        sequence_logprobs(plain, PROMPT, COMPLETION), abs=1e-6
    )
    trained(model, settings)
    moved = sequence_logprobs(model, PROMPT, COMPLETION)
    assert (
        max(
            abs(a - b)
            for a, b in zip(moved, sequence_logprobs(plain, PROMPT, COMPLETION), strict=True)
        )
        > 1e-3
    )
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name


def test_all_linear_is_every_layer_but_the_head(base: Path) -> None:
    model = adapted(base, config(base, lora_target_modules=["all-linear"]))
    modules = {name.split(".")[-3] for name in adapter_parameters(model)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    default = adapted(base)
    assert {name.split(".")[-3] for name in adapter_parameters(default)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("scale", [8 / 4, 8 / 4**0.5], ids=["plain", "rslora"])
def test_peft_loads_what_is_saved(base: Path, tmp_path: Path, scale: float) -> None:
    """And packed attention, the chunked head and the probe's comparison compute what peft does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(
        base, config(base, lora_target_modules=["all-linear"], lora_use_rslora=scale == 4)
    )
    scramble(model)
    write_adapter(model, tmp_path / "adapter")
    assert misfit(tmp_path / "adapter", linear_shapes(load_config(str(base)))) is None, (
        "the server takes it"
    )
    assert {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")} == {scale}
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter")
    )
    pairs = [(PROMPT, COMPLETION), (PROMPT[:2], COMPLETION[:3]), ([7] * 9, COMPLETION)]
    ours = completions_logprobs(model, pairs)
    for (prompt, completion), values in zip(pairs, ours, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(len(completion)), completion].tolist()
        assert values == pytest.approx(wanted, abs=1e-5)


def test_layer_indices(qwen: Path) -> None:
    model = adapted(
        qwen, config(qwen, lora_layer_indices=[1, 2], lora_target_modules=["all-linear"])
    )
    assert {name.split(".layers.")[1].split(".")[0] for name in adapter_parameters(model)} == {
        "1",
        "2",
    }


@pytest.mark.parametrize("layers", [None, [0], [2]])
def test_gradients_are_the_same_with_checkpointing(base: Path, layers: list[int] | None) -> None:
    """Frozen embeddings give an input without a gradient, the case in which reentrant checkpointing
    loses all."""
    grads = []
    for mode in ("off", "on"):
        settings = config(base, lora_layer_indices=layers)
        model = adapted(base, settings)
        scramble(model)
        use_checkpointing(model, mode, tokens=64, optimizer="adamw", device=CPU)
        stepper = Stepper(model, settings)
        batch = rollouts_of(6)
        accumulate(model, stepper, pack(batch, 64), Objective(settings), 1)
        grads.append(
            {
                name: p.grad.clone()
                for name, p in adapter_parameters(model).items()
                if p.grad is not None
            }
        )
    assert grads[0].keys() == grads[1].keys() == adapter_parameters(model).keys()
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, f"{name} got no gradient"
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_dropout_is_off_whatever_is_asked_for(
    qwen: Path, checkpointing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(qwen, lora_dropout=0.5)
    model = adapted(qwen, settings)
    assert "--lora-dropout 0.5 is ignored" in capsys.readouterr().out
    scramble(model)
    use_checkpointing(model, checkpointing, tokens=64, optimizer="adamw", device=CPU)
    first, second = (sequence_logprobs(model, PROMPT, COMPLETION) for _ in range(2))
    assert first == second
    assert not any(isinstance(m, nn.Dropout) and m.p for m in model.modules())


def test_the_base_may_be_bfloat16_and_the_adapter_stays_float32(qwen: Path, tmp_path: Path) -> None:
    model = load_model(qwen, torch.bfloat16, CPU)
    add_adapter(model, config(qwen))
    assert {p.dtype for p in adapter_parameters(model).values()} == {torch.float32}
    before = [p.detach().clone() for p in adapter_parameters(model).values()]
    trained(model, config(qwen, lr=1e-6), steps=1)
    after = list(adapter_parameters(model).values())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "a small update must not be lost"
    )
    write_adapter(model, tmp_path / "served", torch.bfloat16)
    write_adapter(model, tmp_path / "kept")
    sizes = [
        (tmp_path / name / "adapter_model.safetensors").stat().st_size
        for name in ("served", "kept")
    ]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("wanted", ["all-linear", "q_proj"])
def test_a_model_without_linear_layers_is_refused_in_words(wanted: str) -> None:
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    )
    with pytest.raises(
        UsageError, match=r"GPT2LMHeadModel has none.*broadcast, shared_vllm or none"
    ):
        add_adapter(gpt2, config(lora_target_modules=[wanted]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora_target_modules": ["lm_head"]}, "choose from down_proj gate_proj"),
        ({"lora_target_modules": ["q_proj", "c_attn"]}, "--lora-target-modules c_attn"),
        ({"lora_layer_indices": [1, 3]}, r"--lora-layer-indices \[3\]: the model has layers 0-2"),
    ],
)
def test_targets_that_the_model_lacks_are_refused(
    qwen: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        adapted(qwen, config(qwen, **fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"lora_r": 8},
            r"another shape: .*lora_A.weight \[4, 32\] there, \[8, 32\] here \(its --lora-r is 4\)",
        ),
        ({"lora_alpha": 16}, "--lora-alpha 8, not 16"),
        ({"lora_use_rslora": True}, "--lora-use-rslora false"),
        (
            {"lora_target_modules": ["q_proj"]},
            "other modules .*v_proj.*--lora-target-modules q_proj v_proj",
        ),
        ({"lora_layer_indices": [0]}, "other modules"),
    ],
)
def test_another_adapter_is_not_loaded(
    qwen: Path, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    write_adapter(adapted(qwen), tmp_path / "saved")
    model = adapted(qwen, config(qwen, **fields))
    before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    with pytest.raises(UsageError, match=says):
        load_adapter(model, tmp_path / "saved")
    assert all(torch.equal(p, before[name]) for name, p in adapter_parameters(model).items())


def test_half_an_adapter_is_refused_in_words(qwen: Path, tmp_path: Path) -> None:
    write_adapter(adapted(qwen), tmp_path / "saved")
    (tmp_path / "saved" / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(UsageError, match="no readable adapter"):
        load_adapter(adapted(qwen), tmp_path / "saved")


def test_a_checkpoint_holds_the_adapter_and_resumes_to_the_bit(qwen: Path, tmp_path: Path) -> None:
    settings = config(qwen, save_path=str(tmp_path / "out"), resume="auto", keep_checkpoints=2)
    model = adapted(qwen, settings)
    stepper = trained(model, settings)
    for step in (1, 2, 3):
        checkpoint.save_step(model, settings, stepper, step=step, version=step)
    names = [path.name for path in checkpoint.complete_checkpoints(tmp_path / "out", adapters=True)]
    assert names == ["adapter_step_2", "adapter_step_3"]
    assert checkpoint.complete_checkpoints(tmp_path / "out") == []
    point = checkpoint.starting_point(settings)
    assert (point.step, point.version) == (3, 3) and point.path is not None
    files = {path.name for path in point.path.iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
    } <= files and "model.safetensors" not in files

    again = adapted(qwen, settings)
    scramble(again)
    load_adapter(again, point.path)
    resumed = Stepper(again, settings)
    state.restore(point.path, resumed)
    for one, its in ((model, stepper), (again, resumed)):
        accumulate(one, its, pack(rollouts_of(6, seed=1), 64), Objective(settings), 4)
        its.compute()
        its.write()
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(parameter, adapter_parameters(again)[name]), name


def test_a_checkpoint_of_the_other_kind_is_refused(qwen: Path, tmp_path: Path) -> None:
    settings = config(qwen, save_path=str(tmp_path / "out"))
    model = adapted(qwen, settings)
    saved = checkpoint.save_step(model, settings, Stepper(model, settings), step=1, version=1)
    whole = config(qwen, weight_bridge_mode="shared_vllm", resume=str(saved.path))
    with pytest.raises(
        UsageError, match=r"a checkpoint of an adapter, and .* trains the whole model"
    ):
        checkpoint.starting_point(whole)
    plain = load_model(qwen, torch.float32, CPU)
    of_model = checkpoint.save_step(
        plain,
        whole.model_copy(update={"save_path": str(tmp_path / "out")}),
        Stepper(plain, whole),
        step=2,
        version=2,
    )
    with pytest.raises(UsageError, match=r"a checkpoint of a whole model, and .* trains adapters"):
        checkpoint.starting_point(config(qwen, resume=str(of_model.path)))
    assert (
        checkpoint.starting_point(config(qwen, resume="auto", save_path=str(tmp_path / "out"))).step
        == 1
    )


def test_the_final_model_is_an_adapter_of_its_base(qwen: Path, tmp_path: Path) -> None:
    settings = config(qwen)
    saved = checkpoint.save(
        adapted(qwen), settings, tmp_path / "final_model", step=4, version=4, stepper=None
    )
    described = json.loads((saved.path / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(qwen)
    assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (4, 8, 0.0)


@pytest.fixture
def other(qwen: Path, tmp_path: Path) -> Path:
    """An adapter by somebody else, in peft's format."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    made = LoraConfig(
        r=6,
        lora_alpha=3,
        target_modules=["q_proj", "up_proj"],
        use_rslora=True,
        init_lora_weights=False,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32), made)
    assert isinstance(model, PeftModel)
    model.save_pretrained(str(tmp_path / "other"))
    return tmp_path / "other"


def test_training_goes_on_from_an_adapter(qwen: Path, other: Path) -> None:
    """Everything about it is its own, and at the start the model is what peft makes of the two."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = TrainingConfig(
        model_name=str(qwen), weight_bridge_mode="lora_only", lora_adapter_path=str(other)
    )
    assert (settings.lora_r, settings.lora_alpha, settings.lora_use_rslora) == (6, 3, True)
    assert (
        settings.lora_target_modules == ["q_proj", "up_proj"]
        and settings.lora_layer_indices is None
    )
    assert parse_args(settings.to_args()) == settings
    model = adapted(qwen, settings)
    load_adapter(model, other)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(qwen), str(other))
    with torch.no_grad():
        logits = theirs(torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1)[range(len(COMPLETION)), COMPLETION].tolist()
    assert sequence_logprobs(model, PROMPT, COMPLETION) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "changed", "says"),
    [
        ({"lora_r": 4}, {}, r"--lora-r 4: the adapter in .* has 6"),
        (
            {"lora_target_modules": "q_proj v_proj"},
            {},
            r"--lora-target-modules .*has \['q_proj', 'up_proj'\]",
        ),
        ({"lora_layer_indices": [0]}, {}, r"--lora-layer-indices \[0\]: .* has None"),
        ({}, {"use_dora": True}, "DoRA cannot be trained here"),
        ({}, {"modules_to_save": ["lm_head"]}, "whole layers"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "several ranks"),
        ({}, {"target_modules": ".*proj"}, "modules by a pattern"),
        ({}, {"peft_type": "IA3"}, "peft's IA3"),
        ({}, {"target_modules": None}, "modules by a pattern"),
        ({"weight_bridge_mode": "none"}, {}, "--lora-adapter-path is for adapters"),
        ({"lora_adapter_path": "/nowhere"}, {}, "no adapter in peft's format"),
        ({"lora_use_dora": True}, {}, "vLLM does not serve DoRA"),
        ({"lora_modules_to_save": "lm_head"}, {}, "vLLM does not serve adapters with whole layers"),
    ],
)
def test_what_an_adapter_cannot_be_is_said(
    qwen: Path, other: Path, fields: dict[str, Any], changed: dict[str, Any], says: str
) -> None:
    file = other / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    settings, problems = validate(
        {"model_name": "m", "weight_bridge_mode": "lora_only", "lora_adapter_path": str(other)}
        | fields
    )
    assert settings is None and re.search(says, " ".join(problems)), problems


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_export_is_a_model_by_itself(
    base: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exact in float32. In bfloat16 each weight is rounded once, and the report says so. The
    adapter lies beside it."""
    settings = config(
        base,
        save_path=str(tmp_path),
        lora_merged_export=True,
        lora_target_modules="all-linear",
        dtype=dtype,
    )
    torch.manual_seed(3)
    model = load_model(base, getattr(torch, dtype), CPU)
    add_adapter(model, settings)
    scramble(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = checkpoint.save_final(model, settings, step=3, version=3)
    assert saved.path == tmp_path / "final_model"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    merged = load_model(saved.path, torch.float32, CPU)
    exact = load_model(base, torch.float32, CPU)
    add_adapter(exact, settings)
    load_adapter(exact, tmp_path / "final_adapter")
    plain = sequence_logprobs(load_model(base, torch.float32, CPU), PROMPT, COMPLETION)
    wanted, found = (sequence_logprobs(each, PROMPT, COMPLETION) for each in (exact, merged))
    off, moved = (
        max(abs(a - b) for a, b in zip(wanted, each, strict=True)) for each in (found, plain)
    )
    assert off < (1e-5 if dtype == "float32" else moved)
    assert ("rounds each weight once" in capsys.readouterr().out) == (dtype == "bfloat16")
