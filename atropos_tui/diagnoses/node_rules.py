"""Rules for a lost or unreachable node, by the last output of its launcher (ssh, srun, kubectl).

That output is in the component's log. `doctor --nodes` and `attach user@host` use the same rules.
HOST in a fix stands for the node as the launcher knows it.
"""

from __future__ import annotations

import re

from atropos_tui.diagnoses.model import Diagnosis, Layer, LogPattern, LogRule, Rule, shortened

LAUNCHER_RULES: tuple[LogRule, ...] = (
    LogRule(
        "ssh_host_key",
        "the host key is not the one that ssh knows",
        "find out from whoever runs the machine whether it was set up anew; if so: ssh-keygen -R HOST, then ssh HOST "
        "once by hand and compare the key that it shows",
        (
            LogPattern("REMOTE HOST IDENTIFICATION HAS CHANGED"),
            LogPattern("Host key verification failed"),
            LogPattern("host key is known for", r"No \S+ host key is known for"),
        ),
        layer=Layer.LINK,
    ),
    LogRule(
        "ssh_denied",
        "ssh is not let in without a question",
        "a key that needs no passphrase, or an agent: ssh-copy-id HOST, ssh-add; then ssh -o BatchMode=yes HOST true "
        "must pass",
        (
            LogPattern("Permission denied (", r"Permission denied \((?:publickey|password|keyboard|gssapi|hostbased)"),
            LogPattern("Too many authentication failures"),
        ),
        layer=Layer.LINK,
    ),
    LogRule(
        "ssh_unreachable",
        "ssh does not reach the machine",
        'is it up, is the name right, does sshd listen there ([cluster] ssh = ["-p", "PORT"])? ssh -v HOST true shows '
        "where it stops",
        (
            LogPattern("ssh: connect to host"),
            LogPattern("Could not resolve hostname"),
            LogPattern("Connection timed out during banner exchange"),
            LogPattern("Timeout, server", r"Timeout, server \S+ not responding"),
        ),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "srun_refused",
        "Slurm does not start it there",
        "squeue and sinfo show the allocation and its nodes; the job must still run, and the node be part of it",
        (
            LogPattern("srun: error: Unable to"),
            LogPattern("Requested nodes are busy"),
            LogPattern("Invalid job id specified"),
            LogPattern("Requested node configuration is not available"),
        ),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "kubectl_refused",
        "kubectl does not get into the pod",
        "kubectl get pods must show it Running, and kubectl auth can-i create pods/exec say yes",
        (
            LogPattern("Error from server", r"Error from server(?: \((\w+)\))?:"),
            LogPattern("error: unable to upgrade connection"),
            LogPattern("The connection to the server", r"The connection to the server \S+ was refused"),
        ),
        passing=True,
        layer=Layer.LINK,
    ),
)


NODE_SILENT = LogRule(
    "node_silent",
    "node {0} does not answer",
    "nothing, if it comes back; else its component counts as crashed, and is started again there. Is it up, and what "
    "does it do: ssh NODE uptime, sinfo -R",
    (LogPattern("atropos: node ", r"^atropos: node (.+ \(.+\)) has (?:not answered|said nothing) for"),),
    at_exit=False,
    layer=Layer.MACHINE,
)
NODE_LOST = Rule(
    "node_lost", "a node was lost, or could not be reached", passing=True, severity="alarm", layer=Layer.MACHINE
)
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
    """Return the diagnosis of a lost node; `words` is `node NAME (HOST): REASON`."""
    where, _, how = words.partition(": ")
    known = [rule.fix for rule in LAUNCHER_RULES if any(pattern.match(how) for pattern in rule.patterns)]
    known += [fix for pattern, fix in _WAYS_OUT if re.search(pattern, how, re.IGNORECASE)]
    fix = (
        known[0]
        if known
        else "its log ends with what the launcher printed; ssh NODE, sinfo -R and dmesg there say more"
    )
    return NODE_LOST.diagnosis(shortened(how), str(fix), f"{where} was lost, or could not be reached")
