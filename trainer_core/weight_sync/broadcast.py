"""Mode `broadcast` (`shared_vllm --use-shared-memory`): the trainer broadcasts from its own GPUs.

The trainer's ranks and all servers' workers form one group, over NCCL or gloo; each rank sends its
own rows. A server that dies breaks the group: a new one without it brings the present weights to
all others, and the server gets them when it is back.
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
    CHUNK_BYTES,
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
from trainer_core.weight_sync.base import CHECK_S, FIRST_PAUSE_S, Phases, SeparateWeights
from trainer_core.weight_sync.orders import Calls, Follower, Order, Orders
from trainer_core.weight_sync.sending import (
    BroadcastGroup,
    Rendezvous,
    Stage,
    connect,
    meeting_point,
    outgoing,
)

OTHER_ERRORS_S = 1.0
"""Seconds for other servers to report, after one call has failed."""
ABSENT_AFTER_S = 5.0
"""Seconds without an answer after which a server counts as absent."""
WARN_AFTER_S = 8.0
"""Seconds of a wait before the log names the awaited servers."""

Members = dict[ServerClient, BridgeInfo]
"""Servers with the reported state of each."""
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
        """Servers that reported an error."""


class Broadcast(SeparateWeights):
    """Strategy of mode `broadcast`."""

    def __init__(
        self,
        config: TrainingConfig,
        device: torch.device,
        stop: threading.Event,
        *,
        optional: bool = False,
    ) -> None:
        """`optional`: send to the servers after the first. The run goes on without any of them."""
        super().__init__(config, device, stop)
        require_nodes(config)
        self._optional = optional
        if optional:
            self.urls = self.urls[1:]
        # The group, and the servers in it.
        self._place = meeting_point(config.init_method)
        self._meeting: Rendezvous | None = None
        self._group: BroadcastGroup | None = None
        self._members: Members = {}
        # Rank 0 orders; every other rank follows.
        self._orders = Orders(1)
        self._follower: Follower | None = None
        # Servers outside of the group.
        self._requests: dict[ServerClient, Calls[BridgeInfo]] = {}  # for their state, in flight
        self._backoff = GroupBackoff()
        self._begun = False
        """False while servers may still be starting."""
        self._complained: set[str] = set()
        """Servers that reported errors since the last working group."""
        # In flight, with `overlap_publish`.
        self._delivery: Delivery | None = None

    def _spread(self, model: torch.nn.Module) -> torch.nn.Module:
        model = super()._spread(model)
        self._prepare(model)
        return model

    def feed(self, model: torch.nn.Module, version: int) -> None:
        """Bring `model` to every server, now and at each publish, from the memory that it has."""
        self.version = version
        self._prepare(model, moves=False)
        self._collect(Phases())
        self.world.share(self._meet_servers)

    def _prepare(self, model: torch.nn.Module, *, moves: bool = True) -> None:
        rank, size = self.world.rank, self.world.size
        # New threads start on device 0.
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._outgoing = outgoing(model, compute_dtype(model), rank, size, moves=moves)
        # Rank 0 listens before the others connect, and they connect before it waits for them.
        self._orders = Orders(1 if rank else size)
        meeting = self.world.share(lambda: self._orders.meeting)
        if meeting is not None and rank:
            self._follower = Follower(meeting, rank, self.device, self._outgoing)
        self.world.share(self._orders.meet)

    def _collect(self, clock: Phases) -> None:
        self._outgoing.refresh()
        if self._follower is not None:
            self._follower.wrote(self.version)

    def settle(self) -> None:
        if self.config.overlap_publish:
            self.world.share(self._settle)

    def _settle(self) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            moved, seconds = delivery.result()
            self.arrived(self._report(self.version, seconds, moved))

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        with clock("settle") if self.config.overlap_publish else nullcontext():
            self.settle()
        return super()._publish(version, write, clock)

    def _delivered(self, clock: Phases) -> bool:
        """Deliver the version; with `overlap_publish` only start it."""
        if not self.config.overlap_publish:
            return super()._delivered(clock)
        # No server has the version yet. Until `_settle` the thread owns servers, group and orders.
        delivery = self._delivery = Future()
        deliver = partial(self._deliver_to, delivery)
        threading.Thread(target=deliver, name="publish", daemon=True).start()
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
        """Give a restarted or replaced server the present weights.

        Raises:
            EngineGone: no server is left, and none came back within `engine_timeout`.
        """
        now = time.monotonic()
        if self.world.rank or now - self._checked < CHECK_S or self.stop.is_set():
            return  # only rank 0 knows servers; at the end none is needed
        if self._delivery is not None:
            if not self._delivery.done():
                return  # the delivery thread checks servers meanwhile
            self._settle()
        self._checked = now
        back = False
        for engine, info in self._present(CHECK_S / 2).items():
            if engine in self.fed and info.instance_id != self._members[engine].instance_id:
                self._leave_out(engine, "another server has replaced it")
            back |= engine not in self.fed and not self._backoff.active(info.instance_id)
        # Without any server the trainer waits; one more server is worth a new group.
        if back or not (self.fed or self._optional):
            self._begin_anew()
        elif not self.fed:
            self._disband()

    def close(self) -> None:
        if self._delivery is not None:  # after an error the delivery gets no more time
            wait([self._delivery], OTHER_ERRORS_S)
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
                if not self._optional:
                    raise error from None
                self._disband()
            for url, why in self.left_out.items():
                self._tell_left_out(url, why)
        self._begun = True

    def _begin_anew(self) -> None:
        """Form a new group; without servers wait for one, or go on if they are optional."""
        if not self._optional:
            return self._await_server(self._regroup)
        try:
            self._regroup()
        except EngineGone:
            self._disband()  # `check` forms the next one
        return None

    def _disband(self) -> None:
        self._leave()
        self._members = {}

    def _deliver(self, clock: Phases) -> bool:
        if self._optional and not self._members:
            return False
        began = time.perf_counter()
        try:
            if self._group is None:
                raise GroupBroke("the group broke before")
            reports = self._send(self._members)
        except GroupBroke as error:
            print(f"[WARNING] version {self.version} did not reach every server: {error}")
            self._blame(error, self._members, time.perf_counter() - began)
            with clock("begun_anew"):
                self._begin_anew()
        else:
            clock.seconds |= _phases(reports, time.perf_counter() - began)
        return bool(self.fed)

    @property
    def _limit_s(self) -> float:
        # With "wait" one server may first finish completions while all others wait.
        first = self.config.in_flight_timeout if self.config.in_flight == "wait" else 0.0
        return self.config.broadcast_timeout + first

    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        self._regroup()  # no server gets weights alone

    def _present(self, wait_s: float) -> Members:
        # A hanging server delays this once: its request stays in flight.
        new = [engine for engine in self.engines if engine not in self._requests]
        self._requests |= {engine: Calls({engine.base_url: engine.meet}) for engine in new}
        deadline = time.monotonic() + wait_s
        while not all(self._requests[engine].over() for engine in new):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        there: Members = {}
        for engine, request in list(self._requests.items()):
            if request.over():
                del self._requests[engine]
                for info in request.results().values():
                    there[engine] = info
                for error in request.failures().values():
                    if not isinstance(error, EngineGone):
                        raise error
                    self._leave_out(engine, str(error))
            elif wait_s >= ABSENT_AFTER_S:
                self._leave_out(engine, f"it has not answered for {wait_s:.0f} s")
        return there

    def _regroup(self, *, everyone: bool = False) -> None:
        """Form a new group of all servers that do not break it, or raise `EngineGone`."""
        present = self._present(ABSENT_AFTER_S).items()
        there = {e: info for e, info in present if not self._backoff.active(info.instance_id)}
        for engine in there:
            engine.away = False
        # Each failure leaves servers out of the next try, or gives one server a second chance.
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
        servers = ", ".join(engine.base_url for engine in there)
        print(f"✓ Broadcast group: {ranks} and {workers} workers of {servers}")
        for engine, info in there.items():
            self.left_out.pop(engine.base_url, None)
            self._backoff.forget(info.instance_id)
            print(f"✓ The server at {engine.base_url} answers with weight version {self.version}")

    def _blame(self, broke: GroupBroke, there: Members, seconds: float) -> bool:
        """Leave out lost servers, and those with a second error; return True to try again."""
        lost = broke.lost | (broke.complained & self._complained)
        news = bool(lost or broke.complained - self._complained)
        self._complained |= broke.complained
        for engine in [each for each in there if each.base_url in lost]:
            self._backoff.note(there.pop(engine).instance_id, seconds)
            self._leave_out(engine, str(broke))
        return news

    def _leave_out(self, engine: ServerClient, why: str) -> None:
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
        """Let everyone meet, then connect; raise `GroupBroke` with the phase."""
        # Workers wait longer than the trainer, because only the trainer can name the missing one.
        backend, timeout_s = self._backend(infos), self._limit_s + 2 * OTHER_ERRORS_S
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
            # Ranks of the group: the trainer's, then each server's workers.
            first = len(owners)
            own = init.model_copy(update={"first_rank": first})
            joins[engine.base_url] = partial(engine.join_transfer, own)
            owners |= dict.fromkeys(range(first, first + info.workers), engine.base_url)
        self._orders.give(Order(do="join", group=init))
        joining = Calls(joins)

        def late(stage: Stage) -> list[str]:
            return sorted({owners[rank] for rank in meeting.missing(stage)})

        come = f"did not connect to {meeting.address}:{meeting.port}"

        def everyone_is_here() -> bool:
            return not meeting.missing("here")

        self._until(everyone_is_here, joining, "rendezvous", partial(late, "here"), come)
        if crowded := meeting.crowded(self.device):
            self._leave()
            raise UsageError(_on_one_gpu([[owners[rank] for rank in ranks] for ranks in crowded]))
        # Nobody connects before all are there: a connection would wait for the missing rank.
        meeting.go()
        connecting = Calls({"the trainer": lambda: connect(init, meeting.store, 0, self.device)})

        def connected() -> bool:
            connecting.raise_failure()
            return connecting.over() and joining.over() and self._orders.done()

        what = f"no connection over {backend}"
        if backend == "nccl":
            what += " (NCCL_DEBUG=INFO tells why; NCCL_P2P_DISABLE, NCCL_SOCKET_IFNAME)"
        self._until(connected, joining, "connect", partial(late, "connecting"), what)
        self._group = connecting.results()["the trainer"]

    def _backend(self, infos: Members) -> TransferBackend:
        here: TransferBackend = "nccl" if self.device.type == "cuda" else "gloo"
        for engine, info in infos.items():
            if info.receives is None:
                raise UsageError(
                    f"{engine.base_url} takes no broadcast: start it with "
                    "ATROPOS_WEIGHT_UPDATES=1 (and without VLLM_ENABLE_SHARED_WEIGHTS)"
                )
            if info.receives != here:
                raise UsageError(
                    f"{engine.base_url} receives over {info.receives}, but the trainer is on "
                    f"{self.device}: both need GPUs (other ones), or both the CPU; see --device"
                )
        return here

    def _send(self, members: Members) -> dict[str, TransferReport]:
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

        def finished() -> bool:
            return group.sent() and updates.over() and self._orders.done()

        self._until(finished, updates, "transfer", updates.waiting, "did not finish")
        return updates.results()

    def _until(
        self,
        done: Callable[[], bool],
        calls: Calls[T],
        phase: str,
        late: Callable[[], list[str]],
        what: str,
    ) -> None:
        """Poll until `done`; a failure or the timeout ends the group.

        Args:
            late: names the awaited servers at the timeout; `what` is the missing action.
        """
        began, timeout_s, warned, missing = time.monotonic(), self._limit_s, False, []
        try:
            while not done():
                calls.raise_failure()
                waited = time.monotonic() - began
                if waited > min(WARN_AFTER_S, timeout_s):
                    missing = late()
                    problem = f"{', '.join(missing)} {what}".strip()
                    if waited > timeout_s:
                        raise RuntimeError(f"{problem} within {timeout_s:.0f} s")
                    if not warned:
                        warned = True
                        print(f"[WARNING] the broadcast waits (phase {phase}): {problem}")
                # Fast at first, because most waits are short.
                time.sleep(POLL_S if waited < BRISK_S else 20 * POLL_S)
            calls.raise_failure()
        except (EngineGone, EngineError, RuntimeError) as error:
            if missing:
                self._leave()  # servers that only wait for another one report that now
            calls.wait(OTHER_ERRORS_S)
            self._leave()
            self._orders.check()
            raise self._cause(error, calls, phase, missing) from None

    def _cause(
        self, error: Exception, calls: Calls[T], phase: str, missing: Collection[str]
    ) -> GroupBroke | EngineError:
        failures = calls.failures()
        for failure in failures.values():
            if isinstance(failure, EngineError):
                return failure
        # One dead or silent server makes the others fail, so it alone is the cause.
        gone = ((name, e) for name, e in failures.items() if isinstance(e, EngineGone))
        dead = {name: e for name, e in gone if not e.answered}
        silent = [] if dead else [name for name in missing if name in calls.waiting()]
        causes = dead or ({} if silent else failures) or {"": error}
        reasons = [f"no answer from {name}" for name in silent]
        reasons += [first_line(cause) for cause in causes.values()]
        lost = [*dead, *silent]
        text = f"the broadcast broke (phase {phase}): {'; '.join(reasons)}"
        return GroupBroke(text, lost, () if lost else failures)

    def _leave(self) -> None:
        (group, self._group), (meeting, self._meeting) = (self._group, None), (self._meeting, None)
        if group is not None:
            group.close()
        if meeting is not None:
            meeting.close()
            self._orders.give(Order(do="leave"))


class GroupBackoff:
    """Backoff for servers that broke a group; a new instance starts without one."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def note(self, instance: str, seconds: float) -> None:
        # A pause doubles each time, and is at least ten times what the broken group has cost.
        pause = max(2 * self._until.get(instance, (FIRST_PAUSE_S / 2, 0.0))[0], 10 * seconds)
        self._until[instance] = (pause, time.monotonic() + pause)

    def active(self, instance: str) -> bool:
        return time.monotonic() < self._until.get(instance, (0.0, 0.0))[1]

    def forget(self, instance: str) -> None:
        self._until.pop(instance, None)


def require_nodes(config: TrainingConfig, env: Mapping[str, str] = os.environ) -> None:
    """Compare the guides' number of inference nodes with the number of servers."""
    text = env.get("NUM_INFERENCE_NODES") or "0"
    if not text.isdecimal():
        raise UsageError(f"NUM_INFERENCE_NODES={text}: a number of servers is needed, or 0")
    wanted, there = config.num_inference_nodes or int(text), len(config.engine_urls)
    if wanted and wanted != there:
        name = "--num-inference-nodes" if config.num_inference_nodes else "NUM_INFERENCE_NODES"
        raise UsageError(
            f"{name} is {wanted}, but --vllm-urls names {there}: {' '.join(config.engine_urls)}. "
            "Name every server, or leave the number out"
        )


def _on_one_gpu(groups: Iterable[Iterable[str]]) -> str:
    several = "; ".join(" and ".join(names) for names in groups)
    return (
        f"{several} are on one GPU, and NCCL connects one rank a GPU at most (it would say: "
        "invalid usage). Give each GPUs of its own (vllm.gpus, trainer.gpus, or "
        "CUDA_VISIBLE_DEVICES), or use a mode for one GPU (shared_vllm, lora_only)"
    )


def _phases(reports: Mapping[str, TransferReport], seconds: float) -> dict[str, float]:
    """Phases of the slowest server; `request` is the rest of the time."""
    slowest = max(reports.values(), key=lambda report: sum(report.phases.values()))
    return {**slowest.phases, "request": max(seconds - sum(slowest.phases.values()), 0.0)}
