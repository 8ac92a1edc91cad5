"""Draw every view of the screen, at three sizes, dark, light and without colours.

    python -m benchmarks.cockpit.pictures FOLDER [--run RUN_DIR] [--sizes 80x24 120x40 200x50]
        [--looks dark light plain] [--views overview logs ...] [--json]

Without `--run` it draws a generated run with fixed clocks, so that two sets of pictures can be
compared. The list of runs shows those of `several.py`. The views are those of `ui/views.py`, and
the scenes below: a new view needs no change here. Each picture is an SVG that loads no font from
elsewhere; `index.html` shows all of them.
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
from atropos_tui.monitor.catalogue import Catalogue, Source
from atropos_tui.monitor.run_list import listed
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.feed import Control
from atropos_tui.ui.home.app import HomeApp
from atropos_tui.ui.terminal import own_fonts
from atropos_tui.ui.theme import LIGHT, THEME
from atropos_tui.ui.views import VIEWS
from benchmarks.cockpit.several import RECIPES, make
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
# Keys to press in the list of runs, which shows those of `several.py`.
LIST_SCENES = {
    "runs": [],
    "runs-marked": ["R", "space", "down", "space"],
    "runs-differ": ["home", "space", "down", "space", "c"],
    "runs-note": ["n"],
    "runs-filter": ["slash", *"lr-2"],
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


async def draw_list(
    folder: Path, look: str, size: tuple[int, int], shots: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, str]:
    """Return an SVG of each scene of the list of runs, by name.

    Raises:
        TimeoutError: the runs were not read within `READ_S`.
    """
    if not folder.is_dir():
        for recipe in RECIPES:
            make(folder, recipe)
    choose_colours(look)
    roots = [folder / recipe.name for recipe in RECIPES]
    source = Source(
        lambda: roots, lambda root: listed(RunDir(root), is_live=False, now=time.time())
    )
    app, found = HomeApp(Catalogue(source)), {}
    app.theme = LOOKS[look]
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(READ_S):
            while len(app.table.memory.sentences) < len(roots):
                await pilot.pause(0.05)
        for name, keys in shots:
            await pilot.press(*keys)
            await pilot.pause(0.6)
            found[name] = own_fonts(app.export_screenshot(title=f"{name} {size[0]}x{size[1]}"))
            # Esc closes a dialog, then removes filter and marks.
            await pilot.press("escape", "escape", "escape")
    return found


def choose_colours(look: str) -> None:
    """Set or remove NO_COLOR, which an app reads when it is made."""
    os.environ.pop("NO_COLOR", None)
    if look == "plain":
        os.environ["NO_COLOR"] = "1"


def app_of(run: RunDir | None, folder: Path, look: str) -> CockpitApp:
    """Return a screen of a run, or of a generated one with fixed clocks."""
    choose_colours(look)
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
    every = [*VIEWS, *SCENES, *LIST_SCENES]
    parser.add_argument("--views", nargs="+", choices=every, default=every)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.run and not options.run.is_dir():
        print(f"{options.run}: no such run directory", file=sys.stderr)
        return 5
    shots = [(name, SCENES.get(name, ())) for name in options.views if name not in LIST_SCENES]
    of_list = [(name, LIST_SCENES[name]) for name in options.views if name in LIST_SCENES]
    options.folder.mkdir(parents=True, exist_ok=True)
    names, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        # The user's own theme, keys and folds stay out of the pictures.
        os.environ["XDG_CONFIG_HOME"] = temporary
        for look in options.looks:
            for size in options.sizes:
                columns, rows = (int(number) for number in size.split("x"))
                found = {}
                if shots:
                    run = RunDir(options.run) if options.run else None
                    app = app_of(run, Path(temporary), look)
                    found = asyncio.run(draw(app, (columns, rows), shots))
                if of_list:
                    runs = Path(temporary) / "runs"
                    found |= asyncio.run(draw_list(runs, look, (columns, rows), of_list))
                for name, svg in found.items():
                    names.append(f"{name}-{size}-{look}.svg")
                    (options.folder / names[-1]).write_text(svg, encoding="utf-8")
    (options.folder / "index.html").write_text(index(sorted(names)), encoding="utf-8")
    result = {"pictures": len(names), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(result) if options.json else f"{len(names)} pictures in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
