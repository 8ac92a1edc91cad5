"""Private files: links and files that another user planted are neither followed nor overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atropos_common.system.files import is_private, scratch_below, write_private


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """The name of the file beside it used to be the pid, which everybody knows."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".note.{os.getpid()}").symlink_to(victim)
    write_private(tmp_path / "note", "secret")
    assert victim.read_text() == "precious"
    assert (tmp_path / "note").read_text() == "secret"
    assert (tmp_path / "note").stat().st_mode & 0o777 == 0o600


def test_a_planted_open_file_does_not_become_ours(tmp_path: Path) -> None:
    planted = tmp_path / f".note.{os.getpid()}"
    planted.touch()
    planted.chmod(0o666)
    write_private(tmp_path / "note", "secret")
    assert (tmp_path / "note").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "note").stat().st_ino != planted.stat().st_ino


def test_only_a_folder_of_this_user_alone_is_private(tmp_path: Path) -> None:
    private, open_to_all, link = tmp_path / "private", tmp_path / "open", tmp_path / "link"
    private.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    link.symlink_to(private)
    assert is_private(private)
    assert not any(map(is_private, (open_to_all, link, tmp_path / "missing")))


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="not an ordinary file"):
            write_private(path, "words")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_compile_cache_that_another_user_may_write_is_not_used(tmp_path: Path) -> None:
    """torch runs the code in it, and its name in the shared /tmp is known."""
    environment = {"TMPDIR": str(tmp_path), "USER": "u"}
    own = scratch_below(environment, "scratch")[1]
    cache = Path(own["TORCHINDUCTOR_CACHE_DIR"])
    assert cache == tmp_path / "torchinductor_u" and is_private(cache)
    cache.chmod(0o777)
    assert "TORCHINDUCTOR_CACHE_DIR" not in scratch_below(environment, "scratch")[1]
