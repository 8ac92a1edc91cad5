"""Client of atroposlib's run-api: register, then one batch per optimizer step.

How run-api behaves, and what follows from it: environments cannot register before the first `GET /batch`, so that call
comes before the model loads; all its state is in memory, so after its restart the trainer registers again with its own
step; pulling ahead would defeat the environment's off-policy bound, so nothing is prefetched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from trainer_core.config import TrainingConfig
from trainer_core.contracts.http import LIMITS
from trainer_core.errors import ApiError, Stopped

POLL_FIRST_S = 0.02
POLL_MAX_S = 0.2
IDLE_CHECK_S = 1.0
COMPLAIN_AFTER_S = 30.0

RawBatch = list[dict[str, Any]]
"""Groups as run-api returns them: tokens, masks, scores, inference_logprobs, overrides, ..."""


class RunApi:
    """One trainer's side of run-api. Every wait ends at once with `Stopped` when `stop` is set."""

    def __init__(
        self,
        url: str,
        registration: dict[str, Any],
        stop: threading.Event,
        *,
        timeout_s: float = 300.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.registration = registration
        self.stop = stop
        self.timeout_s = timeout_s
        self._http = httpx.Client(base_url=self.url, timeout=30.0, limits=LIMITS, transport=transport, trust_env=False)
        self._ready: RawBatch | None = None

    def open(self, step: int) -> None:
        """Wait for run-api, register at `step` (optimizer steps done) and let environments in with one `GET /batch`.

        Raises:
            ApiError: run-api stays away for `timeout_s`, or refuses the registration.
        """
        self._call("GET", "/info")
        self._register(step)
        self._ready = self._batch(step)

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """The next batch, waiting as long as it takes; `on_idle` is called about once a second and may raise.

        Args:
            step: optimizer steps done, for a new registration when run-api lost its state.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        pause, began = POLL_FIRST_S, time.monotonic()
        next_check, next_word = began + IDLE_CHECK_S, began + COMPLAIN_AFTER_S
        while True:
            batch = self._batch(step)
            if batch is not None:
                return batch
            now = time.monotonic()
            if now >= next_check:
                on_idle()
                next_check = now + IDLE_CHECK_S
            if now >= next_word:
                print(f"Waiting for rollouts for {now - began:.0f} s: {self._why_empty()}")
                next_word = now + COMPLAIN_AFTER_S
            if self.stop.wait(pause):
                raise Stopped
            pause = min(pause * 1.3, POLL_MAX_S)

    def close(self) -> None:
        self._http.close()

    def _register(self, step: int) -> None:
        answer = self._call("POST", "/register", json={**self.registration, "starting_step": step})
        if "uuid" not in answer:
            raise ApiError(f"run-api at {self.url} refused the trainer: {answer}")
        size = self._call("GET", "/info").get("batch_size")
        if size != self.registration["batch_size"]:
            raise ApiError(
                f"run-api at {self.url} serves batches of {size} sequences, this trainer asks for "
                f"{self.registration['batch_size']}: another trainer registered first. Restart run-api, or match "
                "--batch-size x --gradient-accumulation-steps"
            )
        print(f"✓ Registered with run-api at {self.url}: {size} sequences a step, starting at step {step}")

    def _batch(self, step: int) -> RawBatch | None:
        answer = self._call("GET", "/batch")
        if answer.get("status") == "error":
            print(f"run-api says: {answer.get('message', answer)} Registering again at step {step}.")
            self._register(step)
            answer = self._call("GET", "/batch")
        batch = answer.get("batch")
        return batch or None

    def _call(self, method: str, path: str, json: dict[str, Any] | None = None) -> dict[str, Any]:
        """One answer, through outages of up to `timeout_s`."""
        began = time.monotonic()
        last_word = 0.0
        while True:
            try:
                response = self._http.request(method, path, json=json)
                if response.status_code < 500:
                    if last_word:
                        print(f"run-api is back after {time.monotonic() - began:.1f} s")
                    response.raise_for_status()
                    answer = response.json()
                    return answer if isinstance(answer, dict) else {}
                problem = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            except (httpx.HTTPStatusError, ValueError) as error:
                raise ApiError(f"{self.url}{path} is no run-api: {error}. Check --atropos-url") from None
            away = time.monotonic() - began
            if away > self.timeout_s:
                raise ApiError(
                    f"Atropos API not reachable at {self.url} for {away:.0f} s ({problem}). "
                    "Start it: run-api --host 127.0.0.1 --port PORT; or set --atropos-url"
                )
            if not last_word or away - last_word >= COMPLAIN_AFTER_S:
                print(f"Atropos API not reachable at {self.url} ({problem}); waiting")
                last_word = away or 1e-9
            if self.stop.wait(0.25):
                raise Stopped

    def _why_empty(self) -> str:
        """What run-api shows while it gives no batch."""
        queue = int(self._call("GET", "/status").get("queue_size") or 0)
        if not queue:
            return (
                "run-api's queue is empty. Is an environment running, registered at this run-api, and its inference "
                "server answering?"
            )
        group = len(self._call("GET", "/latest_example").get("tokens") or [])
        size = self.registration["batch_size"]
        if group and size % group:
            return f"groups of {group} never add up to a batch of {size}: make it a multiple of {group}"
        return f"{queue} groups queued, not yet a batch of {size} sequences"


def open_api(config: TrainingConfig, step: int, stop: threading.Event) -> RunApi:
    """Register for the run that `config` describes, with `step` optimizer steps done."""
    registration = {
        "wandb_group": config.wandb_group or "",
        "wandb_project": config.wandb_project or "",
        "batch_size": config.sequences_per_step,
        "max_token_len": config.seq_len,
        "checkpoint_dir": config.save_path,
        "save_checkpoint_interval": config.checkpoint_interval or config.training_steps,
        "num_steps": config.training_steps,
    }
    api = RunApi(config.atropos_url, registration, stop, timeout_s=config.api_timeout)
    api.open(step)
    return api
