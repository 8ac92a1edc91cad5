"""The locked requirements: hashes, no address of an index, and the versions of the extra `gpu`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def locked(kind: str) -> dict[str, str]:
    """Requirement text of each locked package, up to its hashes."""
    text = (ROOT / "requirements" / f"{kind}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.partition("\n")[2].strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    return {
        canonicalize_name(Requirement(line).name): line
        for line in (entry.partition(" \\")[0] for entry in entries)
    }


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_lock_has_hashes_and_names_no_index(kind: str) -> None:
    pins = locked(kind)
    assert len(pins) > 200
    assert all("==" in pin and "://" not in pin for pin in pins.values())


def test_the_extra_gpu_has_the_locked_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = locked("gpu")
    own = [r for r in map(Requirement, extras["optional-dependencies"]["gpu"]) if not r.extras]
    assert {"vllm", "transformers", "peft"} < {r.name for r in own}
    for requirement in own:
        assert str(requirement) == pins[canonicalize_name(requirement.name)]
