"""Where a chat template ends an answer, and whether vLLM stops there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atropos_common.system.files import read_regular
from atropos_tui.profile.builders.commands import resolve_path
from atropos_tui.profile.checks.programs import environment_source
from atropos_tui.profile.sections import EnvSection
from atropos_tui.profile.site import Site, engine_model, env_engines

MARK = "atropos-answer"


def turn_warnings(site: Site) -> list[str]:
    """Warnings about models whose chats would run on past the end of an answer."""
    chatting = {
        engine_model(site, engine)
        for env in site.profile.env
        for engine in env_engines(site.profile, env)[:1]
        if engine.flag("chat-template") is None and _chats(site, env)
    }
    return [text for model in sorted(chatting) for text in _unstopped(model)]


def _chats(site: Site, env: EnvSection) -> bool:
    if env.verifiers or env.openenv or env.agent:
        return True
    source = environment_source(site, env)
    return source is not None and source.only_chats


def _unstopped(model: str) -> Iterator[str]:
    folder = resolve_path(model)
    known = special_tokens(folder)
    found = turn_end(folder, known)
    if found is None:
        return
    token, number = found
    stops = stop_tokens(folder, known)
    if stops and number not in stops:
        yield (
            f"{model}: its chat template ends an answer with {token}, and generation stops only at "
            f"token {', '.join(map(str, sorted(stops)))}: answers to chats may run on. Add "
            f"{number} to eos_token_id in {folder / 'generation_config.json'}"
        )


def turn_end(folder: Path, known: Mapping[str, int]) -> tuple[str, int] | None:
    """Return text and id of the token of `known` with which the model's chat template ends an
    answer.

    None: no template, or an answer ends without such a token.
    """
    settings = _object(folder / "tokenizer_config.json")
    template = _template(folder, settings)
    if template is None or not known:
        return None
    text = _rendered(template, settings)
    rest = (text or "").rpartition(MARK)[2].lstrip()
    ends = [token for token in known if rest.startswith(token)]
    return max(((token, known[token]) for token in ends), default=None, key=lambda e: len(e[0]))


def stop_tokens(folder: Path, known: Mapping[str, int]) -> set[int]:
    """Return the ids at which vLLM stops: the tokenizer's, and the generation config's."""
    stops: set[int] = set()
    # vLLM reads the model's config if there is no generation config.
    for name in ("generation_config.json", "config.json"):
        given = _object(folder / name)
        ids = given.get("eos_token_id")
        stops |= {each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int}
        if given:
            break
    eos = _object(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return stops | {number for token, number in known.items() if token == text}


def special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokenizer's special tokens by text; empty: unknown."""
    # transformers before 5 writes them into the small file too.
    decoder = _object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(decoder, dict):
        rows = [(number, each) for number, each in decoder.items() if isinstance(each, dict)]
    else:
        listed = _object(folder / "tokenizer.json").get("added_tokens")
        rows = [
            (each.get("id"), each)
            for each in (listed if isinstance(listed, list) else [])
            if isinstance(each, dict)
        ]
    return {
        str(each["content"]): int(number)
        for number, each in rows
        if each.get("content") and str(number).isdecimal()
    }


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    try:
        return read_regular(folder / "chat_template.jinja", unlinked=0)
    except (OSError, ValueError):
        given = settings.get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _rendered(template: str, settings: dict[str, Any]) -> str | None:
    """Return a chat of one question and the answer MARK; None: the template refuses it."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return None  # vLLM brings it

    def refuse(message: str) -> None:
        raise ValueError(message)

    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: settings.get(name) or "" for name in names}
    tokens = {n: t.get("content", "") if isinstance(t, dict) else t for n, t in tokens.items()}
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    more = {"raise_exception": refuse, "strftime_now": lambda form: form, "tools": None}
    try:
        return made.from_string(template).render(
            messages=chat, add_generation_prompt=False, **tokens, **more
        )
    # A template is a program of somebody else, and may raise anything.
    except Exception:
        return None


def _object(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(read_regular(path, unlinked=0))
    except (OSError, ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
