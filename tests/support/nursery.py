"""Start test processes at once by forking one that has already imported the slow modules.

Each test process has one for all sets of modules that have some in common, and it ends with that.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.support.children import Child, environment
from benchmarks.support.nursery import VLLM, ForkedProcess

START_S = 240.0
TRAINER = (
    "pytest",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
    "trainer_core.loop",
    "trainer_core.ranks.launch",
    "trainer_core.policy.sharding",
    "trainer_core.policy.lora",
    "trainer_core.ranks.group",
    "torch.distributed.fsdp",
)
SERVER = (VLLM, *TRAINER)
"""Modules of an inference server; a test of one has trainers as well."""
SUPERVISOR = ("tests.support.warm_supervisor",)


_started: dict[tuple[str, ...], Child] = {}


def nursery(*modules: str) -> Child:
    """It has imported `modules`, and perhaps more."""
    for imported, there in list(_started.items()):
        if more := set(modules) - set(imported):
            if len(more) == len(modules):
                continue
            there.ask({"modules": [each for each in modules if each in more]}, START_S)
            _started[(*imported, *more)] = _started.pop(imported)
        return there
    folder = tempfile.TemporaryDirectory(prefix="atropos-nursery-")
    place = Path(folder.name)
    made = Child(
        place, ["-m", "benchmarks.support.nursery", *modules], environment(place, None, {})
    )
    atexit.register(lambda: (made.close(), folder.cleanup()))
    made.wait(START_S)
    _started[modules] = made
    return made


def forked(
    modules: Sequence[str],
    call: str,
    args: Sequence[str],
    log: Path,
    *,
    stdin: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> ForkedProcess:
    """`module:function`, called with `args` in a process of its own in which `modules` are
    imported; its output in `log`."""
    return ForkedProcess(nursery(*modules), call, list(args), dict(env), log, stdin=stdin)


def supervisor(stack_json: str, folder: Path) -> ForkedProcess:
    """Start `python -m atropos_tui.supervisor` with the stack on its stdin; its output is in
    `folder`/said."""
    (folder / "stdin").write_text(stack_json)
    return forked(
        SUPERVISOR,
        "tests.support.nursery:be_supervisor",
        [],
        folder / "said",
        stdin=folder / "stdin",
    )


def be_supervisor(_: list[str]) -> NoReturn:
    """In the new process. It ends as an interpreter does, but what was imported is not taken apart:
    that would copy it all."""
    from atropos_tui.supervisor.__main__ import main

    code = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
