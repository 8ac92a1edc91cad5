"""Client of atroposlib's run-api: register, then one batch per optimizer step.

How run-api (atroposlib 0.4.0) behaves, and what follows from it:
- Environments cannot register before the first `GET /batch`, so that call comes before the model loads.
- All its state is in memory, and anybody's `GET /reset_data` wipes it. So the trainer looks at `GET /info` before every
  batch and while it waits, and registers again, with its own step, where the registration is gone.
- The first `POST /register` counts, every later one is answered and ignored; so is one that comes after a group
  (`POST /scored_data`). In a run-api without a trainer (batch_size -1) a `GET /reset_data` of ours makes room; another
  trainer's registration is left alone, and so are its batches.
- A bare run-api takes a batch out before it answers: what breaks then is lost. NaN breaks it (HTTP 500), a client that
  gives up too early, too. And pulling ahead would defeat the environment's off-policy bound there.
- Our own (`atropos_api.batches`) hands out the oldest groups first, and keeps a batch in its queue until the trainer
  asks for the one after it. So the next batch is fetched while the present one trains, and nothing of it is lost when
  the trainer ends before it trains it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import httpx
import msgspec

from atropos_common.bridge import TOKEN_HEADER
from atropos_common.http import AFTER_HEADER, BATCH_HEADER, LIMITS, certificates, door_headers
from atropos_common.run_dir import ENV_TOKEN
from atropos_common.stages import REGISTERED, reach
from trainer_core.config import TrainingConfig
from trainer_core.errors import ApiError, Stopped

POLL_FIRST_S = 0.02
POLL_MAX_S = 0.2
IDLE_CHECK_S = 1.0
STOP_LOOK_S = 0.2
"""Between two looks at the stop while an answer does not come."""
LOOK_S = 3.0
"""Between two looks at the registration while no batch comes."""
COMPLAIN_AFTER_S = 30.0
ANSWER_S = 30.0
"""For every answer but that of `GET /batch`, which may be many megabytes."""
NOBODY = -1
"""`batch_size` of a run-api without a trainer."""
FAILED = "failed"
"""Status of an answer that run-api could not give."""
RESTART = "restart run-api (atropos-tui restart api)"

T = TypeVar("T")
RawBatch = list[Any]
"""Groups as run-api returns them: tokens, masks, scores, inference_logprobs, overrides, ..."""


class RolloutSource(Protocol):
    """Where batches come from: run-api, a file, or anything of one's own."""

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """The groups of the next batch, waiting as long as it takes; `on_idle` is to be called about once a second
        meanwhile and may raise.

        Args:
            step: optimizer steps done. Asked for again with the same one where nothing of a batch could be trained.

        Raises:
            RolloutsEnd: there is none left; the run ends well.
        """

    def close(self) -> None:
        """The run is over."""


class Background(Generic[T]):
    """One call, begun at once. A stop ends the wait for it, not the call."""

    def __init__(self, call: Callable[[], T], stop: threading.Event) -> None:
        self._stop = stop
        self._answers: SimpleQueue[T | BaseException] = SimpleQueue()
        threading.Thread(target=self._run, args=(call,), daemon=True, name="run-api").start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._answers.put(call())
        except BaseException as error:
            self._answers.put(error)

    def answer(self, on_idle: Callable[[], None] = lambda: None) -> T:
        """Wait for it, once; `on_idle` is called about once a second and may raise.

        Raises:
            Stopped: the stop is set. Else what the call raised.
        """
        next_check = time.monotonic() + IDLE_CHECK_S
        while True:
            try:
                found = self._answers.get(timeout=STOP_LOOK_S)
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
        self._http = httpx.Client(
            base_url=self.url, timeout=ANSWER_S, limits=LIMITS, transport=transport, trust_env=False,
            verify=certificates(self.url),
            # Compressing a batch costs run-api more time than sending it.
            headers={"Accept-Encoding": "identity"} | door_headers(os.environ),
        )  # fmt: skip
        self._step = 0
        """Optimizer steps done, for a new registration."""
        self._ready: RawBatch | None = None
        self._after = ""
        """Name of the batch that came last, where run-api keeps batches."""
        self._awaited_since: float | None = None
        """When somebody began to wait for the batch under way; null: nobody does."""
        self._opened = False
        self._registered = False
        """The last look said so."""
        self._complained_at = -COMPLAIN_AFTER_S

    def open(self, step: int) -> None:
        """Wait for run-api, register at `step` (optimizer steps done) and let environments in with one `GET /batch`.

        Where run-api holds another trainer's registration: say so, and wait until it does not.

        Raises:
            ApiError: run-api stays away for `timeout_s`, or refuses the registration.
        """
        self._step = step
        while not self._look():
            self._pause(LOOK_S)
        self._opened = True
        self._ready = self._batch()

    @property
    def keeps_batches(self) -> bool:
        """Whether run-api keeps the batch that came last, and hands it out again, until the next one is asked for: to
        fetch ahead then takes nothing from anybody."""
        return bool(self._after)

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """The next batch, waiting as long as it takes; `on_idle` is called about once a second and may raise. An empty
        one was lost in run-api.

        Args:
            step: optimizer steps done, for a new registration when run-api lost its state.
        """
        self.await_from(step)
        return self._next(on_idle)

    def fetch_ahead(self, read: Callable[[RawBatch], T]) -> Background[T]:
        """Fetch the next batch, and `read` it, while nobody waits for it yet; `await_from` tells when somebody does."""
        self._awaited_since = None
        return Background(lambda: read(self._next()), self.stop)

    def await_from(self, step: int) -> None:
        """Somebody waits from now on for the batch under way, with `step` optimizer steps done."""
        self._step, self._awaited_since = step, time.monotonic()

    def _next(self, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        pause, began = POLL_FIRST_S, time.monotonic()
        next_check, next_word, next_look = began + IDLE_CHECK_S, began + COMPLAIN_AFTER_S, began
        while True:
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_S
            batch = self._batch() if self._registered else None
            if batch is not None:
                return batch
            now = time.monotonic()
            if now >= next_check:
                on_idle()
                next_check = now + IDLE_CHECK_S
            waited = now - self._awaited_since if self._awaited_since is not None else 0.0
            if waited >= COMPLAIN_AFTER_S and now >= next_word and self._registered:
                print(f"Waiting for rollouts for {waited:.0f} s: {self._why_empty()}")
                next_word = now + COMPLAIN_AFTER_S
            self._pause(pause)
            pause = min(pause * 1.3, POLL_MAX_S)

    def close(self) -> None:
        self._http.close()

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped

    def _look(self) -> bool:
        """Whether run-api's registration is ours; registers where it is nobody's."""
        wanted = self.registration["batch_size"]
        info = self._call("GET", "/info")
        if info.get("batch_size") == wanted and self._registered:
            return True
        if info.get("batch_size") == NOBODY and self._registered:
            print(f"run-api has forgotten this trainer. Registering again at step {self._step}.")
        self._registered = False
        if info.get("batch_size") in (NOBODY, wanted):
            info = self._register()
            if info.get("batch_size") == NOBODY:
                # A group came first.
                self._make_room()
                info = self._register()
        self._registered = info.get("batch_size") == wanted
        if self._registered:
            self._greet(info)
        else:
            self._complain(info.get("batch_size"), wanted)
        return self._registered

    def _register(self) -> dict[str, Any]:
        """Ask to be registered; what run-api's `/info` says then."""
        answer = self._call("POST", "/register", json={**self.registration, "starting_step": self._step})
        if "uuid" not in answer:
            raise ApiError(f"run-api at {self.url} refused the trainer: {answer}")
        return self._call("GET", "/info")

    def _make_room(self) -> None:
        """Let a run-api without a trainer forget the groups that it holds; a door before it asks for the run's token.

        Nobody else is shown that: a bare run-api does not ask.
        """
        for token in ("", os.environ.get(ENV_TOKEN, "")):
            try:
                answer = self._http.get("/reset_data", headers={TOKEN_HEADER: token} if token else {})
            except httpx.HTTPError:
                return
            if answer.status_code != httpx.codes.FORBIDDEN:
                return

    def _greet(self, info: dict[str, Any]) -> None:
        self._complained_at = -COMPLAIN_AFTER_S
        size, longest = info.get("batch_size"), info.get("max_token_len")
        reach(REGISTERED)
        print(f"✓ Registered with run-api at {self.url}: {size} sequences a step, starting at step {self._step}")
        wanted = self.registration.get("max_token_len")
        if longest != wanted:
            print(
                f"[WARNING] run-api holds an earlier registration: it tells environments max_token_len {longest}, this "
                f"trainer asks for {wanted}. Training goes on; to change it, {RESTART}"
            )

    def _complain(self, size: Any, wanted: int) -> None:
        """Why this trainer does not get in, now and then."""
        now = time.monotonic()
        if now - self._complained_at < COMPLAIN_AFTER_S:
            return
        self._complained_at = now
        why = "takes no registration, since groups came before one: Trainer not registered"
        if size != NOBODY:
            why = (
                f"holds another trainer's registration and takes no second one: it serves batches of {size} sequences, "
                f"this trainer asks for {wanted}"
            )
        print(
            f"[WARNING] run-api at {self.url} {why}. Waiting until that changes. Way out: {RESTART}, or match "
            "--batch-size x --gradient-accumulation-steps"
        )

    def _batch(self) -> RawBatch | None:
        """One `GET /batch`: its groups; an empty list for a batch that was lost; null when there is none yet."""
        after = {AFTER_HEADER: self._after}
        answer = Background(lambda: self._call("GET", "/batch", headers=after), self.stop).answer()
        if answer.get("status") == "error":
            print(f"run-api says: {answer.get('message', answer)} Registering again at step {self._step}.")
            self._registered = False
            self._look()
        elif answer.get("status") == FAILED:
            # It fails without its state as well as with a batch that it cannot write down; and closes the connection.
            self._pause(POLL_MAX_S)
            known = self._call("GET", "/info").get("batch_size") == self.registration["batch_size"]
            if not known:
                self._look()
            return [] if known else None
        batch = answer.get("batch")
        if not (isinstance(batch, list) and batch):
            return None
        self._after = str(answer.get(BATCH_HEADER, ""))
        return batch

    def _call(
        self, method: str, path: str, json: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """One answer, through outages of up to `timeout_s`; with the name of the batch that it brings, if any."""
        began = time.monotonic()
        last_word = 0.0
        patience = max(ANSWER_S, self.timeout_s) if path == "/batch" else ANSWER_S
        while True:
            try:
                response = self._http.request(method, path, json=json, headers=headers, timeout=patience)
                if response.status_code < 500:
                    if last_word:
                        print(f"run-api is back after {time.monotonic() - began:.1f} s")
                    response.raise_for_status()
                    answer = msgspec.json.decode(response.content)
                    named = {name: response.headers[name] for name in (BATCH_HEADER,) if name in response.headers}
                    return {**answer, **named} if isinstance(answer, dict) else {}
                if path == "/batch":
                    return {"status": FAILED}
                problem = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
                broken_off = isinstance(error, httpx.ReadError | httpx.ReadTimeout | httpx.RemoteProtocolError)
                if path == "/batch" and broken_off and not self.keeps_batches:
                    problem += "; a batch that was on its way may be lost"
            except (httpx.HTTPStatusError, ValueError, RecursionError) as error:
                problem = f"no answer of a run-api: {error}"
                if not self._opened:
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
            self._pause(0.25)

    def _ask(self, path: str) -> dict[str, Any]:
        """One answer if there is one at once, else nothing."""
        try:
            answer = self._http.get(path).json()
        except (httpx.HTTPError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _who_sends(self) -> str:
        """Who is registered and has sent nothing since the last batch."""
        envs = self._ask("/envs").get("envs")
        if not isinstance(envs, list):  # a run-api without our door
            return "is an environment running, registered at this run-api, and its inference server answering?"
        names = [str(env.get("name")) for env in envs if isinstance(env, dict) and env.get("connected")]
        if not names:
            return "no environment is registered there"
        return f"nothing has come since the last batch from {', '.join(names)}, registered there"

    def _why_empty(self) -> str:
        """What run-api shows while it gives no batch."""
        queue = int(self._ask("/status").get("queue_size") or 0)
        if not queue:
            return f"run-api's queue is empty: {self._who_sends()}"
        group = len(self._ask("/latest_example").get("tokens") or [])
        size = self.registration["batch_size"]
        if group and size % group:
            return f"groups of {group} never add up to a batch of {size}: make it a multiple of {group}"
        if queue * group >= size:
            return f"{queue} groups queued, and no {size} sequences of them add up to a batch: {RESTART}"
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
