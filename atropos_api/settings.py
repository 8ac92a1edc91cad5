"""What the door takes from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from atropos_common.http import allowed_hosts, hosts_in
from atropos_common.run_dir import ENV_ALLOWED_HOSTS, ENV_TOKEN

ENV_UIDS = "ATROPOS_API_UIDS"
ENV_MAX_BODY = "ATROPOS_API_MAX_BODY_MIB"
MAX_BODY_MIB = 512
"""A batch of 16 groups of 16 completions of 32,768 tokens, all in one body, has 285 MB: as JSON a token takes 7 bytes,
its mask another 7, its logprob 20."""
ROOT = 0


@dataclass(frozen=True)
class Settings:
    """What the door asks of a request."""

    uids: frozenset[int] | None
    """Users who may call; null: everyone, from other machines too."""
    hosts: frozenset[str]
    """Names that the Host header may have."""
    max_body: int
    """Bytes of a body, as sent and unpacked."""
    token: str = ""
    """The run's; empty: there is none."""

    @classmethod
    def from_env(cls, env: Mapping[str, str], bound: str) -> Settings:
        """Read `env`, for a server bound to the address `bound`.

        Raises:
            ValueError: a variable makes no sense; says which.
        """
        hosts = allowed_hosts(bound, hosts_in(env, ENV_ALLOWED_HOSTS))
        return cls(_uids(env), hosts, _max_body(env), env.get(ENV_TOKEN, ""))


def _uids(env: Mapping[str, str]) -> frozenset[int] | None:
    given = env.get(ENV_UIDS, "").strip()
    if given == "any":
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{ENV_UIDS}={given!r}: numbers of users with commas between them, or `any`")
    return frozenset({ROOT, os.geteuid(), *map(int, words)})


def _max_body(env: Mapping[str, str]) -> int:
    given = env.get(ENV_MAX_BODY) or str(MAX_BODY_MIB)
    if not given.isdecimal() or int(given) == 0:
        raise ValueError(f"{ENV_MAX_BODY}={given!r}: a number of MiB from 1 is needed")
    return int(given) * 1024 * 1024
