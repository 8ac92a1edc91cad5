"""Mode `broadcast` (`shared_vllm --use-shared-memory`): the trainer has its own GPUs and broadcasts
its weights.

The trainer's ranks and all workers of the servers form one group, over NCCL between GPUs and gloo
on CPUs. Each rank sends its own rows, so nothing is gathered first. A server freezes generation
only while it receives.

A server that dies breaks the group. The error names it and the phase, and a new group without it
brings the present weights to all others. The trainer polls it once a second, and a server that is
back gets the present weights before it answers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from atropos_common.broadcast.group import BRISK_S, POLL_S, first_line
from atropos_common.broadcast.transfer import (
    TransferBackend,
    TransferInit,
    TransferReport,
    TransferUpdate,
)
from atropos_common.protocol.bridge import BridgeInfo
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.policy.sharding import compute_dtype
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.base import FIRST_PAUSE_S, LOOK_S, Phases, SeparateWeights
from trainer_core.weight_sync.collectives import (
    BroadcastGroup,
    Rendezvous,
    Stage,
    connect,
    meeting_point,
)
from trainer_core.weight_sync.orders import Calls, Follower, Order, Orders
from trainer_core.weight_sync.outgoing import CHUNK_BYTES, outgoing

LAST_WORDS_S = 1.0
"""Seconds that other servers have to report what they saw, after one call has failed."""
ANSWER_S = 5.0
"""Seconds without an answer after which a server counts as absent."""
NAME_S = 8.0
"""Seconds of a wait after which the log names the awaited servers."""

Members = dict[ServerClient, BridgeInfo]
"""Servers, and the reported state of each."""
Delivery = Future[tuple[bool, dict[str, float]]]
"""True if a server got the version, and the seconds of each phase."""
T = TypeVar("T")


class GroupBroke(EngineGone):
    """The group did not form, or broke; a new one may succeed."""

    def __init__(
        self, message: str, lost: Iterable[str] = (), complained: Iterable[str] = ()
    ) -> None:
        super().__init__(message)
        self.lost = set(lost)
        """Servers that are dead or silent."""
        self.complained = set(complained)
        """Servers that reported an error, their own or another's."""


class Broadcast(SeparateWeights):
    """Strategy of mode `broadcast`."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        require_nodes(config)
        self._place = meeting_point(config.init_method)
        self._meeting: Rendezvous | None = None
        self._group: BroadcastGroup | None = None
        self._orders = Orders(1)
        self._follower: Follower | None = None
        self._members: Members = {}
        self._looks: dict[ServerClient, Calls[BridgeInfo]] = {}
        """State requests in flight."""
        self._rests = Rests()
        self._begun = False
        """False at first: no server is left out while servers may still be starting."""
        self._complained: set[str] = set()
        """Servers that reported errors since the last working group."""
        self._delivery: Delivery | None = None
        """Delivery in flight, with `overlap_publish`."""

    def _spread(self, model: torch.nn.Module) -> torch.nn.Module:
        model = super()._spread(model)
        rank, size = self.world.rank, self.world.size
        if (
            self.device.type == "cuda" and self.device.index is None
        ):  # new threads start on device 0
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._outgoing = outgoing(model, compute_dtype(model), rank, size)
        self._orders = Orders(1 if rank else size)
        meeting = self.world.share(lambda: self._orders.meeting)
        if meeting is not None and rank:
            self._follower = Follower(meeting, rank, self.device, self._outgoing)
        self.world.share(self._orders.meet)
        return model

    def _collect(self, clock: Phases) -> None:
        """Tell this rank's order thread that the weights of `version` are in place; nothing is
        gathered."""
        self._outgoing.refresh()
        if self._follower is not None:
            self._follower.wrote(self.version)

    def settle(self) -> None:
        if self.config.overlap_publish:
            self.world.share(self._settle)

    def _settle(self) -> None:
        """Wait for the delivery in flight, report it, and raise its error."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            moved, seconds = delivery.result()
            self.arrived(self._report(self.version, seconds, moved))

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        with clock("settle") if self.config.overlap_publish else nullcontext():
            self.settle()
        return super()._publish(version, write, clock)

    def _delivered(self, clock: Phases) -> bool:
        """Deliver the version. With `overlap_publish` only start it: no server has the version yet,
        and until `_settle` the thread owns servers, group and orders."""
        if not self.config.overlap_publish:
            return super()._delivered(clock)
        delivery: Delivery = Future()
        self._delivery = delivery
        threading.Thread(
            target=self._deliver_to, args=(delivery,), name="publish", daemon=True
        ).start()
        return False

    def _deliver_to(self, delivery: Delivery) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        clock = Phases()
        try:
            delivery.set_result((super()._delivered(clock), clock.seconds))
        except Exception as error:
            delivery.set_exception(error)

    def check(self) -> None:
        """Give a restarted or replaced server the present weights; it answers no rollouts before.

        Raises:
            EngineGone: no server is left, and none came back within `engine_timeout`.
        """
        now = time.monotonic()
        if self.world.rank or now - self._looked < LOOK_S or self.stop.is_set():
            return  # only rank 0 knows servers; at the end none is needed
        if self._delivery is not None:
            if not self._delivery.done():
                return  # the delivery thread checks servers meanwhile
            self._settle()
        self._looked = now
        back = False
        for engine, info in self._look(LOOK_S / 2).items():
            if engine in self.fed and info.instance_id != self._members[engine].instance_id:
                self._leave_out(engine, "it is another server now")
            back |= engine not in self.fed and not self._rests.rests(info.instance_id)
        if back or not self.fed:
            self._await_server(self._regroup)

    def close(self) -> None:
        if self._delivery is not None:  # after an error the delivery gets no more time
            wait([self._delivery], LAST_WORDS_S)
        if self._follower is not None:
            self._follower.close()
        self._leave()
        self._orders.close()
        super().close()

    def _serve_all(self) -> None:
        """Begin with every server, or after `engine_timeout` with those present."""
        try:
            self._await_server(partial(self._regroup, everyone=True))
        except EngineGone as error:
            try:
                self._regroup()
            except EngineGone:
                raise error from None
            for url, why in self.left_out.items():
                self._tell_left_out(url, why)
        self._begun = True

    def _deliver(self, clock: Phases) -> bool:
        """Broadcast the update. A server that dies meanwhile is left out; the trainer waits only if
        none is left."""
        began = time.perf_counter()
        try:
            if self._group is None:
                raise GroupBroke("the group broke before")
            reports = self._send(self._members)
        except GroupBroke as error:
            print(f"[WARNING] version {self.version} did not reach every server: {error}")
            self._blame(error, self._members, time.perf_counter() - began)
            with clock("begun_anew"):
                self._await_server(self._regroup)
        else:
            clock.seconds |= _phases(reports, time.perf_counter() - began)
        return True

    @property
    def _limit_s(self) -> float:
        """Timeout in seconds of a broadcast. With `in_flight = "wait"` one server may first finish
        completions while all others wait."""
        first = self.config.in_flight_timeout if self.config.in_flight == "wait" else 0.0
        return self.config.broadcast_timeout + first

    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        """Not used here: no server gets weights alone."""
        self._regroup()

    def _look(self, wait_s: float) -> Members:
        """State of all servers that answer. A hanging server delays this once, until it has
        answered."""
        asked = [engine for engine in self.engines if engine not in self._looks]
        self._looks |= {engine: Calls({engine.base_url: engine.meet}) for engine in asked}
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not all(
            self._looks[engine].over() for engine in asked
        ):
            time.sleep(POLL_S)
        there: Members = {}
        for engine, look in list(self._looks.items()):
            if look.over():
                del self._looks[engine]
                for info in look.results().values():
                    there[engine] = info
                for error in look.failures().values():
                    if not isinstance(error, EngineGone):
                        raise error
                    self._leave_out(engine, str(error))
            elif wait_s >= ANSWER_S:
                self._leave_out(engine, f"it has not answered for {wait_s:.0f} s")
        return there

    def _regroup(self, *, everyone: bool = False) -> None:
        """Form a new group of all present servers that do not break it, and give them the present
        weights.

        Args:
            everyone: all servers are required.

        Raises:
            EngineGone: no server is left, or with `everyone` one is missing; the message has the
                reason.
        """
        there = {
            e: info
            for e, info in self._look(ANSWER_S).items()
            if not self._rests.rests(info.instance_id)
        }
        for engine in there:
            engine.away = False
        while True:
            if not there or (everyone and len(there) < len(self.engines)):
                raise EngineGone("; ".join(self.left_out.values()) or "no server is there")
            began = time.monotonic()
            try:
                self._leave()
                self._form(there)
                self._send(there)
                break
            except GroupBroke as broke:
                self.fed.clear()
                if not self._blame(broke, there, time.monotonic() - began):
                    raise
        self._members, self.fed = there, set(there)
        self._complained.clear()
        workers = sum(info.workers for info in there.values())
        ranks = "the trainer" if self.world.size == 1 else f"the trainer's {self.world.size} ranks"
        print(
            f"✓ Broadcast group: {ranks} and {workers} workers of "
            f"{', '.join(e.base_url for e in there)}"
        )
        for engine, info in there.items():
            self.left_out.pop(engine.base_url, None)
            self._rests.forget(info.instance_id)
            print(f"✓ The server at {engine.base_url} answers with weight version {self.version}")

    def _blame(self, broke: GroupBroke, there: Members, seconds: float) -> bool:
        """Leave out lost servers, and servers with a second error; return True if another try makes
        sense."""
        lost = broke.lost | (broke.complained & self._complained)
        news = bool(lost or broke.complained - self._complained)
        self._complained |= broke.complained
        for engine in [each for each in there if each.base_url in lost]:
            self._rests.note(there.pop(engine).instance_id, seconds)
            self._leave_out(engine, str(broke))
        return news

    def _leave_out(self, engine: ServerClient, why: str) -> None:
        """Leave a server out; the first reason stays."""
        self.fed.discard(engine)
        engine.away = True
        if engine.base_url not in self.left_out:
            self.left_out[engine.base_url] = why
            if self._begun:
                self._tell_left_out(engine.base_url, why)

    @staticmethod
    def _tell_left_out(url: str, why: str) -> None:
        print(f"[WARNING] {url} is left out of the broadcast: {why}")

    def _form(self, infos: Members) -> None:
        """Let everyone meet, then connect.

        Raises:
            GroupBroke: names the missing server and the phase.
            UsageError: two ranks are on one GPU.
        """
        # Workers wait longer than the trainer, because only the trainer can name the missing one.
        backend, timeout_s = self._backend(infos), self._limit_s + 2 * LAST_WORDS_S
        world_size = self.world.size + sum(info.workers for info in infos.values())
        meeting = self._meeting = Rendezvous(backend, *self._place, world_size, timeout_s)
        init = TransferInit(
            backend=backend,
            address=meeting.address,
            port=meeting.port,
            key=meeting.key,
            secret=meeting.secret,
            nccl_id=meeting.nccl_id,
            first_rank=self.world.size,
            world_size=world_size,
            timeout_s=timeout_s,
            chunk_bytes=CHUNK_BYTES,
            tensors=self._outgoing.tensors,
        )
        owners = {rank: f"rank {rank} of the trainer" for rank in range(self.world.size)}
        joins: dict[str, Callable[[], BridgeInfo]] = {}
        for engine, info in infos.items():
            first = len(owners)
            joins[engine.base_url] = partial(
                engine.join_transfer, init.model_copy(update={"first_rank": first})
            )
            owners |= dict.fromkeys(range(first, first + info.workers), engine.base_url)
        self._orders.give(Order(do="join", group=init))
        joining = Calls(joins)

        def late(stage: Stage) -> list[str]:
            return sorted({owners[rank] for rank in meeting.missing(stage)})

        come = f"did not come to {meeting.address}:{meeting.port}"
        self._until(
            lambda: not meeting.missing("here"), joining, "rendezvous", partial(late, "here"), come
        )
        if crowded := meeting.crowded(self.device):
            self._leave()
            raise UsageError(_on_one_gpu([[owners[rank] for rank in ranks] for ranks in crowded]))
        meeting.go()
        connecting = Calls({"the trainer": lambda: connect(init, meeting.store, 0, self.device)})

        def connected() -> bool:
            connecting.raise_failure()
            return connecting.over() and joining.over() and self._orders.done()

        hint = (
            " (NCCL_DEBUG=INFO tells why; NCCL_P2P_DISABLE, NCCL_SOCKET_IFNAME)"
            if backend == "nccl"
            else ""
        )
        self._until(
            connected,
            joining,
            "connect",
            partial(late, "connecting"),
            f"no connection over {backend}{hint}",
        )
        self._group = connecting.results()["the trainer"]

    def _backend(self, infos: Members) -> TransferBackend:
        here: TransferBackend = "nccl" if self.device.type == "cuda" else "gloo"
        for engine, info in infos.items():
            if info.receives is None:
                raise UsageError(
                    f"{engine.base_url} takes no broadcast: start it with "
                    f"ATROPOS_WEIGHT_UPDATES=1 (and without "
                    "VLLM_ENABLE_SHARED_WEIGHTS)"
                )
            if info.receives != here:
                raise UsageError(
                    f"{engine.base_url} receives over {info.receives}, but the trainer is on "
                    f"{self.device}: both sides "
                    "need GPUs (other ones), or both the CPU; see --device"
                )
        return here

    def _send(self, members: Members) -> dict[str, TransferReport]:
        """Broadcast the present weights as `self.version`; on return every server answers with
        them.

        Raises:
            GroupBroke: names the server without complete weights.
        """
        request = TransferUpdate(
            weight_version=self.version,
            timeout_s=self._limit_s,
            in_flight=self.config.in_flight,
            wait_s=self.config.in_flight_timeout,
        )
        group = self._group
        assert group is not None
        updates = Calls({engine.base_url: partial(engine.receive, request) for engine in members})
        self._orders.give(Order(do="send", version=self.version))
        group.send(self._outgoing)
        self._until(
            lambda: group.sent() and updates.over() and self._orders.done(),
            updates,
            "transfer",
            updates.waiting,
            "did not finish",
        )
        return updates.results()

    def _until(
        self,
        done: Callable[[], bool],
        calls: Calls[T],
        phase: str,
        late: Callable[[], list[str]],
        what: str,
    ) -> None:
        """Poll until `done`. A failed server, a broken connection or the timeout ends the wait and
        the group.

        Args:
            late: names the awaited servers at the timeout; `what` is the missing action.

        Raises:
            GroupBroke: names phase and cause.
            EngineError: a server refused.
            RankGone: another rank of the trainer has ended.
        """
        began, timeout_s, said, missing = time.monotonic(), self._limit_s, False, []
        try:
            while not done():
                calls.raise_failure()
                waited = time.monotonic() - began
                if waited > min(NAME_S, timeout_s):
                    missing = late()
                    if waited > timeout_s:
                        raise RuntimeError(
                            f"{', '.join(missing)} {what} within {timeout_s:.0f} s".strip()
                        )
                    if not said:
                        said = True
                        print(
                            f"[WARNING] the broadcast waits (phase {phase}): "
                            f"{', '.join(missing)} {what}"
                        )
                time.sleep(POLL_S if waited < BRISK_S else 20 * POLL_S)
            calls.raise_failure()
        except (EngineGone, EngineError, RuntimeError) as error:
            if missing:
                self._leave()  # servers that only wait for another one report that now
            calls.wait(LAST_WORDS_S)
            self._leave()
            self._orders.check()
            raise self._cause(error, calls, phase, missing) from None

    def _cause(
        self, error: Exception, calls: Calls[T], phase: str, missing: Collection[str]
    ) -> GroupBroke | EngineError:
        """The error to raise: a dead or silent server explains the others' errors; a refusal is
        final."""
        failures = calls.failures()
        for failure in failures.values():
            if isinstance(failure, EngineError):
                return failure
        dead = {
            name: e for name, e in failures.items() if isinstance(e, EngineGone) and not e.answered
        }
        silent = [] if dead else [name for name in missing if name in calls.waiting()]
        causes = dead or ({} if silent else failures) or {"": error}
        said = [first_line(cause) for cause in causes.values()]
        text = "; ".join([*(f"no word from {name}" for name in silent), *said])
        lost = [*dead, *silent]
        return GroupBroke(
            f"the broadcast broke (phase {phase}): {text}", lost, () if lost else failures
        )

    def _leave(self) -> None:
        (group, self._group), (meeting, self._meeting) = (self._group, None), (self._meeting, None)
        if group is not None:
            group.close()
        if meeting is not None:
            meeting.close()
            self._orders.give(Order(do="leave"))


class Rests:
    """Backoff for servers that broke a group: it doubles each time, and is at least ten times the
    cost. A new instance starts without one."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def note(self, instance: str, seconds: float) -> None:
        """Record that `instance` has cost this many seconds."""
        pause = max(2 * self._until.get(instance, (FIRST_PAUSE_S / 2, 0.0))[0], 10 * seconds)
        self._until[instance] = (pause, time.monotonic() + pause)

    def rests(self, instance: str) -> bool:
        return time.monotonic() < self._until.get(instance, (0.0, 0.0))[1]

    def forget(self, instance: str) -> None:
        self._until.pop(instance, None)


def require_nodes(config: TrainingConfig, env: Mapping[str, str] = os.environ) -> None:
    """Check the guides' number of inference nodes, if given, against the number of servers.

    Raises:
        UsageError: the numbers differ.
    """
    text = env.get("NUM_INFERENCE_NODES") or "0"
    if not text.isdecimal():
        raise UsageError(
            f"NUM_INFERENCE_NODES={text}: a number of inference servers is needed, or 0"
        )
    wanted, there = config.num_inference_nodes or int(text), len(config.engine_urls)
    if wanted and wanted != there:
        name = "--num-inference-nodes" if config.num_inference_nodes else "NUM_INFERENCE_NODES"
        raise UsageError(
            f"{name} is {wanted}, but --vllm-urls names {there}: "
            f"{' '.join(config.engine_urls)}. Name every server, or "
            "leave the number out"
        )


def _on_one_gpu(groups: Iterable[Iterable[str]]) -> str:
    several = "; ".join(" and ".join(names) for names in groups)
    return (
        f"{several} are on one GPU, and NCCL connects one rank a GPU at most (it would say: "
        f"invalid usage). Give each "
        "GPUs of its own (vllm.gpus, trainer.gpus, or CUDA_VISIBLE_DEVICES), or use a mode "
        "for one GPU (shared_vllm, "
        "lora_only)"
    )


def _phases(reports: Mapping[str, TransferReport], seconds: float) -> dict[str, float]:
    """Phases of the slowest server; `request` is the rest: HTTP and the other servers' pace."""
    slowest = max(reports.values(), key=lambda report: sum(report.phases.values()))
    return {**slowest.phases, "request": max(seconds - sum(slowest.phases.values()), 0.0)}
