"""Train three steps on each environment of other authors; print a table for the docs.

    python -m benchmarks.environments [--only PART ...] [--again] [--table]

`environments.toml` lists them. One real stack (`atropos-tui up`) runs many of them, with a tiny
chat model on the CPU.
Each result is kept in --results, so an interrupted call continues with the next environment.
`make environments` installs their packages (`requirements/environments.txt`) and runs all.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from atropos_common.protocol.records import reason_text
from benchmarks.support.chat_model import make_chat_model
from benchmarks.support.turns import GROUP, Turn, cell, machine_lock, new_row, run_stack

NOT_INSTALLED = "not installed"
ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
A_STACK = 24
"""Environments that one stack runs."""
PATIENCE_S = 180.0
"""Timeout for the start of an environment, and for its three steps."""


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stops a running stack
    until = time.monotonic() + 60 * options.minutes
    results = options.results.resolve()
    known = listed()
    chosen = [
        each
        for each in known
        if not options.only or any(part in each["name"] for part in options.only)
    ]
    todo = [each for each in chosen if options.again or not _record(results, each).exists()]
    if todo and not options.table:
        results.joinpath("work").mkdir(parents=True, exist_ok=True)
        model = make_chat_model(results / "chat-model", ROOT / "docs")
        turns = [_turn(each) for each in todo]
        waiting = [turn for turn in turns if not _write_if_missing(turn, results)]
        while waiting:
            with machine_lock():
                left = run_stack(waiting[:A_STACK], results, model, until=until)
            waiting = [turn for turn in waiting[:A_STACK] if turn in left] + waiting[A_STACK:]
            if time.monotonic() > until:
                break
    records = [path for each in chosen if (path := _record(results, each)).exists()]
    rows = [json.loads(path.read_text()) for path in records]
    print(table(rows))
    bad = [
        row for row in rows if row["outcome"] != "trained" and NOT_INSTALLED not in row["reason"]
    ]
    for row in bad:
        print(f"CHECK FAILED: {row['path']} does not train", file=sys.stderr)
    return int(bool(bad))


def listed() -> list[dict[str, Any]]:
    """Return the entries of `environments.toml`."""
    return list(tomllib.loads(LIST.read_text())["environment"])


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _record(results: Path, each: dict[str, Any]) -> Path:
    return results / f"{slug(each['name'])}.json"


def _turn(each: dict[str, Any]) -> Turn:
    keys = keys_of(each)
    missing = [package for package in each.get("packages", []) if not _installed(package)]
    reason = f"{NOT_INSTALLED}: {', '.join(missing)}" if missing else ""
    args = each.get("args", {})
    row = new_row(each["name"], args, [], reason) | {"kind": each["kind"]}
    common = {
        "env.group_size": GROUP,
        "env.max_tokens": 64,
        "env.steps_per_eval": 0,
        "env.ensure_scores_are_not_same": False,
        "env.max_batches_offpolicy": 1,
    }
    return Turn(slug(each["name"]), keys, common | args, {}, row, patience_s=PATIENCE_S)


def keys_of(each: dict[str, Any]) -> dict[str, Any]:
    """Return an entry's keys of `[[env]]`, with absolute paths for files of this checkout."""
    return {key: _placed(value) for key, value in each["keys"].items()}


def _placed(value: Any) -> Any:
    if isinstance(value, list):
        return [_placed(part) for part in value]
    return str(ROOT / value) if str(value).startswith("examples/") else value


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _write_if_missing(turn: Turn, results: Path) -> bool:
    if turn.row["reason"]:
        turn.write(results)
    return bool(turn.row["reason"])


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each environment."""
    trained = sum(row["outcome"] == "trained" for row in rows)
    lines = [
        f"{trained} of {len(rows)} train.",
        "",
        "| environment | kind | steps | groups | tokens from the engine | ids as "
        "sampled | worst alignment | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        known, worst, taken = row.get("from_engine"), row.get("alignment"), row.get("completions")
        share = "" if known is None else f"{known:.0%}"
        same = f"{row['same_ids']} of {taken}" if taken else ""
        nats = "" if worst is None else f"{worst:.1e}"
        lines.append(
            f"| {row['path']} | {cell(row['kind'])} | {row['steps']} | {row['groups']} | {share} | "
            f"{same} | {nats} | {cell(_notes(row))} |"
        )
    return "\n".join(lines)


def _notes(row: dict[str, Any]) -> str:
    parts = [row["reason"]] if row["reason"] else []
    parts += [f"`{name} = {json.dumps(value)}`" for name, value in row["set"].items()]
    parts += [f"{count} left out ({reason_text(each)})" for each, count in row["left_out"].items()]
    parts += [f"{count} failed ({reason})" for reason, count in row["failures"].items()]
    return "; ".join(parts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("runs/environments"))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no environment after this time"
    )
    parser.add_argument(
        "--again", action="store_true", help="also run environments that have a result"
    )
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
