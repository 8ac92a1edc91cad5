"""Environments made with the package `verifiers`, unmodified.

python -m atropos_envs.verifiers_server serve --env.verifiers ID ...
"""

from __future__ import annotations

import importlib
from importlib import metadata

from atropos_envs import EnvFault

OLDEST = (0, 4)
INSTALL = "python -m pip install 'verifiers>=0.4,<0.5'"


def require_verifiers() -> None:
    """Import verifiers.

    Raises:
        EnvFault: it is missing, or of another release line.
    """
    try:
        found = metadata.version("verifiers")
        importlib.import_module("verifiers.v1")
    except (metadata.PackageNotFoundError, ImportError) as error:
        known = f" ({error})" if isinstance(error, ImportError) else ""
        fault = f"`verifiers = ...` below [env] needs the Python package verifiers{known}"
        raise EnvFault(f"{fault}. Install it: {INSTALL}", exit_code=2) from None
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        fault = f"verifiers {found} is installed, and this program needs 0.4"
        raise EnvFault(f"{fault}. Install it: {INSTALL}", exit_code=2)
