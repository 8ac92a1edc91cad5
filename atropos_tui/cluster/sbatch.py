from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

SHORT = {
    "a": "array",
    "A": "account",
    "c": "cpus-per-task",
    "C": "constraint",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "s": "oversubscribe",
    "t": "time",
}
"""Long names of the short options that matter here."""
OWNED = {
    "job-name": "leave it out: `down` finds the job by the run's name",
    "output": "leave it out: the job writes to slurm.log in the run directory",
    "open-mode": "leave it out: a requeued job appends to slurm.log",
    "signal": "leave it out: [cluster] time determines when the signal comes",
    "requeue": "set [cluster] requeue = true",
    "no-requeue": "set [cluster] requeue = false",
    "time": 'set [cluster] time = "..."',
    "partition": 'set partition = "..." in [cluster] or [[node]]',
    "account": 'set [cluster] account = "..."',
    "constraint": 'set [[node]] constraint = "..."',
    "nodes": "set [[node]] count",
    "ntasks": "leave it out: the job has one task on each node",
    "ntasks-per-node": "leave it out: the job has one task on each node",
    "gpus": "set [[node]] gpus",
    "gpus-per-node": "set [[node]] gpus",
    "array": "leave it out: start one run for each, or use atropos-tui sweep",
    "wrap": "leave it out: atropos-tui up writes the batch script",
}
"""Options that the batch script sets itself -> fix."""
_LONG = re.compile(r"--([A-Za-z][\w-]*)(?:(?:=|\s+)(.*))?")
_SHORT = re.compile(r"-([A-Za-z])(?:=|\s+)?(.*)")
# A second option within one string would be quoted as part of the first one's value.
_SECOND = re.compile(r"\s--[A-Za-z][\w-]*(?:[=\s]|$)")
# SLURM refuses these options for a node without requested GPUs.
_OF_GPUS = re.compile(
    r"(?:cpus|mem|ntasks|tres)-per-gpu|gpu-(?:bind|freq)|gpus-per-(?:task|socket)"
)


@dataclass(frozen=True)
class Option:
    name: str
    """Long name, if it matters here."""
    text: str
    """Quoted text for the batch script."""
    value: str

    @property
    def needs_gpus(self) -> bool:
        """SLURM refuses the option for nodes without GPUs."""
        return bool(_OF_GPUS.fullmatch(self.name)) or (
            self.name == "gres" and self.value.startswith("gpu")
        )

    @property
    def shares_processors(self) -> bool:
        """The option sets the processors per node, so the job does not take the whole node."""
        return self.name.startswith("cpus-per-") or self.name in ("exclusive", "oversubscribe")

    @property
    def sets_memory(self) -> bool:
        return self.name.startswith("mem")


def parse(text: str) -> Option | None:
    """None if `text` is no option."""
    if found := _LONG.fullmatch(text.strip()):
        # `--name value` becomes `--name=value`, so that quoting covers exactly one word.
        name, value = found[1], _bare(found[2] or "")
        return Option(
            name, shlex.quote(f"--{name}={value}" if found[2] is not None else f"--{name}"), value
        )
    if found := _SHORT.fullmatch(text.strip()):
        value = _bare(found[2])
        return Option(SHORT.get(found[1], found[1]), shlex.quote(f"-{found[1]}{value}"), value)
    return None


def problem(text: str) -> tuple[str, str] | None:
    option = parse(text)
    if option is None:
        return f"not an sbatch option: {text!r}", 'write it as "--NAME=VALUE"'
    if _SECOND.search(text):
        return f"two options in one: {text!r}", 'write one each: ["--NAME=VALUE", "--NAME=VALUE"]'
    # A second value would silently override the one of the batch script.
    if option.name in OWNED:
        return f"atropos-tui sets --{option.name} itself", OWNED[option.name]
    return None


def _bare(value: str) -> str:
    """Remove quotes around the whole value: the batch script quotes it again."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
