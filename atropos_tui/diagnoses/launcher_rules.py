"""Rules over what ssh, srun and kubectl say when a program does not get to its node.

They stand in the component's log, whose output passes through the launcher, and are what `doctor --nodes` and `attach
user@host` explain a failure with. HOST in a fix is the node as the launcher knows it.
"""

from __future__ import annotations

from atropos_tui.diagnoses.model import LogPattern, LogRule

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
    ),
)
