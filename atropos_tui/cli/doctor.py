"""`doctor`: is this machine fit to run a stack? One line per check: how it stands, what was found, and the fix.

    atropos-tui doctor              # the machine
    atropos-tui doctor demo         # and what this profile needs
    atropos-tui doctor --json

torch and vLLM are never imported here; where only torch can tell, it is asked in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from atropos_tui import __version__
from atropos_tui.cli import doctor_gpu, doctor_machine, doctor_software
from atropos_tui.cli.doctor_check import Check, Verdict, fail, ok
from atropos_tui.cli.doctor_gpu import Driver
from atropos_tui.errors import Exit, UserError
from atropos_tui.monitor.format import one_line

SIGNS: dict[Verdict, str] = {"ok": "✔ ok  ", "warn": "▲ warn", "fail": "✖ fail"}


def doctor(options: argparse.Namespace) -> int:
    """0: nothing fails (warnings may be there); 2: a check failed."""
    began = time.monotonic()
    checks = []
    for check in _examine(options.profile):
        checks.append(check)
        if not options.json:
            print(_line(check), flush=True)
    if options.json:
        print(json.dumps(_report(checks, time.monotonic() - began), indent=2))
    else:
        counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in SIGNS}
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        print(f"{len(checks)} checks in {time.monotonic() - began:.1f} s: {said}")
    return Exit.USAGE if any(check.verdict == "fail" for check in checks) else Exit.DONE


def report_json() -> str:
    """What `doctor --json` prints about the machine."""
    began = time.monotonic()
    return json.dumps(_report(list(_examine(None)), time.monotonic() - began), indent=2)


def _examine(profile: str | None) -> Iterator[Check]:
    yield from doctor_software.software()
    driver = doctor_gpu.read_driver()
    engines = [name for name in doctor_software.ENGINES if doctor_software.version_of(name)]
    torch_cuda = doctor_software.torch_cuda()
    yield from doctor_gpu.graphics(driver, torch_cuda, engines[0] if engines else None)
    yield from _ask_torch(driver, torch_cuda)
    yield from doctor_machine.machine()
    yield from doctor_machine.leftovers()
    if profile is not None:
        yield from _preflight(profile)


def _ask_torch(driver: Driver | str | None, torch_cuda: str | None) -> Iterator[Check]:
    """Importing torch takes seconds: only where there is a GPU for it to see."""
    if isinstance(driver, Driver) and driver.gpus and torch_cuda:
        yield doctor_gpu.torch_sees_gpus(len(driver.gpus))


def _preflight(name: str) -> Iterator[Check]:
    """What `up` would say about the profile on this machine."""
    from atropos_tui.cli.profiles import checked, planned_site
    from atropos_tui.profile.sections import load_profile

    try:
        profile, file = load_profile(name, [])
        stack = checked(profile, file, planned_site(profile), machine=True)
    except UserError as error:
        for problem in error.problems:
            place = ": ".join(part for part in (problem.file, problem.key) if part)
            yield fail(place or f"profile {name}", problem.reason, problem.fix)
        if not error.problems:
            yield fail(f"profile {name}", error.title, "")
    else:
        yield ok(f"profile {profile.name}", f"{file}: {len(stack.components)} components can start here")


def _line(check: Check) -> str:
    line = f"{SIGNS[check.verdict]}  {one_line(check.name)}: {one_line(check.found)}"
    return f"{line}\n          fix: {one_line(check.fix)}" if check.fix and check.verdict != "ok" else line


def _report(checks: list[Check], seconds: float) -> dict[str, Any]:
    worst = next(verdict for verdict in ("fail", "warn", "ok") if any(check.verdict == verdict for check in checks))
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "verdict": worst,
        "seconds": round(seconds, 2),
        "checks": [asdict(check) for check in checks],
    }
