"""`/generate` without vLLM's work for each token: flat logprobs, and text made once at the end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.logprobs import FlatLogprobs, Logprob

from vllm_server.generate import (
    BrokenWeights,
    Generator,
    completion_logprobs,
    parse_body,
    text_of,
)
from vllm_server.versions import SpanStore, VersionHistory


def flat(*positions: dict[int, float]) -> FlatLogprobs:
    made = FlatLogprobs()
    for position in positions:
        made.append({token: Logprob(value) for token, value in position.items()})
    return made


def test_both_forms_of_logprobs_give_the_same_answer() -> None:
    positions = [{5: -0.5, 7: -0.1}, {1: -math.inf}]
    usual: list[Any] = [
        {token: Logprob(value) for token, value in each.items()} for each in positions
    ]
    expected = [[{"5": -0.5, "7": -0.1}], [{"1": -9999.0}]]
    assert (
        completion_logprobs([5, 1], usual)
        == completion_logprobs([5, 1], flat(*positions))
        == expected
    )
    assert [list(each[0]) for each in completion_logprobs([5, 1], flat(*positions))] == [
        ["5", "7"],
        ["1"],
    ]


def test_a_sampled_token_among_the_most_likely_is_listed_once() -> None:
    made = FlatLogprobs()
    made.append_fast([5, 5, 7], [-0.1, -0.1, -2.0], iter([1, 1, 2]), [None] * 3)  # type: ignore[arg-type]
    assert completion_logprobs([5], made) == [[{"5": -0.1, "7": -2.0}]]


def test_flat_logprobs_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(BrokenWeights):
        completion_logprobs([5], flat({5: math.nan}))


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def text(
    tokenizer: Any, prompt: list[int], ids: list[int], finish: str = "length", **params: Any
) -> str:
    given = SimpleNamespace(
        **{"skip_special_tokens": True, "include_stop_str_in_output": False} | params
    )
    return text_of(tokenizer, prompt, SimpleNamespace(token_ids=ids, finish_reason=finish), given)


def test_the_token_that_stopped_it_is_no_text(byte_level: PreTrainedTokenizerFast) -> None:
    ids = byte_level.encode("ab.")
    assert text(byte_level, [1], ids) == "ab."
    assert text(byte_level, [1], ids, "stop") == "ab"
    assert text(byte_level, [1], ids, "stop", include_stop_str_in_output=True) == "ab."


def test_special_tokens_are_left_out_unless_wanted(byte_level: PreTrainedTokenizerFast) -> None:
    ids = [*byte_level.encode("a"), byte_level.eos_token_id, *byte_level.encode("b")]
    assert text(byte_level, [1], ids) == "ab"
    assert text(byte_level, [1], ids, skip_special_tokens=False) == "a<eos>b"


def test_half_a_character_at_the_end_is_left_out(byte_level: PreTrainedTokenizerFast) -> None:
    ids = byte_level.encode("aé")
    assert len(ids) == 3
    assert text(byte_level, [1], ids) == "aé"
    assert text(byte_level, [1], ids[:-1]) == "a"


def test_a_first_word_keeps_its_space() -> None:
    """Decoded alone, a completion would lose what separates it from the prompt."""
    core = Tokenizer(models.BPE(vocab={"▁one": 0, "▁two": 1}, merges=[]))
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert tokenizer.decode([1]) == "two"
    assert text(tokenizer, [0], [1]) == " two"


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({}, True),
        ({"stop": "x"}, False),
        ({"skip_special_tokens": False}, True),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, False),
    ],
)
async def test_text_waits_unless_it_can_stop_the_completion(
    byte_level: PreTrainedTokenizerFast, fields: dict[str, Any], waits: bool
) -> None:
    engine = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 300), get_tokenizer=lambda: byte_level
    )
    generator = Generator(engine, history=VersionHistory(), spans=SpanStore(), model_names=["m"])
    body = parse_body(b'{"prompt": [1]}').model_copy(update=fields)
    assert (await generator._text_at_the_end(body) is not None) is waits
    engine.get_tokenizer = lambda: object()
    assert await generator._text_at_the_end(body) is None, (
        "a tokenizer of another kind is left to vLLM"
    )
