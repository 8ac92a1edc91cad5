"""`sweep`: one profile with every combination of settings, up to `--parallel` stacks at once.

    atropos-tui sweep demo --set trainer.lr=1e-5,1e-6 --set seed=0..3
    atropos-tui sweep --resume runs/sweep-demo-TIME

Each cell is a run below the sweep's folder, started as by `compare`. `sweep.json` stores only the
grid. A failed cell does not stop the others; `--resume` continues it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ValidationError

from atropos_common.system.files import read_regular, write_private
from atropos_common.system.run_dir import RunDir, safe_text
from atropos_tui.cli import show
from atropos_tui.cli.answers import Sweep, SweepCell
from atropos_tui.cli.manage import runs
from atropos_tui.cli.results import compare
from atropos_tui.cli.results.compare import Board, ComparedStack, Comparison
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.bench import Progress, RunBenchmark, benchmark_run
from atropos_tui.monitor.format import counted, duration, number, one_line, text_table
from atropos_tui.monitor.overlay import read_runs, seeds_table
from atropos_tui.profile.budget.inventory import read_machine
from atropos_tui.profile.checks.preflight import separate
from atropos_tui.profile.errors import printable, refused
from atropos_tui.profile.load import find_profile
from atropos_tui.profile.profile import Profile

STATE = "sweep.json"
MOST_CELLS = 1000
MOST_LABEL = 40
"""Characters of a label: a run's name may have 64."""
QUOTES = "\"'"


class Grid(BaseModel):
    """Content of `sweep.json`."""

    profile: str
    sets: list[str]
    """Assignments as given, several values in one."""
    digest: str
    """Hash of the profile without them, so that a changed profile is refused."""

    def cells(self) -> list[Cell]:
        """Every combination; the last key varies fastest.

        Raises:
            UserError: fewer than two combinations, or more than `MOST_CELLS`.
        """
        axes = [
            (key, values_of(values))
            for key, _, values in (item.partition("=") for item in self.sets)
        ]
        given = Counter(key for key, _ in axes)
        if twice := [key for key, times in given.items() if times > 1]:
            fix = f"give all values of a key together, as --set {twice[0]}=A,B; --steps sets "
            problem = Problem("set twice", f"{fix}trainer.training_steps", key=twice[0])
            raise UserError("no grid of settings", [problem])
        count = math.prod(len(values) for _, values in axes)
        if not 2 <= count <= MOST_CELLS:
            fix = "give a key several values: --set trainer.lr=1e-5,1e-6 --set seed=0..3"
            raise UserError(
                "no grid of settings", [Problem(f"these are {counted(count, 'combination')}", fix)]
            )
        varied = [key for key, values in axes if len(values) > 1]
        rows = itertools.product(*(values for _, values in axes))
        combinations = [dict(zip([key for key, _ in axes], row, strict=True)) for row in rows]
        settings = [{key: each[key] for key in varied} for each in combinations]
        labels = labels_of(settings)
        return [
            Cell(
                label, self.profile, [f"{key}={value}" for key, value in each.items()], settings=own
            )
            for label, each, own in zip(labels, combinations, settings, strict=True)
        ]


@dataclass(eq=False)
class Cell(ComparedStack):
    settings: dict[str, str] = field(default_factory=dict)
    """Settings that differ between cells."""


def values_of(text: str) -> list[str]:
    """Split `1e-5,1e-6` and `0..3`; commas in brackets, braces and quotes do not split."""
    if found := re.fullmatch(r"\s*(-?\d{1,9})\.\.(-?\d{1,9})\s*", text):
        first, last = int(found[1]), int(found[2])
        return [str(value) for value in range(first, last + 1)][
            : MOST_CELLS + 1
        ]  # one more, so that it is refused
    # The expression also matches the empty end of the text: dropped, unless the text ends with a
    # comma.
    parts = re.findall(r"""((?:"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,])*)(?:,|$)""", text)
    return [
        part.strip() for part in (parts if len(parts) == 1 or text.endswith(",") else parts[:-1])
    ]


def labels_of(settings: Sequence[dict[str, str]]) -> list[str]:
    """A label for each combination that is safe as a folder name, such as `lr-1e-5_seed-0`."""
    keys = list(settings[0])
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: name if last[name := key.rpartition(".")[2]] == 1 else key for key in keys}
    labels = [
        "_".join(f"{short[key]}-{each[key].strip(QUOTES)}" for key in keys) for each in settings
    ]
    labels = [safe_text(label) for label in labels]
    # Labels name folders and runs: they have to differ and be short, otherwise cells are numbered.
    fits = len(set(labels)) == len(labels) and all(len(label) <= MOST_LABEL for label in labels)
    return (
        labels
        if fits
        else [f"cell-{at:0{len(str(len(labels)))}d}" for at in range(1, len(labels) + 1)]
    )


async def sweep(options: argparse.Namespace) -> int:
    base, cells = _continued(options) if options.resume is not None else _begun(options)
    slots, said = slots_of(cells, options.parallel)
    if options.resume is None:
        # Every cell is checked before the first one starts: a bad value of the last cell shows now,
        # not in hours.
        compare.each(cells, compare.plan)
        base.mkdir(parents=True, exist_ok=True)
        write_private(base / STATE, _grid(options).model_dump_json(indent=2))
    board = Board(cells, sys.stderr if options.json else sys.stdout)
    board.say(f"{len(cells)} combinations, {len(slots)} at a time: {base}")
    for line in said:
        board.say(f"  {line}")
    code = await SweepRun(cells, board, slots).run()
    print_results(cells, board, base, as_json=options.json)
    if any(cell.code != Exit.DONE for cell in cells):
        board.say(
            f"to continue with the cells that are not done: atropos-tui sweep --resume {base}"
        )
    return code


def _grid(options: argparse.Namespace) -> Grid:
    file = find_profile(options.profile)
    name = str(file.resolve()) if Path(options.profile).is_file() else options.profile
    steps = [] if options.steps is None else [f"trainer.training_steps={options.steps}"]
    return Grid(profile=name, sets=[*options.sets, *steps], digest=_digest(name))


def _digest(name: str) -> str:
    """Hash of a profile and all files that it extends."""
    alone = ComparedStack("", name)
    compare.load(alone)
    return hashlib.blake2b(alone.profile.model_dump_json().encode(), digest_size=16).hexdigest()


def _begun(options: argparse.Namespace) -> tuple[Path, list[Cell]]:
    if options.profile is None:
        raise UserError(
            "no profile", [Problem("PROFILE is missing", "atropos-tui sweep demo --set seed=0..3")]
        )
    grid = _grid(options)
    name = safe_text(Path(options.profile).stem)
    base = (
        options.run_dir or Path("runs") / f"sweep-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    ).resolve()
    if runs.is_used(base):
        fix = f"choose another --run-dir, or continue it with --resume {base}"
        raise UserError("the directory is in use", [Problem(f"{base} is not empty", fix)])
    return base, _loaded(grid, base)


def _continued(options: argparse.Namespace) -> tuple[Path, list[Cell]]:
    """Cells of an earlier sweep, with the exit code of those that are done."""
    if (
        options.profile is not None
        or options.sets
        or options.steps is not None
        or options.run_dir is not None
    ):
        problem = Problem(
            "a resumed sweep keeps its settings",
            "give only --parallel and --json with it",
            key="--resume",
        )
        raise UserError("invalid --resume", [problem])
    base = options.resume.resolve()
    try:
        grid = Grid.model_validate_json(read_regular(base / STATE))
    except (OSError, ValidationError) as error:
        reason = (
            f"{STATE} cannot be read: "
            f"{getattr(error, 'strerror', None) or 'it was not written by `sweep`'}"
        )
        raise UserError(
            f"no sweep in {printable(str(base))}",
            [Problem(reason, "name the folder of a sweep")],
            Exit.NO_RUN,
        ) from None
    if _digest(grid.profile) != grid.digest:
        fix = "start a new sweep, or undo the changes"
        raise UserError(
            "the profile has changed", [Problem("cells would not be comparable", fix, grid.profile)]
        )
    cells = _loaded(grid, base)
    for cell in cells:
        result = runs.read_result(run := RunDir(cell.root))
        if result is not None and result["exit_code"] == Exit.DONE:
            cell.progress, cell.code = Progress(run), Exit.DONE
    return base, cells


def _loaded(grid: Grid, base: Path) -> list[Cell]:
    cells = grid.cells()
    for cell in cells:
        cell.root = base / cell.label
    compare.each(cells, compare.load)
    return cells


def slots_of(cells: Sequence[Cell], wanted: int) -> tuple[list[list[str]], list[str]]:
    """Choose overrides of ports and GPUs for at most `wanted` simultaneous stacks.

    Returns:
        Overrides per slot, and lines about them.

    Raises:
        UserError: several at once are wanted, but the cells differ in their ports or GPUs.
    """
    count = len(read_machine().gpus)
    # The largest number of stacks that fits; all cells have to get the same ports and GPUs in a
    # slot.
    for size in range(min(wanted, len(cells)), 1, -1):
        names = [str(number) for number in range(1, size + 1)]
        first, *others = [
            separate(dict.fromkeys(names, profile), count) for profile in _different(cells)
        ]
        if any(other.sets != first.sets for other in others):
            fix = "omit --parallel, which runs them one after another"
            title = "these combinations cannot run side by side"
            raise refused([Problem("the combinations differ in their ports or GPUs", fix)], title)
        if not first.problems:
            return list(first.sets.values()), [f"slot {line}" for line in first.lines]
    said = (
        [f"one after another: the GPUs of this machine ({count}) suffice for one run"]
        if wanted > 1
        else []
    )
    return [[]], said


def _different(cells: Sequence[Cell]) -> list[Profile]:
    """One profile for each distinct use of ports and GPUs."""

    def place(profile: Profile) -> str:
        engines = [(engine.gpus, engine.tensor_parallel) for engine in profile.vllm]
        gpus = (
            engines,
            profile.inference_gpus,
            profile.trainer.gpus,
            profile.trainer.settings.get("device"),
        )
        return repr((profile.used_ports(), gpus))

    return list({place(cell.profile): cell.profile for cell in cells}.values())


class SweepRun(Comparison):
    """Runs cells in slots: each has its own ports and GPUs, and takes the next cell when it is
    free."""

    def __init__(self, cells: Sequence[Cell], board: Board, slots: list[list[str]]) -> None:
        super().__init__(cells, board, sequential=False)
        self._cells = cells
        self._slots = slots
        self._begun: list[ComparedStack] = []
        self._planning = asyncio.Lock()

    async def _all(self) -> None:
        """Run all open cells. Live runs of a killed sweep come first: they use the same ports
        and GPUs."""
        open_ = [cell for cell in self._cells if cell.code is None]
        live = [cell for cell in open_ if runs.RunEntry(RunDir(cell.root), {}).is_live]
        await asyncio.gather(*map(self._follow, live))
        waiting = [cell for cell in open_ if cell not in live]
        places = await asyncio.to_thread(self._places, waiting[0]) if waiting else []
        queue = iter(waiting)
        await asyncio.gather(*(self._in_place(sets, queue) for sets in places))

    def _places(self, cell: Cell) -> list[list[str]]:
        """Slots for which `cell` can be planned; an unusable slot would fail every cell."""
        places = self._slots[:1]
        for sets in self._slots[1:]:
            trial = replace(cell)  # a copy, because planning changes the cell's settings
            trial.sets, trial.root = list(cell.sets), cell.root
            if _plan_in(trial, sets):
                places.append(sets)
            else:
                self._board.say(f"one slot less: {trial.note}")
        return places

    async def _in_place(self, sets: list[str], waiting: Iterator[Cell]) -> None:
        for cell in waiting:
            async with self._planning:  # one at a time: planning looks for free ports
                planned = not self._interrupts and await asyncio.to_thread(_plan_in, cell, sets)
                self._begun += [cell] if planned else []
            if planned:
                await self._one(cell)
            elif self._interrupts:
                cell.note = "not started"

    def _before(self, entry: ComparedStack) -> Sequence[ComparedStack]:
        return self._begun[: self._begun.index(entry)]


def _plan_in(cell: Cell, sets: list[str]) -> bool:
    """Plan the cell for its slot, or note why it cannot start; an existing run is resumed."""
    cell.sets += sets
    earlier = runs.read_run(cell.root)
    try:
        compare.load(cell)
        compare.plan(cell, resumed_id=earlier.run_id if earlier else None)
    except UserError as error:
        cell.note, cell.code = one_line(str(error)), error.exit_code
        return False
    return True


def print_results(cells: Sequence[Cell], board: Board, base: Path, *, as_json: bool) -> None:
    """Print the table, the spread over seeds and the failed cells; write the page with all
    curves."""
    figures = {cell.label: benchmark_run(cell.root) for cell in cells if cell.progress is not None}
    if as_json:
        rows = [
            SweepCell(
                label=cell.label,
                settings=cell.settings,
                state=cell.phase,
                exit_code=cell.code,
                benchmark=figures.get(cell.label),
            )
            for cell in cells
        ]
        print(Sweep(dir=str(base), cells=rows).as_json())
    else:
        print(f"\n{table(cells, figures)}\n")
        done = read_runs([cell.root for cell in cells if cell.code == Exit.DONE])
        if seeds := seeds_table(done):
            print(f"{text_table(seeds)}\n")
    compare.print_failures(cells, board)
    compare.write_overlay(compare.started(cells), base, board)


def table(cells: Sequence[Cell], figures: Mapping[str, RunBenchmark]) -> str:
    """A row per cell: its settings, then its results."""
    keys = list(cells[0].settings)
    rows = [(*keys, "STEPS", "REWARD, FIRST 5", "LAST 5", "HELD OUT", "TOKENS/S", "TOOK", "STATE")]
    for cell in cells:
        found = figures.get(cell.label)
        shown = _figures(found) if found else ("–",) * 6
        rows.append(
            (*(one_line(cell.settings[key]) for key in keys), *shown, cell.phase.partition(":")[0])
        )
    return show.table(rows, right=range(len(keys), len(keys) + 6))


def _figures(found: RunBenchmark) -> tuple[str, ...]:
    rewards = (number(found.reward_first), number(found.reward_last), number(found.held_out))
    return (str(found.steps), *rewards, number(found.tokens_per_s), duration(found.total_s))
