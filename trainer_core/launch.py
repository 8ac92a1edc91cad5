"""The trainer on several ranks: torchrun, and exit codes that say how they ended.

    python -m trainer_core.launch 4 --model-name DIR --training-steps 60 ...

torchrun starts the ranks, watches over them, passes signals on and ends the others when one has ended badly; it is
never let restart any. Its own exit code is 1 whatever they returned. So this program is torchrun with another end: the
exit code is that of rank 0 where all left together, else 1, and the last line names the rank that ended first.

Its ranks meet in a file, not at a port: what torchrun leaves on a port to the other launchers it unpickles.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer_core.ranks import GONE_CODE, LAUNCHED, meeting_place, read_code

LONGEST_STOP_S = 86_400
"""A rank that was asked to end writes a checkpoint first; whoever asks has a patience of his own."""
SLOW_BEAT_S = 3600
"""Between two lines in torchrun's file, which only grows."""


def main(argv: list[str] | None = None) -> int:
    """Run the ranks; the return value is the exit code."""
    count, *flags = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(count))))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what it says of an end is said here
    folder = meeting_place(os.getpid())
    (folder / LAUNCHED).touch()
    try:
        elastic_launch(_config(int(count), str(folder / "torchrun")), sys.executable)("-m", "trainer_core", *flags)
    except ChildFailedError as failed:
        return _end(folder, failed.failures)
    except SignalException:
        return read_code(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _config(count: int, file: str) -> LaunchConfig:
    fields = {each.name for each in dataclasses.fields(LaunchConfig)}
    newer = {"virtual_local_rank": True, "shutdown_timeout": LONGEST_STOP_S}
    return LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id="trainer", max_restarts=0, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint=file, local_addr="127.0.0.1",
        rdzv_configs={"store_type": "file", "keep_alive_interval": SLOW_BEAT_S},
        logs_specs=DefaultLogsSpecs(log_dir=f"{file}.logs"),
        **{name: value for name, value in newer.items() if name in fields},
    )  # fmt: skip


def _end(folder: Path, failures: Mapping[int, ProcessFailure]) -> int:
    """Say which rank ended first, and how; the exit code for that."""
    codes = {rank: each.exitcode for rank, each in failures.items() if each.exitcode != GONE_CODE}
    killed = {rank: code for rank, code in codes.items() if code < 0}
    if killed:
        rank, code = min(killed.items())
        print(f"error: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        return 1
    if 0 in codes:  # it has said why
        return codes[0]
    rank, code = min(codes.items(), default=(min(failures), GONE_CODE))
    print(f"error: rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
