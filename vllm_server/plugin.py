"""Our part in vLLM's own processes: how they begin, wait for their turn and end, and what they can do for the bridge.

vLLM loads `register` in each of its processes through the entry point group `vllm.general_plugins`, and mixes
`AtroposWorkerExtension` into its workers by `--worker-extension-cls`.

A server can be made ready before it is needed: it imports everything, then waits for the line `go` on standard input.
Its predecessor serves meanwhile: no port is bound, no file of the bridge is touched, no memory of a GPU is taken. An
engine process that is not forked begins as well, and waits in `register` for a lock that the server holds.

Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from atropos_common import parent_death
from atropos_common.bridge import GREEDY_BELOW
from atropos_common.run_dir import ENV_WAIT_FOR_GO, GO_LINE
from vllm_server import compat
from vllm_server.config import ENV_FORK_ENGINE, ENV_INSTANCE_ID, ENV_SHARED_WEIGHTS, ENV_WEIGHT_UPDATES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
"""This process's threads, native ones too."""
ENV_ENGINE_LOCK = "ATROPOS_ENGINE_LOCK"
"""Path of the lock that an engine process has to get before it goes on; between a server and its own engine."""
IMPORTED = "everything is imported; waiting to be told to go"
ENGINE_IMPORTED = "the engine process has imported everything; waiting to be told to go"

Found = TypeVar("Found")


def register() -> None:
    """Entry point `atropos_bridge`. Does nothing in a vLLM that this package's server did not start."""
    if ENV_INSTANCE_ID not in os.environ:
        return
    configure_logging()
    die_with_parent()
    wait_in_engine(os.environ)
    if ENV_SHARED_WEIGHTS in os.environ or ENV_WEIGHT_UPDATES in os.environ:
        from vllm_server.weights.loaders import register_loaders

        register_loaders()
    if ENV_WEIGHT_UPDATES in os.environ:
        from vllm_server.weights.broadcast_engine import register_engine

        register_engine()


def configure_logging() -> None:
    """Send this package's log lines to standard error, in one format in every process; leave the root logger alone."""
    ours = logging.getLogger("vllm_server")
    if ours.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [vllm_server] %(message)s", "%m-%d %H:%M:%S"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def die_with_parent() -> None:
    """In a child process of our server: be killed when the parent dies, so that SIGKILL of the server leaves no orphan.

    Does nothing in any other process. Safe to call twice.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and ENV_INSTANCE_ID in os.environ:
        _tie_to_parent(parent.pid)


def _tie_to_parent(pid: int) -> None:
    """Have the kernel kill this process when its parent `pid` dies; end at once if it is dead already."""
    if not parent_death.die_with_parent(pid):
        os._exit(1)


def merge_worker_into_engine(args: Namespace, env: MutableMapping[str, str]) -> bool:
    """On the CPU let the engine process run the model itself: one process and one import of vLLM less.

    vLLM's separate worker exists there to bind OpenMP threads to cores; who asks for that keeps it.

    Args:
        args: vLLM's arguments, for a model of one rank; changed in place.
        env: changed in place.

    Returns:
        Whether the two are one now.
    """
    if args.distributed_executor_backend is not None:
        return False
    binds = env.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") != "nobind"
    if binds or env.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        return False
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    args.distributed_executor_backend = "uni"
    return True


def why_not_fork(env: Mapping[str, str], *, cpu: bool) -> str | None:
    """Why the engine may not be forked from this process; null when it may, which spares it the second import of vLLM.

    That import is 7 s and 0.3 GB on the CPU. Forking is safe while this process has one thread, native ones counted,
    and the child does not meet a pool of OpenMP threads that stayed behind, hence only with OMP_NUM_THREADS=1. On a GPU
    machine it never is: importing vLLM alone starts a thread of the driver, which does not survive a fork.
    """
    if not cpu:
        return "a GPU's driver does not survive a fork"
    if env.get(ENV_FORK_ENGINE, "1") != "1":
        return f"{ENV_FORK_ENGINE} is not 1"
    if env.get("OMP_NUM_THREADS") != "1":
        return "OMP_NUM_THREADS is not 1"
    names = [(task / "comm").read_text().strip() for task in TASKS.iterdir()]
    return f"{len(names)} threads run already ({', '.join(sorted(set(names)))})" if len(names) > 1 else None


def prepare_fork(listening: int) -> None:
    """Let every later child of this process die with it, keep its signals to itself, and not hold the port.

    Args:
        listening: file descriptor of the server's socket.
    """
    server = os.getpid()
    forked = False

    def in_child() -> None:
        nonlocal forked
        if forked:
            return  # a child of the engine, which is not the server's to tie
        forked = True
        # Closed by replacing it: the number stays taken, so that nobody closes another's file by it.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, listening)
        os.close(nothing)
        # The event loop's wakeup pipe is shared: a signal to the child would be taken for one to the server.
        signal.set_wakeup_fd(-1)
        _tie_to_parent(server)

    os.register_at_fork(after_in_child=in_child)


def is_asked(env: MutableMapping[str, str]) -> bool:
    """Whether ATROPOS_WAIT_FOR_GO=1, once: a process that executes itself again does not wait again."""
    return env.pop(ENV_WAIT_FOR_GO, "") == "1"


def is_told_to_go() -> bool:
    """Wait for the line `go`. False when the input ends instead: who would have said it needs no server any more."""
    logger.info(IMPORTED)
    said = b""
    # Not `sys.stdin`: a thread that waits in it holds its lock, and Python aborts over that when it ends.
    while not said.endswith(b"\n") and (part := os.read(0, 64)):
        said += part
    return said.strip() == GO_LINE.strip()


class Turn(Generic[Found]):
    """Waits for `go` beside the main thread, which vLLM blocks while its engine starts, and lets the engine through.

    Args:
        env: gets the lock's path, for the engine process that is started next.
        arrive: what the server does first when its turn has come, in the waiting thread.
        leave: ends this process: with 0 when the input ends, with 2 when `arrive` fails. Does not return.
    """

    def __init__(
        self, env: MutableMapping[str, str], arrive: Callable[[], Found], leave: Callable[[int], NoReturn]
    ) -> None:
        self._found: Future[Found] = Future()
        self._env, self._arrive, self._leave = env, arrive, leave
        # Nobody else's, and gone with this process; opened by its path, it is locked apart from this descriptor.
        self._lock = os.memfd_create("atropos-go")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        env[ENV_ENGINE_LOCK] = f"/proc/{os.getpid()}/fd/{self._lock}"
        threading.Thread(target=self._await, name="await-go", daemon=True).start()

    def result(self) -> Found:
        """What `arrive` gave; waits for it. From here on the engine has passed."""
        self._env.pop(ENV_ENGINE_LOCK, None)
        return self._found.result()

    def _await(self) -> None:
        if not is_told_to_go():
            self._leave(0)
        try:
            self._found.set_result(self._arrive())
        except Exception as error:
            print(f"vllm_server: {error}", file=sys.stderr, flush=True)
            self._leave(2)
        # Not closed: an engine that is late would find something else under its number.
        fcntl.flock(self._lock, fcntl.LOCK_UN)


def wait_in_engine(env: MutableMapping[str, str], parts: Sequence[str] = compat.ENGINE_PARTS) -> None:
    """In an engine process whose server waits: import `parts`, go on when the server does. Elsewhere nothing."""
    if multiprocessing.parent_process() is None or (path := env.pop(ENV_ENGINE_LOCK, None)) is None:
        return
    compat.import_parts(parts)
    logger.info(ENGINE_IMPORTED)
    with open(path, "rb") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_SH)


def scale_raw_logprobs(sampler: torch.nn.Module) -> None:
    """Have `sampler`, vLLM's, compute raw logprobs [B, V] in nats as log softmax(logits / temperature [B]): by vLLM
    they are those at temperature 1.

    It is told each batch's temperatures before it computes them, through torch's own hooks: nothing of vLLM is replaced
    but one function of one object.
    """
    import torch

    present: list[torch.Tensor | None] = [None]

    def remember(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metadata = kwargs["sampling_metadata"] if "sampling_metadata" in kwargs else args[1]
        present[0] = metadata.temperature

    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        temperature = present[0]
        if temperature is None or len(temperature) != len(logits):  # all greedy, or prompts, which nothing samples
            return logits.log_softmax(-1, dtype=torch.float32)
        scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        return (logits.float() / scale).log_softmax(-1)

    sampler.register_forward_pre_hook(remember, with_kwargs=True)
    sampler.compute_logprobs = compute_logprobs  # type: ignore[assignment]


class AtroposWorkerExtension:
    """Mixed into vLLM's worker class; called by `collective_rpc`.

    Every method name starts with `atropos_`: vLLM refuses an extension whose attributes collide with its worker's.

    What can fail on one rank alone says so in its answer and never raises: of an error vLLM leaves the other ranks'
    answers unread, each later call then takes an older one for its own, and returns before those ranks have done their
    part.
    """

    def atropos_export_weights(self) -> dict[str, Any]:
        """Describe this rank's parameters for the manifest (a `Shard` as plain data), or say under `refused` why they
        cannot be shared."""
        from vllm_server.weights import loaders

        model = self.get_model()  # type: ignore[attr-defined]
        on_cpu = next(model.parameters()).device.type == "cpu"
        try:
            shard = loaders.describe_shared_file(model) if on_cpu else loaders.describe_cuda(model)
        except loaders.SharedWeightsError as error:
            return {"refused": str(error)}
        return shard.model_dump()

    def atropos_whole_distribution(self) -> None:
        """Raw logprobs are from now on those of the whole distribution at each request's temperature, whatever top-p,
        penalties and the like make of the sampling; greedy requests have the model's own."""
        scale_raw_logprobs(self.model_runner.sampler)  # type: ignore[attr-defined]

    def atropos_record_routing(self) -> str | None:
        """Keep the experts of every token from now on, on a CPU; or why that cannot be."""
        from vllm_server.recorded import SlotRecorder

        try:
            self._atropos_routing = SlotRecorder(self.model_runner)  # type: ignore[attr-defined]
        except ValueError as error:
            return str(error)
        return None

    def atropos_routing(self, token_ids: list[int]) -> tuple[bytes, list[int], str] | None:
        """The experts of these tokens but the last, as bytes of a shape and type; null where they are not known."""
        found = self._atropos_routing.look_up(token_ids)
        return None if found is None else (found.tobytes(), list(found.shape), found.dtype.str)

    def atropos_parameter_kinds(self) -> list[str]:
        """One parameter of each kind of layer, by name."""
        from vllm_server.weights import graph_check

        return graph_check.kinds(self.get_model())  # type: ignore[attr-defined]

    def atropos_nudge(self, name: str) -> None:
        """Change this rank's parameter in place until `atropos_put_back`."""
        from vllm_server.weights import graph_check

        graph_check.nudge(self.get_model(), name)  # type: ignore[attr-defined]

    def atropos_put_back(self, name: str) -> None:
        """Give the parameter the values it had before `atropos_nudge`."""
        from vllm_server.weights import graph_check

        graph_check.put_back(self.get_model(), name)  # type: ignore[attr-defined]

    def atropos_why_not_in_place(self) -> str | None:
        """Why weights must not be written over this rank's; null when they may."""
        from vllm_server.weights import loaders

        return loaders.why_not_in_place()

    def atropos_load_weights(self, path: str) -> dict[str, Any]:
        """Load the safetensors of a folder over this rank's parameters; returns what was read and seconds by phase, or
        under `failed` why it broke off."""
        from vllm_server.weights import reload

        try:
            return reload.load_in_worker(self, path)
        except Exception as error:
            logger.exception("the load of %s broke off", path)
            return {"failed": f"{type(error).__name__}: {error}"}

    def atropos_transfer_failure(self) -> str | None:
        """Why this rank's last part in a broadcast failed; null when it did not. Asked once, forgotten."""
        from vllm_server.weights import broadcast_engine

        return broadcast_engine.take_failure()
