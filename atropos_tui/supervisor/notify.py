"""`[notify]`: a run that fails, ends, or trains on wrong weights, and an `[[alert]]`.

One JSON object per event, by POST and on the standard input of a command. A failed delivery is only
a diagnosis. The resolved address (`${VAR}`) never reaches the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import httpx

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import DiagnosisRecord
from atropos_common.system.run_dir import ENV_TOKEN
from atropos_tui.diagnoses import rule_of
from atropos_tui.diagnoses.model import NOT_NOTIFIED
from atropos_tui.errors import Exit
from atropos_tui.profile.redact import REDACTED, mask
from atropos_tui.profile.spec import NotifyPolicy, StackSpec
from atropos_tui.streams import write_own
from atropos_tui.supervisor.journal.store import RunResult, Store, SubscriberDroppedError
from atropos_tui.supervisor.processes.launch import resolve
from atropos_tui.supervisor.processes.process import LaunchError

Event = Literal["failed", "mismatch", "alert", "done", "test"]
"""Events that are posted and that ring the terminal bell."""
TRY_S = 5.0
COMMAND_S = 10.0
PAUSES_S = (0.5, 1.0)
"""Seconds before the second and the third try."""
END_PATIENCE_S = 10.0
"""Seconds that the end of the run waits for deliveries."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RuntimeError)
"""Exceptions of a POST; RuntimeError if no thread can start."""
MISMATCH_EVERY_S = 600.0
"""Seconds before a lasting mismatch is posted again."""
MOST_TEXT = 1500
"""Longest message in characters; Discord refuses more than 2,000."""

logging.getLogger("httpx").setLevel(logging.WARNING)  # INFO logs the address, which may be a secret


def is_event(record: Record, event: Event) -> TypeGuard[DiagnosisRecord]:
    """True if `record` opens a diagnosis of this event."""
    return (
        isinstance(record, DiagnosisRecord) and not record.over and rule_of(record).event == event
    )


def event_of_exit(code: int | None) -> Event | None:
    """None if a user stopped the run, or it still runs."""
    if code is None or code == Exit.INTERRUPTED:
        return None
    return "failed" if code else "done"


class DeliveryError(Exception):
    """The receiver did not accept a notification; the message has no address and no token."""


def payload(
    stack: StackSpec, event: Event, reason: str, component: str | None, code: int | None
) -> dict[str, Any]:
    """JSON object to post. Slack reads `text`, Discord `content`; neither can mention a user."""
    reason = mask(reason)
    host = platform.node()
    message = f"atropos-tui: {stack.name} {event}: {reason} ({stack.run_id} on {host})"[:MOST_TEXT]
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
        # Slack's escapes; `<!channel>` would otherwise notify everyone.
        "text": message.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
        "content": message,
        "allowed_mentions": {"parse": []},
    }


async def post(url: str, body: dict[str, Any]) -> None:
    """POST `body`, up to three times.

    Raises:
        DeliveryError: no try got a 2xx answer.
    """
    try:
        async with httpx.AsyncClient(timeout=None) as client:
            for pause in (0.0, *PAUSES_S):
                await asyncio.sleep(pause)
                problem, may_help = await _try(client, url, body)
                if not problem:
                    return
                if not may_help:
                    break
    except FAILURES as error:  # an unusable proxy or certificate
        problem = f"{type(error).__name__}: {error}"
    raise DeliveryError(_without_address(problem, url))


async def _try(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, bool]:
    """Problem of one try ("": none), and True if another may help."""
    try:
        # A total limit: httpx's own timeouts restart with each byte.
        async with asyncio.timeout(TRY_S), client.stream("POST", url, json=body) as answer:
            status = answer.status_code
    except TimeoutError:
        return f"no answer within {TRY_S:g} s", True
    except FAILURES as error:
        return f"{type(error).__name__}: {error}", True
    if 200 <= status < 300:
        return "", False
    # Redirects and 4xx are final, except request timeout, too early and rate limit.
    return f"status {status}", not 300 <= status < 500 or status in (408, 425, 429)


async def run_command(command: Sequence[str], body: dict[str, Any]) -> None:
    """Run a program with `body` on its standard input, without the run's token.

    Raises:
        DeliveryError: it does not start, fails, or exceeds `COMMAND_S`.
    """
    environment = {name: value for name, value in os.environ.items() if name != ENV_TOKEN}
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=nowhere,
            stderr=pipe,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise DeliveryError(f"{command[0]} cannot be started: {error}") from None
    try:
        async with asyncio.timeout(COMMAND_S):
            _, errors = await process.communicate(json.dumps(body).encode())
    except TimeoutError:
        raise DeliveryError(f"{command[0]} did not end within {COMMAND_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # It is the leader of a session of its own, so its children die too.
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise DeliveryError(f"{command[0]} ended with code {process.returncode}: {mask(last)}")


def resolved(policy: NotifyPolicy, variables: Mapping[str, str]) -> str | None:
    """Webhook address with its variables filled in.

    Raises:
        LaunchError: the address is not usable.
    """
    if policy.webhook is None:
        return None
    url = resolve(policy.webhook, dict(variables), "notify.webhook")
    if not url.startswith(("http://", "https://")):
        fix = (
            "set an http:// or https:// address, or ${VAR} of an environment variable that holds "
            "one"
        )
        raise LaunchError("it is not an http:// or https:// address", fix)
    return url


def _without_address(text: str, url: str) -> str:
    with contextlib.suppress(httpx.InvalidURL):
        parts = httpx.URL(url)
        # The path of a webhook is its secret; libraries print it in several forms.
        for secret in (url, str(parts), parts.raw_path.decode(), parts.host):
            text = text.replace(secret, REDACTED) if len(secret) > 1 else text
    return text.replace(url, REDACTED)


class Notifier:
    """Posts the events of one run. Never raises into the event loop."""

    def __init__(
        self, stack: StackSpec, store: Store, decided: Callable[[], RunResult | None]
    ) -> None:
        """`decided`: the run's result, known before the stack has stopped."""
        self._stack, self._store = stack, store
        self._policy = stack.notify
        self._decided = decided
        self._url = self._resolved()
        self._posted_end = False
        self._mismatch_at: float | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._listener = asyncio.create_task(self._listen())

    def _resolved(self) -> str | None:
        try:
            return resolved(self._policy, self._stack.variables | os.environ)
        except LaunchError as error:
            self._diagnose("the webhook of [notify] cannot be used", error.problem, error.fix)
            return None

    async def _listen(self) -> None:
        while True:
            try:
                async for record in self._store.hub.subscribe():
                    if is_event(record, "mismatch"):
                        self._on_mismatch(record)
                    elif is_event(record, "alert"):
                        self._notify(
                            "alert", f"{record.title}: {record.evidence}", record.component, None
                        )
                    self._post_end()
                return
            except SubscriberDroppedError:
                continue

    def _on_mismatch(self, record: DiagnosisRecord) -> None:
        now = time.monotonic()
        if self._mismatch_at is None or now - self._mismatch_at > MISMATCH_EVERY_S:
            self._mismatch_at = now
            self._notify("mismatch", f"{record.title}: {record.evidence}", record.component, None)

    def _post_end(self) -> None:
        result = self._decided()
        if result is not None and not self._posted_end:
            self._posted_end = True
            event = event_of_exit(result.exit_code)
            if event is not None:
                self._notify(event, result.reason, result.component, result.exit_code)

    def _notify(self, event: Event, reason: str, component: str | None, code: int | None) -> None:
        # The profile's `on` lists the wanted events.
        if event not in self._policy.on:
            return
        if self._policy.bell and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                write_own(sys.stderr, "\a")
        body = payload(self._stack, event, reason, component, code)
        ways = [post(self._url, body)] if self._url is not None else []
        ways += [run_command(self._policy.command, body)] if self._policy.command else []
        for way in ways:
            task = asyncio.create_task(self._deliver(event, way))
            # asyncio keeps only weak references to tasks.
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _deliver(self, event: Event, way: Coroutine[Any, Any, None]) -> None:
        try:
            await way
        except DeliveryError as error:
            self._undelivered(event, str(error))
        except asyncio.CancelledError:
            self._undelivered(
                event, f"no answer within {END_PATIENCE_S:g} s after the end of the run"
            )

    def _undelivered(self, event: Event, evidence: str) -> None:
        fix = (
            "check the address or the command: atropos-tui doctor PROFILE --notify tries one "
            "delivery"
        )
        self._diagnose(f"the notification {event!r} was not delivered", evidence, fix)

    def _diagnose(self, title: str, evidence: str, fix: str) -> None:
        self._store.diagnoses.add(None, NOT_NOTIFIED.diagnosis(evidence, fix, title))

    async def close(self, result: RunResult | None) -> None:
        """Post the result, wait for deliveries, and cancel the rest."""
        # After an internal error only the written result tells how the run ended.
        if self._decided() is None and result is not None:
            self._decided = lambda: result
        self._post_end()
        self._listener.cancel()
        _, late = await asyncio.wait({self._listener, *self._under_way}, timeout=END_PATIENCE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
