"""Client of an OpenEnv server: sessions over its WebSocket, and how an answer becomes an action.

The package openenv-core is not needed here: its protocol is JSON, and it brings a web interface.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Fields of every action or observation, which say nothing about its contents.
COMMON = frozenset({"done", "reward", "metadata"})
# Seconds of one step.
STEP_S = 60.0
# Bytes of one observation.
MOST_BYTES = 100 << 20


class OpenEnvError(RuntimeError):
    """The server answered with an error.

    Args:
        code: one of OpenEnv's, such as VALIDATION_ERROR.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.code = code

    @property
    def is_full(self) -> bool:
        """True if the server has no free session."""
        return self.code == "CAPACITY_REACHED"

    @property
    def is_invalid(self) -> bool:
        """True if the action does not fit its schema."""
        return self.code == "VALIDATION_ERROR"


class ServerGone(OpenEnvError):
    """The connection ended."""


class StepResult(BaseModel):
    """Result of a reset or a step."""

    model_config = ConfigDict(extra="ignore")
    observation: dict[str, Any] = Field(default_factory=dict)
    reward: float | None = None
    done: bool = False


class Session:
    """One episode's connection."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def reset(self, **options: Any) -> StepResult:
        return await self._ask("reset", options)

    async def step(self, action: dict[str, Any]) -> StepResult:
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: dict[str, Any]) -> StepResult:
        try:
            await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive(timeout=STEP_S)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGone(f"the server ended ({error})", "") from None
        except TimeoutError:
            raise OpenEnvError(f"no answer within {STEP_S:g} s", "") from None
        if message.type != aiohttp.WSMsgType.TEXT:
            raise ServerGone("the server closed the session", "")
        try:
            answer = json.loads(message.data)
            data = answer["data"]
            if answer["type"] == "error":
                raise OpenEnvError(str(data.get("message", "")), str(data.get("code", "")))
            return StepResult.model_validate(data)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise OpenEnvError(f"the answer is not OpenEnv's: {error}", "") from None


@asynccontextmanager
async def open_session(address: str) -> AsyncIterator[Session]:
    """Connect to the server at `address`.

    Raises:
        ServerGone: it does not answer.
    """
    async with aiohttp.ClientSession() as http:
        try:
            socket = await http.ws_connect(f"{address.rstrip('/')}/ws", max_msg_size=MOST_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"no OpenEnv server answers at {address} ({error})", "") from None
        async with socket:
            yield Session(socket)


async def action_schema(address: str) -> dict[str, Any]:
    """Return the JSON schema of an action.

    Raises:
        ServerGone: no server answers.
        OpenEnvError: it is not an OpenEnv server.
    """
    url = f"{address.rstrip('/')}/schema"
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            if response.status >= 400:
                raise OpenEnvError(f"{url} answers with status {response.status}", "")
            return dict((await response.json())["action"])
    except (aiohttp.ClientConnectionError, OSError) as error:
        raise ServerGone(f"no OpenEnv server answers at {address} ({error})", "") from None
    except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
        raise OpenEnvError(f"{url} has no schema of an action ({error})", "") from None


class ActionForm:
    """How a model's answer becomes an action."""

    def __init__(self, schema: dict[str, Any]) -> None:
        fields = schema.get("properties", {})
        own = {name: field for name, field in fields.items() if name not in COMMON}
        needed = [name for name in schema.get("required", own) if name in own]
        # A single needed text takes the answer as it is.
        texts = [
            name for name in needed if own[name].get("type") == "string" and "enum" not in own[name]
        ]
        self._field = texts[0] if texts == needed and len(needed) == 1 else None
        shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        self._schema = {"type": "object", "properties": own, "required": needed} | shared

    @property
    def advice(self) -> str:
        """Part of the system message: the form of an answer; empty for plain text."""
        if self._field is not None:
            return ""
        return f"Answer with one JSON object of this schema: {json.dumps(self._schema)}"

    def read(self, text: str) -> dict[str, Any]:
        """Return the action; without a JSON object an empty one, which the server judges."""
        if self._field is not None:
            return {self._field: text}
        begin = text.find("{")
        try:
            found, _ = json.JSONDecoder().raw_decode(text[begin:]) if begin >= 0 else ({}, 0)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def shown(observation: dict[str, Any]) -> str:
    """Return an observation as a message: its only text, else JSON."""
    own = {name: value for name, value in observation.items() if name not in COMMON}
    texts = list(own.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(own)
