"""The trainer on several ranks: torchrun, and exit codes that say how they ended.

    python -m trainer_core.launch 4 --model-name DIR --training-steps 60 ...
    python -m trainer_core.launch --nnodes 2 --node-rank 1 4 --model-name DIR ...

torchrun starts the ranks, watches over them, passes signals on and ends the others when one has ended badly; it is
never let restart any. Its own exit code is 1 whatever they returned. So this program is torchrun with another end: the
exit code is that of rank 0 where all left together, else 1, and the last line names the rank that ended first.

Its ranks meet in a file, not at a port: what torchrun leaves on a port to the other launchers it unpickles. On several
nodes there is one of this program on each, all with the same words but for `--node-rank`, and a folder that all share
(ATROPOS_RANKS_DIR); each has a torchrun of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer_core.errors import UsageError
from trainer_core.ranks import (
    CODE,
    GONE_CODE,
    LAUNCHED,
    first_rank,
    keep_master,
    leave_word,
    meet_nodes,
    meeting_place,
    read_code,
)

LONGEST_STOP_S = 86_400
"""A rank that was asked to end writes a checkpoint first; whoever asks has a patience of his own."""
FAR_S = 5.0
"""So long what rank 0 writes on another node may take to be seen here."""
SLOW_BEAT_S = 3600
"""Between two lines in torchrun's file, which only grows."""


def main(argv: list[str] | None = None) -> int:
    """Run the ranks of this node; the return value is the exit code."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.ranks)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what it says of an end is said here
    if options.nnodes > 1:
        try:
            meet_nodes(options.node_rank, options.nnodes, options.ranks)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    keep_master()
    folder = meeting_place(os.getpid())
    (folder / LAUNCHED).touch()
    torchrun = folder / f"torchrun.{options.node_rank}"
    try:
        elastic_launch(_config(options.ranks, str(torchrun)), sys.executable)("-m", "trainer_core", *options.flags)
    except ChildFailedError as failed:
        return _end(folder, {first_rank() + rank: each for rank, each in failed.failures.items()})
    except SignalException:
        return read_code(folder)
    finally:
        if options.nnodes == 1:  # else the others may still read there; the next start clears it
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer_core.launch", allow_abbrev=False, description=__doc__)
    parser.add_argument("--nnodes", type=int, default=1, help="on how many nodes")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("ranks", type=int, help="on this node")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the trainer")
    return parser


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
        how = f"was killed by {signal.Signals(-code).name}"
        leave_word(folder, rank, how)
        print(f"error: rank {rank} {how}", file=sys.stderr, flush=True)
        return 1
    if 0 in codes:  # it has said why
        return codes[0]
    if codes and _is_of_all(folder, set(codes.values())):
        return min(codes.values())
    rank, code = min(codes.items(), default=(min(failures), GONE_CODE))
    leave_word(folder, rank, f"exit code {code}")
    print(f"error: rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
    return 1


def _is_of_all(folder: Path, codes: set[int]) -> bool:
    """Whether rank 0, on another node, has ended with the same code: it has said why."""
    until = time.monotonic() + (FAR_S if first_rank() else 0)
    while folder / CODE not in set(folder.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    return codes == {read_code(folder)} and (folder / CODE).exists()


if __name__ == "__main__":
    sys.exit(main())
