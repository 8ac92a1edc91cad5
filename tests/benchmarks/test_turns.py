"""Rows of environments that take turns in one stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atropos_common.protocol.bridge import completion_digest
from atropos_common.system.run_dir import RunDir
from benchmarks.support.turns import RECORDING, _recorded_ids


def test_completions_that_the_engine_does_not_know_are_seen(tmp_path: Path) -> None:
    """Two turns of one sequence: the second has another id than the engine sampled."""
    ids, logprobs = [7, 8, 9, 5, 6], [1.0, -0.5, -0.25, 1.0, -0.5]
    group: dict[str, Any] = {
        "tokens": [ids],
        "masks": [[-100, 8, 9, -100, 6]],
        "inference_logprobs": [logprobs],
        "generation_params": {"env": "mine"},
    }
    known = [completion_digest([8, 9], logprobs[1:3]), completion_digest([4], logprobs[4:])]
    spans = {digest: {"oldest": 0, "newest": 0} for digest in known}
    others = group | {"generation_params": {"env": "other"}}
    line = {"batch": [group, others], "step": 1, "versions": spans}
    tmp_path.joinpath(RECORDING).write_text(json.dumps(line) + "\n")
    assert _recorded_ids(RunDir(tmp_path), "mine") == {"completions": 2, "same_ids": 1}
    assert _recorded_ids(RunDir(tmp_path), "silent") == {"completions": 0, "same_ids": 0}
