"""Plant silent bugs around a real vLLM and print what the audit names them.

python -m benchmarks.silent_bugs                    # all faults: about ten minutes on two cores
python -m benchmarks.silent_bugs --only "rotary"    # faults with this word
python -m benchmarks.silent_bugs --healthy 1000     # audits of healthy engines: false alarms
python -m benchmarks.silent_bugs --cuda MODEL       # one GPU: graphs and LoRA, a real model
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from atropos_common.protocol.audit import Audit
from benchmarks.silent_bugs.engines import Nursery, vllm
from benchmarks.silent_bugs.faults import ENGINES, FAULTS, Fault
from benchmarks.silent_bugs.healthy import count_false_alarms
from benchmarks.silent_bugs.large import audit_on_gpu
from trainer_core.audit.program import Settings, audit
from trainer_core.objective.causes.sampling import PLAIN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--healthy", type=int, metavar="N")
    parser.add_argument("--cuda", type=Path, metavar="MODEL")
    parser.add_argument("--work", type=Path, help="folder for models and logs (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        work = options.work or Path(made)
        work.mkdir(parents=True, exist_ok=True)
        if options.cuda:
            return audit_on_gpu(options.cuda, work)
        if options.healthy:
            return count_false_alarms(options.healthy, work, options.only)
        return _faults(work, options.only, options.json)


def _faults(work: Path, only: str, output: Path | None) -> int:
    by_engine: dict[str, list[Fault]] = defaultdict(list)
    for fault in FAULTS:
        if only in f"{fault.name} {fault.engine}":
            by_engine[fault.engine].append(fault)
    found: dict[str, Audit] = {}
    nursery = Nursery(work)
    print(f"{'fault':<46}{'named as':<24}{'right':<7}{'tokens':>7}{'s':>6}  evidence")
    for name, faults in by_engine.items():
        engine = ENGINES[name]
        root = work / name.replace(" ", "-")
        root.mkdir(exist_ok=True)
        folder = engine.folder(root)
        begun = time.monotonic()
        with vllm(folder, root / "vllm.log", engine.flags(root), nursery=nursery) as url:
            print(f"# {name}: ready after {time.monotonic() - begun:.0f} s")
            for fault in faults:
                found[fault.name] = _audited(fault, url, root, folder)
    right = sum(found[f.name].cause in f.named for f in FAULTS if f.name in found)
    healthy = sum(result.verdict == "serves" for result in found.values())
    print(f"{right} of {len(found)} named rightly, {healthy} called healthy")
    if output:
        output.write_text(json.dumps({n: vars(r) for n, r in found.items()}, default=vars))
    return 0 if not healthy and right == len(found) else 1


def _audited(fault: Fault, url: str, root: Path, folder: Path) -> Audit:
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
    named = result.cause or result.verdict
    right = "yes" if result.cause in fault.named else "NO"
    print(
        f"{fault.name:<46}{named:<24}{right:<7}{result.tokens:>7}{result.seconds:>6.1f}  "
        f"{result.evidence}",
        flush=True,
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
