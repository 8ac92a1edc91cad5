"""Tool servers of verifiers, forked from a process that has imported it.

    python -m atropos_envs.verifiers.tool_servers

verifiers starts `python -m MODULE` for each rollout with tools, and its own import takes seconds of
CPU time. Here that command runs in a fork, with the same arguments, variables and log.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from typing import Any

from atropos_common.system.parent_death import die_with_parent


def main() -> None:
    """Answer each request on stdin, a line of JSON, with the pid of a fork."""
    if not die_with_parent(os.getppid()):
        return
    # Forks that ended need no parent to read their exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    importlib.import_module("verifiers.v1")
    importlib.import_module("mcp.server.mcpserver")
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(request)
        print(pid, flush=True)


def _run(request: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    added = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in added if folder and folder not in sys.path]
    sys.argv = [request["module"]]
    code = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code) if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Fork:
    """A fork, with what verifiers uses of asyncio's processes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it ended already
            self._note_end()
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._close)

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode or 0

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._note_end()

    def _note_end(self) -> None:
        self.returncode = 0
        self._ended.set()


class ForkServer:
    """Process that forks tool servers; starts with the first one."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def fork(self, module: str, env: dict[str, str], cwd: str, log: str) -> Fork:
        """Run `python -m module` in a fork."""
        request = {"module": module, "env": env, "cwd": cwd, "log": log}
        # A cancelled caller must not leave its answer to the next one.
        asked = asyncio.ensure_future(self._fork(request))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(_end_unused)
            raise

    async def _fork(self, request: dict[str, Any]) -> Fork:
        async with self._one_at_a_time:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", __name__),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    limit=2**20,
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
            answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that starts tool servers ended; see the log above")
        return Fork(int(answer))

    async def close(self) -> None:
        """End the process. verifiers ends the forks, with the rollouts that they serve."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _end_unused(asked: asyncio.Task[Fork]) -> None:
    """End the fork of a caller that is gone."""
    if not asked.cancelled() and asked.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(asked.result().pid, signal.SIGKILL)


def fork_tool_servers(server: ForkServer) -> None:
    """Make verifiers fork the tool servers of its runtime on this machine."""
    from verifiers.v1.runtimes import SubprocessRuntime

    async def run_background(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        program, *arguments = argv
        if program != sys.executable or arguments[:1] != ["-m"] or len(arguments) != 2:
            await original(self, argv, env, log)
            return
        # As the original: no keys of this process.
        variables = {name: v for name, v in os.environ.items() if "API_KEY" not in name.upper()}
        variables |= self.process_env(env)
        fork = await server.fork(
            arguments[1], variables, str(self.workdir), str(self.workdir / log)
        )
        self._background.append(fork)

    original: Any = SubprocessRuntime.run_background
    original = getattr(original, "__wrapped__", original)
    run_background.__wrapped__ = original  # type: ignore[attr-defined]
    SubprocessRuntime.run_background = run_background


if __name__ == "__main__":
    main()
