"""The table of faults and reactions: `ATROPOS_CLUSTER_TABLE=FILE make test-cluster` writes it."""

from __future__ import annotations

import os
from pathlib import Path


class Table:
    """Rows in the order of the tests."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def row(self, fault: str, said: str, seconds: float) -> None:
        """Add a fault, the reaction to it, and the seconds until then."""
        self.rows.append((fault, said, f"{seconds:.1f}"))

    def write(self) -> None:
        """As Markdown, to the file that the environment names."""
        if name := os.environ.get("ATROPOS_CLUSTER_TABLE"):
            lines = ["| what happens | what is said or done | s |", "|---|---|---|"]
            Path(name).write_text(
                "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows)]) + "\n"
            )
