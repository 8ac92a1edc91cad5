"""Follow docs/start/first-run.md on two CPU cores, and draw the screens that the page shows.

    python -m benchmarks.cockpit.first_run [FOLDER]    # docs/images

It writes the page's environment and its profile for a CPU into an empty folder and starts them
there. The three pictures show that run: while it starts, when it is done, and its rollouts. The
exit status is 1 if the reward does not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean

from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import StepRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.why import next_stage
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.terminal import own_fonts
from benchmarks.demo import prepare
from benchmarks.support.checks import Checks
from benchmarks.support.children import up

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/start/first-run.md"
FENCE = re.compile(r"^```(python|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SIZE = (120, 34)
LOADING = ("its imports", "its weights")
START_S, RUN_S = 180.0, 400.0


def write_files(folder: Path) -> Path:
    """Write the environment of the page and its last profile, that for a CPU; return the latter."""
    found = FENCE.findall(PAGE.read_text())
    environment = next(text for language, text in found if language == "python")
    (folder / "my_env.py").write_text(environment)
    profile = folder / "run.toml"
    profile.write_text([text for language, text in found if language == "toml"][-1])
    return profile


async def draw(run: RunDir) -> dict[str, str]:
    """Return the screens of a run that starts, as SVG.

    Raises:
        TimeoutError: it neither started nor ended in time.
    """
    app, found = CockpitApp(run.root), {}

    def shot() -> str:
        return own_fonts(app.export_screenshot(title="atropos-tui up run.toml"))

    async with app.run_test(size=SIZE) as pilot:

        async def until(holds: Callable[[], object], seconds: float) -> None:
            async with asyncio.timeout(seconds):
                while not holds():
                    await pilot.pause(0.1)

        def trains() -> object:
            """Draw the start again and again: the last picture before the engine answers counts."""
            rows = app.status.components if app.status else []
            stages = [next_stage(row) for row in rows if row.role == "engine" and row.cpu_percent]
            if any(stage and stage.name in LOADING for stage in stages):
                found["starting"] = shot()
            return app.state.step

        await until(trains, START_S)
        await until(lambda: app.loaded and app.gone, RUN_S)
        await pilot.pause(1.2)
        found["done"] = shot()
        await pilot.press("4")
        await pilot.pause(1.2)
        found["rollouts"] = shot()
    return found


def rewards(run: RunDir) -> list[float]:
    """Return the mean reward of each step."""
    records = map(parse_line, run.telemetry_jsonl.read_bytes().splitlines())
    return [record.reward_mean for record in records if isinstance(record, StepRecord)]


def follow(output: Path, sets: Mapping[str, object] | None = None) -> int:
    """Run the page and write its pictures to `output`; return the exit status."""
    checks = Checks()
    prepare("demo", 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # The user's own theme, keys and folds stay out of the pictures.
        os.environ["XDG_CONFIG_HOME"] = temporary
        run = RunDir(folder / "runs" / "sums")
        with (folder / "output").open("wb") as said:
            process = subprocess.Popen(
                up(write_files(folder), run.root, sets), cwd=folder, stdout=said, stderr=said
            )
        try:
            while process.poll() is None and not run.control_sock.exists():
                time.sleep(0.1)
            pictures = asyncio.run(draw(run))
            checks.that(process.wait(60) == 0, (folder / "output").read_text()[-2000:])
        finally:
            process.terminate()
            process.wait(60)
        curve = rewards(run)
    checks.at_least("gain of the reward", mean(curve[-5:]) - mean(curve[:5]), 0.15)
    checks.that(len(pictures) == 3, f"drawn: {', '.join(pictures)}")
    output.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        (output / f"first-run-{name}.svg").write_text(svg, encoding="utf-8")
    print(f"{len(curve)} steps, reward {mean(curve[:5]):.2f} to {mean(curve[-5:]):.2f}")
    return checks.status()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs/images")
    return follow(parser.parse_args().folder)


if __name__ == "__main__":
    sys.exit(main())
