"""Proof that this installation wrote a file of a run directory: a MAC with a key of the user's
state folder.

The MAC covers content and real path, so recordings from elsewhere and copies fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from atropos_common.system.files import read_regular, write_private
from atropos_common.system.run_dir import registry

KEY_BYTES = 32


def mac_of(root: Path, content: dict[str, Any]) -> str:
    """MAC of `content` in hexadecimal; "" without a key. Creates the key if needed."""
    key = _key() or _new_key()
    return _mac(key, root, content) if key else ""


def is_sealed(root: Path, content: dict[str, Any], mac: object) -> bool:
    """True if `mac` belongs to this content and run directory."""
    key = _key()
    return bool(key and isinstance(mac, str) and hmac.compare_digest(_mac(key, root, content), mac))


def _mac(key: bytes, root: Path, content: dict[str, Any]) -> str:
    # Canonical JSON: the same content always gives the same bytes.
    text = json.dumps([os.path.realpath(root), content], sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    return registry().parent / "seal.key"


def _key() -> bytes | None:
    """None if there is no key, or another user may read or write it."""
    path = _key_file()
    try:
        info = path.lstat()
        is_private = (
            stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
        )
        key = bytes.fromhex(read_regular(path)) if is_private else b""
    except (OSError, ValueError):
        return None
    return key if len(key) == KEY_BYTES else None


def _new_key() -> bytes | None:
    """Create or replace the key. Of two processes the first wins."""
    path = _key_file()
    aside = path.with_name(f".{path.name}.new.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(aside, secrets.token_bytes(KEY_BYTES).hex())
        # A hard link fails if the file exists: no reader ever sees half a key.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(aside)
        # The existing file is unusable: replace it.
        if _key() is None:
            aside.replace(path)
        aside.unlink(missing_ok=True)
    except OSError:
        return None
    return _key()
