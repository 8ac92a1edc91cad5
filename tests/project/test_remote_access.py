"""Servers that other machines reach: a request without the run's key gets nothing.

The attack comes over a cable from a machine of its own (`two_machines`); it succeeds on a server
without its auth middleware. `tests/atropos_envs/hosting/test_auth.py` tests an environment's side.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from atropos_common.net.http import accepted_keys, carries_key, run_key
from atropos_common.system.run_dir import ENV_RUN_KEY, ENV_TOKEN, RunDir
from atropos_tui.profile.spec import ComponentSpec, HttpCheck, MetricsPolicy, Probe, Probes
from tests.support import two_machines
from tests.support.two_machines import OTHER, OWN

TOKEN = "a-token-of-the-run"
KEY = run_key(TOKEN)
BEARER = {"Authorization": f"Bearer {KEY}"}
GROUP: dict[str, Any] = {
    "tokens": [[1, 2]] * 8,
    "masks": [[-100, 2]] * 8,
    "scores": [1.0, 0.0] * 4,
    "env_id": None,
}
ASK = """
import json, sys, urllib.error, urllib.request
for method, url, headers, body in json.loads(sys.argv[1]):
    data = body.encode() if body else None
    request = urllib.request.Request(url, method=method, headers=headers, data=data)
    try:
        print(urllib.request.urlopen(request, timeout=20).status)
    except urllib.error.HTTPError as refused:
        print(refused.code)
"""
HARM = [
    ("GET", "/status", ""),
    ("GET", "/batch", ""),
    ("GET", "/latest_example", ""),
    ("GET", "/reset_data", ""),
    ("POST", "/scored_data", json.dumps(GROUP)),
    ("POST", "/disconnect-env", '{"env_id": 0}'),
]


def asked(requests: list[tuple[str, str, dict[str, str], str]], *, far: bool) -> list[int]:
    """Statuses of requests, sent from the other machine or from this one."""
    words = [sys.executable, "-c", ASK, json.dumps(requests)]
    done = subprocess.run(
        two_machines.elsewhere(*words) if far else words, capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


def attack_run_api() -> dict[str, list[int]]:
    """On the first of two machines: run-api at its address, and what each gets of it."""
    env = os.environ | {ENV_TOKEN: TOKEN}
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "atropos_api", "--host", OWN, "--port", "8000"], env=env
    )
    try:
        with socket.socket() as probe:
            while probe.connect_ex((OWN, 8000)):
                assert server.poll() is None
                time.sleep(0.05)
        at = f"http://{OWN}:8000"
        json_body = {"Content-Type": "application/json"}
        basic = {"Authorization": "Basic " + base64.b64encode(f"atropos:{KEY}".encode()).decode()}
        forms = {
            "nothing": {},
            "a guess": {"Authorization": "Bearer " + "0" * 64},
            "bearer": BEARER,
            "basic": basic,
            "the token": {"Authorization": f"Bearer {TOKEN}"},
        }
        statuses = {
            form: asked(
                [(method, at + path, json_body | headers, body) for method, path, body in HARM],
                far=True,
            )
            for form, headers in forms.items()
        }
        statuses["ours here"] = asked([("GET", f"{at}/status", {}, "")], far=False)
        statuses["health"] = asked([("GET", f"{at}/info", {}, "")], far=True)
        statuses["another name"] = asked(
            [("GET", f"{at}/info", BEARER | {"Host": "evil.example"}, "")], far=True
        )
        statuses["a browser"] = asked(
            [("GET", f"{at}/info", BEARER | {"Origin": "http://x.example"}, "")], far=True
        )
        return statuses
    finally:
        server.terminate()
        server.wait()


@pytest.mark.skipif(not two_machines.possible(), reason="no network of one's own here")
def test_run_api_at_an_address_that_others_reach() -> None:
    command = two_machines.command(sys.executable, "-m", "tests.project.test_remote_access")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["nothing"] == seen["a guess"] == [401] * len(HARM)
    # /reset_data takes the token alone, as on the loopback; and nobody is registered, so nobody is
    # to be disconnected.
    assert seen["bearer"] == seen["basic"] == seen["the token"] == [200, 200, 200, 403, 200, 200]
    assert seen["ours here"] == [200], "who is ours on the machine itself is let in as ever"
    assert seen["health"] == [200]
    assert seen["another name"] == seen["a browser"] == [403]


def test_on_the_loopback_nothing_has_changed() -> None:
    for bound in ("127.0.0.1", "localhost", "::1", "127.0.0.12"):
        assert accepted_keys(bound, TOKEN) == frozenset()
    assert accepted_keys("10.0.0.2", "") == frozenset()
    for bound in ("10.0.0.2", "0.0.0.0", "::", "", "infer-1", "fd00::2"):
        assert accepted_keys(bound, TOKEN) == {TOKEN, KEY}
    assert TOKEN not in KEY and run_key("another") != KEY


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer{KEY}",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        "Basic !!",
        "Basic 4pyT",
        f"Digest {KEY}",
        "Bearer \u00fc",
        "Basic " + base64.b64encode(KEY.encode()).decode(),
    ],
)
def test_what_is_no_key(header: str | None) -> None:
    assert not carries_key(header, {KEY})
    assert not carries_key(f"Bearer {KEY}", set())


# vLLM


def vllm(keys: frozenset[str], held: bool = False) -> httpx.AsyncClient:
    from tests.vllm_server.test_auth import guarded_app
    from vllm_server.auth import GenerationHold

    app: Starlette = guarded_app(GenerationHold(held=held), OWN)
    access = app.state.atropos_access
    access.keys, access.public, access.for_everyone = keys, True, not keys
    transport = httpx.ASGITransport(app=app, client=(OTHER, 4711))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{OWN}:9001")


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/v1/models", "/metrics", "/tokenize", "/load"]
)
async def test_generation_and_metrics_ask_for_the_key(path: str) -> None:
    async with vllm(frozenset({KEY})) as http:
        assert (await http.post(path)).status_code == 401
        assert (await http.post(path, headers={"Authorization": "Bearer local"})).status_code == 401
        assert (await http.post(path, headers=BEARER)).status_code == 200
        assert (await http.post(path, headers=BEARER | {"Host": "evil.example"})).status_code == 403
    async with vllm(frozenset()) as http:
        assert (await http.post(path)).status_code == 200


async def test_the_key_opens_no_control_route_and_health_needs_none() -> None:
    async with vllm(frozenset({KEY})) as http:
        for path in ("/bridge/info", "/lora/load", "/v1/load_lora_adapter", "/collective_rpc"):
            assert (await http.post(path, headers=BEARER)).status_code == 403
        for path in ("/health", "/health_generate", "/ping", "/version"):
            assert (await http.get(path)).status_code == 200


# [metrics]


async def test_figures_for_prometheus_ask_for_the_key(tmp_path: Path) -> None:
    from atropos_common.protocol.control import ComponentStatus, Phase, Role, RunStatus, State
    from atropos_tui.supervisor.metrics import metrics_app

    async def status() -> RunStatus:
        rows = [ComponentStatus(name="api", role=Role.API, state=State.HEALTHY)]
        return RunStatus(
            run_id="r",
            name="n",
            mode="none",
            run_dir="",
            phase=Phase.RUNNING,
            started_at=0,
            components=rows,
        )

    for host, without in ((OWN, 401), ("127.0.0.1", 200)):
        app = metrics_app(RunDir(tmp_path), MetricsPolicy(port=9, host=host), TOKEN, status)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url=f"http://{host}:9"
        ) as http:
            assert (await http.get("/metrics")).status_code == without
            assert (await http.get("/metrics", headers=BEARER)).status_code == 200
            assert (
                await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            ).status_code == 200


# Environments, our own and foreign ones


def test_the_trainer_and_the_supervisor_bring_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from trainer_core.rollouts.client import RunApi

    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"batch_size": -1})

    for key, expected in ((KEY, f"Bearer {KEY}"), ("", None)):
        monkeypatch.setenv(ENV_RUN_KEY, key)
        api = RunApi(
            f"http://{OWN}:8000", {}, threading.Event(), transport=httpx.MockTransport(answer)
        )
        api._http.get("/info")
        assert seen.pop() == expected


def test_a_server_is_asked_where_its_probes_ask_it() -> None:
    ready = Probes(readiness=Probe(checks=[HttpCheck(url=f"http://{OWN}:9001/health")]))
    spec = ComponentSpec(name="vllm", command=["x"], port=9001, probes=ready)
    assert spec.url == f"http://{OWN}:9001"
    other = Probes(readiness=Probe(checks=[HttpCheck(url="http://10.0.0.9:90010/health")]))
    assert spec.model_copy(update={"probes": other}).url == "http://127.0.0.1:9001"


if __name__ == "__main__":
    print(json.dumps(attack_run_api()))
