"""Draw every view of the screen, at three sizes, dark, light and without colours.

    python -m benchmarks.cockpit.pictures FOLDER [--run RUN_DIR] [--sizes 80x24 120x40 200x50]
        [--looks dark light plain] [--views overview logs ...] [--json]

Without `--run` it draws a generated run with fixed clocks, so that two sets of pictures can be
compared. The views are those of `ui/views.py`, and the scenes below: a new view needs no change
here. Each picture is an SVG that loads no font from elsewhere; `index.html` shows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from atropos_common.system.run_dir import RunDir
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.feed import Control
from atropos_tui.ui.terminal import own_fonts
from atropos_tui.ui.theme import LIGHT, THEME
from atropos_tui.ui.views import VIEWS
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run

SIZES = ("80x24", "120x40", "200x50")
LOOKS = {"dark": THEME.name, "light": LIGHT.name, "plain": THEME.name}
# Keys to press in the overview. These are scenes that are no view of their own.
SCENES = {
    "chart-alone": ["2", "enter"],
    "logs-alone": ["3", "z"],
    "components-folded": ["1", "F"],
    "help-keys": ["2", "question_mark"],
    "help-words": ["question_mark", "w"],
    "confirm-restart": ["R"],
    "quit": ["q"],
}
READ_S = 60.0  # until the run is read and drawn
NOW = T0 + 31 + 0.33 * 37 + 0.4


async def draw(
    app: CockpitApp, size: tuple[int, int], shots: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, str]:
    """Return an SVG of each view or scene, by name.

    Raises:
        TimeoutError: the run was not read within `READ_S`.
    """
    found = {}
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(READ_S):
            while not (app.loaded and app.status) or app.painter.dirty:
                await pilot.pause(0.05)
        for name, keys in shots:
            if name in VIEWS:
                app.action_view(name)
            else:
                await pilot.press(*keys)
            await pilot.pause(0.6)
            found[name] = own_fonts(app.export_screenshot(title=f"{name} {size[0]}x{size[1]}"))
            while len(app.screen_stack) > 1:
                await pilot.press("escape")
            if app.views.folded:
                app.action_fold()
            app.action_view("overview")
    return found


def app_of(run: RunDir | None, folder: Path, look: str) -> CockpitApp:
    """Return a screen of a run, or of a generated one with fixed clocks."""
    os.environ.pop("NO_COLOR", None)
    if look == "plain":
        os.environ["NO_COLOR"] = "1"
    control: Control
    clock: Callable[[], float] = time.time
    if run is None:
        run = RunDir(folder / "run")
        if not run.root.is_dir():
            make_run(run.root)
        control, clock = FakeControl(live_status(run, NOW)), lambda: NOW
    else:
        control = ControlClient(run.root)
    app = CockpitApp(run.root, control=control, clock=clock)
    app.theme = LOOKS[look]
    return app


def index(names: Sequence[str]) -> str:
    """Return a page with all pictures."""
    pictures = "\n".join(
        f'<figure><img src="{escape(name)}" loading="lazy" width="100%"><figcaption>{escape(name)}'
        "</figcaption></figure>"
        for name in names
    )
    return f"<!doctype html><meta charset=utf-8><title>Pictures of the screen</title>\n{pictures}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="a run instead of the generated"
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="COLUMNSxROWS")
    parser.add_argument("--looks", nargs="+", default=list(LOOKS), choices=list(LOOKS))
    parser.add_argument("--views", nargs="+", choices=[*VIEWS, *SCENES], default=[*VIEWS, *SCENES])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.run and not options.run.is_dir():
        print(f"{options.run}: no such run directory", file=sys.stderr)
        return 5
    shots = [(name, SCENES.get(name, ())) for name in options.views]
    options.folder.mkdir(parents=True, exist_ok=True)
    names, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        # The user's own theme, keys and folds stay out of the pictures.
        os.environ["XDG_CONFIG_HOME"] = temporary
        for look in options.looks:
            for size in options.sizes:
                columns, rows = (int(number) for number in size.split("x"))
                app = app_of(RunDir(options.run) if options.run else None, Path(temporary), look)
                for name, svg in asyncio.run(draw(app, (columns, rows), shots)).items():
                    names.append(f"{name}-{size}-{look}.svg")
                    (options.folder / names[-1]).write_text(svg, encoding="utf-8")
    (options.folder / "index.html").write_text(index(sorted(names)), encoding="utf-8")
    result = {"pictures": len(names), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(result) if options.json else f"{len(names)} pictures in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
