"""Measure how long the trainer waits for run-api and packing while it trains a step.

    python -m benchmarks.trainer.intake [--sequences 64 256] [--length 8192] [--train-s 13]
        [--times 3] [--rows NAME ...]

Three ways on the same groups: atroposlib's run-api asked as it was until 2026-11-22, compressed and
after the step; our run-api asked after the step; our run-api asked ahead, as the trainer does. The
step is the product's own, of a tiny model on one thread of the CPU, repeated until it has taken
`--train-s` seconds: 64 x 8,192 tokens at 40,000 a second, which is what an H200 does, are 13.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.support.checks import Checks
from benchmarks.support.children import free_ports
from benchmarks.trainer_step import Ours, make_batch
from trainer_core.rollouts.batch import Batch, read_batch
from trainer_core.rollouts.client import RunApi
from trainer_core.rollouts.packing import pack

VOCABULARY = 151_936
GROUP = 8
PROMPT = 128
ROW_TOKENS = 16_384
OLD_TIMEOUT_S = 30.0
"""A trainer's patience with `GET /batch` in those days: then the batch was gone."""
BARE = ["-m", "uvicorn", "atroposlib.api:app", "--log-level", "error"]
OURS = ["-m", "atropos_api"]

Taken = dict[str, float]
"""Seconds by name; `waited` is what lies on the critical path."""


def make_group(length: int, dice: np.random.Generator) -> dict[str, Any]:
    """A group of 8 sequences of `length` tokens as an environment sends it."""
    tokens = dice.integers(1, VOCABULARY, (GROUP, length)).tolist()
    logprobs = (-dice.exponential(1.0, (GROUP, length))).tolist()
    return {
        "tokens": tokens,
        "masks": [[-100] * PROMPT + row[PROMPT:] for row in tokens],
        "scores": dice.random(GROUP).tolist(),
        "inference_logprobs": [[1.0] * PROMPT + row[PROMPT:] for row in logprobs],
    }


@contextlib.contextmanager
def serving(words: list[str]) -> Iterator[str]:
    """The URL of a run-api that answers."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    child = subprocess.Popen(
        [sys.executable, *words, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/info")
                break
            time.sleep(0.05)
        yield url
    finally:
        child.terminate()
        child.wait()


def opened(url: str, sequences: int) -> RunApi:
    """A trainer's registration."""
    registration = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": sequences,
        "max_token_len": 8192,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 1,
        "num_steps": 100,
    }
    api = RunApi(url, registration, threading.Event())
    with contextlib.redirect_stdout(io.StringIO()):
        api.open(0)
    return api


def send(url: str, groups: list[dict[str, Any]]) -> None:
    for group in groups:
        httpx.post(f"{url}/scored_data", json=group, timeout=120).raise_for_status()


def read(raw: list[Any]) -> Batch:
    return read_batch(raw, seq_len=1 << 30)


def timed(name: str, taken: Taken, call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    found = call()
    taken[name] = time.perf_counter() - began
    return found


def finish(raw: list[Any], taken: Taken, sequences: int) -> Taken:
    """Read and pack what was fetched after the step."""
    batch = timed("read", taken, lambda: read(raw))
    timed("pack", taken, lambda: pack(batch.rollouts, ROW_TOKENS))
    assert len(batch.rollouts) == sequences, "the batch is whole"
    return taken | {"waited": sum(taken[name] for name in ("fetch", "read", "pack"))}


def old(
    url: str, api: RunApi, groups: list[Any], train: Callable[[], None], sequences: int
) -> Taken:
    """As it was: compressed, decoded by the standard library, after the step."""
    send(url, groups)
    taken: Taken = {}
    timed("train", taken, train)
    ask = lambda: httpx.get(f"{url}/batch", timeout=OLD_TIMEOUT_S).json()["batch"]  # noqa: E731
    try:
        return finish(timed("fetch", taken, ask), taken, sequences)
    except httpx.TimeoutException:
        assert httpx.get(f"{url}/status", timeout=120).json()["queue_size"] == 0
        return taken | {"waited": float("inf")}


def after(
    url: str, api: RunApi, groups: list[Any], train: Callable[[], None], sequences: int
) -> Taken:
    """Our run-api, asked after the step, as for the first batch of all."""
    send(url, groups)
    taken: Taken = {}
    timed("train", taken, train)
    return finish(timed("fetch", taken, lambda: api.next_batch(0)), taken, sequences)


def ahead(
    url: str, api: RunApi, groups: list[Any], train: Callable[[], None], sequences: int
) -> Taken:
    """Our run-api, asked while the step trains."""
    send(url, groups)
    taken: Taken = {}
    coming = api.fetch_ahead(read)
    timed("train", taken, train)
    api.await_from(0)
    batch = timed("rest", taken, coming.answer)
    timed("pack", taken, lambda: pack(batch.rollouts, ROW_TOKENS))
    assert len(batch.rollouts) == sequences, "the batch is whole"
    return taken | {"waited": taken["rest"] + taken["pack"]}


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    says: str
    api: list[str]
    """How its run-api is started."""
    take: Callable[..., Taken]


WAYS = {
    "old": Way("atroposlib's run-api, gzip, after the step", BARE, old),
    "after": Way("our run-api, after the step (the first batch)", OURS, after),
    "ahead": Way("our run-api, ahead (every other batch)", OURS, ahead),
}
PARTS = ("fetch", "read", "pack", "train")


def trainer(seconds: float) -> Callable[[], None]:
    """Optimizer steps of a tiny model that take about `seconds`."""
    ours, batch = Ours("tiny", torch.device("cpu"), torch_threads=1), make_batch("tiny", "short")
    ours.step(batch)
    began = time.perf_counter()
    ours.step(batch)
    times = max(1, round(seconds / (time.perf_counter() - began)))

    def train() -> None:
        for _ in range(times):
            ours.step(batch)

    return train


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.trainer.intake", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[64, 256], help="sequences of a batch"
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of each")
    parser.add_argument(
        "--train-s", type=float, default=13.0, help="seconds that the step beside it takes"
    )
    parser.add_argument(
        "--times", type=int, default=3, help="batches of each way; the median is shown"
    )
    parser.add_argument("--rows", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    train, dice, checks = trainer(options.train_s), np.random.default_rng(0), Checks()
    print(f"| sequences x tokens | way | trainer waited (s) | {' | '.join(PARTS)} |\n{'|---' * 7}|")
    for sequences in options.sequences:
        groups = [make_group(options.length, dice) for _ in range(sequences // GROUP)]
        for way in (WAYS[name] for name in options.rows):
            with serving(way.api) as url:
                api = opened(url, sequences)
                if way.take is ahead:
                    send(url, groups)
                    api.next_batch(0)
                found = [way.take(url, api, groups, train, sequences) for _ in range(options.times)]
            waits = [one["waited"] for one in found]
            waited = f"{median(waits):.2f} (most {max(waits):.2f})"
            if max(waits) == float("inf"):
                waited = f"{waits.count(max(waits))} of {len(waits)} lost after {OLD_TIMEOUT_S:.0f}"
            cells = [f"{sequences} x {options.length:,}", way.says, waited]
            for part in PARTS:
                values = [one[part] for one in found if part in one]
                cells.append(f"{median(values):.2f}" if values else "")
            print(f"| {' | '.join(cells)} |", flush=True)
            if way.api is OURS:
                checks.that(max(waits) < float("inf"), f"a batch was lost: {cells[0]}, {way.says}")
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
