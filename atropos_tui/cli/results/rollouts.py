"""`rollouts` lists recorded completions, or writes them as JSONL."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_common.system.files import write_private
from atropos_tui.cli.manage import runs
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.conversation import SIGNS, completion_parts, prompt_parts, shown
from atropos_tui.monitor.format import columns, counted, number, one_line
from atropos_tui.monitor.patterns import Pattern, PatternError
from atropos_tui.monitor.rollout_export import Choice, json_line, read_rollouts
from atropos_tui.monitor.rollout_groups import answer, question
from atropos_tui.profile.errors import printable

SHOWN = 20
"""Rollouts of a list on the terminal."""
ANSWER_CELLS, QUESTION_CELLS = 48, 40


def rollouts(options: argparse.Namespace) -> int:
    """Print or write the chosen rollouts.

    Raises:
        UserError: the pattern is invalid, nothing is found, or the file cannot be written.
    """
    entry = runs.pick(options.run or options.run_dir)
    as_rows = options.json or options.output is not None
    limit = options.limit if options.limit is not None else 0 if as_rows else SHOWN
    choice = Choice(
        step=options.step,
        env=options.env,
        pattern=_pattern(options.grep),
        sort=options.sort,
        reverse=options.reverse,
        limit=limit,
    )
    found = read_rollouts(entry.dir.telemetry_jsonl, choice)
    if not found and not as_rows:
        raise UserError("no rollouts", [_nothing(entry, options)])
    if options.output is not None:
        _write(found, options)
    elif options.json:
        for record in found:
            print(json_line(record))
    elif options.full:
        print("\n\n".join(conversation(record) for record in found))
    else:
        print("\n".join(table(found)))
    return Exit.DONE


def _pattern(text: str | None) -> Pattern | None:
    if text is None:
        return None
    try:
        return Pattern(text, ignore_case=text == text.lower())
    except PatternError as error:
        problem = Problem(str(error), "correct the pattern (RE2 syntax)", f"--grep {text}")
        raise UserError("not a regular expression", [problem]) from None


def _nothing(entry: runs.RunEntry, options: argparse.Namespace) -> Problem:
    if newest := read_rollouts(entry.dir.telemetry_jsonl, Choice(limit=1)):
        given = options.step is not None or options.env or options.grep
        what = f"the newest recorded step is {newest[0].step}" if given else "none match"
        return Problem(what, "change --step, --env or --grep", str(entry.dir.root))
    fix = "set trainer.rollout_samples above 0; the first ones come with step 1"
    return Problem("the trainer has recorded none", fix, str(entry.dir.root))


def _write(found: Sequence[RolloutRecord], options: argparse.Namespace) -> None:
    # Private, because rollouts hold prompts.
    try:
        write_private(options.output, "".join(f"{json_line(record)}\n" for record in found))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = Problem(reason, "choose another -o FILE", printable(str(options.output)))
        raise UserError("the rollouts cannot be written", [problem]) from None
    print(f"{options.output}  ({counted(len(found), 'rollout')})")


def table(found: Sequence[RolloutRecord]) -> list[str]:
    """Return a line for each rollout, below the titles."""
    width = shutil.get_terminal_size((120, 40)).columns
    head = ["step", "score", "advantage", "lag", "tokens", "answer ← question"]
    rows = [
        [
            str(record.step),
            number(record.reward, 2),
            number(record.advantage, 2),
            number(record.policy_lag, 0),
            number(record.tokens, 0),
            f"{_ends(answer(record.completion), ANSWER_CELLS)} ← "
            f"{_ends(question(record.prompt), QUESTION_CELLS)}",
        ]
        for record in found
    ]
    return [line[:width] for line in columns([head, *rows], right=range(5))]


def _ends(text: str, room: int) -> str:
    line = one_line(text)
    half = room // 2
    return line if len(line) <= room else f"{line[: half - 1]}…{line[-half:]}"


def conversation(record: RolloutRecord) -> str:
    """Return a rollout as text, turn by turn."""
    lines = [
        f"step {record.step} · {one_line(record.env)} · score {number(record.reward, 2)} · "
        f"advantage {number(record.advantage, 2)} · lag {number(record.policy_lag, 0)}"
    ]
    for text, parts in (
        (record.prompt, prompt_parts(record.prompt)),
        (record.completion, completion_parts(record)),
    ):
        for part in parts:
            sign, words = SIGNS[part.role]
            body = shown(part, text).replace("\n", "\n    ")
            if part.skipped:
                lines.append(f"  … {counted(part.skipped, 'turn')} left out")
            lines.append(f"  {sign} {words}\n    {body}")
    return "\n".join(lines)
