"""Which models train: every architecture of the zoo is proved, logprobs and gradients; each known wrong is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atropos_common.model_math import why_refused
from benchmarks.model_zoo import ZOO, Architecture, build
from trainer_core.errors import UsageError
from trainer_core.policy import attention, logprobs
from trainer_core.policy.attention import register
from trainer_core.policy.logprobs import LastWord, chunked_scores, row_logprobs, whole_row
from trainer_core.policy.proof import prove

TRAINED = [name for name in ZOO if name not in ("Llama 4", "Nemotron")]
SEQUENCES = [torch.arange(3, 33) * 7 % 120, torch.arange(3, 20) * 11 % 120]


def _made(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = build(name, dtype=dtype)
    model.set_attn_implementation(register())
    return model


@pytest.mark.parametrize("name", TRAINED)
def test_an_architecture_is_computed_right(name: str) -> None:
    """Logprobs by the proof, and gradients of all parameters against the model's own eager code."""
    model = _made(name)
    assert prove(model) < 1e-4
    row_logprobs(model, whole_row(SEQUENCES)).sum().backward()
    packed = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    for tokens in SEQUENCES:
        shares = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        shares.gather(1, tokens[1:, None]).sum().backward()
    for n, p in model.named_parameters():
        mine, own = packed[n], p.grad
        assert (mine is None) == (own is None), n
        if mine is not None and own is not None:
            assert (mine - own).norm() <= 1e-4 * own.norm() + 1e-6, n


def test_half_precision_is_proved_in_float32() -> None:
    """On weights of bfloat16 the bound is as sharp, and every parameter is its own again afterwards."""
    model = _made("Qwen3-MoE", torch.bfloat16)
    before = dict(model.named_parameters())
    assert prove(model) < 1e-4
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert all(parameter.dtype == torch.bfloat16 for parameter in before.values())


def _no_last_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logprobs, "last_word", lambda config: LastWord())


def _state_runs_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logprobs, "carries_state", lambda config: False)


def _whole_without(left_out: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right: Any = attention._whole

        def wrong(*args: Any) -> torch.Tensor:
            return right(*(None if i == left_out else value for i, value in enumerate(args)))  # type: ignore[no-any-return]

        patch.setattr(attention, "_whole", wrong)

    return plant


def _no_window(patch: pytest.MonkeyPatch) -> None:
    right: Any = attention._padded
    patch.setattr(attention, "_padded", lambda *args: right(*args[:-1], None))


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """The configuration is enough."""


CHANGING: dict[str, Any] = {"rope_theta": 10000.0, "original_max_position_embeddings": 26, "factor": 4.0}
LONGROPE = CHANGING | {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "soft-capping of logits": ("Gemma 2", _no_last_word, "final_logit_softcapping = 3.0"),
    "soft-capping of scores": ("Gemma 2", _whole_without(5), "attn_logit_softcapping = 2.0"),
    "logits_scaling": ("Granite", _no_last_word, "logits_scaling = 4.0"),
    "logit_scale": ("Cohere 2", _no_last_word, "logit_scale = 0.25"),
    "sinks": ("GPT-OSS", _whole_without(6), "attention sinks (s_aux)"),
    "a state that runs on": ("Qwen3-Next", _state_runs_on, "layers of kind linear_attention"),
    "a state that runs on, Mamba": ("Falcon-H1", _state_runs_on, "layers of kind state-space"),
    "a window": ("Mistral", _no_window, "sliding_window = 8"),
    "longrope": ("longrope", _nothing, "rope_type longrope"),
    "dynamic": ("dynamic", _nothing, "rope_type dynamic"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_wrong_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, cause = PLANTED[what]
    monkeypatch.setitem(
        ZOO, "longrope", Architecture("LlamaConfig", {"rope_parameters": LONGROPE, "max_position_embeddings": 104})
    )
    dynamic = CHANGING | {"rope_type": "dynamic"}
    monkeypatch.setitem(
        ZOO, "dynamic", Architecture("LlamaConfig", {"rope_parameters": dynamic, "max_position_embeddings": 26})
    )
    model = _made(name)
    plant(monkeypatch)
    with pytest.raises(UsageError, match=r"does not compute \w+ right: packed sequences are off by") as refused:
        prove(model)
    assert cause in str(refused.value)


@pytest.mark.parametrize("name", ["Llama 4", "Nemotron"])
def test_what_does_not_go_our_way_at_all_is_refused_in_words(name: str) -> None:
    model = _made(name)
    with pytest.raises(UsageError, match="it cannot compute it"):
        prove(model)
    assert why_refused(model.config.to_dict()), "and from the configuration alone"


@pytest.mark.parametrize("labels", [1, 3])
def test_the_last_word_has_its_gradient(labels: int) -> None:
    """Scaled and capped logits, in chunks, against plain float64."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    wanted = torch.randint(11, (9, labels)) if labels > 1 else torch.randint(11, (9,))
    temperatures = torch.rand(9, dtype=torch.float64) + 0.5
    ways = []
    for chunked in (True, False):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if chunked:
            scores = chunked_scores(*inputs, None, wanted, temperatures, chunk_elements=33, last=LastWord(0.7, 2.5))
            own, entropy = scores.logprobs, scores.entropy
        else:
            logits = 2.5 * torch.tanh(0.7 * inputs[0] @ inputs[1].T / 2.5) / temperatures[:, None]
            shares = logits.log_softmax(-1)
            own, entropy = shares.gather(1, wanted.view(9, -1)).view(wanted.shape), -(shares.exp() * shares).sum(1)
        (own * torch.arange(own.numel(), dtype=own.dtype).view(own.shape)).sum().backward()
        ways.append([own, entropy, *(value.grad for value in inputs)])
    for mine, plain in zip(*ways, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-10, rtol=1e-9)
