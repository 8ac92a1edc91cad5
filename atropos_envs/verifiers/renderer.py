"""Prompts from any chat template, as token ids, for the train client of verifiers.

The package `renderers` has classes for known models. For any other it renders the whole
conversation at each turn, so tokens of earlier answers may change. `TemplateRenderer` renders only
the new messages, and appends them to the ids of earlier turns as the engine sampled them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from renderers import DefaultRendererConfig, RenderedTokens
from renderers.base import ParsedToolCall, ToolCallParseStatus, extract_message_tool_names
from renderers.default import DefaultRenderer

HERMES = "hermes"
"""Tool parser that needs no special tokens."""
# Stands for the last answer in the template; no message has this text.
MARK = "\u27e6answer\u27e7"
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class TemplateConfig(DefaultRendererConfig):
    """Configuration of `TemplateRenderer`; `tool_parser` may also be `hermes`."""


class TemplateRenderer(DefaultRenderer):
    """Renderer of a chat template that keeps sampled ids."""

    config_class = TemplateConfig

    def __init__(self, tokenizer: Any, config: TemplateConfig | None = None) -> None:
        config = config or TemplateConfig()
        hermes = config.tool_parser == HERMES
        known = config.model_copy(update={"tool_parser": None}) if hermes else config
        super().__init__(tokenizer, known)
        if hermes:
            self._tool_parser = HermesParser(tokenizer)

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        # In one piece: some templates refuse a conversation that ends at a system message.
        ids = self._apply(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return _rendered(ids, messages)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Return the ids of the turns so far, as sampled, and those of `new_messages`.

        None if the template does not show where an answer ends: then all is rendered again.
        """
        text = self._behind_answer(new_messages, tools)
        if text is None:
            return None
        end = self._tokenizer.eos_token_id
        # The template ends an answer with this token. An answer that was cut off lacks it.
        closing = [] if previous_completion_ids[-1:] == [end] else [end]
        new = self._tokenizer.encode(text, add_special_tokens=False)
        ids = [*previous_prompt_ids, *previous_completion_ids, *closing, *new]
        return _rendered(ids, new_messages)

    def _behind_answer(self, messages: list[Any], tools: list[Any] | None) -> str | None:
        """Return the template's text behind the end token of the last answer."""
        calls = [
            {"id": message.get("tool_call_id"), "type": "function", "function": _CALLED}
            for message in messages
            if message.get("role") == "tool"
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": MARK}
        # Some templates need calls in front of results, and others cannot render calls.
        for given in ([answer | {"tool_calls": calls}] if calls else []) + [answer]:
            text = self._text([{"role": "user", "content": "?"}, given, *messages], tools)
            if text is None or text.count(MARK) != 1:
                continue
            _, found, rest = text.partition(MARK)[2].partition(self._tokenizer.eos_token or MARK)
            if found:
                return rest
        return None

    def _text(self, messages: list[Any], tools: list[Any] | None) -> str | None:
        options = dict(self.config.model_extra or {}) | ({"tools": tools} if tools else {})
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **options
                )
            )
        except Exception:  # a template raises its own errors for roles that it does not know
            return None


_CALLED = {"name": "called", "arguments": {}}


# Without spans of single messages: verifiers then gives the whole prompt to the answer behind it.
def _rendered(ids: list[int], messages: list[Any]) -> RenderedTokens:
    return RenderedTokens(
        token_ids=ids,
        message_indices=[-1] * len(ids),
        message_roles=[message.get("role") or "" for message in messages],
        message_tool_names=extract_message_tool_names(messages),
    )


class HermesParser:
    """Tool calls in `<tool_call>` tags, read from text as vLLM's parser `hermes` reads them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def extract(self, token_ids: list[int]) -> tuple[list[int], list[ParsedToolCall]]:
        """Return the ids in front of the first call, and all calls."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        found = list(CALL.finditer(text))
        if not found:
            return token_ids, []
        before = self._tokenizer.encode(text[: found[0].start()], add_special_tokens=False)
        return before, [_call(match[1].strip(), closed=bool(match[2])) for match in found]


def _call(text: str, *, closed: bool) -> ParsedToolCall:
    status = ToolCallParseStatus
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return ParsedToolCall(text, status=status.INVALID_JSON if closed else status.UNCLOSED_BLOCK)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return ParsedToolCall(text, status=status.MISSING_NAME)
    return ParsedToolCall(text, name=call["name"], arguments=call.get("arguments", {}))
