"""Where a model's config.json lies, and what transformers would build of it: asked of another process, since nothing
here imports torch.

`config_file` looks into a directory, then into the local cache of huggingface_hub, then on the hub itself, where
Hugging Face's own settings (`HF_HUB_OFFLINE`, `HF_ENDPOINT`, a token) let it. Of a hub model config.json alone comes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from atropos_common.files import write_private
from atropos_tui.profile.load import cache_dir

BUILD_TIMEOUT = 180.0
"""Seconds for importing transformers and building a model without memory: about 6 on an idle core."""
HUB_TIMEOUT = 5.0
"""Seconds for the hub to answer at all."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Built:
    """What transformers makes of a configuration."""

    config: dict[str, Any]
    """With the defaults of its class put in."""
    shapes: dict[str, tuple[int, ...]]


def is_hub_id(model: str) -> bool:
    """`owner/name`, as against a path: not absolute, not dotted, one slash, and no such folder here."""
    looks = _HUB_ID.fullmatch(model) is not None and not model.startswith(".")
    return looks and not Path(model.split("/")[0]).is_dir()


def config_file(name: str) -> Path | str:
    """config.json of a directory or of a hub id, or in words why there is none."""
    try:
        folder = Path(name).expanduser()
        if (folder / "config.json").is_file():
            return folder / "config.json"
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except Exception:  # no huggingface_hub, or a name that it takes for none: either way nothing is here
        return "model not on this machine"
    if isinstance(cached, str):
        return Path(cached)
    return _from_hub(name) if is_hub_id(name) else "model not on this machine"


def _from_hub(name: str) -> Path | str:
    import httpx
    from huggingface_hub import constants, errors, hf_hub_download

    here = "model not on this machine"
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES:
        return f"{here}, and HF_HUB_OFFLINE forbids asking the hub"
    try:
        # Asked by hand first: huggingface_hub repeats what fails for half a minute.
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_TIMEOUT))
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        return f"{here}, and {constants.ENDPOINT} gives it to nobody without a token (hf auth login), or has no {name}"
    except errors.EntryNotFoundError:
        return f"{here}, and {name} on {constants.ENDPOINT} has no config.json"
    except (OSError, httpx.HTTPError, errors.HfHubHTTPError, ValueError):
        return (
            f"{here}, and {constants.ENDPOINT} cannot be reached: fill the cache, or give a folder with its config.json"
        )


def build(folder: Path, config: Mapping[str, Any]) -> Built | str:
    """What transformers makes of the configuration in `folder`, by `trainer_core.shapes`; or in words why nothing.

    It takes seconds, and is kept in the cache folder for each configuration and release.
    """
    if not isinstance(config.get("model_type"), str):
        return "its config.json names no model_type"
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return "torch and transformers, which would build it without memory, are not installed here"
    key = json.dumps([config, metadata.version("transformers")], sort_keys=True).encode()
    kept = cache_dir() / "shapes" / f"{hashlib.sha256(key).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        return _built(json.loads(kept.read_text(encoding="utf-8")))
    said = _ask(folder)
    if isinstance(said, str):
        return said
    with suppress(OSError):  # a cache that cannot be written costs the same seconds again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_private(kept, json.dumps(said))
    return _built(said)


def _ask(folder: Path) -> dict[str, Any] | str:
    command = [sys.executable, "-P", "-m", "trainer_core.shapes", str(folder)]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT, check=True, env=os.environ | quiet
        )
        said: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"it could not be built without memory ({type(error).__name__})"
    return said


def _built(said: Mapping[str, Any]) -> Built | str:
    if "error" in said:
        return f"transformers {metadata.version('transformers')} cannot build it: {said['error']}"
    return Built(said["config"], {name: tuple(shape) for name, shape in said["shapes"].items()})
