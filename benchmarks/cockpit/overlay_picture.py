"""Draw runs on the same axes for the documents: a band of seeds, or settings side by side.

    python -m benchmarks.cockpit.overlay_picture RUN RUN ... -o docs/overlay-modes.svg
        [--along steps|tokens|minutes] [--charts reward useful entropy diff]
    python -m benchmarks.cockpit.overlay_picture --seeds 0 1 2 3 4 --folder FOLDER
        --modes none shared_vllm broadcast lora_only lora_restart -o docs/overlay-modes.svg

The second form first runs the demo with every seed, and with the first seed in every mode, one
after another, and keeps the run folders in FOLDER; those that are there and ended well are not run
again. It then draws two pictures: OUTPUT, of the modes, and beside it `overlay-seeds.svg`, of the
seeds. Everything is drawn by `monitor.overlay` and `monitor.report_charts`, as `report RUN RUN`
does; colours are those of a light page.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from atropos_tui.monitor.charts import Along
from atropos_tui.monitor.overlay import by_setting, read_runs, summary
from atropos_tui.monitor.report import chart_over, environment
from atropos_tui.monitor.report_charts import SVG, draw
from benchmarks.support.children import free_ports, up

CELL = (440, 232)
"""Width and height of one chart in the picture, its title and legend included; pixels."""


def colours() -> dict[str, str]:
    """The light page's colours, by their names in its style sheet."""
    style = environment().get_template("style.css.j2").render()
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", style.partition("@media")[0]))


def picture(roots: Sequence[Path], charts: Sequence[str], along: Along) -> str:
    """The SVG: charts side by side in rows of two, one legend above them."""
    runs = read_runs(roots)
    settings, palette = by_setting(runs), colours()
    parts, x = [], 12
    for at, setting in enumerate(settings, 1):
        colour = palette[f"--c{(at - 1) % 6 + 1}"]
        parts.append(f'<rect x="{x}" y="12" width="14" height="4" fill="{colour}"/>')
        parts.append(
            f'<text x="{x + 19}" y="18" font-size="12" '
            f'fill="{palette["--ink"]}">{escape(setting.label)}</text>'
        )
        x += 40 + 7 * len(setting.label)
    for at, name in enumerate(charts):
        chart = chart_over(name, settings, along)
        if chart is None:
            continue
        left, top = 12 + at % 2 * CELL[0], 34 + at // 2 * CELL[1]
        title = f"{chart.name}, over {along}"
        parts.append(
            f'<text x="{left}" y="{top + 12}" font-size="13" '
            f'fill="{palette["--ink"]}">{escape(title)}</text>'
        )
        drawn = ElementTree.fromstring(draw(chart, f"chart{at}"))
        for spot in [element for element in drawn if element.get("class") == "spot"]:
            drawn.remove(spot)
        drawn.attrib |= {
            "x": str(left),
            "y": str(top + 18),
            "width": str(CELL[0] - 24),
            "height": str(CELL[1] - 34),
        }
        parts.append(
            re.sub(
                r"var\((--[\w-]+)\)",
                lambda found: palette[found[1]],
                ElementTree.tostring(drawn, "unicode"),
            )
        )
    width, height = 2 * CELL[0], 40 + -(-len(charts) // 2) * CELL[1]
    ground = f'<rect width="{width}" height="{height}" fill="{palette["--panel"]}"/>'
    head = (
        f'<svg xmlns="{SVG}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">'
    )
    return "\n".join([head, ground, *parts, "</svg>"])


def run_demo(folder: Path, label: str, sets: dict[str, object]) -> Path:
    """The demo with these settings, in `folder`/`label`, unless it is there and ended well."""
    root = folder / label
    result = root / "result.json"
    if result.is_file() and json.loads(result.read_text()).get("exit_code") == 0:
        return root
    api, engine = free_ports(2)
    command = up("demo", root, {**sets, "api.port": api, "vllm.port": engine})
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return root


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--modes", nargs="+", default=[])
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/overlay"), help="where runs are kept"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/overlay-modes.svg"))
    parser.add_argument("--charts", nargs="+", default=["reward", "useful", "entropy", "diff"])
    parser.add_argument("--along", type=Along, choices=list(Along), default=Along.STEPS)
    options = parser.parse_args()
    seeds = [run_demo(options.folder, f"seed{seed}", {"seed": seed}) for seed in options.seeds]
    modes = [
        run_demo(options.folder, mode, {"mode": mode, "seed": options.seeds[0]})
        for mode in options.modes
    ]
    for roots, path in (
        (seeds, options.output.with_name("overlay-seeds.svg")),
        (modes or options.runs, options.output),
    ):
        if roots:
            path.write_text(picture(roots, options.charts, options.along) + "\n")
            print(f"{path}\n\n{summary(read_runs(roots))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
