"""FlashAttention 4 in the trainer with kernels computed on the CPU; tests/gpu/test_kernels.py has
the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer_core.errors import UsageError
from trainer_core.policy import attention
from trainer_core.policy.attention import NAME_FLASH4, layout, packed_attention, register
from trainer_core.policy.kernel_choice import _heads, use_attention, wrong_kernels

CPU = torch.device("cpu")


def _by_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any
) -> Iterator[Any]:
    """Query, key and value in float32, [heads, tokens, size], and the shares of attention, of each
    sequence."""
    lengths = more["cu_seqlens_q"].diff().tolist()
    left, groups = more["window_size_left"], query.shape[1] // key.shape[1]
    for q, k, v in zip(
        *(x.float().transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True
    ):
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) * more["softmax_scale"]
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        yield (
            q,
            k,
            v,
            scores.masked_fill(~(seen if left is None else seen.triu(-left)), -torch.inf).softmax(
                -1
            ),
        )


class Kernels:
    """`flash_attn.cute.interface`, by operations; its gradients are `factor` times what they should
    be."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def _flash_attn_fwd(
        self, *tensors: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [(shares @ v).transpose(0, 1) for _, _, v, shares in _by_sequence(*tensors, **more)]
        return torch.cat(parts).to(tensors[0].dtype), torch.zeros(
            tensors[0].shape[1], len(tensors[0])
        )

    def _flash_attn_bwd(
        self, query: Any, key: Any, value: Any, out: Any, to_out: Any, sums: Any, **more: Any
    ) -> None:
        found, done = [], 0
        for q, k, v, shares in _by_sequence(query, key, value, **more):
            onto = to_out[done : done + q.shape[1]].float().transpose(0, 1)
            back = onto @ v.transpose(1, 2)
            scores = shares * (back - (back * shares).sum(-1, keepdim=True)) * more["softmax_scale"]
            found.append((scores @ k, scores.transpose(1, 2) @ q, shares.transpose(1, 2) @ onto))
            done += q.shape[1]
        for name, like, parts in zip(
            ("dq", "dk", "dv"), (query, key, value), zip(*found, strict=True), strict=True
        ):
            whole = torch.cat(parts, 1).unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1)
            more[name].copy_(whole * self.factor)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(attention, "kernels", lambda: made)
    attention.PROVEN.clear()
    wrong_kernels.cache_clear()
    return made


@pytest.mark.parametrize("window", [None, 16])
def test_right_kernels_are_taken(window: int | None) -> None:
    assert wrong_kernels(CPU, torch.bfloat16, 4, 2, 64, 32, window) == ""
    assert {(64, 32)} == attention.PROVEN


def test_wrong_gradients_are_seen(kernels: Kernels) -> None:
    """So is a head of 80 with 4.0.0b18: right forward, wrong backward."""
    kernels.factor = 1.02
    found = wrong_kernels(CPU, torch.bfloat16, 4, 2, 80, 80, None)
    assert found == "results for heads of size 80 are wrong, relative error 0.02"
    assert not attention.PROVEN


def test_what_does_not_run_is_told(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_flash_attn_fwd", lambda *_, **__: 1 / 0)
    assert (
        wrong_kernels(CPU, torch.bfloat16, 4, 2, 64, 64, None)
        == "it does not run: ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_a_packed_row_is_the_same(
    compiled: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (5, 40, 1)
    row = layout(lengths, CPU, torch.bfloat16)
    by_kernel = flash4_layout(lengths)
    wrong_kernels(CPU, torch.bfloat16, 4, 2, 64, 64, None)
    inputs = [
        torch.randn(1, heads, 46, 64, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    ]

    def run(packing: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            module = torch.nn.Module()
            return packed_attention(
                module, *tensors, None, packing=packing, sliding_window=window, **more
            )[0]

        call = (
            torch.compile(attend, backend="aot_eager", fullgraph=True)
            if compiled and more
            else attend
        )
        out = call(*inputs)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)

    for mine, theirs in zip(run(by_kernel, by_flash4=True), run(row), strict=True):
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < 0.01


def flash4_layout(lengths: tuple[int, ...]) -> Any:
    """As it would be on a GPU."""
    return replace(
        layout(lengths, CPU, torch.bfloat16), varlen=True, max_length=256, pad=None, unpad=None
    )


def test_registered_operators_are_sound() -> None:
    query, key = (
        torch.randn(6, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2)
    )
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    value = key.detach().clone().requires_grad_()
    checks = torch.library.opcheck(
        attention._flash4_forward, (query, key, value, starts, 4, 0.35, -1)
    )
    assert set(checks.values()) == {"SUCCESS"}


def _model() -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=register()
    )


def test_the_kernel_is_chosen_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    assert _heads(model) == ((4, 2, 16, 16), None)
    assert use_attention(model, "auto") == use_attention(model, "flash_attention_2") == "sdpa"
    with pytest.raises(
        UsageError, match=r"--attention-kernel flash_attention_4 needs a GPU .* use auto"
    ):
        use_attention(model, "flash_attention_4")
    card = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(model, "parameters", lambda: iter([card]))
    monkeypatch.setattr("trainer_core.policy.kernel_choice.compute_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(
        "trainer_core.policy.kernel_choice._why_not_flash4", lambda _: "it is not installed"
    )
    assert use_attention(model, "auto") == "flash_attention_2"
    with pytest.raises(
        UsageError, match=r"--attention-kernel flash_attention_4: it is not installed; or use auto"
    ):
        use_attention(model, "flash_attention_4")
    monkeypatch.setattr("trainer_core.policy.kernel_choice._why_not_flash4", lambda _: "")
    assert use_attention(model, "flash_attention_2") == "flash_attention_2"
    assert model.config._attn_implementation == register()
    assert use_attention(model, "auto") == "flash_attention_4"
    assert model.config._attn_implementation == NAME_FLASH4


def test_sizes_of_latent_attention() -> None:
    config = SimpleNamespace(
        num_attention_heads=16,
        qk_head_dim=192,
        head_dim=64,
        kv_lora_rank=512,
        v_head_dim=128,
        num_key_value_heads=16,
    )
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert _heads(model) == ((16, 16, 192, 128), None)  # type: ignore[arg-type]


def test_a_configuration_without_heads_is_left_as_it_is() -> None:
    """A model of state spaces alone, or one with a number of heads for each layer."""
    for config in (
        SimpleNamespace(hidden_size=64),
        SimpleNamespace(hidden_size=64, num_attention_heads=[4, 8]),
    ):
        model = SimpleNamespace(
            config=SimpleNamespace(get_text_config=lambda config=config: config)
        )
        heads, _ = _heads(model)  # type: ignore[arg-type]
        assert not all(isinstance(one, int) for one in heads)
