"""`bundle RUN [-o FILE]`: one private archive for a support request, without secrets.

Only a fixed list of files is read, up to a size limit, without following links; never weights.
Every text passes `redact.Scrubber`. `contents.json` lists what is whole, cut or left out.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import netrc
import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w

from atropos_common.system.files import IN_LOGS, names_in, open_regular, read_regular
from atropos_common.system.run_dir import ENV_TOKEN, RunDir
from atropos_tui.cli.manage import runs
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.run.run_files import streams
from atropos_tui.profile.load import parse_toml
from atropos_tui.profile.redact import (
    Scrubber,
    is_harmless,
    is_plain_setting,
    is_secret_name,
    secret_references,
)
from atropos_tui.profile.spec import references
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.processes import procfs

MIB = 1024 * 1024
HEAD_BYTES = MIB // 4
TAIL_BYTES = MIB
"""Bytes kept of the start and the end of a larger file."""
MOST_ATTEMPTS = 5
"""Latest attempts per component whose logs are packed."""
WHOLE = (
    "run.json",
    "profile.toml",
    "plan.json",
    "result.json",
    "journal.json",
    "fault.txt",
    "notes.json",
)
STREAMS = ("supervisor.jsonl", "supervisor.log", "telemetry.jsonl")


@dataclass
class Bundle:
    tar: tarfile.TarFile
    folder: str
    scrub: Scrubber
    contents: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str, note: str = "whole") -> None:
        data = text.encode("utf-8", "replace")
        info = tarfile.TarInfo(f"{self.folder}/{name}")
        info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
        self.tar.addfile(info, io.BytesIO(data))
        self.contents[name] = note


def bundle(options: argparse.Namespace) -> int:
    entry = runs.pick(options.run)
    run_id = str(entry.info.get("run_id") or entry.dir.root.name).replace("/", "_")
    path = options.output or Path(f"{run_id}-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    try:
        # Never over a file or through a link, and private from the first byte.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        problem = Problem(error.strerror or str(error), "name another file with -o", str(path))
        raise UserError("the bundle cannot be written", [problem]) from None
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            packed = Bundle(tar, run_id, _scrubber(entry))
            _fill(packed, entry)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    size = path.stat().st_size / MIB
    print(f"{path}  ({size:.1f} MiB, {len(packed.contents)} files, secrets redacted)")
    print("  check it before you send it: it holds the output of models and programs")
    return Exit.DONE


def _fill(packed: Bundle, entry: runs.RunEntry) -> None:
    from atropos_tui.cli.doctor.command import report_json
    from atropos_tui.cli.manage.inspect import status_of

    run = entry.dir
    named = [path.name for path in streams(run) if path.name not in STREAMS]
    for name in (*WHOLE, *STREAMS, *named, *_logs(run)):
        _add_file(packed, run.root, name)
    packed.add("files.txt", packed.scrub.text("\n".join(_listing(run.root)) + "\n"))
    if entry.is_live:
        _add_report(
            packed, "status.json", lambda: asyncio.run(status_of(entry)).model_dump_json(indent=1)
        )
    _add_report(packed, "doctor.json", report_json)
    _add_report(packed, "versions.json", lambda: json.dumps(_versions(), indent=1))
    packed.contents["contents.json"] = "whole"  # before it is written, so that it lists itself
    packed.add("contents.json", json.dumps(packed.contents, indent=1))


def _add_report(packed: Bundle, name: str, report: Callable[[], str]) -> None:
    """Add a report made now, or the error of making it."""
    try:
        text = report()
    except Exception as error:
        packed.add(name, packed.scrub.text(f"{type(error).__name__}: {error}\n"), "failed")
    else:
        packed.add(name, json.dumps(packed.scrub.tree(json.loads(text)), indent=1))


def _add_file(packed: Bundle, root: Path, name: str) -> None:
    try:
        head, tail, size = _read(root, name)
    except FileNotFoundError:
        return
    except OSError as error:
        packed.contents[name] = f"left out: {error.strerror}"
        return
    scrub = _by_kind(packed.scrub, name)
    text = scrub(head.decode("utf-8", "replace"))
    cut = size - len(head) - len(tail)
    if cut:
        text += f"[atropos-tui bundle: {cut:,} of {size:,} bytes left out here]\n"
        text += scrub(tail.decode("utf-8", "replace"))
    packed.add(name, text, f"{size:,} bytes, {cut:,} of them left out" if cut else "whole")


def _by_kind(scrubber: Scrubber, name: str) -> Callable[[str], str]:
    if name == "journal.json":  # before the general case of JSON files
        return lambda text: scrubber.json_line(_without_identity(text)) + "\n"
    if name.endswith(".jsonl"):
        return lambda text: "".join(
            scrubber.json_line(line) + "\n" for line in text.rstrip("\n").split("\n")
        )
    if name.endswith(".json"):
        return lambda text: scrubber.json_line(text) + "\n"
    if name.endswith(".toml"):
        return lambda text: _toml(scrubber, text)
    return scrubber.text


def _without_identity(text: str) -> str:
    """Remove what could make `journal.json` act on a machine: boot ids, commands to nodes, its
    seal."""

    def kept(value: Any, key: str = "") -> Any:
        if isinstance(value, list):
            return [kept(item) for item in value]
        if not isinstance(value, dict):
            return value
        left_out = {"boot_id", "mac"} | ({"command"} if key == "far" else set())
        return {name: kept(item, name) for name, item in value.items() if name not in left_out}

    try:
        return json.dumps(kept(json.loads(text)))
    except (ValueError, RecursionError):
        return ""


def _toml(scrubber: Scrubber, text: str) -> str:
    try:
        return tomli_w.dumps(scrubber.tree(parse_toml(text)))
    except (ValueError, RecursionError):
        return scrubber.text(text)


def _read(root: Path, name: str) -> tuple[bytes, bytes, int]:
    """Head, tail and size of a file, cut between lines: the scrubber would miss half a secret."""
    with open_regular(root / name, unlinked=len(Path(name).parts)) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= HEAD_BYTES + TAIL_BYTES:
            data = file.read(size)
            return data, b"", len(data)
        head = file.read(HEAD_BYTES)
        file.seek(size - TAIL_BYTES)
        tail = file.read(TAIL_BYTES)
    return head[: head.rfind(b"\n") + 1], tail.partition(b"\n")[2], size


def _logs(run: RunDir) -> Iterator[str]:
    """Logs of the latest attempts, rotated parts included."""
    for component in names_in(run.logs, folders=True):
        names = [name for name in names_in(run.logs / component, IN_LOGS - 1) if ".log" in name]
        attempts = sorted(
            {int(start) for name in names if (start := name.split(".")[0]).isdecimal()}
        )
        kept = set(map(str, attempts[-MOST_ATTEMPTS:]))
        yield from (f"logs/{component}/{name}" for name in names if name.split(".")[0] in kept)


def _listing(root: Path) -> Iterator[str]:
    """Every file below the run with its size."""
    for folder, folders, files, descriptor in os.fwalk(root):
        folders.sort()  # in place, which makes `fwalk` descend in this order
        for name in sorted(files):
            try:
                info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except OSError:
                continue  # a live run has removed it since the listing
            kind = " (link)" if stat.S_ISLNK(info.st_mode) else ""
            yield f"{info.st_size:>15,}  {Path(folder, name).relative_to(root)}{kind}"


def _versions() -> dict[str, str]:
    return {
        name: found.version
        for found in metadata.distributions()
        if (name := found.metadata["Name"])
    }


def _scrubber(entry: runs.RunEntry) -> Scrubber:
    """Scrubber for the secrets of this shell, `.env` files, token files, and a live run."""
    git = entry.info.get("git")
    commit = git.get("commit") if isinstance(git, dict) else None
    values = {*_environment_secrets(entry), *_token_files()}
    return Scrubber(values, keep=[commit] if isinstance(commit, str) else [], home=str(Path.home()))


def _environment_secrets(entry: runs.RunEntry) -> Iterator[str]:
    """Secret variables, and all values of `.env` files that are not plainly harmless."""
    table = ProcessTable.load(entry.dir.journal_json)
    processes = tracker.find_leftovers(
        str(entry.info.get("run_id", "")), table
    )  # of any folder, for the secrets in their environment
    sources = [dict(os.environ), *(dict(procfs.environ(process.pid)) for process in processes)]
    files = [_dotenv(folder / ".env") for folder in _env_folders(entry)]
    secret_names = {ENV_TOKEN, *_names_in_secrets(entry.dir)}
    for source in (*sources, *files):
        for name, value in source.items():
            if value and (
                name in secret_names or (is_secret_name(name) and not is_harmless(value))
            ):
                yield value
    model = str(entry.info.get("model") or "")
    # The model's name is in every file; as a value of .env it must not be taken for a secret.
    models = {model, *(source.get(name) for source in files for name in references(model))}
    yield from (
        value
        for source in files
        for value in source.values()
        if value not in models and not is_plain_setting(value)
    )


def _env_folders(entry: runs.RunEntry) -> set[Path]:
    """Folders whose `.env` the run may have read."""
    words = entry.info.get("command")
    words = words if isinstance(words, list) else []
    named = [word for word in words if isinstance(word, str) and word.endswith(".toml")]
    if isinstance(profile := entry.info.get("profile"), str):
        named.append(profile)
    root = entry.dir.root
    return {Path.cwd(), root, root.parent.parent, *(Path(file).parent for file in named)}


def _dotenv(file: Path) -> dict[str, str]:
    from dotenv import dotenv_values

    try:
        return {
            name: value
            for name, value in dotenv_values(
                stream=io.StringIO(read_regular(file, unlinked=0))
            ).items()
            if value
        }
    except (OSError, ValueError):  # ValueError: not UTF-8
        return {}


def _names_in_secrets(run: RunDir) -> set[str]:
    """Variables that the profile or the plan puts into a secret."""
    names: set[str] = set()
    for path, parse in ((run.plan_json, json.loads), (run.profile_toml, parse_toml)):
        try:
            names |= secret_references(parse(read_regular(path)))
        except (OSError, ValueError, RecursionError):
            continue
    return names


def _token_files() -> Iterator[str]:
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    for path in (Path(os.environ.get("HF_TOKEN_PATH") or hub / "token"), hub / "stored_tokens"):
        try:
            yield from (line.rpartition("=")[2].strip() for line in path.read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            continue
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or None).hosts
    except (OSError, netrc.NetrcParseError):
        return
    yield from (password for _, _, password in hosts.values() if password)
