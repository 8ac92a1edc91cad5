"""The terminal: run a screen, open an editor, ring the bell, save a picture."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from textual.app import App, SuspendNotSupported

from atropos_common.protocol.control import Phase, RunStatus
from atropos_common.protocol.record_base import Record
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.run_files import read_json
from atropos_tui.profile.spec import NotifyPolicy
from atropos_tui.supervisor.notify import event_of_exit, is_event
from atropos_tui.ui import user_files
from atropos_tui.ui.base import BaseApp
from atropos_tui.ui.theme import first_theme

Ground = Literal["dark", "light"]
Result = TypeVar("Result")
Themed = TypeVar("Themed", bound=BaseApp[Any])

COLOUR_TIMEOUT_S = 0.5  # for the terminal's answer about its background colour
CLOSE_TIMEOUT_S = 3.0  # a screen that cannot close by then ends with `os._exit`
NEWS_S = 60.0  # older records do not ring the bell
COLLECT_S = 60.0  # between two full garbage collections
FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


def run_app(app: BaseApp[Result], left_alone: Result) -> Result | Literal["failed"]:
    """Show `app` until the user leaves it.

    Args:
        left_alone: the result after a signal, or a lost terminal.
    """
    # A long history is half a million permanent objects. Searching them for cycles takes a fifth of
    # the time to read them. The app enables the collector after it has read the history.
    gc.disable()
    # Threads parse records and logs. The default switch interval (5 ms for each) would delay keys.
    sys.setswitchinterval(0.0005)

    left = threading.Event()
    # Textual's writer thread can block forever on a closed terminal. The screen owns no process of
    # the run, so a hard exit is safe.
    last_resort = threading.Timer(CLOSE_TIMEOUT_S, os._exit, (0,))
    last_resort.daemon = True

    async def run_until_left() -> Result | None:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            if not left.is_set():
                with contextlib.suppress(RuntimeError):  # a second signal: the timer already runs
                    last_resort.start()
                loop.call_soon_threadsafe(app.exit, left_alone)

        # Textual's driver handles neither signal.
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, leave)
        threading.Thread(target=_watch_terminal, args=(leave,), daemon=True).start()
        try:
            return await app.run_async()
        finally:
            left.set()
            last_resort.cancel()

    found = asyncio.run(run_until_left())
    return found if found is not None else "failed" if app.return_code else left_alone


def keep_history_out_of_collections(app: App[Any]) -> None:
    """Enable the garbage collector for the objects to come."""
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)
    gc.enable()
    # A full collection stops the screen for 0.25 s.
    app.set_interval(COLLECT_S, _collect)


def _collect() -> None:
    gc.collect()
    # Batches of records and drawn lines leave gaps in the heap, about 10 MB, that glibc would keep.
    # Other C libraries have no such function.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _watch_terminal(gone: Callable[[], None]) -> None:
    # SIGHUP reaches only the process that owns the terminal. Any other process would read
    # end-of-file in a busy loop.
    if sys.__stdin__ is None or not sys.__stdin__.isatty():
        return
    watched = select.poll()
    watched.register(sys.__stdin__.fileno(), 0)  # no flags: POLLHUP and POLLERR are always reported
    ends = select.POLLHUP | select.POLLERR | select.POLLNVAL
    while not any(event & ends for _, event in watched.poll()):
        pass
    gone()


def with_theme(app: Themed) -> Themed:
    """Apply ATROPOS_THEME, the user's last choice, or the terminal's default."""
    wish = os.environ.get("ATROPOS_THEME") or user_files.theme()
    known = app.available_themes
    # Ask the terminal for its background only without a valid choice: the answer may take up to
    # half a second.
    app.theme = first_theme(wish, known, None if wish in known else ground())
    app.keep_theme = lambda name: user_files.keep(theme=name)
    return app


def edit(app: App[Any], path: Path) -> str:
    """Open `path` in an editor; return an error message, empty on success."""
    line = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "less"
    try:
        words = shlex.split(line)
    except ValueError as error:
        return f"cannot parse the editor command {line!r}: {error}"
    try:
        with _ignore_ctrl_c(), app.suspend():
            subprocess.run([*words, str(path)], check=False)
    except SuspendNotSupported:
        return "this terminal cannot be suspended for an editor"
    except OSError as error:
        return f"{words[0] if words else 'the editor'} cannot be started: {error.strerror}"
    return ""


@contextmanager
def _ignore_ctrl_c() -> Iterator[None]:
    # Ctrl+C in the editor also reaches this process. A handler, unlike SIG_IGN, is not inherited by
    # the editor.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ground(timeout_s: float = COLOUR_TIMEOUT_S) -> Ground | None:
    """Return the terminal's background, if known, from COLORFGBG or OSC 11."""
    colour = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if colour.isdecimal():
        return "light" if colour in ("7", "15") else "dark"
    if os.environ.get("TERM", "dumb") in ("dumb", "linux"):
        return None
    return _asked_ground(timeout_s)


@cache  # each return to the list of runs would wait for the terminal again
def _asked_ground(timeout_s: float) -> Ground | None:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        before = termios.tcgetattr(terminal)
        try:
            tty.setraw(terminal)
            # OSC 11 asks for the background colour, DA1 for the device attributes. Every terminal
            # answers DA1, so one without OSC 11 ends the wait early.
            os.write(terminal, b"\x1b]11;?\x1b\\\x1b[c")
            return ground_of(_answer(terminal, timeout_s))
        finally:
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
    except (OSError, termios.error):
        return None
    finally:
        os.close(terminal)


def _answer(terminal: int, timeout_s: float) -> bytes:
    answer, give_up = b"", time.monotonic() + timeout_s
    # The answer to DA1 (`ESC [ ? ... c`) comes last.
    while not re.search(rb"\x1b\[\?[\d;]*c", answer):
        left = give_up - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            break
        answer += os.read(terminal, 256)
    return answer


def ground_of(answer: bytes) -> Ground | None:
    """Parse an answer to OSC 11: `rgb:` and three hexadecimal numbers of up to four digits."""
    found = re.search(rb"\]11;rgba?:([0-9a-f]{1,4})/([0-9a-f]{1,4})/([0-9a-f]{1,4})", answer, re.I)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    # Perceived luminance by the Rec. 601 weights.
    return "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"


class Bell:
    """Decides which records and which exits ring the terminal's bell."""

    def __init__(self, run: RunDir, *, muted: bool = False) -> None:
        self._muted = muted
        try:
            self._policy = NotifyPolicy.model_validate(read_json(run.plan_json).get("notify") or {})
        except ValidationError:
            self._policy = NotifyPolicy()
        self._saw_it_run = False

    def at_records(self, records: Iterable[Record], now: float) -> bool:
        """Return True if a recent record rings by the run's notify policy."""
        # A screen that attaches late, or reads a file again, must not ring for old records.
        news = [record for record in records if record.time > now - NEWS_S]
        return any(
            self._wants(event) and any(is_event(record, event) for record in news)
            for event in ("mismatch", "alert")
        )

    def at_status(self, status: RunStatus | None) -> bool:
        """Return True if the run ended since the last call, and that rings."""
        if status is None:
            return False
        ended = status.phase is Phase.ENDED
        # A run that had ended before the screen opened does not ring.
        news, self._saw_it_run = self._saw_it_run and ended, not ended
        return news and self._wants(event_of_exit(status.exit_code))

    def _wants(self, event: str | None) -> bool:
        return not self._muted and self._policy.bell and event in self._policy.on


def own_fonts(svg: str) -> str:
    # Rich's SVG export loads its fonts from a web server.
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg)
    return re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONTS};", svg)
