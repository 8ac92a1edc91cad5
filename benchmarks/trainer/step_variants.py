"""Divide the time of one optimizer step into phases, for several ways to compute it, on one GPU.

    python -m benchmarks.trainer.step_variants --shape qwen3-1.7b --kernels --limit 240 --json
    python -m benchmarks.trainer.step_variants --shape qwen3-8b --limit 300 --json
    python -m benchmarks.trainer.step_variants --shape tiny --mix short    # a trial on a CPU

The batch is that of `trainer_step.py`, the step is the trainer's own, from rollouts that were read
beforehand: the trainer reads the next batch while it trains. Phases are measured on the device:
body (the layers, forward), head (its logprobs), head_back, body_back, clip, compute (the optimizer)
and write; `other` is the rest of the step. MFU is relative to the card's dense bfloat16 peak.
`--kernels` profiles one more step of the first variant and sums kernels by kind. Nothing new begins
after `--limit` seconds; a variant that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch

from atropos_common.models.model_math import LOGITS_AT_ONCE
from benchmarks.support.checks import Checks
from benchmarks.support.shapes import SHAPES
from benchmarks.trainer_step import MIXES, Ours, flops_of, make_batch, mfu_of
from trainer_core.policy import attention, logprobs
from trainer_core.rollouts.batch import Rollout

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def kept(yes: bool) -> Patch:
    """Logits stay for the backward pass, or are computed twice, whatever the room."""

    def patch() -> contextlib.AbstractContextManager[Any]:
        whole = logprobs.chunked_scores
        return mock.patch.object(
            logprobs, "chunked_scores", lambda *args, **more: whole(*args, **(more | {"keep": yes}))
        )

    return patch


def chunks(power: int) -> Patch:
    """Compute this many logits at a time, as a power of two."""
    return lambda: mock.patch.dict(LOGITS_AT_ONCE, {True: 1 << power})


def summed_apart() -> contextlib.AbstractContextManager[Any]:
    """The head's gradient is added up after each product, not by it."""

    def add(total: torch.Tensor, to_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        total += torch.mm(to_logits.T, hidden, out_dtype=total.dtype)

    return mock.patch.object(logprobs, "_add_product", add)


def heads_not_repeated() -> contextlib.AbstractContextManager[Any]:
    """FlashAttention 2 gets the fewer heads of keys and values as they are."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(query, key, value, packing, groups, scaling, window):  # type: ignore[no-untyped-def]
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        starts, longest = packing.cumulative, packing.max_length
        return varlen_attn(
            query, key, value, starts, starts, longest, longest, window_size=(-1, 0), scale=scaling
        )

    return mock.patch.object(attention, "_varlen", attend)


def static_shapes() -> contextlib.AbstractContextManager[Any]:
    """Layers are compiled for each length of a row."""
    return mock.patch.object(
        torch.nn.Module, "compile", lambda self, **_: _compile(self, dynamic=False)
    )


_compile = torch.nn.Module.compile
FLASH2 = {"attention_kernel": "flash_attention_2"}
BIG = {
    "optimizer": "adafactor",
    "master_weights": "stochastic",
    "gradient_dtype": "bfloat16",
    "pack_tokens": 16_384,
}
VARIANTS: dict[str, dict[str, tuple[dict[str, Any], list[Patch]]]] = {
    "qwen3-1.7b": {
        "as it is": ({}, []),
        "logits computed twice": ({}, [kept(False)]),
        "logits kept": ({}, [kept(True)]),
        "logits kept, 2^30 at a time": ({}, [kept(True), chunks(30)]),
        "bf16 gradients": ({"gradient_dtype": "bfloat16"}, []),
        "rows of 32,768": ({"pack_tokens": 32_768}, []),
        "fp32 logits": ({"head_dtype": "float32"}, []),
        "importance weights": ({"ratio_base": "proximal"}, []),
        "a compilation for each length": ({}, [static_shapes]),
        "one row": ({"pack_tokens": 49_152}, []),
        "rows of 32,768, 2^31 logits at a time": (
            {"pack_tokens": 32_768},
            [kept(True), chunks(30)],
        ),
        "rows of 32,768, head's gradient summed apart": ({"pack_tokens": 32_768}, [summed_apart]),
        "rows of 32,768, FlashAttention 2": ({"pack_tokens": 32_768} | FLASH2, []),
        "rows of 32,768, FlashAttention 2, heads not repeated": (
            {"pack_tokens": 32_768} | FLASH2,
            [heads_not_repeated],
        ),
        "rows of 32,768, a compilation for each length": ({"pack_tokens": 32_768}, [static_shapes]),
        "rows of 32,768, all of these, bf16 gradients": (
            {"pack_tokens": 32_768, "gradient_dtype": "bfloat16"},
            [kept(True), chunks(30), static_shapes],
        ),
    },
    "qwen3-8b": {
        "as it is": (BIG, []),
        "FlashAttention 2": (BIG | FLASH2, []),
        "logits kept, 2^30 at a time": (BIG, [kept(True), chunks(30)]),
        "checkpointing": (BIG | {"gradient_checkpointing": "on"}, []),
        "checkpointing, activations in the host": (
            BIG | {"gradient_checkpointing": "on", "activation_offload": True},
            [],
        ),
        "adamw_8bit, fp32 masters, both in the host": (
            BIG | {"optimizer": "adamw_8bit", "master_weights": "fp32", "optimizer_offload": True},
            [],
        ),
        "adamw_8bit, kahan": (BIG | {"optimizer": "adamw_8bit", "master_weights": "kahan"}, []),
        "rows of 8,192": (BIG | {"pack_tokens": 8192}, []),
    },
}
VARIANTS["qwen3-moe-8"] = VARIANTS["qwen3-30b-a3b"] = VARIANTS["tiny-moe"] = {
    "checkpointing": VARIANTS["qwen3-8b"]["checkpointing"],
    "checkpointing, one row": (
        VARIANTS["qwen3-8b"]["checkpointing"][0] | {"pack_tokens": 49_152},
        [],
    ),
    "checkpointing, not compiled": (
        VARIANTS["qwen3-8b"]["checkpointing"][0] | {"compile": "off"},
        [],
    ),
}
VARIANTS["tiny"] = {
    name: VARIANTS["qwen3-1.7b"][name]
    for name in ("as it is", "logits kept", "bf16 gradients", "fp32 logits", "importance weights")
}
KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk"),
    "attention": ("flash", "fmha", "attention"),
    "compiled": ("triton",),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "copies": ("memcpy", "memset", "copy_"),
}


class Phases:
    """Seconds of the device in each phase of a step."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._spans: list[tuple[str, Any, Any]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            found = function(*args, **kwargs)
            self._spans.append((name, began, self._now()))
            return found

        return call

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def totals(self) -> dict[str, float]:
        """Return the totals by name, and forget them."""
        if self._cuda:
            torch.cuda.synchronize()
        sums: dict[str, float] = {}
        for name, began, ended in self._spans:
            sums[name] = sums.get(name, 0.0) + (
                began.elapsed_time(ended) / 1e3 if self._cuda else ended - began
            )
        self._spans.clear()
        if "back" in sums:
            sums["body_back"] = sums.pop("back") - sums.get("head_back", 0.0)
        return sums


@contextlib.contextmanager
def watched(phases: Phases, runner: Ours) -> Iterator[None]:
    """Within, the parts of a step are timed."""
    head, stepper = logprobs._HeadScores, runner.stepper
    with contextlib.ExitStack() as stack:
        for owner, name, phase in (
            (logprobs, "_predicting_states", "body"),
            (torch.Tensor, "backward", "back"),
            (stepper, "clip", "clip"),
            (stepper, "compute", "compute"),
            (stepper, "write", "write"),
        ):
            stack.enter_context(
                mock.patch.object(owner, name, phases.timed(phase, getattr(owner, name)))
            )
        for name, phase in (("forward", "head"), ("backward", "head_back")):
            timed = staticmethod(phases.timed(phase, getattr(head, name)))
            stack.enter_context(mock.patch.object(head, name, timed))
        yield


def measure(
    shape: str,
    mix: str,
    settings: dict[str, Any],
    patches: list[Patch],
    steps: int,
    *,
    kernels: bool,
) -> dict[str, Any]:
    """One variant: median seconds, MFU, phases, peak."""
    cuda = torch.cuda.is_available()
    batch = make_batch(shape, mix)
    flops, phases = flops_of(shape, batch), Phases(cuda)
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for patch in patches:
            stack.enter_context(patch())
        began = time.perf_counter()
        runner = Ours(shape, torch.device("cuda" if cuda else "cpu"), **settings)
        rollouts = runner.read(batch)
        runner.train(rollouts)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        first, took, each = time.perf_counter() - began, [], []
        stack.enter_context(watched(phases, runner))
        for _ in range(steps):
            began = time.perf_counter()
            runner.train(rollouts)
            each.append(phases.totals())
            took.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        by_kind = _kernels(runner, rollouts) if kernels and cuda else None
    seconds = median(took)
    parts = {name: median(one[name] for one in each) for name in each[0]}
    return {
        "step_s": seconds,
        "mfu": mfu_of(flops, seconds),
        "peak_gib": peak,
        "first_s": first,
        "phases_s": parts | {"other": seconds - sum(parts.values())},
        "kernels": by_kind,
        "said": said.getvalue().strip().splitlines(),
    }


def _kernels(runner: Ours, rollouts: list[Rollout]) -> dict[str, Any]:
    """Seconds of the device by kind of kernel, and the longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        runner.train(rollouts)
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / 1e6 for event in profiled.key_averages()}
    kinds: dict[str, float] = {}
    for name, seconds in found.items():
        kind = next(
            (kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)),
            "other",
        )
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    longest = sorted(found.items(), key=lambda item: -item[1])[:25]
    return {"kinds_s": kinds, "longest_s": {name[:110]: seconds for name, seconds in longest}}


def show(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name:<58} {found['error'][:150]}"
    mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
    peak = "-" if found["peak_gib"] is None else f"{found['peak_gib']:.1f}"
    parts = " ".join(f"{phase} {seconds:.3f}" for phase, seconds in found["phases_s"].items())
    lines = [f"{name:<58} {found['step_s']:.3f} s  MFU {mfu}  peak {peak} GiB   {parts}"]
    if found["kernels"]:
        lines += [f"    {kind:<12}{s:.3f} s" for kind, s in found["kernels"]["kinds_s"].items()]
        lines += [
            f"        {s:.3f} s  {kernel}" for kernel, s in found["kernels"]["longest_s"].items()
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=[*VARIANTS], default="qwen3-1.7b" if cuda else "tiny")
    parser.add_argument("--mix", choices=MIXES, default="lognormal" if cuda else "short")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps, after one that is not"
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these variants alone")
    parser.add_argument("--kernels", action="store_true", help="profile the first variant")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds after which nothing new is begun"
    )
    parser.add_argument(
        "--json", action="store_true", help="one object at the end, beside the lines on stderr"
    )
    options = parser.parse_args()
    assert options.shape in SHAPES
    began, found = time.perf_counter(), {}
    for number, (name, (settings, patches)) in enumerate(VARIANTS[options.shape].items()):
        if time.perf_counter() - began > options.limit or (
            options.only and name not in options.only
        ):
            continue
        try:
            found[name] = measure(
                options.shape,
                options.mix,
                settings,
                patches,
                options.steps,
                kernels=options.kernels and not number,
            )
        except Exception as error:  # the other variants are still measured
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()
        print(show(name, found[name]), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        about = {"shape": options.shape, "mix": options.mix, "torch": torch.__version__}
        about |= {
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(about | {"variants": found}))
    checks = Checks()
    for name, row in found.items():
        checks.that("error" not in row, f"the variant {name} failed: {row.get('error')}")
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
