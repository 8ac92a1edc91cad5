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
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_common.protocol.record_base import RecordError
from atropos_common.protocol.records import (
    EnvCountsRecord,
    StageRecord,
    StateRecord,
    parse_line,
    reason_text,
)
from atropos_common.protocol.stages import ATTACHED, REGISTERED
from atropos_common.system.run_dir import RunDir
from benchmarks.support.chat_model import CONTEXT, make_chat_model
from benchmarks.support.children import free_ports, up
from benchmarks.support.upstream_files import OFFLINE, Candidate, find, flags, screen, why

STEPS = 3
GROUP = 4
BATCH = 8
A_STACK = 12
"""Files that take turns in one stack: the engine's start is what costs most."""
SILENT = "no group came in time"
ADJUSTMENTS = Path(__file__).with_suffix(".toml")
FEWEST_GROUPS = STEPS * BATCH // GROUP
"""Groups of three steps: with fewer, some would be another environment's."""
READY_S, EACH_S = 300.0, 60.0
"""Patience for the engine and the trainer, and for three steps of one environment that runs."""
PROFILE = """
name = "upstream"
model = {model}

[api]
port = {api}

[vllm]
port = {engine}
max_model_len = {context}

[vllm.env]
OMP_NUM_THREADS = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"

[vllm.args]
enforce-eager = true
kv-cache-memory-bytes = 134217728
block-size = 32
max-num-seqs = 128

[trainer]
device = "cpu"
dtype = "float32"
training_steps = 1000000
batch_size = {batch}
gradient_accumulation_steps = 1
lr = 1e-5
checkpoint_interval = 0

[trainer.env]
OMP_NUM_THREADS = "1"
"""
ENVIRONMENT = """
[[env]]
name = {name}
script = {script}
cwd = {cwd}
restart = {{policy = "never"}}
depends_on = {{api = "healthy", {gate} = "completed"}}

[env.env]
{env}

[env.args]
{args}

[component.{gate}]
command = ["sh", "-c", "until [ -e {go} ]; do sleep 0.2; done"]
"""
"""Each waits for its turn: the gate before it ends when its file is there."""


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
            run_all(todo, checkout, results, adjustments, screen_only=options.screen)
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
) -> None:
    """Screen all, then run what is set up, a few to a stack; a record for each as soon as its
    outcome is known."""
    model = make_chat_model(results / "chat-model", checkout / "environments")
    import_what_all_import()
    waiting: list[Try] = []
    for each in todo:
        attempt = prepare(each, checkout, results, adjustments)
        if attempt.row["reason"] or not attempt.is_set_up(model):
            attempt.write(results)
        else:
            print(f"set up   {each.path}", flush=True)
            waiting.append(attempt)
    while waiting and not screen_only:
        chunk, waiting = waiting[:A_STACK], waiting[A_STACK:]
        with machine_lock():
            waiting = run_stack(chunk, results, model) + waiting


@dataclass(eq=False)
class Try:
    """One file on its way: what it is given, and its row of the table."""

    name: str
    target: Path
    folder: Path
    args: dict[str, Any]
    env: dict[str, str]
    row: dict[str, Any]

    def is_set_up(self, model: Path) -> bool:
        """Import and `setup` go well without an engine; else the row says why not."""
        log = self.folder / "screen.log"
        good = screen(self.target, log, flags(model, self.args), self.env, self.folder)
        if not good:
            self.row["reason"] = why(log.read_text(errors="replace"))
        return good

    def write(self, results: Path) -> None:
        """Keep the record."""
        (results / f"{self.name}.json").write_text(json.dumps(self.row, indent=1) + "\n")
        print(
            f"{self.row['outcome']:8} {self.row['path']}: "
            f"{self.row['reason'] or self.row['groups']}",
            flush=True,
        )


def prepare(each: Candidate, checkout: Path, results: Path, adjustments: dict[str, Any]) -> Try:
    """A folder with the data that stands in, and what `upstream.toml` sets."""
    mine = adjustments.get("file", {}).get(each.path, {})
    folder = results / "work" / each.name
    folder.mkdir(parents=True, exist_ok=True)
    args, env = mine.get("args", {}), mine.get("env", {})
    write_data(folder, adjustments.get("data", {}), mine.get("data", []))
    row = {
        "path": each.path,
        "outcome": "failed",
        "groups": 0,
        "steps": 0,
        "left_out": {},
        "failures": {},
        "adjusted": {},
        "set": args | env,
        "data": mine.get("data", []),
        "reason": mine.get("skip", "") if each.trains else "only evaluates: it makes no groups",
    }
    return Try(
        each.name,
        checkout / each.target,
        folder,
        {"env.group_size": GROUP, "env.ensure_scores_are_not_same": False} | args,
        OFFLINE | {"PYTHONPATH": f"{checkout}:{(checkout / each.path).parent}"} | env,
        row,
    )


def run_stack(chunk: list[Try], results: Path, model: Path) -> list[Try]:
    """One `atropos-tui up` in which they take turns; those that had none, because a stack ended
    early, are returned."""
    root = results / "work" / f"run-{int(time.time())}"
    gates = {
        attempt.name: root.with_name(f"{root.name}.{index}.go")
        for index, attempt in enumerate(chunk)
    }
    profile = write_profile(root.with_suffix(".toml"), gates, chunk, model)
    keys = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith(("API_KEY", "_TOKEN"))
    }
    with (results / "work" / "up.log").open("w") as log:
        stack = subprocess.Popen(
            up(profile, root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=keys | {"XDG_STATE_HOME": str(results / "work" / "state")},
        )
    run, had = RunDir(root), []
    try:
        if not _until(lambda: _reached(run, "trainer", ATTACHED), stack, READY_S):
            raise SystemExit(f"the stack does not come up: see {results}/work/up.log")
        for attempt in chunk:
            if stack.poll() is not None:
                break
            gates[attempt.name].touch()
            take_turn(attempt, run, stack)
            attempt.write(results)
            had.append(attempt)
    finally:
        stack.send_signal(signal.SIGTERM)
        stack.wait(120)
    return [attempt for attempt in chunk if attempt not in had]


def write_profile(path: Path, gates: dict[str, Path], chunk: list[Try], model: Path) -> Path:
    """The stack's profile, with ports that are free now."""
    api, engine = free_ports(2)
    text = PROFILE.format(
        model=json.dumps(str(model)), api=api, engine=engine, batch=BATCH, context=CONTEXT
    )
    for index, attempt in enumerate(chunk):
        text += ENVIRONMENT.format(
            name=json.dumps(attempt.name),
            script=json.dumps(str(attempt.target)),
            cwd=json.dumps(str(attempt.folder)),
            gate=f"turn{index}",
            go=gates[attempt.name],
            env=_toml(attempt.env),
            args=_toml(attempt.args),
        )
    path.write_text(text)
    return path


def take_turn(attempt: Try, run: RunDir, stack: subprocess.Popen[bytes]) -> None:
    """Wait for its three steps, its end, or the end of patience; then stop it and fill in its
    row."""
    name, before = attempt.name, 0

    def done() -> bool:
        return _steps(run) - before >= STEPS and _counts(run, name).sent >= FEWEST_GROUPS

    def over() -> bool:
        return done() or _ended(run, name)

    _until(lambda: _reached(run, name, REGISTERED) or _ended(run, name), stack, EACH_S)
    before = _steps(run)
    _until(over, stack, EACH_S)
    steps, counts = _steps(run) - before, _counts(run, name)
    log, started = _log(run, name), _reached(run, name, REGISTERED)
    if stack.poll() is None:
        command = [sys.executable, "-m", "atropos_tui", "stop", name, "--run-dir", str(run.root)]
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
        )
    trained = steps >= STEPS and counts.sent >= FEWEST_GROUPS
    bad = counts.failures or counts.left_out
    reason = ""
    if not trained:
        reason = why(log) if not started or _ended(run, name) else _silence(log)
        reason = (
            f"every group: {reason_text(max(bad, key=lambda each: bad[each]))}"
            if started and bad
            else reason
        )
    attempt.row |= {
        "outcome": "trained" if trained else "started" if started else "failed",
        "reason": reason,
        "steps": min(steps, STEPS) if counts.sent else 0,
        "groups": counts.sent,
        "left_out": dict(counts.left_out),
        "failures": dict(counts.failures),
        "adjusted": dict(counts.adjusted),
    }


def _silence(log: str) -> str:
    """Why one that runs sends nothing: a key that it misses, or what it called an error."""
    key = re.search(r"\b[A-Z][A-Z_]*API_KEY\b", log)
    errors = re.findall(r"^\S+ \S+ ERROR [\w.]+: (.*)$", log, re.MULTILINE)
    said = "; ".join([*([f"wants {key[0]}"] if key else []), *errors[-1:]])
    return (
        f"{SILENT}: {said}"[:200]
        if said
        else f"{SILENT}; it leaves out groups whose answers are all worth the same"
    )


def _until(condition: Callable[[], bool], stack: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until it holds; False where the stack ends before, or the time is over."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end and stack.poll() is None:
        time.sleep(0.5)
    return held


def _log(run: RunDir, name: str) -> str:
    return "".join(
        path.read_text(errors="replace") for path in sorted((run.logs / name).glob("*.log"))
    )


def _reached(run: RunDir, name: str, stage: str) -> bool:
    """Return True if a component has recorded that stage."""
    return any(
        each.stage == stage
        for each in _records(run.stages_jsonl(name))
        if isinstance(each, StageRecord)
    )


def _steps(run: RunDir) -> int:
    return sum(each.kind == "step" for each in _records(run.telemetry_jsonl))


def _counts(run: RunDir, name: str) -> EnvCountsRecord:
    """The last that it told."""
    told = [each for each in _records(run.eval_jsonl(name)) if isinstance(each, EnvCountsRecord)]
    return told[-1] if told else EnvCountsRecord(env=name, sent=0)


def _ended(run: RunDir, name: str) -> bool:
    """It ended by itself."""
    states = [
        each
        for each in _records(run.supervisor_jsonl)
        if isinstance(each, StateRecord) and each.component == name
    ]
    return bool(states) and states[-1].new in (
        "failed",
        "exited",
        "completed",
        "stopped",
        "backoff",
    )


def _toml(table: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())


def _records(path: Path) -> Iterator[Any]:
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            yield parse_line(line)
        except RecordError:
            continue


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
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        place = folder / data.get("file", f"{name}/README.md")
        place.parent.mkdir(parents=True, exist_ok=True)
        if "file" in data:
            place.write_text(lines if place.suffix == ".jsonl" else json.dumps(rows))
            continue
        for split in data["splits"]:
            place.with_name(f"{split}.jsonl").write_text(lines)
        listed = "".join(
            f'  - split: {split}\n    path: "{split}.jsonl"\n' for split in data["splits"]
        )
        config = data.get("config", "default")
        place.write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{listed}---\n")


def _filled(value: Any, number: int) -> Any:
    if isinstance(value, str):
        return value.replace("{n}", str(number)).replace("{m}", str(number % 4))
    if isinstance(value, list):
        return [_filled(each, number) for each in value]
    if isinstance(value, dict):
        return {name: _filled(each, number) for name, each in value.items()}
    return value


@contextmanager
def machine_lock() -> Iterator[None]:
    """Run one stack at a time among all programs that take the same lock (ATROPOS_BENCH_LOCK names
    the file)."""
    path = os.environ.get("ATROPOS_BENCH_LOCK")
    if path is None:
        yield
        return
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
            f"| `{name}` | {started} | {row['groups']} | {row['steps']} | {_notes(row)} | "
            f"{_cell(row['reason'])} |"
        )
    return "\n".join(lines)


def _notes(row: dict[str, Any]) -> str:
    parts = [f"`{name} = {json.dumps(value)}`" for name, value in row["set"].items()]
    parts += [f"data: {name}" for name in row["data"]]
    parts += [f"{name} left out of {count} requests" for name, count in row["adjusted"].items()]
    parts += [
        f"{count} groups left out ({reason_text(reason)})"
        for reason, count in row["left_out"].items()
    ]
    parts += [f"{count} failed ({reason})" for reason, count in row["failures"].items()]
    return _cell("; ".join(parts))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


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
    parser.add_argument("--screen", action="store_true", help="import and set up only")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the records and run nothing"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
