"""Rules for a lost node, by the last output of its launcher (ssh, srun, kubectl). HOST stands for
the node's address."""

from __future__ import annotations

import re

from atropos_tui.diagnoses.model import Diagnosis, Layer, LogPattern, LogRule, Rule, shortened

LAUNCHER_RULES: tuple[LogRule, ...] = (
    LogRule(
        "ssh_host_key",
        "the host key is not the one that ssh knows",
        "ask the administrator if the machine was reinstalled; if so, run ssh-keygen -R "
        "HOST, then ssh HOST once by "
        "hand, and compare the key that it shows",
        (
            LogPattern("REMOTE HOST IDENTIFICATION HAS CHANGED"),
            LogPattern("Host key verification failed"),
            LogPattern("host key is known for", r"No \S+ host key is known for"),
        ),
        layer=Layer.LINK,
    ),
    LogRule(
        "ssh_denied",
        "ssh cannot log in without a password or passphrase",
        "set up a key without a passphrase, or an agent: ssh-copy-id HOST, ssh-add; then ssh "
        "-o BatchMode=yes HOST "
        "true must succeed",
        (
            LogPattern(
                "Permission denied (",
                r"Permission denied \((?:publickey|password|keyboard|gssapi|hostbased)",
            ),
            LogPattern("Too many authentication failures"),
        ),
        layer=Layer.LINK,
    ),
    LogRule(
        "ssh_unreachable",
        "ssh does not reach the machine",
        "check that it is up, the name is right, and sshd listens on that port ([cluster] "
        'ssh = ["-p", "PORT"]); '
        "ssh -v HOST true shows where it stops",
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
        "Slurm does not start it on that node",
        "check with squeue and sinfo that the job still runs, and that the node is part of "
        "its allocation",
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
        "kubectl cannot run a command in the pod",
        "check that kubectl get pods shows it Running, and that kubectl auth can-i create "
        "pods/exec says yes",
        (
            LogPattern("Error from server", r"Error from server(?: \((\w+)\))?:"),
            LogPattern("error: unable to upgrade connection"),
            LogPattern(
                "The connection to the server", r"The connection to the server \S+ was refused"
            ),
        ),
        passing=True,
        layer=Layer.LINK,
    ),
)


NODE_SILENT = LogRule(
    "node_silent",
    "node {0} does not answer",
    "wait: if it does not come back, its component counts as crashed and restarts there. To "
    "check the node: ssh NODE "
    "uptime, sinfo -R",
    (
        LogPattern(
            "atropos: node ", r"^atropos: node (.+ \(.+\)) has (?:not answered|said nothing) for"
        ),
    ),
    at_exit=False,
    layer=Layer.MACHINE,
)
NODE_LOST = Rule(
    "node_lost",
    "a node was lost, or could not be reached",
    passing=True,
    severity="alarm",
    layer=Layer.MACHINE,
)
_WAYS_OUT = (
    (
        r"job/step already completing|job .* (expired|revoked)|cancelled at|due to time limit",
        "submit the run again: the allocation has ended (scontrol show job and sacct -j show why)",
    ),
    (
        r"unable to contact slurm|socket timed out|communication connection failure|node failure",
        "check the node and Slurm's controller: sinfo -R, scontrol show node NODE",
    ),
    (
        r"connection to .* closed|closed by remote|connection (reset|closed)|broken pipe",
        "check that the node is up: ssh NODE true; its component restarts there",
    ),
    (
        r"no module named .?atropos",
        "put the project at the same path on every node, or share it: atropos-tui doctor --nodes",
    ),
    (
        r"no such file or directory|command not found|execve",
        "set [cluster] python to an interpreter that every node has; atropos-tui doctor --nodes",
    ),
    (
        r"killed|oom|out of memory",
        "find out who killed it on that node, a user or the out-of-memory killer: dmesg "
        "there, sacct -j JOB",
    ),
    (
        r"nothing was heard",
        "check the node, its network and our agent there: ssh NODE uptime, sinfo -R; its "
        "component restarts there",
    ),
)


def node_lost(words: str) -> Diagnosis:
    """`words` is `node NAME (HOST): REASON`."""
    where, _, how = words.partition(": ")
    known = [
        rule.fix for rule in LAUNCHER_RULES if any(pattern.match(how) for pattern in rule.patterns)
    ]
    known += [fix for pattern, fix in _WAYS_OUT if re.search(pattern, how, re.IGNORECASE)]
    fix = (
        known[0]
        if known
        else "read the launcher's output at the end of its log; check with ssh NODE, sinfo -R and "
        "dmesg there"
    )
    return NODE_LOST.diagnosis(
        shortened(how), str(fix), f"{where} was lost, or could not be reached"
    )
