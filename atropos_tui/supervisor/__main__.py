"""Supervisor in the background: reads a StackSpec as JSON from stdin, runs it, exits with the run's
code.

    python -m atropos_tui.supervisor [LOCK] < stack.json

LOCK is a descriptor with the lock of the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from pydantic import ValidationError


def main() -> int:
    from atropos_tui.profile.spec import StackError, StackSpec
    from atropos_tui.supervisor.client import SocketError
    from atropos_tui.supervisor.journal.store import RunInUseError
    from atropos_tui.supervisor.runner import run_stack

    # A session of its own, so that the end of the terminal does not end the run. Fails for a
    # session leader.
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def run(stack: StackSpec) -> int:
        code = await run_stack(stack, lock=int(sys.argv[1]) if sys.argv[1:] else None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a late signal must not change the exit code
        return code

    try:
        return asyncio.run(run(StackSpec.model_validate_json(sys.stdin.buffer.read())))
    except (ValidationError, StackError, RunInUseError, SocketError) as error:
        print(f"atropos_tui.supervisor: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
