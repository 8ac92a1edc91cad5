"""Routes `/bridge/transfer/*`: join the trainer's group and receive its broadcasts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter

from atropos_common.broadcast.transfer import TransferInit, TransferReport, TransferUpdate
from atropos_common.protocol.bridge import BridgeInfo
from atropos_common.system.run_dir import ENV_TRAINER_HOSTS
from vllm_server.bridge import ASLEEP, NotDone, WeightBridge, answered, timed
from vllm_server.weights.collectives import REFUSED_PREFIX

# After its own timeout, a worker gets this long before it counts as stuck.
REPLY_GRACE_S = 15.0


class BrokenTransfer(NotDone):
    """The trainer's broadcast did not arrive; the message names the phase, or begins with
    `REFUSED_PREFIX`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.status = 409 if REFUSED_PREFIX in why else 503


class Transfers:
    def __init__(self, bridge: WeightBridge) -> None:
        self.bridge = bridge

    async def join(self, request: TransferInit) -> BridgeInfo:
        """Let every worker join; the answering weights stay.

        Raises:
            BrokenTransfer: no group, or this server takes no weights from it.
        """
        async with self.bridge.lock:
            self._require_awake()
            self._require_in_place(request.address)
            await self._workers(_init(self.bridge.engine, request.model_dump()), request.timeout_s)
            return self.bridge.info()

    async def update(self, request: TransferUpdate) -> TransferReport:
        """Receive the weights and answer as `weight_version`.

        Raises:
            BrokenTransfer: the weights are incomplete; the server is unhealthy.
        """
        phases: dict[str, float] = {}
        async with self.bridge.lock:
            self._require_awake()
            with timed(phases, "pause"):
                await self.bridge.freeze_to_write(request, request.timeout_s + REPLY_GRACE_S)
            # A failure from here on leaves the server unhealthy until a complete update.
            with timed(phases, "receive"):
                try:
                    await self._workers(self._receive(request), request.timeout_s)
                except BrokenTransfer as error:
                    self.bridge.fail(
                        f"weights were received only in part, so requests are refused: {error}"
                    )
                    raise
            with timed(phases, "resume"):
                await self.bridge.reset_prefix_cache()
                await self.bridge.declare(request.weight_version)
        return TransferReport(weight_version=request.weight_version, phases=phases)

    def _require_awake(self) -> None:
        if self.bridge.sleeping:
            raise BrokenTransfer(REFUSED_PREFIX + ASLEEP)

    def _require_in_place(self, address: str) -> None:
        if not self.bridge.config.may_meet(address):
            raise BrokenTransfer(
                f"{REFUSED_PREFIX}weights would come from {address}, which is not this machine's "
                "loopback; to take them from there, start this server with "
                f"{ENV_TRAINER_HOSTS}={address}"
            )
        if reason := self.bridge.not_in_place:
            raise BrokenTransfer(
                f"{REFUSED_PREFIX}a broadcast would write weights in place, and {reason}. Use "
                "another weight bridge mode (none, which restarts the server where it must, or "
                "lora_only)"
            )

    async def _receive(self, request: TransferUpdate) -> None:
        engine = self.bridge.engine
        try:
            await engine.start_weight_update()
        except Exception:
            # Some releases end a failed update by themselves, others do not.
            with contextlib.suppress(Exception):
                await engine.finish_weight_update()
            await engine.start_weight_update()
        await _update(engine, request.model_dump())
        await engine.finish_weight_update()

    async def _workers(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        async def work_of_all() -> list[str | None]:
            await work
            engine = self.bridge.engine
            noted: list[str | None] = await engine.collective_rpc("atropos_transfer_failure")
            return noted

        limit_s = timeout_s + REPLY_GRACE_S
        try:
            found = await asyncio.wait_for(work_of_all(), limit_s)
        except TimeoutError:
            raise BrokenTransfer(
                f"a worker is stuck: no answer for {limit_s:.0f} s, {REPLY_GRACE_S:.0f} s beyond "
                "its timeout; restart this server"
            ) from None
        except Exception as error:
            raise BrokenTransfer(_message(error)) from error
        # A refusal explains the broken connections of the other ranks.
        if failures := [failure for failure in found if failure]:
            raise BrokenTransfer(max(failures, key=lambda failure: REFUSED_PREFIX in failure))


def make_router(transfers: Transfers) -> APIRouter:
    router = APIRouter()

    @router.post("/bridge/transfer/init")
    async def init(request: TransferInit) -> Any:
        return await answered(transfers.join(request))

    @router.post("/bridge/transfer/update")
    async def update(request: TransferUpdate) -> Any:
        return await answered(transfers.update(request))

    return router


async def _init(engine: Any, info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))


async def _update(engine: Any, info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await engine.update_weights(WeightTransferUpdateRequest(update_info=info))


# Without the engine's wrapping.
def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix("Call to collective_rpc method failed: ")[:600]
