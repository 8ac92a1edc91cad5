"""Start the real inference server for tests, talk to it, and compare it with transformers.

On a CPU it is forked from a process that has imported vLLM already, one for all servers of a test
process: most of what a start costs is that import. What a command line starts is `begin_server(...,
plain=True)`, and every test of a stack.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from atropos_common.net.http import certificates
from atropos_common.protocol.bridge import TOKEN_HEADER, completion_digest
from atropos_common.protocol.manifest import Manifest, read_manifest
from atropos_common.system.run_dir import ENV_HELD_PORT
from atropos_tui.supervisor.processes.procfs import mapped_by, remove_unused
from benchmarks.support.nursery import ForkedProcess, forked_server
from tests.support.nursery import SERVER, START_S, nursery
from vllm_server.config import ENV_SHM_NAME

TOKEN = "e2e-token-0123456789"
SHARED_NAME = "test-server-"
"""How the shared memory of these servers is called: a run beside them has none of that name."""


@dataclass
class Server:
    """One running server and the ways to talk to it."""

    process: subprocess.Popen[bytes] | ForkedProcess
    url: str
    bridge_dir: Path
    log: Path
    model: Path
    token: str = TOKEN
    started_s: float = 0.0

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        token: bool = True,
        timeout: float = 60,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        headers = {**(headers or {}), **({TOKEN_HEADER: self.token} if token else {})}
        return httpx.post(
            self.url + path,
            json=body,
            headers=headers,
            timeout=timeout,
            verify=certificates(self.url),
        )

    def get(self, path: str, *, token: bool = True) -> httpx.Response:
        headers = {TOKEN_HEADER: self.token} if token else {}
        return httpx.get(
            self.url + path, headers=headers, timeout=30, verify=certificates(self.url)
        )

    def generate(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/generate", body, token=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def publish(self, version: int, write: Any = None) -> dict[str, Any]:
        """Pause, let `write` change the weights, resume as `version`."""
        assert self.post("/bridge/pause", {"lease_s": 30, "dirty": True}).status_code == 200
        if write is not None:
            write()
        answer = self.post("/bridge/resume", {"weight_version": version})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def manifest(self) -> Manifest:
        return read_manifest(self.bridge_dir / "vllm_bridge_config.json")


def start_server(
    folder: Path, model: Path, *, flags: Sequence[str] = (), port: int = 0, **env: str
) -> Server:
    """One that is ready, on `port` or on any free one."""
    return await_ready(begin_server(folder, model, flags=flags, port=port, **env))


def begin_server(
    folder: Path,
    model: Path,
    *,
    flags: Sequence[str] = (),
    port: int = 0,
    plain: bool = False,
    **env: str,
) -> Server:
    """One that has just begun to start; a `plain` one as from a command line, with a pipe to its
    stdin."""
    if ENV_HELD_PORT not in env:
        with socket.create_server(("127.0.0.1", port)) as probe:
            port = probe.getsockname()[1]
    bridge_dir, log = folder / "bridge", folder / "server.log"
    argv = [
        "--model",
        str(model),
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "67108864",
        "--max-model-len",
        "256",
        "--block-size",
        "32",
        *flags,
    ]
    settings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LOGDIR": str(bridge_dir),
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        ENV_SHM_NAME: SHARED_NAME + secrets.token_hex(8),
        **env,
    }
    log.write_bytes(b"")
    process: subprocess.Popen[bytes] | ForkedProcess
    if plain or Path("/dev/nvidiactl").exists():
        command, pipe = (
            [sys.executable, "-m", "vllm_server", *argv],
            subprocess.PIPE if plain else None,
        )
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=settings, stdin=pipe, stdout=out, stderr=out, start_new_session=True
            )
    else:
        process = forked_server(nursery(*SERVER), argv, settings, log)
    return Server(process, f"http://127.0.0.1:{port}", bridge_dir, log, model)


def await_ready(server: Server) -> Server:
    """Until it answers; one that does not is ended, and fails the test with the end of its log."""
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < START_S and server.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if server.get("/health_generate", token=False).status_code == 200:
                    server.started_s = time.monotonic() - begun
                    return server
            time.sleep(0.2)
    finally:  # a test's own time limit strikes here too
        if not server.started_s:
            end_of(server.process)
    pytest.fail(
        f"no server after {time.monotonic() - begun:.0f} s:\n" + server.log.read_text()[-4000:]
    )


def end_of(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """Kill a server that still runs, with its children, and remove their shared memory."""
    if process.poll() is not None:
        return
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends at this moment
        leader = psutil.Process(process.pid)
        family = [leader, *leader.children(recursive=True)]
    shared = {path for each in family for path in mapped_by(each.pid)}
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 5
    while still_running(family) and time.monotonic() < deadline:
        time.sleep(0.01)
    remove_unused(shared)  # vLLM's resource tracker, which would do it, is killed as well


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still execute; a zombie has ended and waits for its parent."""
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def reference_logprobs(
    reference: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> list[float]:
    import torch

    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)[range(len(tokens)), tokens].tolist()


def largest_gap(reference: Any, answer: dict[str, Any]) -> float:
    """Largest |server - transformers| over all sampled tokens of an answer."""
    gaps = []
    for tokens, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
        mine = [position[0][str(token)] for token, position in zip(tokens, positions, strict=True)]
        theirs = reference_logprobs(reference, answer["prompt_token_ids"], tokens)
        gaps += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    return max(gaps)


def digests(answer: dict[str, Any]) -> list[str]:
    """Return the digests that a trainer computes from what atroposlib's client passes on."""
    return [
        completion_digest(
            [int(next(iter(position[0]))) for position in completion],
            [next(iter(position[0].values())) for position in completion],
        )
        for completion in answer["logprobs"]
    ]


def mapped(manifest: Manifest, name: str) -> Any:
    """A parameter of the server, mapped into this process."""
    import torch

    shard = manifest.ranks[0]
    entry = shard.param_mappings[shard.aliases.get(name, name)]
    assert shard.shm_path is not None
    storage = torch.UntypedStorage.from_file(shard.shm_path, shared=True, nbytes=shard.shm_bytes)
    flat = torch.empty(0, dtype=getattr(torch, entry.dtype))
    return flat.set_(storage, entry.offset, entry.shape, entry.stride)


def client(server: Server) -> Any:
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    return VLLMServer(
        APIServerConfig(
            model_name=str(server.model),
            base_url=server.url + "/v1",
            api_key="x",
            server_type="vllm",
            timeout=60,
        )
    )


def cache_hits(server: Server) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("vllm:prefix_cache_hits_total"):
            return float(line.rpartition(" ")[2])
    raise AssertionError("vLLM reports no prefix cache hits")
