"""Run every environment of NousResearch/atropos through `atropos-tui up`; tell which train.

    python -m benchmarks.upstream --checkout FOLDER [--only PART ...] [--screen] [--again] [--table]

Each file runs unmodified, three optimizer steps on a tiny chat model with random weights
(`chat_model.py`), with the real run-api, vLLM on the CPU and trainer, unless its import or `setup`
fails: that is found out first, in seconds (`upstream_files.py`). What is set for a file, and the
rows that stand in for a data set from a hub, is in `upstream.toml`, and in the table. A record per
file is kept in --results, so that a broken-off pass goes on; --again repeats. The environments' own
packages must be in the Python that runs this: install what you want tried.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.chat_model import make_chat_model
from benchmarks.support.turns import (
    A_STACK,
    EACH_S,
    GROUP,
    Turn,
    cell,
    machine_lock,
    new_row,
    notes_of,
    run_stack,
)
from benchmarks.support.upstream_files import OFFLINE, Candidate, find, flags, lacks, screen, why

ADJUSTMENTS = Path(__file__).with_suffix(".toml")


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a stack that runs is taken down
    results, checkout = options.results.resolve(), options.checkout.resolve()
    adjustments = tomllib.loads(ADJUSTMENTS.read_text())
    candidates = [
        each
        for each in find(checkout)
        if not options.only or any(part in each.path for part in options.only)
    ]
    if not options.table:
        todo = [each for each in candidates if options.again or not _record(results, each).exists()]
        with tempfile.TemporaryDirectory(
            prefix="atropos-upstream-"
        ) as cache:  # made rows may have changed since
            os.environ |= OFFLINE | {"HF_DATASETS_CACHE": cache}
            run_all(
                todo,
                checkout,
                results,
                adjustments,
                screen_only=options.screen,
                patience_s=options.patience,
            )
    print(
        table(
            [
                json.loads(path.read_text())
                for each in candidates
                if (path := _record(results, each)).exists()
            ]
        )
    )
    return 0


def _record(results: Path, each: Candidate) -> Path:
    return results / f"{each.name}.json"


def run_all(
    todo: list[Candidate],
    checkout: Path,
    results: Path,
    adjustments: dict[str, Any],
    *,
    screen_only: bool,
    patience_s: float,
) -> None:
    """Screen all, then run what is set up, a few to a stack; a record for each as soon as its
    outcome is known."""
    model = make_chat_model(results / "chat-model", checkout / "environments")
    import_what_all_import()
    waiting: list[Try] = []
    for each in todo:
        attempt = prepare(each, checkout, results, adjustments)
        attempt.patience_s = patience_s
        if attempt.row["reason"] or not attempt.is_set_up(model):
            attempt.write(results)
        else:
            print(f"set up   {each.path}", flush=True)
            waiting.append(attempt)
    while waiting and not screen_only:
        chunk, waiting = waiting[:A_STACK], waiting[A_STACK:]
        with machine_lock():
            left = run_stack(chunk, results, model)
            waiting = [each for each in chunk if each in left] + waiting


@dataclass(eq=False)
class Try(Turn):
    """One file on its way."""

    def is_set_up(self, model: Path) -> bool:
        """Import and `setup` go well without an engine; else the row says why not."""
        target, folder = Path(self.keys["script"]), Path(self.keys["cwd"])
        log = folder / "screen.log"
        good = screen(target, log, flags(model, self.args), self.env, folder)
        if not good:
            self.row["reason"] = why(log.read_text(errors="replace"))
        return good


def prepare(each: Candidate, checkout: Path, results: Path, adjustments: dict[str, Any]) -> Try:
    """A folder with the data that stands in, and what `upstream.toml` sets."""
    mine = adjustments.get("file", {}).get(each.path, {})
    folder = results / "work" / each.name
    folder.mkdir(parents=True, exist_ok=True)
    args, env = mine.get("args", {}), mine.get("env", {})
    write_data(folder, adjustments.get("data", {}), mine.get("data", []))
    return Try(
        each.name,
        {"script": str(checkout / each.target), "cwd": str(folder)},
        {"env.group_size": GROUP, "env.ensure_scores_are_not_same": False} | args,
        OFFLINE | {"PYTHONPATH": f"{checkout}:{(checkout / each.path).parent}"} | env,
        new_row(
            each.path,
            args | env,
            mine.get("data", []),
            mine.get("skip", "") if each.trains else "only evaluates: it makes no groups",
        )
        | {"lacks": lacks(checkout, each.path, mine.get("data", [])) if each.trains else []},
    )


def write_data(folder: Path, known: dict[str, Any], wanted: list[str]) -> None:
    """Rows that stand in for data sets of a hub, in folders of their names: `datasets` looks there
    first.

    In `upstream.toml` a set has `splits`, and `rows`; {n} in a text is the row's number, {m} the
    same modulo 4.
    """
    for name in wanted:
        data = known[name]
        rows = [
            _filled(row, number) for number in range(data.get("count", 32)) for row in data["rows"]
        ]
        place = folder / data.get("file", f"{name}/README.md")
        place.parent.mkdir(parents=True, exist_ok=True)
        if "file" in data:
            place.write_text(_text(rows, place.suffix))
            continue
        for split in data["splits"]:
            place.with_name(f"{split}.jsonl").write_text(_text(rows, ".jsonl"))
        listed = "".join(
            f'  - split: {split}\n    path: "{split}.jsonl"\n' for split in data["splits"]
        )
        config = data.get("config", "default")
        place.write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{listed}---\n")


def _text(rows: list[Any], suffix: str) -> str:
    """Return rows as JSON Lines, CSV, plain lines (no suffix) or JSON."""
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    if suffix == ".csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        return "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)
    return json.dumps(rows) if suffix else "".join(f"{row}\n" for row in rows)


def _filled(value: Any, number: int) -> Any:
    if isinstance(value, str):
        return value.replace("{n}", str(number)).replace("{m}", str(number % 4))
    if isinstance(value, list):
        return [_filled(each, number) for each in value]
    if isinstance(value, dict):
        return {name: _filled(each, number) for name, each in value.items()}
    return value


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what trained first, then the others with their reasons."""
    trained = [row for row in rows if row["outcome"] == "trained"]
    lines = [
        f"{len(trained)} of {len(rows)} files train.",
        "",
        "| environment | started | groups | steps | set, stood in, adjusted | |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["outcome"] != "trained", row["path"])):
        name = row["path"].removeprefix("environments/").removesuffix(".py")
        started = "yes" if row["outcome"] in ("trained", "started") else "no"
        lines.append(
            f"| `{name}` | {started} | {row['groups']} | {row['steps']} | {notes_of(row)} | "
            f"{cell(_reason(row))} |"
        )
    return "\n".join(lines)


def _reason(row: dict[str, Any]) -> str:
    """Return why it does not train, with everything that is missing."""
    if row["outcome"] == "trained":
        return ""
    more = [each for each in row.get("lacks", []) if each not in row["reason"]]
    return "; ".join([row["reason"], *([f"it lacks {', '.join(more)}"] if more else [])])


def import_what_all_import() -> None:
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    import atropos_envs.hosting.runner  # noqa: F401


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("runs/upstream"))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="files whose path has this in it"
    )
    parser.add_argument("--again", action="store_true", help="repeat what has a record")
    parser.add_argument(
        "--patience",
        type=float,
        default=EACH_S,
        metavar="SECONDS",
        help="for the start of one, and for its three steps",
    )
    parser.add_argument("--screen", action="store_true", help="import and set up only")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the records and run nothing"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
