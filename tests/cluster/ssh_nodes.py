"""Three hosts to reach by ssh on this one: `with SshNodes(folder) as ssh:`, then `ssh -F ssh.config
n2 ...`.

Each is an sshd of its own on an address of its own, so that one can be stopped alone. Host keys,
user key, known_hosts and configuration lie in the folder; nothing of the user's own is read or
written.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from tests.cluster.processes import HOSTS, Daemons, free_port, listens, program, wait_until

SSHD = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_{node}
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
CLIENT = """\
Host n1 n2 n3
  Port {port}
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
"""
SEPARATION = Path("/run/sshd")
"""An sshd of root's wants this folder, at each connection. It stays, for the hosts of tests
beside."""


class SshNodes:
    """The hosts; `config` is the file for `ssh -F`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "ssh.config"
        self.port = free_port()
        self.daemons = Daemons(folder, os.environ)

    def __enter__(self) -> SshNodes:
        sshd = program("sshd", "openssh-server")
        self._write()
        if os.getuid() == 0:
            SEPARATION.mkdir(mode=0o755, exist_ok=True)
        try:
            for node in HOSTS:
                self.daemons.start(
                    f"sshd-{node}", sshd, "-D", "-e", "-f", str(self.folder / f"sshd_{node}")
                )
            for address in HOSTS.values():
                wait_until(
                    lambda address=address: listens(address, self.port), f"sshd at {address}"
                )
        except BaseException as error:
            error.add_note(self.daemons.said())
            self.daemons.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.daemons.stop()

    def _write(self) -> None:
        self._key("user_key")
        client = CLIENT.format(
            port=self.port, user=pwd.getpwuid(os.getuid()).pw_name, folder=self.folder
        )
        for node, address in HOSTS.items():
            self._key(f"host_{node}")
            self.know(node)
            sshd = self.folder / f"sshd_{node}"
            sshd.write_text(
                SSHD.format(port=self.port, address=address, folder=self.folder, node=node)
            )
            client += f"Host {node}\n  HostName {address}\n"
        self.config.write_text(client)

    def _key(self, name: str) -> None:
        command = [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            name,
            "-f",
            str(self.folder / name),
        ]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def know(self, node: str, key: str = "") -> None:
        """Write the host key of `node` into known_hosts; with `key` another one, as if it had
        changed since."""
        file = self.folder / "known_hosts"
        line = f"[{HOSTS[node]}]:{self.port}"
        others = (
            [old for old in file.read_text().splitlines() if not old.startswith(line)]
            if file.exists()
            else []
        )
        public = (self.folder / f"{key or f'host_{node}'}.pub").read_text().strip()
        file.write_text("\n".join([*others, f"{line} {public}"]) + "\n")

    def silence(self, node: str) -> None:
        """Let a host take connections and say nothing."""
        self.daemons.kill(f"sshd-{node}", signal.SIGSTOP)

    def wake(self, node: str) -> None:
        """End a silence."""
        self.daemons.kill(f"sshd-{node}", signal.SIGCONT)
