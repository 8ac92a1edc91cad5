"""The terminal itself: a screen is run in it, it is handed to an editor, it rings, and a picture of it is saved."""

from __future__ import annotations

import asyncio
import contextlib
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
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from textual.app import App, SuspendNotSupported

from atropos_common.control import Phase, RunStatus
from atropos_common.records import Record
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.run_files import read_json
from atropos_tui.profile.spec import NotifyPolicy
from atropos_tui.supervisor.notify import event_of_exit, is_event
from atropos_tui.ui.commands import CommandApp, Outcome

Ground = Literal["dark", "light"]

ANSWER_S = 0.5
"""How long a terminal may take to say what its ground is."""
LEAVE_S = 3.0
"""How long the screen may take to close once it was told to go."""
NEWS_S = 60.0
"""An older record is history: the screen was opened since, or a file is read again."""
FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


def run_app(app: CommandApp) -> Outcome:
    """Show `app` until it is left. TERM, HUP and a terminal that is gone detach, as the driver itself would not."""
    # A long history is half a million objects that stay: looking for cycles among them costs a fifth of reading it.
    # The app turns it on again when it has read all.
    gc.disable()
    # Threads parse records and logs: a key need not wait for the usual five milliseconds of each of them.
    sys.setswitchinterval(0.0005)

    left = threading.Event()
    # The driver's writer can block for ever on a terminal that is gone; the screen owns nothing, so it may just go.
    last_resort = threading.Timer(LEAVE_S, os._exit, (0,))
    last_resort.daemon = True

    async def attended() -> Outcome | None:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            if not left.is_set():
                with contextlib.suppress(RuntimeError):  # told twice
                    last_resort.start()
                loop.call_soon_threadsafe(app.exit, "detach")

        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, leave)
        threading.Thread(target=_watch_terminal, args=(leave,), name="terminal", daemon=True).start()
        try:
            return await app.run_async()
        finally:
            left.set()
            last_resort.cancel()

    return asyncio.run(attended()) or ("failed" if app.return_code else "detach")


def _watch_terminal(gone: Callable[[], None]) -> None:
    """Wait until the other side of our terminal is closed. Only who owns the terminal is told by a HUP signal; any
    other would read its end for ever, at the cost of a whole core."""
    if sys.__stdin__ is None or not sys.__stdin__.isatty():
        return
    watched = select.poll()
    watched.register(sys.__stdin__.fileno(), 0)  # a hang-up is told unasked
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in watched.poll()):
        pass
    gone()


def edit(app: App[Any], path: Path) -> str:
    """Show `path` in `$VISUAL`, `$EDITOR` or `less`; what went wrong, or nothing."""
    line = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "less"
    try:
        words = shlex.split(line)
    except ValueError as error:
        return f"the editor {line!r} cannot be read: {error}"
    try:
        with _deaf_to_ctrl_c(), app.suspend():
            subprocess.run([*words, str(path)], check=False)
    except SuspendNotSupported:
        return "this terminal cannot be handed to an editor"
    except OSError as error:
        return f"{words[0] if words else 'the editor'} does not start: {error.strerror}"
    return ""


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """The terminal tells us, too, what is meant for the editor. A handler of ours is not inherited by it, unlike
    SIG_IGN."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ground(patience_s: float = ANSWER_S) -> Ground | None:
    """Whether the terminal is dark or light: as COLORFGBG says, else as it answers itself (OSC 11).

    A terminal that does not know the question answers the one behind it (DA1), so nothing is waited for in vain; None
    where it answers neither.
    """
    told = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if told.isdecimal():
        return "light" if told in ("7", "15") else "dark"
    if os.environ.get("TERM", "dumb") in ("dumb", "linux"):
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        before = termios.tcgetattr(terminal)
        try:
            tty.setraw(terminal)
            os.write(terminal, b"\x1b]11;?\x1b\\\x1b[c")
            return ground_of(_answer(terminal, patience_s))
        finally:
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
    except (OSError, termios.error):
        return None
    finally:
        os.close(terminal)


def _answer(terminal: int, patience_s: float) -> bytes:
    """What comes until the answer to DA1 is complete, or for so long."""
    answer, give_up = b"", time.monotonic() + patience_s
    while not re.search(rb"\x1b\[\?[\d;]*c", answer):
        left = give_up - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            break
        answer += os.read(terminal, 256)
    return answer


def ground_of(answer: bytes) -> Ground | None:
    """What a terminal's answer to OSC 11 means: `rgb:` and three numbers of one to four hexadecimal digits."""
    found = re.search(rb"\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})", answer)
    if found is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
    return "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"


class Bell:
    """Decides about ringing; what had happened before the screen was opened is no news."""

    def __init__(self, run: RunDir, *, muted: bool = False) -> None:
        self._muted = muted
        try:
            self._policy = NotifyPolicy.model_validate(read_json(run.plan_json).get("notify") or {})
        except ValidationError:
            self._policy = NotifyPolicy()
        self._saw_it_run = False

    def at_records(self, records: Iterable[Record], now: float) -> bool:
        """Whether one of these records is to be rung for."""
        news = [record for record in records if record.time > now - NEWS_S]
        return any(
            self._wants(event) and any(is_event(record, event) for record in news) for event in ("mismatch", "alert")
        )

    def at_status(self, status: RunStatus | None) -> bool:
        """Whether the run has just ended in a way to be rung for."""
        if status is None:
            return False
        ended = status.phase is Phase.ENDED
        news, self._saw_it_run = self._saw_it_run and ended, not ended
        return news and self._wants(event_of_exit(status.exit_code))

    def _wants(self, event: str | None) -> bool:
        return not self._muted and self._policy.bell and event in self._policy.on


def own_fonts(svg: str) -> str:
    """`svg` without fonts from elsewhere."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg)
    return re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONTS};", svg)


def save_screenshot(svg: str, name: str, folder: Path) -> Path:
    """Write a picture under a name of its own in `folder`.

    Raises:
        OSError: it cannot be written there.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "run"
    stem = f"atropos-{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = folder / f"{stem}.svg", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}_{number}.svg"
    path.write_text(own_fonts(svg), encoding="utf-8", errors="replace")
    return path
