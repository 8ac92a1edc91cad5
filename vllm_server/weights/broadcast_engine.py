"""Weight transfer engine for vLLM's registry: receives the trainer's broadcast in a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from atropos_common.broadcast.transfer import SLOTS, Chunk, TransferInit, TransferUpdate, chunks
from vllm_server.weights import collectives
from vllm_server.weights.copy_recorder import Copies, CopyRecorder, named_views

logger = logging.getLogger(__name__)

BACKEND = "atropos_broadcast"  # in `--weight-transfer-config`

# Of this rank's last part in a broadcast; `AtroposWorkerExtension` explains why nothing is raised.
_failure: str | None = None


def take_failure() -> str | None:
    """Return and clear the last failure; None if there is none."""
    global _failure
    failure, _failure = _failure, None
    return failure


def _noted(call: Callable[[BroadcastEngine, Any], None]) -> Callable[[BroadcastEngine, Any], None]:
    """Wrap `call`: keep its error for `take_failure`."""

    @wraps(call)
    def without_raising(self: BroadcastEngine, info: Any) -> None:
        global _failure
        _failure = None
        try:
            call(self, info)
        except (TransferRefused, collectives.LinkError) as error:
            _failure = str(error)
            logger.error("%s", error)
        except Exception as error:
            _failure = f"{type(error).__name__}: {error}"
            logger.exception("a broadcast failed here")

    return without_raising


@cache
def register_engine() -> None:
    WeightTransferEngineFactory.register_engine(BACKEND, __name__, "BroadcastEngine")


class TransferRefused(ValueError):
    """The sent tensors cannot become this model's weights; a retry does not help."""

    def __init__(self, why: str) -> None:
        super().__init__(collectives.REFUSED_PREFIX + why)


class BroadcastEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Receives all parameters in place."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._link: collectives.Link | None = None
        self._chunks: list[Chunk] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[Copies] | None = None
        self._addresses: list[int] = []

    @_noted
    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the trainer's group and allocate receive buffers."""
        self.shutdown()
        if (init_info.backend == "nccl") != (self.device.type == "cuda"):
            here = f"the weights here are on {self.device.type}"
            raise TransferRefused(f"the trainer broadcasts over {init_info.backend}, and {here}")
        self._chunks = chunks(init_info.tensors, init_info.chunk_bytes)
        # Free the old buffers first: there may be no memory for both.
        self._copies, self._buffers = None, []
        size = max(chunk.nbytes for chunk in self._chunks)
        for _ in range(SLOTS):
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        parallel = self.parallel_config
        replica = int(getattr(parallel, "data_parallel_index", 0) or 0)
        rank = init_info.first_rank + replica * parallel.world_size + parallel.rank
        self._link = collectives.join(init_info, rank, self.device)
        logger.info("Joined the trainer's group as rank %d of %d", rank, init_info.world_size)

    def start_weight_update(self) -> None:
        """No-op: parameters are written in place."""

    def finish_weight_update(self) -> None:
        """No-op: `update_weights` returns when the device has everything."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @_noted
    @torch.no_grad()
    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Fill the model's parameters from the current broadcast."""
        if self._link is None:
            fault = "this server is in no group: /bridge/transfer/init comes first"
            raise collectives.LinkError(fault)
        # Recorded copies write to these addresses, and CUDA graphs read from them.
        now = [parameter.data_ptr() for parameter in self.model.parameters()]
        try:
            # The first update runs the model's own loader and records every copy that it makes.
            # Later ones only repeat those copies: no name lookup, no allocation.
            if self._copies is None or now != self._addresses:
                self._copies, self._addresses = self._load(self._link), now
            else:
                self._repeat(self._link, self._copies)
            self._link.finish()
        except Exception:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    # Returns None if copies alone do not reproduce the load.
    def _load(self, link: collectives.Link) -> list[Copies] | None:
        recorder = CopyRecorder(self.model)
        copies: list[Copies] = []
        for index, chunk in enumerate(self._chunks):
            slot = index % SLOTS
            buffer = self._buffers[slot][: chunk.nbytes]
            link.receive(chunk, buffer, slot)
            try:
                with recorder:
                    self.model.load_weights(recorder.give(named_views(chunk, buffer)))
            except torch.OutOfMemoryError:
                raise  # a retry may succeed
            except Exception as error:
                why = f"{type(error).__name__} {error}"
                raise TransferRefused(
                    "is it the same model on both sides? This one's loader does not take what the "
                    f"trainer sends ({why})"
                ) from error
            copies.append(recorder.take())
            link.emptied(slot)
        if gaps := recorder.gaps():
            raise TransferRefused(
                "is it the same model on both sides? What the trainer sends does not fill "
                f"{len(gaps)} parameters: {'; '.join(gaps[:5])}"
            )
        if reason := recorder.without_place():
            raise TransferRefused(reason)
        if not recorder.whole:
            logger.info("This model's loader does more than copy: every update runs through it")
            return None
        return copies

    def _repeat(self, link: collectives.Link, copies: list[Copies]) -> None:
        for index, (chunk, (targets, sources)) in enumerate(zip(self._chunks, copies, strict=True)):
            slot = index % SLOTS
            link.receive(chunk, self._buffers[slot][: chunk.nbytes], slot)
            # On a GPU the next chunk arrives meanwhile, in the other slot.
            if targets:
                torch._foreach_copy_(targets, sources)
            link.emptied(slot)
