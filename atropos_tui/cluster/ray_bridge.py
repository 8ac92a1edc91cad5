"""Runs a command on a node of a Ray cluster with stdin, stdout, stderr and exit code here.

    python -m atropos_tui.cluster.ray_bridge [--address ADDRESS] NODE COMMAND [ARG...]

An actor there starts the command and relays its input and output; it dies with this process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from typing import Any

PIECE = 1 << 20
"""Bytes per relay call."""
START_S = 60.0
"""Seconds for the actor's start."""


class Relay:
    """Actor with one child process and its pipes."""

    async def begin(self, command: list[str]) -> str:
        """Start the command. Return the problem, or ""."""
        # Ray's own variables and its GPU mask of the actor would mislead the component.
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "CUDA_VISIBLE"))
        }
        pipe = asyncio.subprocess.PIPE
        try:
            self.child = await asyncio.create_subprocess_exec(
                *command, env=env, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            return f"{command[0]} cannot be started there: {error.strerror}"
        return ""

    async def write(self, data: bytes) -> None:
        assert self.child.stdin is not None
        try:
            if data:
                self.child.stdin.write(data)
                await self.child.stdin.drain()
            else:
                self.child.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            return

    async def read(self, which: int) -> bytes:
        """Wait for output of stream `which` (1: stdout, 2: stderr); b"" at its end."""
        stream = self.child.stdout if which == 1 else self.child.stderr
        assert stream is not None
        return await stream.read(PIECE)

    async def end(self) -> int:
        return await self.child.wait()


def node_id(nodes: list[dict[str, Any]], wanted: str) -> str | None:
    """Ray's id of the live node with this name or address."""
    alive = (node for node in nodes if node["Alive"])
    return next(
        (
            node["NodeID"]
            for node in alive
            if wanted in (node["NodeName"], node["NodeManagerAddress"])
        ),
        None,
    )


def _inwards(ray: Any, relay: Any) -> None:
    while True:
        data = os.read(0, PIECE)
        ray.get(relay.write.remote(data))
        if not data:
            return


def _outwards(ray: Any, relay: Any, which: int) -> None:
    while data := ray.get(relay.read.remote(which)):
        view = memoryview(data)
        while view:
            view = view[os.write(which, view) :]


def main() -> int:
    """Return the command's exit code; 255, as with ssh, if it was not reached."""
    parser = argparse.ArgumentParser(prog="ray_bridge", description=__doc__)
    parser.add_argument("--address", default=None)
    parser.add_argument("node")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        return _failed(
            "ray is not installed for this interpreter: pip install ray, the version of the cluster"
        )
    try:
        ray.init(
            address=options.address or "auto", log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        return _failed(
            f"no Ray cluster at {options.address or os.environ.get('RAY_ADDRESS', 'auto')}: {error}"
        )
    node = node_id(ray.nodes(), options.node)
    if node is None:
        there = ", ".join(sorted(each["NodeName"] for each in ray.nodes() if each["Alive"]))
        return _failed(f"Ray has no living node {options.node}: it has {there}")
    # soft=False: exactly this node, or an error.
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    remote: Any = ray.remote
    try:
        # Several calls at once: one for stdin and one for each output stream.
        relay = remote(num_cpus=0, max_concurrency=8, max_restarts=0, scheduling_strategy=strategy)(
            Relay
        ).remote()
        if wrong := ray.get(relay.begin.remote(options.command), timeout=START_S):
            return _failed(wrong)
        threading.Thread(target=_inwards, args=(ray, relay), daemon=True).start()
        errors = threading.Thread(target=_outwards, args=(ray, relay, 2), daemon=True)
        errors.start()
        _outwards(ray, relay, 1)
        code: int = ray.get(relay.end.remote())
        # Let the last lines of stderr arrive, but never wait for a grandchild that holds it open.
        errors.join(1)
        return code if code >= 0 else 128 - code
    except (RayError, TimeoutError) as error:
        return _failed(
            f"Ray lost the node {options.node}, or the actor there: {str(error).splitlines()[0]}"
        )
    except BrokenPipeError:
        return 255


def _failed(reason: str) -> int:
    print(f"ray_bridge: {reason}", file=sys.stderr, flush=True)
    return 255


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may block in a read, and Ray's shutdown takes a second
