"""Bodies and answers of `/generate` with a stand-in engine: logprobs in both forms, and text made
once at the end."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.logprobs import FlatLogprobs, Logprob

from atropos_common.protocol.bridge import ARRAYS, FORM_HEADER, completion_digest
from vllm_server.generate import (
    BrokenWeights,
    Generator,
    RequestError,
    completion_logprobs,
    finite_logprob,
    make_router,
    parse_body,
    position_logprobs,
    sampled_logprobs,
    sampling_options,
    text_of,
)
from vllm_server.versions import SpanStore, VersionHistory


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": {"prompt_token_ids": [3, 4]}, **fields}).encode()


def logprob(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


def test_a_bare_body_still_asks_for_logprobs() -> None:
    request = parse_body(b'{"prompt": "1+2=", "max_tokens": 4}')
    assert request.prompt == "1+2="
    assert sampling_options(request, 0)["logprobs"] == 0
    assert sampling_options(parse_body(body(logprobs=None)), 0)["logprobs"] == 0


@pytest.mark.parametrize("prompt", [[3, 4], {"prompt_token_ids": [3, 4]}])
def test_token_prompts(prompt: object) -> None:
    request = parse_body(json.dumps({"prompt": prompt}).encode())
    assert not isinstance(request.prompt, str)
    assert request.prompt.prompt_token_ids == [3, 4]


def test_each_completion_has_its_own_seed_and_only_the_first_scores_the_prompt() -> None:
    request = parse_body(body(n=3, seed=10, prompt_logprobs=1))
    options = [sampling_options(request, index) for index in range(3)]
    assert [each["seed"] for each in options] == [10, 11, 12]
    assert [each["prompt_logprobs"] for each in options] == [1, None, None]
    assert all(each["n"] == 1 for each in options)


def test_logit_bias_keys_become_ids() -> None:
    asked = parse_body(body(logit_bias={"5": -1.0}, for_training=False))
    assert sampling_options(asked, 0)["logit_bias"] == {5: -1.0}
    with pytest.raises(RequestError, match="logit_bias"):
        sampling_options(parse_body(body(logit_bias={"five": -1.0}, for_training=False)), 0)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "body"),
        (b'{"max_tokens": 4}', "prompt"),
        (b'{"prompt": {"prompt_token_ids": []}}', "prompt"),
        (b'{"prompt": {"prompt_token_ids": [-1]}}', "prompt"),
        (b'{"prompt": {"prompt_token_ids": ["3"]}}', "prompt"),
        (b'{"prompt": 7}', "prompt"),
        (body(temprature=1.0), "temprature"),
        (body(temperature="hot"), "temperature"),
        (body(temperature=-1), "temperature"),
        (b'{"prompt": "1", "temperature": NaN}', "temperature"),
        (body(n=0), "n"),
        (body(n=10**9), "n"),
        (body(max_tokens=0), "max_tokens"),
        (body(top_p=1.5), "top_p"),
        (body(seed=2**70), "seed"),
        (body(stream=True), "stream"),
        (body(stop=[1]), "stop"),
    ],
)
def test_bad_bodies_are_refused_with_the_field(raw: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_body(raw)


def test_the_sampled_token_comes_first_whatever_its_rank() -> None:
    entry = {7: logprob(-0.5), 9: logprob(-1.5), 2: logprob(-3.0)}
    assert list(position_logprobs(2, entry)) == ["2", "7", "9"]
    assert position_logprobs(9, entry)["9"] == -1.5
    assert completion_logprobs([9, 7], [entry, entry])[1] == [{"7": -0.5, "9": -1.5, "2": -3.0}]


def test_infinities_are_clamped_and_nan_is_an_error() -> None:
    assert finite_logprob(-math.inf) == -9999.0
    assert finite_logprob(-0.25) == -0.25
    with pytest.raises(BrokenWeights, match="weights are broken"):
        finite_logprob(math.nan)


class FakeEngine:
    """Answers like vLLM's engine client: one finished output for each request."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 14)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            encode=lambda text: [int(c) for c in text], decode=lambda ids: "".join(map(str, ids))
        )


async def answer(
    monkeypatch: pytest.MonkeyPatch, raw: bytes, outputs: list[Any]
) -> tuple[dict[str, Any], Generator]:
    history, spans = VersionHistory(), SpanStore()
    history.change(4, 100.0)
    history.change(5, 200.0)
    generator = Generator(FakeEngine(), history=history, spans=spans, model_names=["m"])

    async def complete(prompt_ids: list[int], request: Any, adapter: Any) -> list[Any]:
        return outputs

    async def decode(ids: list[int]) -> str:
        return "".join(map(str, ids))

    monkeypatch.setattr(generator, "_complete", complete)
    monkeypatch.setattr(generator, "_decode", decode)
    return await generator.answer(parse_body(raw)), generator


def output(tokens: list[int], values: list[float], first: float, last: float) -> SimpleNamespace:
    entries = [{token: logprob(value)} for token, value in zip(tokens, values, strict=True)]
    completion = SimpleNamespace(text="t", token_ids=tokens, logprobs=entries, finish_reason="stop")
    times = SimpleNamespace(scheduled_ts=first - 60, first_token_ts=first, last_token_ts=last)
    return SimpleNamespace(
        outputs=[completion],
        metrics=times,
        prompt_logprobs=[None, {4: logprob(-2.0)}],
        num_cached_tokens=0,
    )


async def test_the_answer_has_the_contract_s_shape_and_the_digest_finds_its_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = [output([5, 1], [-0.1, -math.inf], 150.0, 250.0), output([6], [-0.3], 210.0, 220.0)]
    result, generator = await answer(monkeypatch, body(n=2, prompt_logprobs=1), outputs)
    assert result["logprobs"] == [[[{"5": -0.1}], [{"1": -9999.0}]], [[{"6": -0.3}]]]
    assert result["token_ids"] == [[5, 1], [6]]
    assert result["finish_reasons"] == ["stop", "stop"]
    assert result["prompt_token_ids"] == [3, 4]
    assert result["prompt_logprobs"] == [None, {"4": -2.0}]
    assert result["weight_versions"] == [(4, 5), (5, 5)]
    assert result["token_versions"] == [[(4, 1), (5, 1)], [(5, 1)]]
    seen = json.loads(json.dumps(result))
    digests = [
        completion_digest(
            [int(next(iter(position[0]))) for position in completion],
            [next(iter(position[0].values())) for position in completion],
        )
        for completion in seen["logprobs"]
    ]
    assert generator.log.spans.look_up(digests) == [(4, 5, 2, 4.5), (5, 5, 1, 5.0)]
    assert generator.completions == 2


async def test_with_reuse_the_weights_of_the_prompt_s_keys_count_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = output([6], [-0.3], 210.0, 220.0)
    _, generator = await answer(monkeypatch, body(n=1), [late])
    found = {}
    for keeps in (False, True):
        generator.log.history.keeps_cache = keeps
        found[keeps] = generator.log.note(
            [3], [6], [-0.3], metrics=late.metrics, tokens_at={}, version=None, temperature=1.0
        )
    assert found == {False: ((5, 5), [(5, 1)]), True: ((4, 5), [(5, 1)])}


async def test_tokens_outside_the_vocabulary_never_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RequestError, match="vocabulary of 14"):
        await answer(monkeypatch, b'{"prompt": [14]}', [])


async def test_a_model_not_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="'other' is not served"):
        await answer(monkeypatch, body(model="other"), [])


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


def test_sampled_logprobs_are_the_first_of_each_position_in_both_forms() -> None:
    positions = [{7: -0.1, 5: -0.5}, {1: -math.inf}]
    usual: list[Any] = [
        {token: Logprob(value) for token, value in each.items()} for each in positions
    ]
    assert sampled_logprobs([5, 1], usual) == [-0.5, -9999.0]
    first = [{5: -0.5, 7: -0.1}, {1: -math.inf}]
    assert sampled_logprobs([5, 1], flat(*first)) == [-0.5, -9999.0]
    assert sampled_logprobs([5, 1], flat({5: -0.5}, {1: -math.inf})) == [-0.5, -9999.0]
    with pytest.raises(BrokenWeights):
        sampled_logprobs([5, 6], flat({5: -0.5}, {6: math.nan}))


class FlatEngine(FakeEngine):
    """Answers each request with the same two tokens, and keeps the parameters."""

    def __init__(self) -> None:
        self.params: list[Any] = []

    async def generate(self, prompt: Any, params: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.params.append(params)
        made = output([5, 1], [-0.1, -0.3], 1.0, 2.0)
        made.finished, made.outputs[0].logprobs = True, flat({5: -0.1, 7: -2.0}, {1: -0.3, 2: -1.0})
        yield made


async def test_a_client_that_asks_for_arrays_gets_the_same_numbers_and_no_text() -> None:
    engine, spans, app = FlatEngine(), SpanStore(), FastAPI()
    generator = Generator(engine, history=VersionHistory(), spans=spans, model_names=["m"])
    app.include_router(make_router(generator))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:

        async def ask(**fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            raw = body(n=2, **fields)
            usual = await client.post("/generate", content=raw)
            arrays = await client.post("/generate", content=raw, headers={FORM_HEADER: ARRAYS})
            return usual.json(), arrays.json()

        usual, arrays = await ask()
        wanted = {"token_ids", "finish_reasons", "sampled_logprobs", "weight_versions"}
        assert set(arrays) == wanted | {"cached_tokens", "token_versions"}
        assert set(usual) == set(arrays) - {"sampled_logprobs"} | {
            "text",
            "prompt",
            "prompt_token_ids",
            "logprobs",
        }
        first = [[next(iter(step[0].values())) for step in each] for each in usual["logprobs"]]
        assert arrays["sampled_logprobs"] == first == [[-0.1, -0.3]] * 2
        pairs = zip(arrays["token_ids"], arrays["sampled_logprobs"], strict=True)
        found = spans.look_up([completion_digest(*pair) for pair in pairs])
        assert [span[:2] for span in found] == [(0, 0)] * 2
        usual, arrays = await ask(logprobs=1, prompt_logprobs=0)
        for name in ("logprobs", "prompt_logprobs"):
            assert usual[name] == arrays[name], "alternatives are in both forms"


@pytest.mark.parametrize(("fields", "objects"), [({}, 1), ({"seed": 4}, 3)])
async def test_equal_completions_share_their_parameters(
    fields: dict[str, Any], objects: int
) -> None:
    engine = FlatEngine()
    generator = Generator(engine, history=VersionHistory(), spans=SpanStore(), model_names=["m"])
    await generator.answer(parse_body(body(n=3, **fields)), arrays=True)
    assert len(engine.params) == 3 and len(set(map(id, engine.params))) == objects
    copied = engine.params[0].clone()
    assert copied == engine.params[0] and copied is not engine.params[0]


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
