"""The one exception that ends an environment with a sentence in the place of a traceback."""

from __future__ import annotations


class EnvFault(Exception):
    """What happened and the way out.

    Args:
        message: one or two sentences for the user.
        exit_code: 1 when a part of the stack is gone (a restart may help), 2 for a mistake in the configuration.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
