"""`[notify]`: tell someone who is not looking that the run failed, is done, or trains against the wrong weights.

One POST with one JSON object per event, from a thread of its own: a slow name server, a dead host or an answer that
never comes costs the run nothing but a diagnosis. The address is resolved (`${VAR}`) in memory and written nowhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from atropos_tui.stack.redact import REDACTED, mask
from atropos_tui.stack.spec import StackSpec
from atropos_tui.supervisor.environment import LaunchError, resolve
from atropos_tui.supervisor.occasions import Event, event_of_exit, is_mismatch
from atropos_tui.supervisor.store import RunResult, Store, SubscriberDroppedError
from trainer_core.contracts.records import DiagnosisRecord

TRIES = 3
TRY_S = 3.0
"""One try takes at most so long in each of connecting, writing and waiting for the answer."""
PAUSES_S = (0.5, 1.0)
"""Between the tries."""
END_PATIENCE_S = 10.0
"""So long the end of the run waits for what is still under way."""
DELIVERY_S = TRIES * 3 * TRY_S + sum(PAUSES_S)
"""Nothing takes longer, however the other side drips its answer."""
QUIET_S = 600.0
"""A mismatch that goes on is told again only after so long."""
MOST_TEXT = 1500
"""Discord refuses more than 2,000 characters."""

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it would log the address


class DeliveryError(Exception):
    """The other side did not take it; the message names neither address nor token."""


def payload(stack: StackSpec, event: Event, reason: str, component: str | None, code: int | None) -> dict[str, Any]:
    """The object that is posted; `text` is read by Slack, `content` by Discord, and neither may mention anybody."""
    reason = mask(reason)
    host = platform.node()
    said = f"atropos-tui: {stack.name} {event}: {reason} ({stack.run_id} on {host})"[:MOST_TEXT]
    return {
        "run_id": stack.run_id,
        "name": stack.name,
        "event": event,
        "reason": reason,
        "component": component,
        "exit_code": code,
        "time": time.time(),
        "host": host,
        "run_dir": stack.run_dir,
        "text": said.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
        "content": said,
        "allowed_mentions": {"parse": []},
    }


def post(url: str, body: dict[str, Any], pause: Callable[[float], object] = time.sleep) -> None:
    """POST `body`, up to three times; blocking.

    Raises:
        DeliveryError: no try was answered with 2xx, or the answer says that another would not help.
    """
    last = ""
    for attempt in range(TRIES):
        if attempt:
            pause(PAUSES_S[attempt - 1])
        try:
            with httpx.Client(timeout=TRY_S) as client, client.stream("POST", url, json=body) as answer:
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            last = _without_address(f"{type(error).__name__}: {error}", url)
            continue
        if 200 <= status < 300:
            return
        last = f"status {status}"
        if 300 <= status < 500 and status not in (408, 425, 429):
            break
    raise DeliveryError(last)


def _without_address(text: str, url: str) -> str:
    with contextlib.suppress(httpx.InvalidURL):
        parts = httpx.URL(url)
        for secret in (url, str(parts), parts.raw_path.decode(), parts.host):
            text = text.replace(secret, REDACTED) if len(secret) > 1 else text
    return text.replace(url, REDACTED)


class Notifier:
    """Listens to one run and tells. Belongs to the event loop of the supervisor; nothing here raises into it."""

    def __init__(self, stack: StackSpec, store: Store, decided: Callable[[], RunResult | None]) -> None:
        """`decided` gives the outcome as soon as it is known, which is before the stack has stopped."""
        self._stack, self._store = stack, store
        self._policy = stack.notify
        self._decided = decided
        self._url = self._resolved()
        self._told_end = False
        self._mismatch_at: float | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._listener = asyncio.create_task(self._listen())

    def _resolved(self) -> str | None:
        """The address; one that cannot be resolved is said at the start of the run, not after a week."""
        if self._policy.webhook is None:
            return None
        try:
            url = resolve(self._policy.webhook, self._stack.variables | os.environ, "notify.webhook")
        except LaunchError as error:
            self._diagnose("the webhook of [notify] cannot be used", error.problem, error.fix)
            return None
        if not url.startswith(("http://", "https://")):
            fix = "give an http:// or https:// address, or ${VAR} of an environment variable that holds one"
            self._diagnose("the webhook of [notify] cannot be used", "it is no http address", fix)
            return None
        return url

    async def _listen(self) -> None:
        while True:
            _, live = self._store.hub.subscribe(lambda: None)
            try:
                async for record in live:
                    if is_mismatch(record):
                        self._on_mismatch(record)
                    self._look_at_the_end()
                return
            except SubscriberDroppedError:
                continue

    def _on_mismatch(self, record: DiagnosisRecord) -> None:
        now = time.monotonic()
        if self._mismatch_at is None or now - self._mismatch_at > QUIET_S:
            self._mismatch_at = now
            self._tell("mismatch", f"{record.title}: {record.evidence}", record.component, None)

    def _look_at_the_end(self) -> None:
        result = self._decided()
        if result is not None and not self._told_end:
            self._told_end = True
            event = event_of_exit(result.exit_code)
            if event is not None:
                self._tell(event, result.reason, result.component, result.exit_code)

    def _tell(self, event: Event, reason: str, component: str | None, code: int | None) -> None:
        if event not in self._policy.on:
            return
        if self._policy.bell and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                sys.stderr.write("\a")
                sys.stderr.flush()
        if self._url is not None:
            body = payload(self._stack, event, reason, component, code)
            task = asyncio.create_task(self._deliver(event, self._url, body))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _deliver(self, event: Event, url: str, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(DELIVERY_S):
                await asyncio.wrap_future(_in_thread(post, url, body))
        except (DeliveryError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._undelivered(event, str(error))
        except TimeoutError:
            self._undelivered(event, f"no answer within {DELIVERY_S:g} s")
        except asyncio.CancelledError:
            self._undelivered(event, f"no answer within {END_PATIENCE_S:g} s after the end of the run")

    def _undelivered(self, event: Event, evidence: str) -> None:
        fix = "check the address and that this machine reaches it; atropos-tui events has what was not told"
        self._diagnose(f"the notification {event!r} was not delivered", evidence, fix)

    def _diagnose(self, title: str, evidence: str, fix: str) -> None:
        self._store.emit(DiagnosisRecord(title=title, evidence=evidence, fix=fix))

    async def close(self, result: RunResult | None) -> None:
        """The run is over: tell how, wait a little for what is under way, and let go of the rest."""
        if self._decided() is None and result is not None:
            self._decided = lambda: result
        self._look_at_the_end()
        self._listener.cancel()
        await _settle({self._listener, *self._under_way}, END_PATIENCE_S)


async def _settle(tasks: Iterable[asyncio.Task[None]], patience_s: float) -> None:
    _, late = await asyncio.wait(set(tasks), timeout=patience_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)


def _in_thread(function: Callable[..., None], *arguments: object) -> concurrent.futures.Future[None]:
    """Run `function` in a daemon thread: unlike an executor's, it holds up neither the loop's end nor the process's."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def work() -> None:
        try:
            function(*arguments)
        except BaseException as error:
            result: BaseException | None = error
        else:
            result = None
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            future.set_result(None) if result is None else future.set_exception(result)

    threading.Thread(target=work, name="notify", daemon=True).start()
    return future
