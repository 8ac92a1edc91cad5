"""Programs that play an episode or score it, as child processes that leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from atropos_common.system.parent_death import with_parent
from atropos_common.system.run_dir import ENV_RUN_KEY, ENV_TOKEN

# Bytes that are kept of a program's output, from its end.
MOST_OUTPUT = 1 << 20
# Seconds between SIGTERM and SIGKILL.
GRACE_S = 2.0
# Seconds between two looks for a program's end, and for the rest of its output after that.
POLL_S, LAST_OUTPUT_S = 0.02, 1.0
# Addresses that a proxy of this machine's settings must not take.
NO_PROXY = "127.0.0.1,localhost"


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int | None
    """Exit status; negative: a signal; None: it ran out of time."""
    output: str
    """End of its standard output."""
    errors: str
    """End of its standard error."""

    @property
    def complaint(self) -> str:
        """Last line of its standard error."""
        lines = self.errors.strip().splitlines()
        return lines[-1].strip() if lines else "it wrote no error"


async def run_program(
    command: Sequence[str], *, env: Mapping[str, str], given: bytes, timeout_s: float
) -> Ended:
    """Run `command` in a process group of its own, which ends with it.

    Args:
        env: variables beside those of this process, without the run's secrets.
        given: its standard input.

    Raises:
        OSError: it cannot be started.
    """
    hidden = {ENV_RUN_KEY, ENV_TOKEN}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    around = {name: f"{inherited[name]},{NO_PROXY}" for name in _NO_PROXY if inherited.get(name)}
    process = await asyncio.create_subprocess_exec(
        *with_parent(list(command)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inherited | dict.fromkeys(_NO_PROXY, NO_PROXY) | around | dict(env),
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    parts = (bytearray(), bytearray())
    streams = zip((process.stdout, process.stderr), parts, strict=True)
    kept = [asyncio.ensure_future(_keep_end(*each)) for each in streams]
    feeding = asyncio.ensure_future(_feed(process.stdin, given))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _exited(process)
        status = process.returncode
    finally:
        # Also after a normal end: its own children may go on, and hold its output open.
        feeding.cancel()
        await _end(process)
    # A child that left the group may still hold the output open: its end is not worth a wait.
    await asyncio.wait(kept, timeout=LAST_OUTPUT_S)
    for each in kept:
        each.cancel()
    process._transport.close()  # type: ignore[attr-defined]
    output, errors = (bytes(part).decode(errors="replace") for part in parts)
    return Ended(status, output, errors)


_NO_PROXY = ("NO_PROXY", "no_proxy")


async def _exited(process: asyncio.subprocess.Process) -> None:
    # `process.wait` also waits until nobody holds the program's output open.
    while process.returncode is None:
        await asyncio.sleep(POLL_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        if process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await _exited(process)
    finally:
        _signal(process.pid, signal.SIGKILL)
    await _exited(process)


def _signal(group: int, number: signal.Signals) -> None:
    # The group keeps its number while one process of it lives, the leader's zombie included.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _feed(writer: asyncio.StreamWriter, given: bytes) -> None:
    with suppress(ConnectionError):  # it does not read its standard input
        writer.write(given)
        await writer.drain()
    writer.close()


async def _keep_end(reader: asyncio.StreamReader, kept: bytearray) -> None:
    while part := await reader.read(1 << 16):
        kept += part
        del kept[:-MOST_OUTPUT]
