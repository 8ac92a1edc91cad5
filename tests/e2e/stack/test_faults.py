"""Faults while the real stack runs: restarts by hand, kills of every component, mistakes in a
profile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from atropos_common.protocol.records import DiagnosisRecord
from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e.live_stack import LiveStack, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
Start = Callable[..., LiveStack]


@pytest.mark.slow
def test_restart_of_vllm_goes_on_from_the_weights_it_had(stack: Start) -> None:
    run = stack(trainer__training_steps=45)
    run.until_step(20, timeout=240)
    shown = run.cli("restart", "vllm", "--dry-run")
    assert "trainer → vllm" in shown.stdout and "vllm → trainer" in shown.stdout
    done = run.cli("restart", "vllm", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    code, output = run.wait(timeout=300)
    assert code == 0, output[-4000:]

    steps = run.telemetry("step")
    before = [step for step in steps if step.attempt == 1]
    after = [step for step in steps if step.attempt == 2]
    assert after[0].step == before[-1].step + 1, (
        "the checkpoint of the stop signal was resumed, nothing repeated"
    )
    assert after[0].weight_version == before[-1].weight_version + 1
    assert after[-1].step == 45
    assert [s.weight_version for s in run.steps()] == list(range(1, 46)), (
        "no version is lost, none is used twice"
    )
    syncs = [sync.weight_version for sync in run.telemetry("sync")]
    assert syncs == sorted(set(syncs)), "and none was published twice"
    # The base model scores about 0.55: had a rollout come from it, the mean would show it.
    assert mean(s.reward_mean for s in after[:3]) > mean(s.reward_mean for s in before[:3]) + 0.15
    lags = [step.policy_lag_max for step in after]
    assert None not in lags and max(lags) <= 2, f"policy lag after the restart: {lags}"
    assert all(r.verdict == "ok" for r in run.telemetry("alignment"))
    run.assert_nothing_left()


def _kill(run: LiveStack, component: str, again: int) -> None:
    """SIGKILL a component's main process, wait for its next attempt to be healthy and for training
    to go on."""
    step = run.telemetry("step")[-1].step
    os.kill(run.pid_of(component), signal.SIGKILL)
    run.until(
        lambda: any(r.new == "healthy" and r.attempt == again for r in run.states(component)),
        240,
        f"{component} healthy again",
    )
    back = time.time()
    run.until(
        lambda: any(r.time > back and r.step > step for r in run.telemetry("step")),
        240,
        f"training after {component}",
    )


@pytest.mark.slow
def test_an_environment_whose_requests_are_refused_is_told_so(stack: Start) -> None:
    """Before, its log held the refusals, the engine's did not, and after three minutes rollouts
    were "slow"."""
    run = stack(
        env__module="tests.e2e.stack.asks_top_p",
        vllm__sampling="refuse",
        env__env__PYTHONPATH=str(Path(__file__).parents[3]),
    )

    def diagnoses() -> list[DiagnosisRecord]:
        return [r for r in read_records(run.run.supervisor_jsonl) if isinstance(r, DiagnosisRecord)]

    found = run.until(
        lambda: [r for r in diagnoses() if r.rule == "rollouts_refused"], 240, "the diagnosis"
    )[0]
    assert (
        found.component == "arithmetic"
        and "vllm refuses the requests of arithmetic (400)" in found.title
    )
    assert "top_p=0.9: changes the distribution" in found.evidence and "send top_p=1." in found.fix
    log = run.run.log("arithmetic", 1).read_text()
    first = next(line for line in log.splitlines() if "/generate: 400" in line)
    refused_at = time.mktime(time.strptime(first[:19], "%Y-%m-%d %H:%M:%S"))
    print(f"{found.time - refused_at:.1f} s from the first refusal to the diagnosis")
    assert found.time - refused_at < 15
    assert "atropos-tui restart arithmetic" in run.cli("why").stdout
    engine = run.run.log("vllm", 1).read_text()
    assert (
        1 <= engine.count("[vllm_server] refused ") < 10
        and engine.count('"POST /generate HTTP/1.1" 400') > 10
    )
    run.cli("down")
    assert (
        "WARNING" in run.run.log("vllm", 1).read_text().rpartition(" refused ")[0].splitlines()[-1]
    )
    assert [r.rule for r in diagnoses()] == ["rollouts_refused"]


@pytest.mark.slow
def test_every_component_may_die(stack: Start) -> None:
    run = stack(trainer__training_steps=100_000, trainer__checkpoint_interval=5)
    run.until_step(6, timeout=240)
    shown = run.cli("restart", "vllm", "--dry-run").stdout
    assert "trainer → vllm" in shown and "vllm → trainer" in shown
    _kill(run, "arithmetic", again=2)
    _kill(run, "trainer", again=2)
    _kill(run, "api", again=2)
    killed_at = run.telemetry("step")[-1].step
    _kill(run, "vllm", again=2)
    last = max(step.step for step in run.telemetry("step") if step.attempt == 2)
    first = min(step.step for step in run.telemetry("step") if step.attempt == 3)
    assert first == last + 1 > killed_at, (
        "the weights outlived their server: no step is lost, none is repeated"
    )
    assert (
        f"No step is lost: the weights of step {last} are intact after the end of the server"
        in run.run.log("trainer", 2).read_text()
    )
    checkpoints = [record for record in run.telemetry("checkpoint") if record.attempt == 2]
    assert checkpoints[-1].path.endswith(f"step_{last}")
    resumed = next(step for step in run.telemetry("step") if step.attempt == 3)
    assert resumed.weight_version == first, "the version goes on as well"
    verdicts = [record.verdict for record in run.telemetry("alignment") if record.attempt == 3]
    assert verdicts and set(verdicts) == {"ok"}, "nothing came from base weights"
    for attempt in (2, 3):  # its own kill, then vLLM's
        log = run.run.log("trainer", attempt).read_text()
        first = min(step.step for step in run.telemetry("step") if step.attempt == attempt)
        assert f"checkpoints/step_{first - 1}" in log, (
            f"attempt {attempt} says which checkpoint it goes on from:\n{log[:800]}"
        )
    lags = [
        step.policy_lag_max for step in run.telemetry("step") if step.policy_lag_max is not None
    ]
    assert min(lags) >= 0, "rollouts of weights that were given up do not train"
    attempts = {step.attempt for step in run.telemetry("step")}
    assert attempts == {1, 2, 3}, "killed once, taken along by vLLM once"
    down = run.cli("down", timeout=180)
    assert down.returncode == 0, down.stderr
    code, output = run.wait(timeout=30)
    assert code == 130, output[-2000:]
    run.assert_nothing_left()


def _failed_for_good(run: LiveStack, component: str) -> str:
    code, output = run.wait(timeout=300)
    assert code == 3, output[-3000:]
    assert f"last lines of {component}:" in output and "fix:" in output, output[-3000:]
    assert "Traceback" not in output.split("last lines of")[0]
    run.assert_nothing_left()
    return output


@pytest.mark.slow
def test_environment_that_crashes_at_import(
    stack: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The checks before the start read import statements.
    (tmp_path / "crashing_env.py").write_text(
        "import importlib\nimportlib.import_module('no_such_thing_at_all')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = _failed_for_good(stack(env__module="crashing_env"), "arithmetic")
    assert "no_such_thing_at_all" in output


def test_a_layer_that_the_model_does_not_have_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    model = save_model(build_tiny_model(), tmp_path / "model")
    run = LiveStack(
        tmp_path / "run", sets={"model": model, "trainer.train_layer_indices": "90-95"}
    ).up()
    code, output = run.wait(timeout=60)
    assert code == 2, output[-2000:]
    assert "trainer.train_layer_indices" in output and "fix:" in output
    assert not run.run.supervisor_jsonl.exists()


@pytest.mark.slow
def test_trainer_told_the_impossible(stack: Start) -> None:
    output = _failed_for_good(stack(trainer__resume="/no/such/checkpoint"), "trainer")
    assert "/no/such/checkpoint" in output.split("last lines of trainer")[1]


@pytest.mark.slow
def test_trainer_that_raises(stack: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = (
        "import trainer_core.optimization.step as step\n\n\ndef accumulate(*_, **__):\n    raise "
        "RuntimeError('planted fault')\n"
    )
    (tmp_path / "planted.py").write_text(plant + "\n\nstep.accumulate = accumulate\n")
    hook = "import os\nif os.environ.get('ATROPOS_COMPONENT') == 'trainer':\n    import planted\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = _failed_for_good(stack(trainer__restart="{policy='never'}"), "trainer")
    assert "planted fault" in output
