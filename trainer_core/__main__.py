"""Command line of the trainer, built from `TrainingConfig`.

    python -m trainer_core --model-name DIR --weight-bridge-mode shared_vllm --training-steps 60
    torchrun --nproc-per-node 2 -m trainer_core ...

Exit codes: 0 done; 1 the run could not go on; 2 wrong flags; 3 no update in the run, or none in its
last steps; 130 interrupted; 143 stopped by SIGTERM (a checkpoint is saved); 70 another rank is
gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
import types
import typing
from typing import TYPE_CHECKING, Any, NoReturn

from atropos_common.protocol.manifest import ManifestError
from atropos_common.system.leaving import leave
from atropos_common.system.run_dir import RunDir
from trainer_core.config import TrainingConfig, flag, validate
from trainer_core.errors import RankGone, Stopped, TrainerError, UsageError, suggestion
from trainer_core.ranks.world import (
    GONE_CODE,
    on_every_rank,
    own_rank,
    rank_count,
    restore_master,
    write_code,
)

if TYPE_CHECKING:
    from trainer_core.checkpoints.checkpoint import StartingPoint
    from trainer_core.rollouts.client import RunApi

# A terminal's signal reaches a rank directly, and again through torchrun.
SAME_SIGNAL_S = 3.0


def main(argv: list[str] | None = None) -> int:
    """Run the trainer and return the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        config = parse_args(argv).in_run_dir(RunDir.from_env())
    except UsageError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        print("atropos-trainer --help lists every flag", file=sys.stderr)
        return 2
    return _run(config)


def _run(config: TrainingConfig) -> int:
    stop = threading.Event()
    received: list[int] = []
    last_request = 0.0

    def on_signal(number: int, _frame: types.FrameType | None) -> None:
        nonlocal last_request
        again, last_request = received and time.monotonic() - last_request, time.monotonic()
        # A second request ends the process at once, without a checkpoint.
        if again and (rank_count() == 1 or again > SAME_SIGNAL_S):
            os._exit(128 + number)
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        # Only rank 0 talks to run-api; the others get the starting point from it inside `train`.
        start, api = (None, None) if own_rank() else _starting_point_and_api(config, stop)
        # Imported late: this loads torch, which takes seconds.
        from trainer_core.loop import train

        done = train(config, api=api, stop=stop, start=start, keep_history=False).done
    except Stopped:
        done = False
    except (TrainerError, ManifestError) as error:
        if not own_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        # An error that all ranks raise is printed by rank 0 alone.
        elif not on_every_rank(error):
            print(f"error: rank {own_rank()}: {error}", file=sys.stderr, flush=True)
        return GONE_CODE if isinstance(error, RankGone) else getattr(error, "exit_code", 1)
    return 0 if done or not stop.is_set() else 128 + (received or [signal.SIGTERM])[0]


def _starting_point_and_api(
    config: TrainingConfig, stop: threading.Event
) -> tuple[StartingPoint, RunApi | None]:
    # Before torch is imported, so that environments warm up while the trainer loads.
    from trainer_core.checkpoints.checkpoint import starting_point
    from trainer_core.rollouts.client import open_api

    start = starting_point(config)
    return start, None if config.rollouts else open_api(config, start.step, stop)


def build_parser() -> argparse.ArgumentParser:
    """Build a parser with one flag for each field; values stay strings."""
    parser = argparse.ArgumentParser(
        prog="atropos-trainer",
        description="GRPO trainer: trains on rollouts from run-api and publishes the weights to "
        "the inference server.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    aliases: dict[str, list[str]] = {}
    for alias, name in TrainingConfig.ALIASES.items():
        aliases.setdefault(name, []).append(flag(alias))
    group: Any = parser
    for name, field in TrainingConfig.model_fields.items():
        if name in TrainingConfig.SECTIONS:
            group = parser.add_argument_group(TrainingConfig.SECTIONS[name])
        kind = _kind(field.annotation)
        options: dict[str, Any] = {"dest": name, "help": _help(field.description or "", field)}
        if kind is bool:
            options |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        elif kind is list:
            options |= {"nargs": "+", "metavar": name.rsplit("_", 1)[-1].upper()}
        elif typing.get_origin(kind) is typing.Literal:
            options |= {"metavar": "{" + ",".join(typing.get_args(kind)) + "}"}
        else:
            options |= {"metavar": getattr(kind, "__name__", "value").upper()}
        group.add_argument(flag(name), *aliases.get(name, []), **options)
    return parser


def parse_args(argv: list[str] | None = None) -> TrainingConfig:
    """Parse and validate `argv` (default: `sys.argv`).

    Raises:
        UsageError: lists every problem, one a line.
    """
    # argparse only splits the words; pydantic checks them, so one call reports every problem at
    # once.
    parsed, unknown = build_parser().parse_known_args(argv)
    problems = [
        f"{word}: no such flag{_suggested_flag(word)}" for word in unknown if word.startswith("-")
    ]
    problems += (
        [f"{word!r}: stray argument" for word in unknown if not word.startswith("-")]
        if not problems
        else []
    )
    values = {name: _value(name, value) for name, value in vars(parsed).items()}
    config, wrong = validate(values)
    if config is None or problems:
        raise UsageError("\n".join(problems + wrong))
    return config


def _suggested_flag(word: str) -> str:
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    return suggestion(name, TrainingConfig.model_fields).replace("_", "-")


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        # `--x-indices 0-3 28-31` arrives as two words; `parse_layer_indices` expects commas.
        value = ("," if name.endswith("indices") else " ").join(value)
    # `none` and an empty word unset a field whose default is None.
    optional = TrainingConfig.model_fields[name].default is None
    return None if optional and isinstance(value, str) and value.lower() in ("none", "") else value


def _kind(annotation: Any) -> Any:
    """Type of a flag's value, without `None` and metadata."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    origin = typing.get_origin(annotation)
    return list if origin in (list, tuple) else annotation


def _help(text: str, field: Any) -> str:
    text = " ".join(text.split()).replace("%", "%%")
    if field.is_required():
        return f"{text} (required)"
    default = field.default
    return text if default is None or default is False else f"{text} (default: {default})"


def _rank() -> NoReturn:
    restore_master()
    try:
        code = main()
    except Exception as error:
        code = 1
        if not own_rank() or not on_every_rank(error):
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if not own_rank():
        # torchrun exits with 1 whatever its ranks return; `ranks/launch.py` reads this file.
        write_code(code)
    # The interpreter's normal exit would wait for ranks that are gone.
    os._exit(code)


if __name__ == "__main__":
    leave(main()) if rank_count() == 1 else _rank()
