"""Train: parse and validate, then import the loop.

    python -m trainer_core --model-name DIR --weight-bridge-mode shared_vllm --training-steps 60

Exit codes: 0 all steps done; 1 the run could not go on; 2 wrong flags; 130 interrupted; 143 stopped by SIGTERM
(a checkpoint is saved).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from atropos_common.manifest import ManifestError
from atropos_common.run_dir import RunDir
from trainer_core.cli import parse_args
from trainer_core.config import TrainingConfig
from trainer_core.errors import Stopped, TrainerError, UsageError


def main(argv: list[str] | None = None) -> int:
    """Run the trainer; the return value is the exit code."""
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

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if received:  # asked twice: leave now
            os._exit(128 + number)
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        from trainer_core.checkpoint import starting_point
        from trainer_core.rollouts.client import open_api

        # Before torch: environments register and warm up while the rest is imported and loaded.
        api = open_api(config, starting_point(config).step, stop)
        from trainer_core.loop import train

        done = train(config, api=api, stop=stop).done
    except Stopped:
        done = False
    except (TrainerError, ManifestError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
    return 0 if done or not received else 128 + received[0]


if __name__ == "__main__":
    sys.exit(main())
