"""Inference servers for tests of the broadcast: real HTTP, real gloo groups, a dictionary of
tensors as model."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

from atropos_common.broadcast.transfer import SLOTS, Chunk, TransferInit, chunks
from tests.support.json_server import JsonServer
from vllm_server.weights import collectives
from vllm_server.weights.copy_recorder import Copies, CopyRecorder, named_views

Fault = Literal[
    "dies at join",
    "never comes",
    "never connects",
    "dies at update",
    "never receives",
    "refuses",
    "breaks",
    "a worker dies at join",
    "a worker dies at update",
    "a worker hangs at update",
]


class Worker:
    """One rank of a server. With a model of vLLM's kind it takes what comes as `BroadcastEngine`
    does: by the model's own loader first, then by the copies that were noted there."""

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self.kept: list[list[torch.Tensor]] = []
        """The model's parameters after each update."""
        self._copies: list[Copies] = []
        self.link: collectives.Link | None = None
        self.parts: list[Chunk] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def join(self, init: TransferInit, rank: int) -> None:
        self.leave()
        self.parts, self._copies = chunks(init.tensors, init.chunk_bytes), []
        self._buffers = [
            torch.empty(max(p.nbytes for p in self.parts), dtype=torch.uint8) for _ in range(SLOTS)
        ]
        self.link = collectives.join(init, rank, torch.device("cpu"))

    def receive(self) -> None:
        if self.link is None:
            raise collectives.LinkError("in no group")
        try:
            link, recorder, known = (
                self.link,
                CopyRecorder(self.model or torch.nn.Module()),
                len(self._copies),
            )
            for index, part in enumerate(self.parts):
                buffer = self._buffers[index % SLOTS][: part.nbytes]
                link.receive(part, buffer, index % SLOTS)
                self.tensors |= {name: view.clone() for name, view in named_views(part, buffer)}
                if known:
                    torch._foreach_copy_(*self._copies[index])
                elif self.model is not None:
                    with recorder, torch.no_grad():
                        self.model.load_weights(recorder.give(named_views(part, buffer)))
                    self._copies.append(recorder.take())
            link.finish()
            if self.model is not None:
                self.kept.append(
                    [parameter.detach().clone() for parameter in self.model.parameters()]
                )
        except collectives.LinkError:
            self.leave()
            raise

    def leave(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


class Receiver:
    """A server with `workers` ranks that takes broadcasts, or fails in the way of `fault`."""

    def __init__(
        self,
        workers: int = 1,
        *,
        receives: str | None = "gloo",
        instance: str = "a",
        models: Sequence[Any] = (),
    ) -> None:
        self.workers = [Worker(model) for model in models] or [Worker() for _ in range(workers)]
        self.receives, self.instance = receives, instance
        self.fault: Fault | None = None
        self.fault_at: dict[int, Fault] = {}
        """Faults by weight version."""
        self.version: int | None = None
        self.dead = False
        self.errors: list[str] = []
        """Errors of the workers."""
        self.joins = 0
        self.lets_end_s = 0.0
        """Seconds for which completions go on before an update is received."""
        self.versions: dict[str, tuple[int, int]] = {}
        self.server = JsonServer(self._reply)
        self.url = self.server.url

    def die(self) -> None:
        """As a killed process: its connections are cut, its groups are left."""
        self.dead = True
        for worker in self.workers:
            worker.leave()

    def restart(self) -> None:
        self.dead, self.fault, self.version = False, None, None
        self.workers = [Worker() for _ in self.workers]
        self.instance += "+"

    def close(self) -> None:
        self.server.close()
        for worker in self.workers:
            worker.leave()

    def info(self) -> dict[str, Any]:
        return {
            "instance_id": self.instance,
            "model": "m",
            "vllm_version": "0",
            "weight_version": self.version,
            "workers": len(self.workers),
            "receives": self.receives,
        }

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/bridge/transfer/init":
            return self._init(TransferInit.model_validate(body))
        if path == "/bridge/transfer/update":
            return self._update(int(body["weight_version"]))
        if path == "/bridge/versions":
            return 200, {"versions": [self.versions.get(digest) for digest in body["digests"]]}
        return 200, self.info()

    def _init(self, init: TransferInit) -> tuple[int, Any]:
        self.joins += 1
        if self.fault == "dies at join":
            self.die()
        elif self.fault == "refuses":
            return 409, {"error": "refused: this is another model"}
        elif self.fault in ("never comes", "never connects"):
            if self.fault == "never connects":
                for rank in range(init.first_rank, init.first_rank + len(self.workers)):
                    threading.Thread(
                        target=collectives.Lifeline, args=(init, rank), daemon=True
                    ).start()
            threading.Event().wait(3)
        elif self.fault == "a worker dies at join":
            self._all([(self.workers[0].join, (init, init.first_rank))])
            self.die()  # so does vLLM's engine without one of its workers
        else:
            return self._all(
                [
                    (worker.join, (init, init.first_rank + i))
                    for i, worker in enumerate(self.workers)
                ]
            )
        return 503, {}

    def _update(self, version: int) -> tuple[int, Any]:
        self.fault = self.fault_at.get(version, self.fault)
        if self.fault == "dies at update":
            self.die()
        elif self.fault == "never receives":
            threading.Event().wait(3)
        elif self.fault in ("a worker dies at update", "a worker hangs at update"):
            hangs = "hangs" in self.fault
            if not hangs:
                self.workers[-1].leave()
            self._all([(worker.receive, ()) for worker in self.workers[:-1]])
            if hangs:  # vLLM waits for all of them
                threading.Event().wait(3)
            else:
                self.die()
        elif self.fault == "breaks":
            return 503, {"error": "a worker broke"}
        else:
            time.sleep(self.lets_end_s)
            status, answer = self._all([(worker.receive, ()) for worker in self.workers])
            if status == 200:
                self.version = version
                answer = {
                    "weight_version": version,
                    "phases": {"pause": 0.0, "receive": 0.001, "resume": 0.0},
                }
            return status, answer
        return 503, {}

    def _all(self, work: list[tuple[Any, tuple[Any, ...]]]) -> tuple[int, Any]:
        """Every rank at the same time, as vLLM's workers."""
        errors: list[str] = []

        def run(call: Any, args: tuple[Any, ...]) -> None:
            try:
                call(*args)
            except collectives.LinkError as error:
                errors.append(str(error))
            except (AttributeError, IndexError):
                # it has left its group in the middle of a call: killed, or asked to join another
                pass

        threads = [threading.Thread(target=run, args=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.errors += errors
        return (503, {"error": errors[0]}) if errors else (200, self.info())

    def _reply(self, path: str, body: dict[str, Any], _: str | None) -> tuple[int, Any] | None:
        answer = None if self.dead else self.answer(path, body)
        return None if self.dead else answer


def assert_same_weights(receiver: Receiver, model: torch.nn.Module) -> None:
    named = dict(model.named_parameters())
    for worker in receiver.workers:
        assert worker.tensors.keys() == named.keys()
        for name, tensor in worker.tensors.items():
            assert torch.equal(tensor, named[name]), name


@torch.no_grad()
def step(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
