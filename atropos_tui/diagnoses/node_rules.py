"""How a node was lost, or could not be reached, and the way out: told by what its launcher printed last."""

from __future__ import annotations

import re

from atropos_tui.diagnoses.launcher_rules import LAUNCHER_RULES
from atropos_tui.diagnoses.model import Diagnosis, LogPattern, LogRule, Rule, shortened

NODE_SILENT = LogRule(
    "node_silent",
    "node {0} does not answer",
    "nothing, if it comes back; else its component counts as crashed, and is started again there. Is it up, and what "
    "does it do: ssh NODE uptime, sinfo -R",
    (LogPattern("atropos: node ", r"^atropos: node (.+ \(.+\)) has (?:not answered|said nothing) for"),),
    at_exit=False,
)
NODE_LOST = Rule("node_lost", "a node was lost, or could not be reached", passing=True)
_WAYS_OUT = (
    (
        r"job/step already completing|job .* (expired|revoked)|cancelled at|due to time limit",
        "the allocation has ended: scontrol show job and sacct -j say why; submit the run again",
    ),
    (
        r"unable to contact slurm|socket timed out|communication connection failure|node failure",
        "slurm has lost the node or its controller: sinfo -R, scontrol show node NODE",
    ),
    (
        r"connection to .* closed|closed by remote|connection (reset|closed)|broken pipe",
        "is the node up? ssh NODE true says so; its component is started again there",
    ),
    (
        r"no module named .?atropos",
        "the project must lie at the same path on every node, or be shared: atropos-tui doctor --nodes",
    ),
    (
        r"no such file or directory|command not found|execve",
        "the interpreter is not there: [cluster] python names one that every node has; atropos-tui doctor --nodes",
    ),
    (
        r"killed|oom|out of memory",
        "someone, or the kernel for want of memory, ended it on that node: dmesg there, sacct -j JOB",
    ),
    (
        r"nothing was heard",
        "the node, its network or the far end hangs: ssh NODE uptime, sinfo -R; its component is started again there",
    ),
)


def node_lost(words: str) -> Diagnosis:
    """The diagnosis of a component whose node (`node NAME (HOST)`) was lost in the way that `words` tell after it."""
    where, _, how = words.partition(": ")
    known = [rule.fix for rule in LAUNCHER_RULES if any(pattern.match(how) for pattern in rule.patterns)]
    known += [fix for pattern, fix in _WAYS_OUT if re.search(pattern, how, re.IGNORECASE)]
    fix = (
        known[0]
        if known
        else "its log ends with what the launcher printed; ssh NODE, sinfo -R and dmesg there say more"
    )
    return Diagnosis(f"{where} was lost, or could not be reached", shortened(how), str(fix), NODE_LOST.name)
