"""Render the real screen of a live or ended run as SVG, without a terminal.

    python -m benchmarks.cockpit.screenshot RUN_DIR -o docs/demo.svg
        [--size 160x45] [--keys 2] [--json]

It starts the cockpit headless on RUN_DIR, waits until everything is read and drawn, and saves what
a terminal would show. The SVG loads no font from elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.terminal import own_fonts
from atropos_tui.ui.widgets.log_view import LogView


async def capture(
    run_dir: Path, size: tuple[int, int], keys: list[str], timeout_s: float = 30.0
) -> str:
    """The screen of `run_dir` as SVG.

    Raises:
        TimeoutError: it was not drawn within `timeout_s`.
    """
    app = CockpitApp(run_dir)
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(timeout_s):
            while not (app.loaded and app.status):
                await pilot.pause(0.05)
            while app.state.step and not app.query_one(LogView).buffer:
                await pilot.pause(0.05)
            while not app.gone and any(
                row.pid and row.cpu_percent is None for row in app.status.components
            ):
                await pilot.pause(0.05)
        for key in keys:
            await pilot.press(key)
        await pilot.pause(1.2)
        return own_fonts(app.export_screenshot(title=f"atropos-tui · {app.info.name}"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/demo.svg"))
    parser.add_argument("--size", default="160x45", help="columns x rows (default: %(default)s)")
    parser.add_argument(
        "--keys", default="", help="keys to press first, separated by commas, such as 2"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.run_dir.is_dir():
        print(f"{options.run_dir}: no such run directory", file=sys.stderr)
        return 5
    columns, rows = (int(number) for number in options.size.lower().split("x"))
    began = time.perf_counter()
    svg = asyncio.run(
        capture(options.run_dir, (columns, rows), [key for key in options.keys.split(",") if key])
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(svg)
    took = round(time.perf_counter() - began, 2)
    result = {"svg": str(options.output), "size": options.size, "seconds": took}
    print(
        json.dumps(result)
        if options.json
        else "\n".join(f"{key:<10} {value}" for key, value in result.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
