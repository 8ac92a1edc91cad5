"""The run's key in an environment's configuration: for run-api and the run's engines alone."""

from __future__ import annotations

import os
from typing import Any

from atropos_common.net.http import KEY_USER
from atropos_common.system.run_dir import ENV_ENGINE_URLS


class KeyedUrl(str):
    """run-api's address, with the run's key as its password only where it is formatted."""

    key: str

    @classmethod
    def of(cls, url: str, key: str) -> KeyedUrl:
        made = cls(url)
        made.key = key
        return made

    # atroposlib's clients format their URLs (`f"{url}/info"`). `str(url)`, which goes to W&B and
    # logs, stays the plain address.
    def __format__(self, form: str) -> str:
        scheme, mark, rest = self.partition("://")
        return format(f"{scheme}{mark}{KEY_USER}:{self.key}@{rest}", form)


def with_run_key(config: Any, server_configs: Any, key: str) -> tuple[Any, Any]:
    """Return both configurations with the run's key."""
    if not key:
        return config, server_configs
    # The key goes only to servers of the plan, never to a judge or another model's server.
    known = {base_url.rstrip("/") for base_url in os.environ.get(ENV_ENGINE_URLS, "").split()}

    def keyed(each: Any) -> Any:
        url = str(getattr(each, "base_url", None) or "").rstrip("/")
        return each.model_copy(update={"api_key": key}) if url in known else each

    several = isinstance(server_configs, list)
    servers = [keyed(each) for each in server_configs] if several else keyed(server_configs)
    url = KeyedUrl.of(str(config.rollout_server_url), key)
    return config.model_copy(update={"rollout_server_url": url}), servers
