"""Plant silent bugs around a real vLLM and print what the audit names them.

python -m benchmarks.silent_bugs                    # all faults: about ten minutes on two cores
python -m benchmarks.silent_bugs --only "rotary"    # faults with this word
python -m benchmarks.silent_bugs --healthy 1000     # audits of healthy engines: false alarms
python -m benchmarks.silent_bugs --cuda MODEL       # one GPU: graphs and LoRA, a real model

With --work DIR and --seconds S a run goes in parts: the next call makes the missing audits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.silent_bugs.engines import Nursery, vllm
from benchmarks.silent_bugs.faults import ENGINES, FAULTS, Fault
from benchmarks.silent_bugs.healthy import count_false_alarms
from benchmarks.silent_bugs.large import audit_on_gpu
from benchmarks.silent_bugs.state import State
from trainer_core.audit.program import Settings, audit
from trainer_core.objective.causes.sampling import PLAIN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--healthy", type=int, metavar="N")
    parser.add_argument("--cuda", type=Path, metavar="MODEL")
    parser.add_argument("--work", type=Path, help="folder for models, logs and results")
    parser.add_argument("--seconds", type=float, help="begin no further audit after this time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        work = options.work or Path(made)
        work.mkdir(parents=True, exist_ok=True)
        if options.cuda:
            return audit_on_gpu(options.cuda, work, options.seconds or 330.0)
        if options.healthy:
            state = State(work / "healthy.json", options.seconds)
            return count_false_alarms(options.healthy, work, options.only, state)
        return _faults(work, options.only, State(work / "faults.json", options.seconds))


def _faults(work: Path, only: str, state: State) -> int:
    chosen = [fault for fault in FAULTS if only in f"{fault.name} {fault.engine}"]
    by_engine: dict[str, list[Fault]] = defaultdict(list)
    for fault in chosen:
        if fault.name not in state.done:
            by_engine[fault.engine].append(fault)
    nursery: Nursery | None = None
    for name, faults in by_engine.items():
        if state.over:
            break
        nursery = nursery or Nursery(work)
        engine = ENGINES[name]
        root = work / name.replace(" ", "-")
        root.mkdir(exist_ok=True)
        folder = engine.folder(root)
        begun = time.monotonic()
        with vllm(folder, root / "vllm.log", engine.flags(root), nursery=nursery) as url:
            print(f"# {name}: ready after {time.monotonic() - begun:.0f} s", flush=True)
            for fault in faults:
                if not state.over:
                    state.done[fault.name] = _audited(fault, url, root, folder)
                    state.save()
    return _print(chosen, state)


def _print(chosen: Sequence[Fault], state: State) -> int:
    print(f"{'fault':<46}{'named as':<24}{'right':<7}{'tokens':>7}{'s':>6}  evidence")
    found = [(fault, state.done[fault.name]) for fault in chosen if fault.name in state.done]
    right = 0
    for fault, row in found:
        good = row["cause"] in fault.named
        right += good
        print(
            f"{fault.name:<46}{row['cause'] or row['verdict']:<24}{'yes' if good else 'NO':<7}"
            f"{row['tokens']:>7}{row['seconds']:>6.1f}  {row['evidence']}"
        )
    healthy = sum(row["verdict"] == "serves" for _, row in found)
    print(
        f"{right} of {len(found)} named rightly, {healthy} called healthy; {len(found)} of "
        f"{len(chosen)} faults audited at {state.commit}"
    )
    return 0 if right == len(chosen) else 1


def _audited(fault: Fault, url: str, root: Path, folder: Path) -> dict[str, Any]:
    fault.before(url, root)
    given: dict[str, Any] = {"weights": folder, **fault.settings(root)}
    temperature = given.pop("temperature", 1.0)
    with fault.between(url) as address:
        result = audit(
            Settings(
                **given,
                engine=address,
                device="cpu",
                sampler=PLAIN._replace(temperature=temperature),
                # Other programs may share the two cores: no hypothesis is left out for that.
                timeout_s=240.0,
            )
        )
    print(f"{fault.name}: {result.cause or result.verdict}", flush=True)
    kept = ("verdict", "cause", "evidence", "tokens", "seconds")
    return {name: getattr(result, name) for name in kept}


if __name__ == "__main__":
    sys.exit(main())
