"""Stand-in for a trainer: a step every 0.2 s in telemetry.jsonl, and a saved step.

On a signal it writes its step down, and the next attempt continues there. It ends after
`--training-steps`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

run = Path(os.environ["ATROPOS_RUN_DIR"])
kept = run / "checkpoints" / "stand-in-step"
ended: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
step = int(kept.read_text()) if kept.exists() else 0
last = int(sys.argv[sys.argv.index("--training-steps") + 1])
figures = dict.fromkeys(
    (
        "loss",
        "reward_mean",
        "reward_std",
        "lr",
        "grad_norm",
        "ratio_mean",
        "clip_fraction",
        "tokens",
        "sequences",
    ),
    0,
)
print(f"from step {step}", flush=True)
with (run / "telemetry.jsonl").open("a") as telemetry:
    while step < last and not ended:
        time.sleep(0.2)
        step += 1
        record = {
            "run_id": os.environ["ATROPOS_RUN_ID"],
            "time": time.time(),
            "seq": step - 1,
            "kind": "step",
        }
        honest = {"ratio_mean": 1.0, "reward_mean": step % 7 / 7, "reward_std": 0.5}
        record |= figures | honest | {"step": step, "weight_version": step}
        print(json.dumps(record, separators=(",", ":")), file=telemetry, flush=True)
        print(f"step {step}", flush=True)
kept.write_text(str(step))
