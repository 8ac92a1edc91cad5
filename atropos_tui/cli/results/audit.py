"""`audit`: does an engine serve the weights of a folder? The trainer's package does the work."""

from __future__ import annotations

import argparse
import subprocess
import sys

from atropos_tui.errors import Problem, UserError

FLAGS = (
    "engine",
    "weights",
    "adapter",
    "older",
    "rollouts",
    "model",
    "dtype",
    "device",
    "temperature",
    "token_env",
    "seed",
    "timeout",
)


def audit(options: argparse.Namespace) -> int:
    """Run the audit with this terminal; return its exit code."""
    if not options.engine and not options.rollouts:
        raise UserError(
            "nothing to audit",
            [Problem("neither an engine nor rollouts are given", "add --engine URL")],
        )
    words: list[str] = []
    for name in FLAGS:
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if options.prompt_logprobs:
        words.append("--prompt-logprobs")
    if options.json:
        words.append("--json")
    # A program of its own: it needs torch, and this package does not import the trainer.
    command = [sys.executable, "-P", "-m", "trainer_core.audit", *words]
    return subprocess.run(command, check=False).returncode
