"""`.env` files: what `${VAR}` in a profile may refer to, beside the environment itself."""

from __future__ import annotations

from pathlib import Path

from atropos_tui.errors import Problem, UserError


def read_env_files(profile: Path) -> None:
    """Make `.env` of the current folder and of the profile's folder known to `${VAR}`; what is set already wins.

    Raises:
        UserError: one of them cannot be read.
    """
    from dotenv import load_dotenv

    for folder in dict.fromkeys((Path.cwd(), profile.resolve().parent)):
        try:
            load_dotenv(folder / ".env", override=False)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in a value
            raise UserError(
                "unreadable .env", [Problem(str(error), "write lines of NAME=value in UTF-8", file=f"{folder}/.env")]
            ) from None
