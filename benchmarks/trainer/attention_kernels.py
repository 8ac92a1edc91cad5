"""Compare FlashAttention 4 with FlashAttention 2 on one GPU: speed, and error against float32.

    python -m benchmarks.trainer.attention_kernels

Rows: 32,000 tokens of the lengths of `trainer_step.py`, one sequence of 32,768, and seven short
ones, for which output and gradients are held against whole scores in float32 (relative distance of
the whole tensor: out, query, key, value).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.support.checks import Checks
from benchmarks.trainer_step import make_batch, sizes
from trainer_core.policy.attention import _varlen, flash4, kernels, layout, one_by_one

FARTHEST = 0.02
"""Largest relative distance of output and gradients in bfloat16 from whole scores in float32."""
SHORT = [1, 7, 300, 1000, 64, 2048, 129]
LONG = [32_768]
SHAPES: list[tuple[int, int, int, int, int | None]] = [
    (16, 8, 128, 128, None),
    (32, 8, 128, 128, None),
    (32, 8, 64, 64, None),
    (16, 8, 128, 128, 128),
    (8, 4, 256, 256, None),
    (16, 16, 192, 128, None),
    (8, 2, 96, 96, None),
    (8, 2, 80, 80, None),
]
"""Heads of queries and keys, size of a head in keys and values, window."""


def row() -> list[int]:
    """Lengths of a row of the benchmark's batch."""
    lengths: list[int] = []
    for length in sizes(make_batch("qwen3-1.7b", "lognormal")):
        if sum(lengths) + length <= LONG[0]:
            lengths.append(length)
    return lengths


def milliseconds(function: Callable[[], Any], repeats: int = 10) -> float:
    function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats * 1e3


def compare(
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    window: int | None,
    lengths: list[int],
    checks: Checks,
) -> str:
    device, tokens, groups = torch.device("cuda"), sum(lengths), heads // kv_heads
    packing = layout(tuple(lengths), device, torch.bfloat16)
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(count, tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
        for count, width in ((heads, size), (kv_heads, size), (kv_heads, value_size))
    )
    to_out = torch.randn(tokens, heads, value_size, device=device, dtype=torch.bfloat16)
    inputs = query, key, value

    def newer() -> torch.Tensor:
        turned = (x.transpose(0, 1) for x in inputs)
        return flash4(*turned, packing.cumulative, packing.max_length, window=window)  # type: ignore[misc]

    def older() -> torch.Tensor:
        return _varlen(query, key, value, packing, groups, None, window)

    def both(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = function()
        return out, *torch.autograd.grad(out, inputs, to_out)

    words = (
        f"{heads:>3} {kv_heads:>2} {size:>3} {value_size:>3}  window {window or '-':>4}  "
        f"{tokens:>6} tokens"
    )
    for name, function in (("FA4", newer), ("FA2", older)):
        found = [x.float() for x in both(function)]
        words += (
            f"   {name} {milliseconds(function):.2f} ms, with gradients "
            f"{milliseconds(lambda: both(function)):.2f}"  # noqa: B023
        )
        if tokens == sum(SHORT):
            wide = [x.detach().float().requires_grad_() for x in inputs]
            out = one_by_one(*wide, packing, groups, window=window)[0]  # type: ignore[arg-type]
            exact = out, *torch.autograd.grad(out, wide, to_out.float())
            offs = distances(found, exact)
            words += ", off " + " ".join(f"{off:.1e}" for off in offs)
            checks.at_most(
                f"the largest distance of {name} from float32 ({heads} heads of {size})",
                max(offs),
                FARTHEST,
            )
    return words


def distances(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    return [
        float((mine - theirs).norm() / theirs.norm())
        for mine, theirs in zip(found, exact, strict=True)
    ]


def main() -> int:
    if kernels() is None or not torch.cuda.is_available():
        print("FlashAttention 4 needs a GPU, and: pip install flash-attn-4", file=sys.stderr)
        return 1
    checks = Checks()
    for lengths in (row(), LONG):
        print(compare(*SHAPES[0], lengths, checks), flush=True)
    for shape in SHAPES:
        print(compare(*shape, SHORT, checks), flush=True)
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
