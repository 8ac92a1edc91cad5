"""Mode `broadcast` (`shared_vllm --use-shared-memory`): the trainer has GPUs of its own and broadcasts its weights.

All workers of all servers form one group with the trainer, over NCCL between GPUs and gloo on CPUs. The model's
parameters lie one after the other in a single piece of memory, so that a publish packs nothing that a checkpoint holds
as it is trained: a few large broadcasts leave from where the weights are. A server freezes generation only while it
receives.

A server that dies takes the group along: what it was and in which phase is said, its return is awaited, and a new group
gives everyone the present weights.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch

from atropos_common.bridge import BridgeInfo
from atropos_common.strided import contiguous
from atropos_common.transfer import SentTensor, TransferInit, TransferReport, TransferUpdate, chunks, place
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.policy.checkpoint_layout import Spot, checkpoint_layout, view_of
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.base import Phases, SeparateWeights
from trainer_core.weight_sync.collectives import BroadcastGroup, Rendezvous, connect, meeting_point

CHUNK_BYTES = 256 << 20
"""Of one broadcast: long enough to run at the link's speed, short enough to unpack while the next one comes."""
POLL_S = 0.0002
BRISK_S = 0.05
"""After this long without an end, polls become rare."""
LAST_WORDS_S = 1.0
"""Time that the other servers get to say what they saw, when one call has failed."""

T = TypeVar("T")


class Broadcast(SeparateWeights):
    """Strategy of mode `broadcast`."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        require_nodes(config)
        self._place = meeting_point(config.init_method)
        self._meeting: Rendezvous | None = None
        self._group: BroadcastGroup | None = None

    def load(self, weights: Path | None) -> torch.nn.Module:
        model = super().load(weights)
        self._stream, self._tensors, self._copied = into_one_piece(model)
        self._parts = chunks(self._tensors, CHUNK_BYTES)
        return model

    def _deliver(self, clock: Phases) -> bool:
        """Broadcast the update; a server that died meanwhile is waited for."""
        began = time.perf_counter()
        try:
            if self._group is None:
                raise EngineGone("the group broke before")
            reports = self._send(self._group)
        except EngineGone as error:
            print(f"[WARNING] version {self.version} did not reach every server: {error}")
            self.fed.clear()
            with clock("begun_anew"):
                self._serve_again(self.engines[0])
        else:
            clock.seconds |= _phases(reports, time.perf_counter() - began)
        return True

    def close(self) -> None:
        self._leave()
        super().close()

    @property
    def _limit_s(self) -> float:
        """Seconds for a broadcast. With `in_flight = "wait"` a server may let completions end first, and everybody else
        waits for it meanwhile."""
        first = self.config.in_flight_timeout if self.config.in_flight == "wait" else 0.0
        return self.config.broadcast_timeout + first

    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        """Form a new group of all servers and give all of them the weights: a group is whole or none."""
        infos = {each: info if each is engine else each.meet() for each in self.engines}
        with self.backoff.attempt(*(info.instance_id for info in infos.values())):
            self._leave()
            self._group = self._form(infos)
            self._send(self._group)
        workers = sum(info.workers for info in infos.values())
        print(f"✓ Broadcast group: the trainer and {workers} workers of {', '.join(e.base_url for e in infos)}")
        self.fed.update(infos)

    def _form(self, infos: Mapping[ServerClient, BridgeInfo]) -> BroadcastGroup:
        """Let everyone meet, then connect.

        Raises:
            EngineGone: somebody did not come; says who, and in which phase.
        """
        backend, timeout_s = self._backend(infos), self._limit_s
        world_size = 1 + sum(info.workers for info in infos.values())
        meeting = self._meeting = Rendezvous(backend, *self._place, world_size, timeout_s)
        requests, first_rank = {}, 1
        owners: dict[int, str] = {}
        for engine, info in infos.items():
            requests[engine] = TransferInit(
                backend=backend, address=meeting.address, port=meeting.port, key=meeting.key, secret=meeting.secret,
                nccl_id=meeting.nccl_id, first_rank=first_rank, world_size=world_size, timeout_s=timeout_s,
                chunk_bytes=CHUNK_BYTES, tensors=self._tensors,
            )  # fmt: skip
            owners |= dict.fromkeys(range(first_rank, first_rank + info.workers), engine.base_url)
            first_rank += info.workers
        joins = Calls({engine.base_url: partial(engine.join_transfer, requests[engine]) for engine in infos})

        def who_is_missing() -> str:
            missing = sorted({owners[rank] for rank in meeting.missing()})
            return f"{', '.join(missing)} did not come to {meeting.address}:{meeting.port}"

        self._until(lambda: not meeting.missing(), joins, "rendezvous", who_is_missing)
        meeting.go()
        connecting = Calls({"the trainer": lambda: connect(meeting, self.device, timeout_s)})

        def connected() -> bool:
            connecting.raise_failure()
            return connecting.over() and joins.over()

        hint = " (NCCL_DEBUG=INFO tells why; NCCL_P2P_DISABLE, NCCL_SOCKET_IFNAME)" if backend == "nccl" else ""
        self._until(connected, joins, "connect", lambda: f"no connection over {backend}{hint}")
        return connecting.results()["the trainer"]

    def _backend(self, infos: Mapping[ServerClient, BridgeInfo]) -> str:
        here = "nccl" if self.device.type == "cuda" else "gloo"
        for engine, info in infos.items():
            if info.receives is None:
                raise UsageError(
                    f"{engine.base_url} takes no broadcast: start it with ATROPOS_WEIGHT_UPDATES=1 (and without "
                    "VLLM_ENABLE_SHARED_WEIGHTS)"
                )
            if info.receives != here:
                raise UsageError(
                    f"{engine.base_url} receives over {info.receives}, but the trainer is on {self.device}: both sides "
                    "need GPUs (other ones), or both the CPU; see --device"
                )
        return here

    def _send(self, group: BroadcastGroup) -> dict[str, TransferReport]:
        """Broadcast the present weights as `self.version`; every server answers with them when this returns."""
        request = TransferUpdate(
            weight_version=self.version, timeout_s=self._limit_s, in_flight=self.config.in_flight,
            wait_s=self.config.in_flight_timeout,
        )  # fmt: skip
        with torch.no_grad():
            for sent, tensor in self._copied:
                sent.copy_(tensor)
        updates = Calls({engine.base_url: partial(engine.receive, request) for engine in self.engines})
        group.send(self._stream, self._parts)
        self._until(
            lambda: group.sent() and updates.over(), updates, "transfer",
            lambda: f"{', '.join(updates.waiting())} did not finish",
        )  # fmt: skip
        return updates.results()

    def _until(self, done: Callable[[], bool], calls: Calls[T], phase: str, what: Callable[[], str]) -> None:
        """Poll until `done`. A server that failed, a broken connection or the timeout ends the wait and the group.

        Raises:
            EngineGone: with the phase and the cause; a new group may do.
            EngineError: a server refused.
        """
        began, timeout_s = time.monotonic(), self._limit_s
        try:
            while not done():
                calls.raise_failure()
                waited = time.monotonic() - began
                if waited > timeout_s:
                    raise RuntimeError(f"{what()} within {timeout_s:.0f} s")
                time.sleep(POLL_S if waited < BRISK_S else 20 * POLL_S)
            calls.raise_failure()
        except (EngineGone, EngineError, RuntimeError) as error:
            calls.wait(LAST_WORDS_S)
            self._leave()
            raise self._cause(error, calls, phase) from None

    def _cause(self, error: Exception, calls: Calls[T], phase: str) -> EngineGone | EngineError:
        """The server that died, or says nothing, explains the others' complaints; a refusal is final."""
        failures = calls.failures() or [error]
        for failure in failures:
            if isinstance(failure, EngineError):
                return failure
        dead = [failure for failure in failures if isinstance(failure, EngineGone) and not failure.answered]
        silent = [f"no word from {name}" for name in calls.waiting() if not dead]
        text = "; ".join([*silent, *(str(failure).strip().splitlines()[0] for failure in dead or failures)])
        return EngineGone(f"the broadcast broke (phase {phase}): {text}")

    def _leave(self) -> None:
        (group, self._group), (meeting, self._meeting) = (self._group, None), (self._meeting, None)
        if group is not None:
            group.close()
        if meeting is not None:
            meeting.close()


class Calls(Generic[T]):
    """One call for each name, all at the same time, in threads that nobody has to wait for."""

    def __init__(self, calls: Mapping[str, Callable[[], T]]) -> None:
        self.names = list(calls)
        self._results: dict[str, T] = {}
        self._failures: dict[str, Exception] = {}
        for name, call in calls.items():
            threading.Thread(target=self._run, args=(name, call), daemon=True).start()

    def over(self) -> bool:
        """Every call has returned or failed."""
        return not self.waiting()

    def waiting(self) -> list[str]:
        return [name for name in self.names if name not in self._results and name not in self._failures]

    def wait(self, timeout_s: float) -> None:
        """Until every call is over, but no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.over() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def failures(self) -> list[Exception]:
        return [self._failures[name] for name in self.names if name in self._failures]

    def raise_failure(self) -> None:
        for error in self.failures():
            raise error

    def results(self) -> dict[str, T]:
        self.raise_failure()
        return dict(self._results)

    def _run(self, name: str, call: Callable[[], T]) -> None:
        try:
            self._results[name] = call()
        except Exception as error:
            self._failures[name] = error


def require_nodes(config: TrainingConfig, env: Mapping[str, str] = os.environ) -> None:
    """The guides' number of inference nodes, where one is named, is the number of servers.

    Raises:
        UsageError: it is another.
    """
    text = env.get("NUM_INFERENCE_NODES") or "0"
    if not text.isdecimal():
        raise UsageError(f"NUM_INFERENCE_NODES={text}: a number of inference servers is needed, or 0")
    wanted, there = config.num_inference_nodes or int(text), len(config.engine_urls)
    if wanted and wanted != there:
        name = "--num-inference-nodes" if config.num_inference_nodes else "NUM_INFERENCE_NODES"
        raise UsageError(
            f"{name} is {wanted}, but --vllm-urls names {there}: {' '.join(config.engine_urls)}. Name every server, or "
            "leave the number out"
        )


Copied = list[tuple[torch.Tensor, torch.Tensor]]
"""Places in what is sent, and the tensors that are copied there before."""


@torch.no_grad()
def into_one_piece(model: torch.nn.Module) -> tuple[torch.Tensor, list[SentTensor], Copied]:
    """Move every parameter into one tensor of bytes, in the order in which it is sent and under the names of the
    checkpoint; a tied one lies there once. What cannot be trained as it is sent is copied there instead.

    Raises:
        UsageError: some of the checkpoint's tensors are not views of the parameters.
    """
    named = dict(model.named_parameters())
    parts = _parts_of(model)
    spots = [(name, spot) for owner in named for name, spot in parts[owner]]
    tensors = [
        SentTensor.model_validate(
            {"name": name, "dtype": str(named[spot.parameter].dtype).removeprefix("torch."), "shape": list(spot.shape)}
        )
        for name, spot in spots
    ]
    placed, total = place(tensors)
    stream = torch.zeros(total, dtype=torch.uint8, device=next(model.parameters()).device)
    starts = {spot.tensor.name: spot.start for spot in placed}
    copied: Copied = []
    for owner, param in named.items():
        first = starts[parts[owner][0][0]]
        if all(_lies_so(spot, starts[name] - first, param) for name, spot in parts[owner]):
            view = stream[first : first + param.nbytes].view(param.dtype).view(param.shape)
            view.copy_(param)
            param.data = view
            continue
        for name, spot in parts[owner]:
            sent = stream[starts[name] :][: math.prod(spot.shape) * param.element_size()]
            copied.append((sent.view(param.dtype).view(spot.shape), view_of(param.detach(), spot)))
    return stream, tensors, copied


def _parts_of(model: torch.nn.Module) -> dict[str, list[tuple[str, Spot]]]:
    """Parameter -> what checkpoints hold of it, in the order in which it lies there."""
    parts: defaultdict[str, list[tuple[str, Spot]]] = defaultdict(list)
    for name, spot in checkpoint_layout(model).items():
        if spot is None:
            raise UsageError(
                f"mode broadcast cannot send {name}: transformers makes it anew from its parameters when it saves. Use "
                "another weight bridge mode (none or lora_only)"
            )
        parts[spot.parameter].append((name, spot))
    return {owner: sorted(found, key=lambda part: part[1].offset) for owner, found in parts.items()}


def _lies_so(spot: Spot, start: int, param: torch.Tensor) -> bool:
    """Whether a contiguous `param` has this part `start` bytes after its first one, in one piece."""
    return spot.stride == contiguous(spot.shape) and start == spot.offset * param.element_size()


def _phases(reports: Mapping[str, TransferReport], seconds: float) -> dict[str, float]:
    """The slowest server's own phases, and in `request` what HTTP and the other servers' pace added."""
    slowest = max(reports.values(), key=lambda report: sum(report.phases.values()))
    return {**slowest.phases, "request": max(seconds - sum(slowest.phases.values()), 0.0)}
