"""Arguments of the measurements between two GPUs."""

from __future__ import annotations

import argparse

import torch


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser with the arguments of all measurements between two GPUs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; exit with code 2 on a machine with fewer than two GPUs."""
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.exit(2, "two GPUs are needed\n")
    return options
