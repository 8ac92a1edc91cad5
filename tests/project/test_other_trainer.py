"""A foreign trainer under the cockpit: its environment, its refusals, and the figures it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli.main import run
from atropos_tui.cli.start.profiles import checked, planned_site
from atropos_tui.errors import UserError
from atropos_tui.profile.ports import free_port
from atropos_tui.profile.profile import parse_profile

STAND_INS = Path(__file__).parents[1] / "cluster/stand_ins"
TRAINER = '''
"""Registers at run-api and takes batches; trains nothing."""
import json, os, sys, time, urllib.request

def call(path, body=None):
    data = json.dumps(body).encode() if body else None
    url, headers = os.environ["ATROPOS_API_URL"] + path, {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))

steps, pause = int(sys.argv[1]), float(sys.argv[2])
call("/register", {"wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64,
                   "checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0,
                   "num_steps": steps})
for step in range(1, steps + 1):
    while (batch := call("/batch")["batch"]) is None:
        time.sleep(0.1)
    print(f"step {step}: {sum(len(group['tokens']) for group in batch)} sequences", flush=True)
    time.sleep(pause)
given = os.environ
print(given["ATROPOS_MODEL"], given["ATROPOS_ENGINE_URLS"], bool(given["ATROPOS_TOKEN"]))
'''
ENVIRONMENT = '''
"""Sends a group of eight again and again."""
import json, sys, time, urllib.request

group = {"tokens": [[1, 2]] * 8, "masks": [[-100, 2]] * 8, "scores": [1.0, 0.0] * 4, "env_id": None}
while True:
    data, kind = json.dumps(group).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(sys.argv[1] + "/scored_data", data, kind)
    urllib.request.urlopen(request, timeout=60)
    time.sleep(0.3)
'''


def profile(folder: Path, **trainer: Any) -> dict[str, Any]:
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text("{}")
    api, engine = free_port(), free_port()
    up = {
        "readiness": {"checks": [{"kind": "log", "pattern": "^up$"}]},
        "env": {"PYTHONPATH": str(STAND_INS)},
    }
    return {
        "name": "other",
        "mode": "none",
        "model": str(folder / "model"),
        "api": {"port": api},
        "env": {
            "command": ["python", str(folder / "env.py"), f"http://127.0.0.1:{api}"],
            "depends_on": {"trainer": "started"},
        },
        "vllm": {"port": engine, "liveness": up["readiness"], **up},
        "trainer": {
            "command": ["python", str(folder / "trainer.py"), "3", "0.5"],
            "restart": {"policy": "never"},
        }
        | trainer,
    }


def test_what_it_is_told(tmp_path: Path) -> None:
    data = profile(tmp_path, gpus=[3])
    data["trainer"]["command"] = [
        "python",
        "t.py",
        "--api",
        "${ATROPOS_API_URL}",
        "--at",
        "${ATROPOS_ENGINE_URLS}",
    ]
    made = parse_profile(data, "p.toml")
    stack = checked(made, Path("p.toml"), planned_site(made), machine=False).stack
    trainer, engine = stack.component("trainer"), stack.component("vllm")
    assert trainer is not None and engine is not None
    api, urls = (
        f"http://127.0.0.1:{data['api']['port']}",
        f"http://127.0.0.1:{data['vllm']['port']}/v1",
    )
    assert trainer.command == [sys.executable, "t.py", "--api", api, "--at", urls]
    told = {
        name: trainer.env[name]
        for name in ("ATROPOS_API_URL", "ATROPOS_ENGINE_URLS", "CUDA_VISIBLE_DEVICES")
    }
    assert told == {
        "ATROPOS_API_URL": api,
        "ATROPOS_ENGINE_URLS": urls,
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert trainer.ends_run and not trainer.stages and trainer.probes.startup is None
    assert "ATROPOS_HOLD_GENERATION" not in engine.env, "nobody would ever name weights to it"


def test_our_settings_beside_it_are_refused(tmp_path: Path) -> None:
    made = parse_profile(profile(tmp_path, lr=1e-5) | {"mode": "broadcast"}, "p.toml")
    with pytest.raises(UserError) as refused:
        checked(made, Path("p.toml"), planned_site(made), machine=False)
    assert "trainer.lr: is a setting of our trainer" in str(refused.value)
    assert 'mode = "none"' in str(refused.value)


@pytest.mark.slow
def test_it_trains_under_the_same_cockpit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    data = profile(tmp_path, command=["python", str(tmp_path / "trainer.py"), "6", "3"])
    (tmp_path / "p.toml").write_text(tomli_w.dumps(data))
    there = RunDir(tmp_path / "run")
    seen: list[str] = []

    def look() -> None:
        """Read the sentence while it trains."""
        while not there.result_json.exists() and not seen:
            time.sleep(0.2)
            log = there.log("trainer", 1)
            if log.exists() and "step 2" in log.read_text():
                done = subprocess.run(
                    [sys.executable, "-P", "-m", "atropos_tui", "why", "--json", str(there.root)],
                    capture_output=True,
                    text=True,
                    env=os.environ,
                )
                seen.append(json.loads(done.stdout)["sentence"])

    looking = threading.Thread(target=look)
    looking.start()
    code = run(["up", str(tmp_path / "p.toml"), "--headless", "--run-dir", str(there.root)])
    looking.join(30)
    said = there.log("trainer", 1).read_text()
    assert code == 0, capfd.readouterr().err + said
    assert (
        "step 6: 8 sequences" in said
        and str(tmp_path / "model") in said
        and said.rstrip().endswith("True")
    )
    assert seen and seen[0].startswith(
        "● the trainer is python trainer.py, which tells no figures: steps, reward, loss and"
    )
