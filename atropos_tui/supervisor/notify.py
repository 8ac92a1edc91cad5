"""`[notify]`: tell someone who is not looking that the run failed, is done, or trains against the wrong weights, and
when a metric leaves the bounds of an `[[alert]]`.

One JSON object per event, by POST and on the standard input of a command, beside the run: a dead host or an answer that
never comes costs the run nothing but a diagnosis. (A name server that never answers holds up the end of the process
until the resolver gives up.) The address is resolved (`${VAR}`) in memory and written nowhere.
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

from atropos_common.records import DiagnosisRecord, Record
from atropos_common.run_dir import ENV_TOKEN
from atropos_tui.diagnoses import rule_of
from atropos_tui.diagnoses.model import NOT_NOTIFIED
from atropos_tui.errors import Exit
from atropos_tui.gate import write_own
from atropos_tui.profile.redact import REDACTED, mask
from atropos_tui.profile.spec import NotifyPolicy, StackSpec
from atropos_tui.supervisor.launch import resolve
from atropos_tui.supervisor.process import LaunchError
from atropos_tui.supervisor.store import RunResult, Store, SubscriberDroppedError

Event = Literal["failed", "mismatch", "alert", "done", "test"]
"""What is posted, and what the bell of a screen rings for."""
TRY_S = 5.0
"""One try takes at most so long, however the other side drips its answer."""
COMMAND_S = 10.0
"""So long a command may take."""
PAUSES_S = (0.5, 1.0)
"""Before the second and the third try."""
END_PATIENCE_S = 10.0
"""So long the end of the run waits for what is still under way."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RuntimeError)
"""What a POST may raise; RuntimeError where no thread can be started that looks a name up."""
QUIET_S = 600.0
"""A mismatch that goes on is posted again only after so long, in seconds."""
MOST_TEXT = 1500
"""Discord refuses more than 2,000 characters."""

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it would log the address


def is_event(record: Record, event: Event) -> TypeGuard[DiagnosisRecord]:
    """Whether `record` opens a diagnosis that is this event."""
    return isinstance(record, DiagnosisRecord) and not record.over and rule_of(record).event == event


def event_of_exit(code: int | None) -> Event | None:
    """What an exit code of a run means; None for one that was stopped by hand, or still runs."""
    if code is None or code == Exit.INTERRUPTED:
        return None
    return "failed" if code else "done"


class DeliveryError(Exception):
    """The other side did not take it; the message names neither address nor token."""


def payload(stack: StackSpec, event: Event, reason: str, component: str | None, code: int | None) -> dict[str, Any]:
    """The object that is posted; `text` is read by Slack, `content` by Discord, and neither may mention anybody."""
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
        "text": message.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
        "content": message,
        "allowed_mentions": {"parse": []},
    }


async def post(url: str, body: dict[str, Any]) -> None:
    """POST `body`, up to three times.

    Raises:
        DeliveryError: no try was answered with 2xx, or the answer says that another would not help.
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
    except FAILURES as error:  # a proxy or certificates that cannot be used
        problem = f"{type(error).__name__}: {error}"
    raise DeliveryError(_without_address(problem, url))


async def _try(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, bool]:
    """What kept `body` from being taken, if anything, and whether another try may help."""
    try:
        async with asyncio.timeout(TRY_S), client.stream("POST", url, json=body) as answer:
            status = answer.status_code
    except TimeoutError:
        return f"no answer within {TRY_S:g} s", True
    except FAILURES as error:
        return f"{type(error).__name__}: {error}", True
    if 200 <= status < 300:
        return "", False
    return f"status {status}", not 300 <= status < 500 or status in (408, 425, 429)


async def run_command(command: Sequence[str], body: dict[str, Any]) -> None:
    """Run a program with `body` on its standard input, without the run's token.

    Raises:
        DeliveryError: it cannot be started, ends with another code than 0, or does not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if name != ENV_TOKEN}
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=nowhere, stderr=pipe, env=environment, start_new_session=True
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
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        said = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise DeliveryError(f"{command[0]} ended with code {process.returncode}: {mask(said)}")


def resolved(policy: NotifyPolicy, variables: Mapping[str, str]) -> str | None:
    """The address of the webhook with its references filled in; None without one.

    Raises:
        LaunchError: it cannot be used.
    """
    if policy.webhook is None:
        return None
    url = resolve(policy.webhook, dict(variables), "notify.webhook")
    if not url.startswith(("http://", "https://")):
        fix = "give an http:// or https:// address, or ${VAR} of an environment variable that holds one"
        raise LaunchError("it is no http address", fix)
    return url


def _without_address(text: str, url: str) -> str:
    with contextlib.suppress(httpx.InvalidURL):
        parts = httpx.URL(url)
        for secret in (url, str(parts), parts.raw_path.decode(), parts.host):
            text = text.replace(secret, REDACTED) if len(secret) > 1 else text
    return text.replace(url, REDACTED)


class Notifier:
    """Listens to one run and posts what happens, in the supervisor's event loop, into which nothing here raises."""

    def __init__(self, stack: StackSpec, store: Store, decided: Callable[[], RunResult | None]) -> None:
        """`decided` gives the outcome as soon as it is known, which is before the stack has stopped."""
        self._stack, self._store = stack, store
        self._policy = stack.notify
        self._decided = decided
        self._url = self._resolved()
        self._posted_end = False
        self._mismatch_at: float | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._listener = asyncio.create_task(self._listen())

    def _resolved(self) -> str | None:
        """The address; one that cannot be resolved is diagnosed at the start of the run, not after a week."""
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
                        self._notify("alert", f"{record.title}: {record.evidence}", record.component, None)
                    self._look_at_the_end()
                return
            except SubscriberDroppedError:
                continue

    def _on_mismatch(self, record: DiagnosisRecord) -> None:
        now = time.monotonic()
        if self._mismatch_at is None or now - self._mismatch_at > QUIET_S:
            self._mismatch_at = now
            self._notify("mismatch", f"{record.title}: {record.evidence}", record.component, None)

    def _look_at_the_end(self) -> None:
        result = self._decided()
        if result is not None and not self._posted_end:
            self._posted_end = True
            event = event_of_exit(result.exit_code)
            if event is not None:
                self._notify(event, result.reason, result.component, result.exit_code)

    def _notify(self, event: Event, reason: str, component: str | None, code: int | None) -> None:
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
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _deliver(self, event: Event, way: Coroutine[Any, Any, None]) -> None:
        try:
            await way
        except DeliveryError as error:
            self._undelivered(event, str(error))
        except asyncio.CancelledError:
            self._undelivered(event, f"no answer within {END_PATIENCE_S:g} s after the end of the run")

    def _undelivered(self, event: Event, evidence: str) -> None:
        fix = "check the address or the command: atropos-tui doctor PROFILE --notify tries one delivery"
        self._diagnose(f"the notification {event!r} was not delivered", evidence, fix)

    def _diagnose(self, title: str, evidence: str, fix: str) -> None:
        self._store.diagnoses.add(None, NOT_NOTIFIED.diagnosis(evidence, fix, title))

    async def close(self, result: RunResult | None) -> None:
        """The run is over: tell how, wait a little for what is under way, and let go of the rest."""
        if self._decided() is None and result is not None:
            self._decided = lambda: result
        self._look_at_the_end()
        self._listener.cancel()
        _, late = await asyncio.wait({self._listener, *self._under_way}, timeout=END_PATIENCE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
