"""Our code in vLLM's own processes: their start, their end, and the worker methods of the bridge.

vLLM loads `register` in each of them, and mixes `AtroposWorkerExtension` into its workers.
Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_common.models import engine_release
from atropos_common.protocol.bridge import GREEDY_BELOW
from atropos_common.system import parent_death
from atropos_common.system.run_dir import (
    ENV_LOADS_AFTER,
    ENV_SHARED_WEIGHTS,
    ENV_WEIGHT_UPDATES,
)
from vllm_server.config import (
    ENV_FORK_ENGINE,
    ENV_INSTANCE_ID,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")  # threads of this process, native ones included


def register() -> None:
    """Entry point `atropos_bridge`; does nothing in a vLLM that another program started."""
    if ENV_INSTANCE_ID not in os.environ:
        return
    configure_logging()
    die_with_parent()
    hide_torchcodec()
    # Also in the server: a forked engine does not call this again.
    from vllm_server.held_outputs import register_held_outputs

    register_held_outputs()
    if other := os.environ.get(ENV_LOADS_AFTER):
        from vllm_server.load_order import register_wait

        register_wait(other)
    if ENV_SHARED_WEIGHTS in os.environ or ENV_WEIGHT_UPDATES in os.environ:
        from vllm_server.weights.loaders import register_loaders

        register_loaders()
    if ENV_WEIGHT_UPDATES in os.environ:
        from vllm_server.weights.broadcast_engine import register_engine

        register_engine()


def configure_logging() -> None:
    """Send this package's log lines to standard error in one format."""
    ours = logging.getLogger("vllm_server")
    if ours.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    layout = "%(levelname)s %(asctime)s [vllm_server] %(message)s"
    handler.setFormatter(logging.Formatter(layout, "%m-%d %H:%M:%S"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def die_with_parent() -> None:
    """Make a child process of our server die with its parent."""
    # SIGKILL of the server must leave no orphan.
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and ENV_INSTANCE_ID in os.environ:
        _tie_to_parent(parent.pid)


def hide_torchcodec() -> None:
    """Make PyPI's CUDA build of torchcodec look missing to vLLM for the CPU.

    pip installs that build with vLLM. Beside a CPU build of torch its import raises `OSError`,
    which vLLM does not catch. A process of the engine calls this before vLLM's media code.
    """
    release, codec = engine_release.installed(), engine_release.version_of("torchcodec")
    if release and release.cpu and codec and "+cpu" not in codec:
        sys.modules.setdefault("torchcodec", None)  # type: ignore[arg-type]


def _tie_to_parent(pid: int) -> None:
    # False: the parent is dead already.
    if not parent_death.die_with_parent(pid):
        os._exit(1)


def merge_worker_into_engine(args: Namespace, env: MutableMapping[str, str]) -> bool:
    """Let the CPU engine process run the model itself.

    Args:
        args: vLLM's arguments, for a model of one rank; changed in place.
        env: changed in place.

    Returns:
        True if worker and engine are merged.
    """
    if args.distributed_executor_backend is not None:
        return False
    # vLLM's separate CPU worker exists to bind OpenMP threads to cores. Without it one process and
    # one import of vLLM are saved.
    binds = env.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") != "nobind"
    if binds or env.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        return False
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    args.distributed_executor_backend = "uni"
    return True


def why_not_fork(env: Mapping[str, str], *, cpu: bool) -> str | None:
    """Return the reason against forking the engine from this process; None if forking is safe."""
    # A fork saves the second import of vLLM (7 s and 0.3 GB on the CPU). On a GPU machine that
    # import starts a driver thread.
    if not cpu:
        return "a GPU's driver does not survive a fork"
    if env.get(ENV_FORK_ENGINE, "1") != "1":
        return f"{ENV_FORK_ENGINE} is not 1"
    # More threads would leave the child a stale OpenMP pool.
    if env.get("OMP_NUM_THREADS") != "1":
        return "OMP_NUM_THREADS is not 1"
    names = [(task / "comm").read_text().strip() for task in TASKS.iterdir()]
    if len(names) == 1:
        return None
    return f"{len(names)} threads run already ({', '.join(sorted(set(names)))})"


def prepare_fork(listening: int) -> None:
    """Make every later child die with this process, ignore its terminal's signals, and close the
    port.

    Args:
        listening: file descriptor of the server's socket.
    """
    server = os.getpid()
    forked = False

    def in_child() -> None:
        nonlocal forked
        if forked:
            return  # a child of the engine, which ties itself
        forked = True
        # Replaced, for a free number could become another file that vLLM then closes.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, listening)
        os.close(nothing)
        # The pipe is shared: the server's event loop would take the child's signal for its own.
        signal.set_wakeup_fd(-1)
        _tie_to_parent(server)

    os.register_at_fork(after_in_child=in_child)


def scale_raw_logprobs(sampler: Any) -> None:
    """Make raw logprobs [B, V] in nats log softmax(logits / temperature [B]), in place of
    temperature 1."""
    import torch

    if not isinstance(sampler, torch.nn.Module):
        _scale_returned_logits(sampler)
        return
    # A hook passes each batch's temperatures in. Only one function of this one object is replaced.
    present: list[torch.Tensor | None] = [None]

    def remember(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metadata = kwargs["sampling_metadata"] if "sampling_metadata" in kwargs else args[1]
        present[0] = metadata.temperature

    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        temperature = present[0]
        # All requests are greedy, or only prompts are computed.
        if temperature is None or len(temperature) != len(logits):
            return logits.log_softmax(-1, dtype=torch.float32)
        return _at_temperature(logits, temperature).log_softmax(-1)

    sampler.register_forward_pre_hook(remember, with_kwargs=True)
    sampler.compute_logprobs = compute_logprobs  # type: ignore[assignment]


def _scale_returned_logits(sampler: Any) -> None:
    # vLLM's second model runner, its default on GPUs: the logprobs are those of the logits that
    # `sample` returns beside the sampled tokens.
    sample, temperatures = sampler.sample, sampler.sampling_states.temperature

    def whole(logits: torch.Tensor, requests: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sampled, _ = sample(logits, requests, *args, **kwargs)
        return sampled, _at_temperature(logits, temperatures.gpu[requests])

    sampler.sample = whole
    sampler.logprobs_mode = "processed_logprobs"


def _at_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide each row by its temperature; greedy rows by 1."""
    import torch

    scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
    return logits.float() / scale


class AtroposWorkerExtension:
    """Mixed into vLLM's worker class; called by `collective_rpc`."""

    # Names start with `atropos_`: vLLM refuses attributes that collide with its worker's. A method
    # that can fail on one rank returns its failure. After an exception vLLM leaves the other ranks'
    # answers unread, and each later call would take an older answer for its own.

    def atropos_export_weights(self) -> dict[str, Any]:
        """Describe this rank's parameters (a `Shard` as plain data); `refused`: why they cannot be
        shared."""
        from vllm_server.weights import loaders

        model = self.get_model()  # type: ignore[attr-defined]
        on_cpu = next(model.parameters()).device.type == "cpu"
        try:
            shard = loaders.describe_shared_file(model) if on_cpu else loaders.describe_cuda(model)
        except loaders.SharedWeightsError as error:
            return {"refused": str(error)}
        return shard.model_dump()

    def atropos_whole_distribution(self) -> None:
        """Compute raw logprobs of the whole distribution at each request's temperature."""
        sampler = self.model_runner.sampler  # type: ignore[attr-defined]
        if sampler is not None:  # None: this pipeline stage samples nothing
            scale_raw_logprobs(sampler)

    def atropos_record_routing(self) -> str | None:
        """Record the experts of every token on a CPU; return the reason if that is impossible."""
        from vllm_server.recorded import SlotRecorder

        try:
            self._atropos_routing = SlotRecorder(self.model_runner)  # type: ignore[attr-defined]
        except ValueError as error:
            return str(error)
        return None

    def atropos_routing(self, token_ids: list[int]) -> tuple[bytes, list[int], str] | None:
        """Return the experts of these tokens except the last, as bytes with shape and dtype."""
        found = self._atropos_routing.look_up(token_ids)
        return None if found is None else (found.tobytes(), list(found.shape), found.dtype.str)

    def atropos_parameter_kinds(self) -> list[str]:
        """Return one parameter of each kind of layer."""
        from vllm_server.weights import graph_check

        return graph_check.kinds(self.get_model())  # type: ignore[attr-defined]

    def atropos_nudge(self, name: str) -> None:
        """Change this rank's parameter in place until `atropos_put_back`."""
        from vllm_server.weights import graph_check

        graph_check.nudge(self.get_model(), name)  # type: ignore[attr-defined]

    def atropos_put_back(self, name: str) -> None:
        from vllm_server.weights import graph_check

        graph_check.put_back(self.get_model(), name)  # type: ignore[attr-defined]

    def atropos_why_not_in_place(self) -> str | None:
        """Return the reason against writing weights over this rank's."""
        from vllm_server.weights import loaders

        return loaders.why_not_in_place()

    def atropos_load_weights(self, path: str) -> dict[str, Any]:
        """Load a folder's safetensors over this rank's parameters; `failed`: the failure."""
        from vllm_server.weights import reload

        try:
            return reload.load_in_worker(self, path)
        except Exception as error:
            logger.exception("the load of %s broke off", path)
            return {"failed": f"{type(error).__name__}: {error}"}

    def atropos_transfer_failure(self) -> str | None:
        """Return and clear the failure of this rank's last part in a broadcast."""
        from vllm_server.weights import broadcast_engine

        return broadcast_engine.take_failure()
