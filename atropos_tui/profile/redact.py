"""Removal of secrets before text reaches a file. References and numbers stay."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atropos_common.system.run_dir import ENV_TOKEN

REDACTED = "(redacted)"
PLACEHOLDER = "local"
"""Public key for local servers that require any."""
SHORTEST = 6
"""Length below which values are too common to search for."""

_SECRET = re.compile(
    r"(?<![a-z])(api[_-]?key|access[_-]?key|private[_-]?key|key|secret|token|pass|passwd|password"
    r"|credentials?|auth|authorization|cookie|webhook)(?![a-z])",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_SETTINGS = re.compile(
    "false|true|enabled|disabled|online|offline|debug|info|warning|error|critical", re.IGNORECASE
)

_NEEDED_BY = (
    (re.compile(ENV_TOKEN), {"api", "engine", "trainer"}),
    (re.compile("WANDB_API_KEY"), {"env", "trainer", "other"}),
    (re.compile("VLLM_API_KEY"), {"engine", "env"}),
    (
        re.compile(r"\w+_API_KEY"),
        {"env", "prepare", "other"},
    ),  # judges, search engines and similar services
    # Keys of hubs and object stores: all that load models or data.
    (re.compile(""), {"prepare", "engine", "trainer", "env", "other"}),
)
"""Roles that need a secret, by name; the first match counts."""

# Each service's documented key prefix, so that ordinary words do not match.
_SHAPES = re.compile(
    r"""
    (?<=://) [^\s/@'"]+ (?=@)                                            # URL with user:password
  | (?<=hooks\.slack\.com/) [\w/-]+ | (?<=/api/webhooks/) [\w/-]+        # Slack, Discord
  | \b (?: hf_ | api_org_ ) [A-Za-z0-9]{16,}                             # Hugging Face
  | \b sk- [\w-]{16,}                                                    # OpenAI, Anthropic
  | \b wandb_v\d_ [\w-]{16,}
  | \b gh[pousr]_ [A-Za-z0-9]{20,} | \b github_pat_ \w{20,} | \b glpat- [\w-]{16,}
  | \b xox[abeprs]- [\w-]{10,}                                           # Slack
  | \b (?: AKIA | ASIA ) [0-9A-Z]{16} \b | \b AIza [\w-]{35}             # AWS, Google
  | (?<![\w-]) eyJ [\w-]{8,} \. [\w-]{8,} \. [\w-]+                     # JSON web token
  | \b nvapi- [\w-]{20,} | \b npm_ [A-Za-z0-9]{20,}
  | \b r8_ [A-Za-z0-9]{20,} | \b [rs]k_(?:live|test)_ \w{16,}
  | (?<=\ -u\ ) [^\s:]+:\S+ | (?<=--user[ =]) [^\s:]+:\S+               # curl
  | -----BEGIN\ [A-Z ]*PRIVATE\ KEY----- [\s\S]*? (?: -----END\ [A-Z ]*PRIVATE\ KEY----- | \Z )
    """,
    re.VERBOSE | re.ASCII,
)
# A name and its value in text: headers, `KEY=value`, `"token": "..."`.
_NAMED_VALUE = re.compile(
    r"""
    ( (?<![A-Za-z]) (?:proxy-)? authorization ["']? \s* [:=] \s* ["']?
      (?:(?:bearer|basic|token|digest)\s+)? ) [^"'\n]+
  | ( (?<![A-Za-z]) (?:set-)? cookie ["']? \s* : \s* ["']? ) (?=\S+=) [^"'\n]+
  | ( \b (?:bearer|basic) \s+ ) (?=\S{8}) (?=[\w+/.-]*[\d+/=_]) [\w+/=.-]+
  | ( \b \w{0,32} (?:passwd | password) ["']? \s* [=:] \s* ["']? )
      (?! \$\{ | \(redacted | (?:none|null|true|false)\b ) [^\s"',;&)}\]]{4,}
  | ( (?<![\w-]) --? [\w-]{0,32} (?: key | token | secret | password | passwd ) \s+ )
      (?! \$\{ | \(redacted | -- | \d+(?:\.\d+)?\b ) \S{4,}
  | ( (?: (?:api|access|private|secret|client|signing) [_-]? key | secret | passwd | password
        | (?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_) token
        | (?-i: \b [A-Z][A-Z0-9_]* _(?:KEY|PASS|AUTH|CREDENTIALS) ) )
      ["']? \s* [=:] \s* ["']? )
      (?! \d+(?:\.\d+)? (?:[\s"',;&)}\]]|$) | \$\{ | \(redacted | (?:none|null|true|false)\b )
      (?: (?<=["'])[^"'\n]+ | [^\s"',;&)}\]]{4,} )
    """,
    re.VERBOSE | re.IGNORECASE,
)
# The lookbehind keeps parts of paths, URLs and commits in text.
# W&B keys (40 hex digits) and a run's key (43 characters) without a name.
_KEY_LIKE = re.compile(
    r"(?<![0-9A-Za-z/@_-])(?:[0-9a-f]{40}"
    r"|(?=[\w-]{0,42}[a-z])(?=[\w-]{0,42}[A-Z])(?=[\w-]{0,42}\d)[\w-]{43})(?![0-9A-Za-z_-])",
    re.ASCII,
)


# A token that a command sends; references and code that handles a token stay.
_BEARER = re.compile(
    r"""
    ( \A bearer \s+
    | (?<![a-z]) authorization ["']? \s* : \s* ["']? (?:bearer|basic|token|digest) \s+
    ) [\w+/=.~-]{4,}
  | ( \b bearer \s+ ) (?=[\w+/=.~-]{8}) (?=[\w+/.~-]*[\d+/=_]) [\w+/=.~-]+
    """,
    re.VERBOSE | re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    return _SECRET.search(name) is not None


def goes_to(name: str, role: str) -> bool:
    """A component of `role` inherits the variable from `up`. Secrets go only to roles that need
    them."""
    if not is_secret_name(name):
        return True
    return role in next(roles for pattern, roles in _NEEDED_BY if pattern.match(name))


def is_harmless(value: str) -> bool:
    """References, numbers and the placeholder reveal nothing."""
    bare = _REFERENCE.sub("", value)
    nothing_left = not any(letter.isalnum() for letter in bare)
    return value == PLACEHOLDER or nothing_left or value.replace(".", "").isdecimal()


def is_plain_setting(value: str) -> bool:
    """Clearly no secret: a switch, a log level, or a path that exists."""
    if is_harmless(value) or _SETTINGS.fullmatch(value):
        return True
    try:
        return "/" in value and Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False


def secret_references(data: Any, name: str = "") -> set[str]:
    if isinstance(data, dict):
        return set().union(*(secret_references(value, str(key)) for key, value in data.items()))
    if isinstance(data, list):
        flags = [
            "",
            *(word if isinstance(word, str) and word.startswith("-") else "" for word in data),
        ]
        return set().union(
            *(
                secret_references(item, f"{name} {flag}")
                for item, flag in zip(data, flags, strict=False)
            )
        )
    if not isinstance(data, str):
        return set()
    return {
        reference[1]
        for reference in _REFERENCE.finditer(data)
        if is_secret_name(" ".join([name, *data[: reference.start()].split()[-2:]]))
    }


def mask(text: str) -> str:
    """Mask secrets by their form."""
    return _BEARER.sub(_but_its_name, _SHAPES.sub(REDACTED, text))


def _but_its_name(match: re.Match[str]) -> str:
    return match.group(match.lastindex or 0) + REDACTED


def hide(name: str, value: str) -> str:
    return REDACTED if is_secret_name(name) and not is_harmless(value) else mask(value)


def hide_command(words: Sequence[str]) -> list[str]:
    """Mask `--flag value`, `--flag=value` and `KEY=VALUE`."""
    hidden: list[str] = []
    before = ""
    for word in map(mask, words):  # before it is taken apart: a token may hold "="
        name, separator, value = word.partition("=")
        if before.lower() == "bearer" and not is_harmless(word):
            hidden.append(REDACTED)
        elif separator:
            hidden.append(f"{name}={hide(name, value)}")
        elif before.startswith("-") and not word.startswith("-"):
            hidden.append(hide(before, word))
        else:
            hidden.append(word)
        before = word
    return hidden


def hide_tree(data: Any, name: str = "") -> Any:
    """Mask nested tables; a list named `command` is masked as a command line."""
    if isinstance(data, dict):
        return {key: hide_tree(value, str(key)) for key, value in data.items()}
    if isinstance(data, list):
        if name == "command" and all(isinstance(word, str) for word in data):
            return hide_command(data)
        return [hide_tree(item, name) for item in data]
    return hide(name, data) if isinstance(data, str) else data


class Scrubber:
    def __init__(self, values: Iterable[str], *, keep: Iterable[str] = (), home: str = "") -> None:
        spellings = {
            form for value in values if len(value) >= SHORTEST for form in _spellings(value)
        }
        ordered = sorted(
            spellings, key=len, reverse=True
        )  # a longer one may begin with a shorter one
        self._values = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._keep = set(keep)
        self._home = (
            re.compile(r"(?<![\w.-])" + re.escape(home.rstrip("/")) + r"(?![\w.-])")
            if len(home) > 1
            else None
        )

    def text(self, text: str) -> str:
        if self._values:
            text = self._values.sub(REDACTED, text)
        text = _NAMED_VALUE.sub(_but_its_name, mask(text))
        text = _KEY_LIKE.sub(
            lambda match: match.group() if match.group() in self._keep else REDACTED, text
        )
        return self._home.sub("~", text) if self._home else text

    def tree(self, data: Any) -> Any:
        return self._strings(hide_tree(data))

    def _strings(self, data: Any) -> Any:
        if isinstance(data, dict):
            return {self.text(str(key)): self._strings(value) for key, value in data.items()}
        if isinstance(data, list):
            return [self._strings(item) for item in data]
        return self.text(data) if isinstance(data, str) else data

    def json_line(self, line: str) -> str:
        """A line of JSON stays JSON; any other is scrubbed as text."""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return self.text(line)
        return json.dumps(self.tree(data), ensure_ascii=False)


def _spellings(value: str) -> set[str]:
    return {value, quote(value, safe=""), quote(value), json.dumps(value)[1:-1]}
