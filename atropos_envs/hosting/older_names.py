"""Older names and answers of libraries that atroposlib and its environments expect.

Call `install` before an environment's file is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig

from atropos_envs import EnvFault

TRANSLATOR = "atroposlib.envs.server_handling.tool_call_translator"
PROTOCOL = "vllm.entrypoints.openai.engine.protocol"
MOVED = {PROTOCOL: "vllm.entrypoints.generate.base.protocol"}
"""Modules that atroposlib's tool parsers import -> their place in newer releases of vLLM."""
PACKAGES = {name.rpartition(".")[0] for name in MOVED}


def install() -> None:
    """Make the older names importable, and chat templates return token ids."""
    base.OpenaiConfig = APIServerConfig  # atroposlib before 0.2
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())  # at the end: only modules that are really missing come here
    token_ids_by_default()


def token_ids_by_default() -> None:
    """Let chat templates return token ids by default, as in transformers 4; in 5 they return a
    dictionary."""
    from transformers import PreTrainedTokenizerBase

    original = PreTrainedTokenizerBase.apply_chat_template
    # `functools.wraps` sets this: the method is patched already.
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def apply(self: Any, *args: Any, return_dict: bool = False, **options: Any) -> Any:
        return original(self, *args, return_dict=return_dict, **options)

    PreTrainedTokenizerBase.apply_chat_template = apply


def load_tool_parser(name: str) -> None:
    """Import vLLM's tool parser `name` for atroposlib's ManagedServer; slow, since it imports vLLM
    as a whole.

    Raises:
        EnvFault: the import fails; ManagedServer would then train as if the model never called a
            tool.
    """
    translator = importlib.import_module(TRANSLATOR)
    if not translator.VLLM_AVAILABLE:
        raise EnvFault(
            f"tool_parser = {name!r} needs vLLM's tool parsers beside the environment "
            f"({_why_no_vllm()}). Install vLLM "
            "where the environment runs, in a release that `make install` pins, or leave "
            "tool_parser out",
            exit_code=2,
        )
    try:
        translator.ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(translator.ToolParserManager.list_registered()))
        raise EnvFault(f"vLLM has no tool parser {name!r}. It has: {known}", exit_code=2) from None


def _why_no_vllm() -> str:
    for module in (
        "vllm.entrypoints.openai.chat_completion.protocol",
        PROTOCOL,
        "vllm.tool_parsers",
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return str(error)
    return "vLLM lacks a name that atroposlib imports"


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for modules that moved, by their older names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MOVED and name not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in MOVED:
            moved = importlib.import_module(MOVED[module.__name__])
            # The contents of the new module, without `__name__` and `__spec__`, which belong to the
            # old name.
            module.__dict__.update(
                {name: value for name, value in vars(moved).items() if not name.startswith("__")}
            )
