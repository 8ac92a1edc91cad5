"""Environments of the package verifiers, unmodified.

python -m atropos_envs.verifiers_server serve --env.verifiers ID --env.arguments JSON ...
"""

from __future__ import annotations

import logging

from atropos_envs import without_torch

if __name__ == "__main__":
    without_torch()

from atropos_envs.hosting.base import configure_logging, exit_code_of, leave, run
from atropos_envs.verifiers import require_verifiers

if __name__ == "__main__":
    configure_logging()
    # Both log several lines for each rollout; failed ones are counted in the progress line.
    for library in ("verifiers", "aiohttp.access"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if code := exit_code_of(require_verifiers):
        leave(code)
    from atropos_envs.verifiers.environment import VerifiersEnv

    run(VerifiersEnv)
