"""Client of atroposlib's run-api (0.4.0): register, then fetch one batch an optimizer step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import httpx
import msgspec

from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER, LIMITS, certificates, key_headers
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_common.protocol.stages import REGISTERED, reach
from atropos_common.system.run_dir import ENV_TOKEN
from trainer_core.config import TrainingConfig
from trainer_core.errors import ApiError, Stopped

POLL_FIRST_S = 0.02
POLL_MAX_S = 0.2
IDLE_CHECK_S = 1.0
STOP_CHECK_S = 0.2
"""Seconds between looks at the stop event during an answer."""
REGISTRATION_CHECK_S = 3.0
"""Seconds between registration checks without a batch."""
COMPLAIN_AFTER_S = 30.0
REQUEST_TIMEOUT_S = 30.0
"""Timeout in seconds of every request but `GET /batch`."""
NO_TRAINER = -1
"""`batch_size` of a run-api without a trainer."""
FAILED = "failed"
"""Status of a batch request that run-api failed to answer."""
RESTART = "restart run-api (atropos-tui restart api)"

T = TypeVar("T")
RawBatch = list[Any]
"""Groups as run-api returns them."""


class RolloutSource(Protocol):
    """Source of batches: run-api, a file, or the caller's object."""

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """Return the groups of the next batch; wait without a limit.

        Args:
            step: optimizer steps done; it repeats if nothing in a batch could train.
            on_idle: called about once a second during the wait; may raise.

        Raises:
            RolloutsEnd: no batch is left.
        """

    def close(self) -> None: ...


class Background(Generic[T]):
    """A call in a thread. A stop ends the wait for its result, not the call."""

    def __init__(self, call: Callable[[], T], stop: threading.Event) -> None:
        self._stop = stop
        self._answers: SimpleQueue[T | BaseException] = SimpleQueue()
        # Daemon: a pending request must not delay the end of the process.
        threading.Thread(target=self._run, args=(call,), daemon=True, name="run-api").start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._answers.put(call())
        # `answer` raises it in the thread that waits.
        except BaseException as error:
            self._answers.put(error)

    def answer(self, on_idle: Callable[[], None] = lambda: None) -> T:
        """Wait for the result, once, with `on_idle` as in `RolloutSource`.

        Raises:
            Stopped: the stop event is set. Otherwise the call's exception.
        """
        next_check = time.monotonic() + IDLE_CHECK_S
        while True:
            try:
                found = self._answers.get(timeout=STOP_CHECK_S)
            except Empty:
                if self._stop.is_set():
                    raise Stopped from None
                if time.monotonic() >= next_check:
                    on_idle()
                    next_check = time.monotonic() + IDLE_CHECK_S
                continue
            if isinstance(found, BaseException):
                raise found
            return found


class RunApi:
    """One trainer's connection to run-api. `stop` ends every wait with `Stopped`."""

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
        self._http = httpx.Client(
            base_url=self.url,
            timeout=REQUEST_TIMEOUT_S,
            limits=LIMITS,
            transport=transport,
            # A proxy of the environment must not get the run's traffic.
            trust_env=False,
            verify=certificates(self.url),
            # run-api would take longer to compress a batch than to send it.
            headers={"Accept-Encoding": "identity"} | key_headers(os.environ),
        )
        self._step = 0  # optimizer steps done, for a new registration
        self._ready: RawBatch | None = None
        self._after = ""
        """Name of the last batch, if run-api keeps batches."""
        self._awaited_since: float | None = None
        """Monotonic start of the wait; None: the trainer still trains."""
        self._opened = False
        self._registered = False  # at the last check
        self._complained_at = -COMPLAIN_AFTER_S

    def open(self, step: int) -> None:
        """Wait for run-api, register at `step`, and admit environments with `GET /batch`.

        Raises:
            ApiError: run-api is unreachable for `timeout_s`, or refuses.
        """
        self._step = step
        while not self._check_registration():
            self._pause(REGISTRATION_CHECK_S)
        self._opened = True
        # Environments can register only after a first `GET /batch`, so the model loads later.
        self._ready = self._batch()

    @property
    def keeps_batches(self) -> bool:
        """True if run-api keeps the last batch, so that prefetching loses nothing."""
        # Upstream run-api removes a batch before it answers, so a failed answer loses it. Our front
        # (`atropos_api.batches`) keeps a batch until the next request.
        return bool(self._after)

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """Return the next batch, as in `RolloutSource`; an empty one was lost in run-api."""
        self.await_from(step)
        return self._next(on_idle)

    def fetch_ahead(self, read: Callable[[RawBatch], T]) -> Background[T]:
        """Fetch the next batch and `read` it in a thread."""
        self._awaited_since = None
        return Background(lambda: read(self._next()), self.stop)

    def await_from(self, step: int) -> None:
        """Mark that the trainer waits for the pending batch, `step` steps done."""
        self._step, self._awaited_since = step, time.monotonic()

    def _next(self, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        if self._ready is not None:
            # `open` may have received the first batch already.
            ready, self._ready = self._ready, None
            return ready
        pause, began = POLL_FIRST_S, time.monotonic()
        next_check, next_message = began + IDLE_CHECK_S, began + COMPLAIN_AFTER_S
        next_registration_check = began
        while True:
            # Any client's `GET /reset_data` wipes run-api's state.
            if time.monotonic() >= next_registration_check:
                self._check_registration()
                next_registration_check = time.monotonic() + REGISTRATION_CHECK_S
            # Another trainer's batch must not be taken.
            batch = self._batch() if self._registered else None
            if batch is not None:
                return batch
            now = time.monotonic()
            if now >= next_check:
                on_idle()
                next_check = now + IDLE_CHECK_S
            waited = now - self._awaited_since if self._awaited_since is not None else 0.0
            if waited >= COMPLAIN_AFTER_S and now >= next_message and self._registered:
                print(f"Waiting for rollouts for {waited:.0f} s: {self._why_empty()}")
                next_message = now + COMPLAIN_AFTER_S
            self._pause(pause)
            # Back off, so that a long wait does not load run-api.
            pause = min(pause * 1.3, POLL_MAX_S)

    def close(self) -> None:
        self._http.close()

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped

    def _check_registration(self) -> bool:
        wanted = self.registration["batch_size"]
        info = self._call("GET", "/info")
        if info.get("batch_size") == wanted and self._registered:
            return True
        if info.get("batch_size") == NO_TRAINER and self._registered:
            restarted = "run-api was restarted and has no registration of this trainer."
            print(f"{restarted} Registering again at step {self._step}.")
        self._registered = False
        # `wanted` may be our own registration of an earlier attempt; registering again changes
        # nothing.
        if info.get("batch_size") in (NO_TRAINER, wanted):
            info = self._register()
            if info.get("batch_size") == NO_TRAINER:
                # run-api ignores a registration that comes after a group.
                self._drop_groups()
                info = self._register()
        self._registered = info.get("batch_size") == wanted
        if self._registered:
            self._print_registered(info)
        else:
            self._print_refused(info.get("batch_size"), wanted)
        return self._registered

    def _register(self) -> dict[str, Any]:
        registration = {**self.registration, "starting_step": self._step}
        answer = self._call("POST", "/register", json=registration)
        # A refusal may come with status 200.
        if "uuid" not in answer:
            raise ApiError(f"run-api at {self.url} refused the trainer: {answer}")
        return self._call("GET", "/info")

    def _drop_groups(self) -> None:
        # The run's token goes only to auth middleware that refused (403): upstream run-api needs
        # none, and must not see it.
        for token in ("", os.environ.get(ENV_TOKEN, "")):
            headers = {TOKEN_HEADER: token} if token else {}
            try:
                answer = self._http.get("/reset_data", headers=headers)
            except httpx.HTTPError:
                return
            if answer.status_code != httpx.codes.FORBIDDEN:
                return

    def _print_registered(self, info: dict[str, Any]) -> None:
        self._complained_at = -COMPLAIN_AFTER_S
        size, longest = info.get("batch_size"), info.get("max_token_len")
        reach(REGISTERED)
        where = f"run-api at {self.url}: {size} sequences a step"
        print(f"✓ Registered with {where}, starting at step {self._step}")
        wanted = self.registration.get("max_token_len")
        if longest != wanted:
            print(
                f"[WARNING] run-api has an earlier registration: environments get max_token_len "
                f"{longest}, this trainer asks for {wanted}. Training continues. fix: {RESTART}"
            )

    def _print_refused(self, size: Any, wanted: int) -> None:
        now = time.monotonic()
        if now - self._complained_at < COMPLAIN_AFTER_S:
            return
        self._complained_at = now
        why = "ignores the registration, because groups came before it: Trainer not registered"
        if size != NO_TRAINER:
            why = (
                f"holds another trainer's registration and allows only one: it serves batches of "
                f"{size} sequences, this trainer asks for {wanted}"
            )
        print(
            f"[WARNING] run-api at {self.url} {why}. Waiting until that changes. fix: {RESTART}, "
            "or match --batch-size x --gradient-accumulation-steps"
        )

    def _batch(self) -> RawBatch | None:
        """Groups of one `GET /batch`; empty for a lost batch, None if none is ready."""
        # Acknowledges the last batch, which a run-api that keeps batches then drops. The thread
        # lets a stop interrupt a slow answer.
        after = {AFTER_HEADER: self._after}
        answer = Background(lambda: self._call("GET", "/batch", headers=after), self.stop).answer()
        if answer.get("status") == "error":
            message = answer.get("message", answer)
            print(f"run-api says: {message} Registering again at step {self._step}.")
            self._registered = False
            self._check_registration()
        elif answer.get("status") == FAILED:
            # HTTP 500 has two causes: run-api lost its state, or it cannot encode this batch.
            # `/info` tells.
            self._pause(POLL_MAX_S)
            known = self._call("GET", "/info").get("batch_size") == self.registration["batch_size"]
            if not known:
                self._check_registration()
            return [] if known else None
        batch = answer.get("batch")
        if not (isinstance(batch, list) and batch):
            return None
        self._after = str(answer.get(BATCH_HEADER, ""))
        return batch

    def _call(
        self,
        method: str,
        path: str,
        json: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        began = time.monotonic()
        printed_at = 0.0
        # Giving up on a batch request early can lose the batch, so it gets the long timeout.
        patience = max(REQUEST_TIMEOUT_S, self.timeout_s) if path == "/batch" else REQUEST_TIMEOUT_S
        more: dict[str, Any] = {"json": json, "headers": headers, "timeout": patience}
        broken_off = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)
        while True:
            try:
                response = self._http.request(method, path, **more)
                if response.status_code < 500:
                    if printed_at:
                        print(f"run-api is back after {time.monotonic() - began:.1f} s")
                    response.raise_for_status()
                    answer = msgspec.json.decode(response.content)
                    if not isinstance(answer, dict):
                        return {}
                    name = response.headers.get(BATCH_HEADER)
                    return answer if name is None else {**answer, BATCH_HEADER: name}
                if path == "/batch":
                    return {"status": FAILED}
                problem = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
                # It failed after the request was sent, so run-api may have removed a batch already.
                sent = isinstance(error, broken_off)
                if path == "/batch" and sent and not self.keeps_batches:
                    problem += "; a batch in transit may be lost"
            except (httpx.HTTPStatusError, ValueError, RecursionError) as error:
                problem = f"unexpected answer: {error}"
                if not self._opened:
                    raise ApiError(
                        f"{self.url}{path} is not a run-api: {error}. fix: check --atropos-url"
                    ) from None
            away = time.monotonic() - began
            if away > self.timeout_s:
                raise ApiError(
                    f"Atropos API not reachable at {self.url} for {away:.0f} s ({problem}). "
                    "fix: start it with run-api --host 127.0.0.1 --port PORT, or set --atropos-url"
                )
            if not printed_at or away - printed_at >= COMPLAIN_AFTER_S:
                print(f"Atropos API not reachable at {self.url} ({problem}); waiting")
                printed_at = away or 1e-9
            self._pause(0.25)

    def _get_once(self, path: str) -> dict[str, Any]:
        try:
            answer = self._http.get(path).json()
        except (httpx.HTTPError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _silent_environments(self) -> str:
        envs = self._get_once("/envs").get("envs")
        if not isinstance(envs, list):  # upstream run-api has no /envs
            running = "check that an environment is running and registered here"
            return f"{running}, and that its inference server answers"
        connected = (env for env in envs if isinstance(env, dict) and env.get("connected"))
        names = [str(env.get("name")) for env in connected]
        if not names:
            return "no environment is registered there"
        return f"nothing since the last batch from {', '.join(names)}, which is registered there"

    def _why_empty(self) -> str:
        queue = int(self._get_once("/status").get("queue_size") or 0)
        if not queue:
            return f"run-api's queue is empty: {self._silent_environments()}"
        group = len(self._get_once("/latest_example").get("tokens") or [])
        size = self.registration["batch_size"]
        # run-api only builds batches of whole groups.
        if group and size % group:
            never = f"groups of {group} never add up to a batch of {size}"
            return f"{never}: make the batch size a multiple of {group}"
        if queue * group >= size:
            none = f"none of them add up to a batch of {size} sequences"
            return f"{queue} groups queued, but {none}: {RESTART}"
        return f"{queue} groups queued, not yet a batch of {size} sequences"


def open_api(config: TrainingConfig, step: int, stop: threading.Event) -> RunApi:
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
