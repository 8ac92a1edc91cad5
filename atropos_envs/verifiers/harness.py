"""The chat loop of verifiers' tool-less harness, in this process.

verifiers starts a Python program for each rollout, which takes a second of CPU time for its
imports. Here the same program runs as a task of the event loop.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import traceback
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

HARNESS_ID = "atropos_chat"
"""Name by which verifiers finds this module."""
_arguments: ContextVar[argparse.Namespace] = ContextVar("arguments")


def offer_harness() -> None:
    """Make the harness known to verifiers, whose ids are names of top-level modules."""
    sys.modules[HARNESS_ID] = sys.modules[__name__]


class ChatHarness(NullHarness):
    """Conversation with tools, without a program of its own."""

    async def setup(self, runtime: Any) -> None:
        """Do nothing: the program is part of this process."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Play one segment of the conversation; an error becomes an exit status."""
        system, prompt = self.resolve_prompt(data)
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        arguments = argparse.Namespace(
            base_url=endpoint,
            api_key=secret,
            model=ctx.model,
            system_prompt=system or "",
            prompt=prompt if isinstance(prompt, str) else "",
            initial_messages_file="" if isinstance(prompt, str) else _file_of(prompt or []),
            mcp_config=json.dumps({"mcpServers": servers}) if servers else "",
            tool_interception_url=tool_interception_url or "",
            serper_key="",
            summarize_at_tokens=None,
            bash=False,
            compaction=False,
            edit=False,
            search=False,
        )
        return await _run(arguments)


async def _run(arguments: argparse.Namespace) -> ProgramResult:
    _arguments.set(arguments)
    try:
        await _program().main()
    except SystemExit as end:  # the program's own exit status for a lost connection
        return ProgramResult(exit_code=int(end.code or 0), stdout="", stderr=str(end.__cause__))
    except Exception:
        return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
    return ProgramResult(exit_code=0, stdout="", stderr="")


# The program deletes the file.
def _file_of(messages: list[Any]) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump([message_to_wire(message) for message in messages], file)
    return file.name


@functools.cache
def _program() -> Any:
    """Return the chat program as a module."""
    program = ModuleType("atropos_chat_program")
    exec(compile(CHAT_PROGRAM_SOURCE, program.__name__, "exec"), program.__dict__)
    # The program has no arguments here, and ends without closing its HTTP client.
    shared = program.DefaultAsyncHttpxClient()
    program.__dict__["parse_args"] = _arguments.get
    program.__dict__["DefaultAsyncHttpxClient"] = lambda **_: shared
    return program
