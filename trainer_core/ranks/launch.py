"""Start the trainer on several ranks: torchrun with meaningful exit codes.

    python -m trainer_core.ranks.launch 4 --model-name DIR --training-steps 60 ...
    python -m trainer_core.ranks.launch --nnodes 2 --node-rank 1 4 --model-name DIR ...

torchrun starts the ranks and ends all when one fails. Its own exit code is always 1; this program
exits with the code of rank 0 if all ranks left together, else with 1. Its last line names the rank
that ended first.

On several nodes, run it on each with its own `--node-rank`. All nodes share a folder
(ATROPOS_RANKS_DIR).
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
from trainer_core.ranks.world import (
    CODE,
    GONE_CODE,
    LAUNCHED,
    first_rank,
    keep_master,
    meet_nodes,
    meeting_place,
    read_code,
    record_end,
)

# Long: a rank writes a checkpoint first, and the caller has a timeout of its own.
LONGEST_STOP_S = 86_400
"""Seconds that torchrun waits for ranks after a stop."""
FAR_S = 5.0
"""Seconds for rank 0's file on another node to appear here."""
# Rare, because the file only grows.
KEEP_ALIVE_S = 3600
"""Seconds between heartbeats in torchrun's file."""


def main(argv: list[str] | None = None) -> int:
    """Run the ranks of this node and return the exit code."""
    options = _parser().parse_args(argv)
    # torchrun's default of 1 thread would leave a trainer on a CPU with idle cores.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.ranks)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # `_end` reports failures
    if options.nnodes > 1:
        try:
            meet_nodes(options.node_rank, options.nnodes, options.ranks)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    # torchrun overwrites MASTER_ADDR and MASTER_PORT, which name the user's broadcast group.
    keep_master()
    folder = meeting_place(os.getpid())
    (folder / LAUNCHED).touch()
    torchrun = folder / f"torchrun.{options.node_rank}"
    try:
        elastic_launch(_config(options.ranks, str(torchrun)), sys.executable)(
            "-m", "trainer_core", *options.flags
        )
    except ChildFailedError as failed:
        return _end(folder, {first_rank() + rank: each for rank, each in failed.failures.items()})
    except SignalException:
        return read_code(folder)
    finally:
        if options.nnodes == 1:  # other nodes may still read theirs; the next start clears it
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_core.ranks.launch", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--nnodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("ranks", type=int, help="number of ranks on this node")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the trainer")
    return parser


def _config(count: int, file: str) -> LaunchConfig:
    fields = {each.name for each in dataclasses.fields(LaunchConfig)}
    # Fields that only newer releases of torch have; left out where they are missing.
    newer = {"virtual_local_rank": True, "shutdown_timeout": LONGEST_STOP_S}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="trainer",
        max_restarts=0,
        monitor_interval=0.1,
        # A file store: torchrun unpickles what other launchers leave on a port.
        rdzv_backend="c10d",
        rdzv_endpoint=file,
        local_addr="127.0.0.1",
        rdzv_configs={"store_type": "file", "keep_alive_interval": KEEP_ALIVE_S},
        logs_specs=DefaultLogsSpecs(log_dir=f"{file}.logs"),
        **{name: value for name, value in newer.items() if name in fields},
    )


def _end(folder: Path, failures: Mapping[int, ProcessFailure]) -> int:
    # Ranks that left because another was gone are consequences, not the cause.
    codes = {rank: each.exitcode for rank, each in failures.items() if each.exitcode != GONE_CODE}
    # A negative exit code is the number of the signal that killed the process.
    killed = {rank: code for rank, code in codes.items() if code < 0}
    if killed:
        rank, code = min(killed.items())
        how = f"was killed by {signal.Signals(-code).name}"
        record_end(folder, rank, how)
        print(f"error: rank {rank} {how}", file=sys.stderr, flush=True)
        return 1
    if 0 in codes:  # rank 0 has printed its own error
        return codes[0]
    # All ranks raised the same error, and rank 0 printed it.
    if codes and _rank_0_has_reported(folder, set(codes.values())):
        return min(codes.values())
    rank, code = min(codes.items(), default=(min(failures), GONE_CODE))
    record_end(folder, rank, f"exit code {code}")
    print(f"error: rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
    return 1


def _rank_0_has_reported(folder: Path, codes: set[int]) -> bool:
    until = time.monotonic() + (FAR_S if first_rank() else 0)
    while folder / CODE not in set(folder.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    return codes == {read_code(folder)} and (folder / CODE).exists()


if __name__ == "__main__":
    sys.exit(main())
