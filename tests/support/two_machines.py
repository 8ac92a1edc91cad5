"""Two machines on one: network namespaces with a cable between them, without root.

python -m tests.support.two_machines PROGRAM...     # runs PROGRAM on 10.77.0.1; what it runs by
`elsewhere` is 10.77.0.2
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

OWN, OTHER = "10.77.0.1", "10.77.0.2"
APART = ["unshare", "--user", "--map-root-user", "--net"]
ENV_OTHER = "TWO_MACHINES_OTHER"
"""The process that holds the other machine's network."""


def possible() -> bool:
    """Return True if this system allows it."""
    tools = all(shutil.which(name) for name in ("unshare", "ip", "nsenter"))
    link = ["ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
    return tools and subprocess.run([*APART, *link], capture_output=True).returncode == 0


def command(*program: str) -> list[str]:
    """`program` on the first of two machines."""
    return [*APART, sys.executable, "-m", "tests.support.two_machines", *program]


def elsewhere(*program: str) -> list[str]:
    """`program` on the other one, as the same user; within what `command` runs."""
    return ["nsenter", "--net", "--target", os.environ[ENV_OTHER], "--", *program]


def main(program: list[str]) -> int:
    """Lay the cable, run, and give back the exit code."""
    other = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; read _"], stdin=-1, stdout=-1)
    assert other.stdout is not None
    other.stdout.readline()
    os.environ[ENV_OTHER] = str(other.pid)
    for words in (
        ["ip", "link", "set", "lo", "up"],
        [
            "ip",
            "link",
            "add",
            "here",
            "type",
            "veth",
            "peer",
            "name",
            "there",
            "netns",
            str(other.pid),
        ],
        ["ip", "addr", "add", f"{OWN}/24", "dev", "here"],
        ["ip", "link", "set", "here", "up"],
        elsewhere("ip", "addr", "add", f"{OTHER}/24", "dev", "there"),
        elsewhere("ip", "link", "set", "there", "up"),
    ):
        subprocess.run(words, check=True)
    try:
        return subprocess.run(program, check=False).returncode
    finally:
        other.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
