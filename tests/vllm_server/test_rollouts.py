"""Recorded rollouts: which turn a prompt continues, with the tokens that were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from atropos_common.protocol.bridge import RecordedTurn, completion_digest
from vllm_server import rollouts
from vllm_server.recorded import CompletionLog, CompletionStore
from vllm_server.rollouts import Conversation, NamedRollouts, RolloutRecorder
from vllm_server.versions import SpanStore, VersionHistory

END = 0


def _tokenizer() -> Any:
    """`ab` has two encodings: one token, which the tokenizer chooses, and two."""
    words = {"<e>": END, "a": 1, "b": 2, "ab": 3, "u": 4, "x": 5, "ub": 6}
    merges = [("a", "b"), ("u", "b")]
    core = Tokenizer(models.BPE(vocab=words, merges=merges))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken("<e>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def _turn(after: int | None, prompt: list[int], made: list[int]) -> RecordedTurn:
    return RecordedTurn(
        after=after,
        prompt_ids=prompt,
        token_ids=made,
        logprobs=[-0.5] * len(made),
        token_versions=[(0, len(made))],
        temperature=1.0,
        finish_reason="stop",
    )


class _Play:
    def __init__(self) -> None:
        self.conversation, self.tokenizer = Conversation(), _tokenizer()

    def ask(self, text: str, made: list[int]) -> rollouts.Prompt:
        rendered = self.tokenizer.encode(text)
        begun = self.conversation.begin(rendered, self.tokenizer)
        own = begun.ids[begun.own_from :].tolist()
        self.conversation.add(begun, _turn(begun.after, own, made))
        return begun


def test_another_encoding_of_an_answer_gives_way_to_the_sampled_tokens() -> None:
    play = _Play()
    assert play.ask("u", [1, 2, END]).after is None
    second = play.ask("uab<e>u", [1, 2, 1, 2])
    assert second.after == 0 and not second.rewritten and second.replaced > 0
    assert second.ids.tolist() == [4, 1, 2, END, 4] and second.own_from == 4
    third = play.ask("uab<e>uabab<e>x", [5, END])
    assert third.after == 1 and third.ids.tolist() == [4, 1, 2, END, 4, 1, 2, 1, 2, END, 5]
    same = play.ask("uab<e>uabab<e>xx<e>u", [1])
    assert same.after == 2 and same.ids.tolist() == [*third.ids, 5, END, 4], "text equal to ids"
    assert len(play.conversation.turns) == 4


def test_an_equal_prompt_is_a_fork_and_a_changed_answer_a_branch() -> None:
    play = _Play()
    play.ask("u", [1, 1, END])
    again = play.ask("u", [2, END])
    assert again.after is None and not again.rewritten
    assert play.ask("ub<e>u", [5]).after == 1, "of two answers the one that it contains"
    changed = play.ask("ux<e>u", [1])
    assert changed.after is None and changed.rewritten
    deeper = play.ask("ub<e>ua<e>u", [1])
    assert deeper.after == 1 and deeper.rewritten, "only its newest answer was changed"


def test_a_token_across_the_end_of_an_answer_is_encoded_apart() -> None:
    """The answer ended after `u`, and the program continues with `b`: the tokenizer merges them."""
    play = _Play()
    play.ask("x", [4])
    further = play.ask("xub", [5])
    assert further.after == 0 and further.ids.tolist() == [5, 4, 2] and not further.rewritten


def test_branches_leave_the_shared_beginning_as_it_is() -> None:
    play = _Play()
    play.ask("u", [1, END])
    play.ask("ua<e>u", [2, END])
    play.ask("ua<e>u", [5, END])
    assert play.ask("ua<e>ub<e>x", [1]).after == 1
    assert play.ask("ua<e>ux<e>x", [1]).after == 2


class _Engine:
    """Answers with `made`; a version changes after its first token."""

    def __init__(self, made: list[int]) -> None:
        self.made, self.history, self.seen = made, VersionHistory(), []
        self.aborts = self.taken = 0
        self.before: Callable[[], int] = lambda: 0

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        from vllm.sampling_params import RequestOutputKind

        self.seen.append((prompt, params, request_id))
        self.taken = self.before()
        reason = "stop"
        if self.aborts:
            self.aborts -= 1
            reason = "abort"
        deltas = params.output_kind == RequestOutputKind.DELTA
        parts = [[token] for token in self.made] if deltas else [self.made]
        for number, ids in enumerate(parts):
            last = number == len(parts) - 1
            rows = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
            one = SimpleNamespace(
                index=0, token_ids=ids, logprobs=rows, finish_reason=reason if last else None
            )
            yield SimpleNamespace(request_id=request_id, outputs=[one], finished=last, metrics=None)
            await asyncio.sleep(0)


def _recorder(engine: _Engine, *, as_asked: bool = False) -> tuple[RolloutRecorder, CompletionLog]:
    async def tokenizer() -> Any:
        return _tokenizer()

    log = CompletionLog(engine.history, SpanStore(), CompletionStore())
    return RolloutRecorder(log, tokenizer, as_asked=as_asked), log


async def _ask(recorder: RolloutRecorder, engine: _Engine, name: str, params: Any) -> list[Any]:
    """Send one request through the middleware, as vLLM's routes do."""
    got: list[Any] = []

    async def route(*_: Any) -> None:
        stream = recorder.wrap(engine.generate)({"prompt_token_ids": [4]}, params, "id")
        got.extend([output async for output in stream])

    headers = [(b"x-atropos-rollout", name.encode())] if name else []
    scope = {"type": "http", "headers": headers}
    await NamedRollouts(route)(scope, None, None)  # type: ignore[arg-type]
    return got


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
async def test_each_of_n_completions_is_recorded(kind: str) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = _Engine([1, 2, END])
    recorder, log = _recorder(engine)
    params = SamplingParams(n=2, seed=7, top_p=0.5, output_kind=RequestOutputKind[kind])
    outputs = await _ask(recorder, engine, "r", params)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {one.index for output in outputs for one in output.outputs} == {0, 1}
    assert [seen[1].seed for seen in engine.seen] == [7, 8]
    assert all(seen[1].top_p == 1.0 and seen[1].logprobs == 0 for seen in engine.seen)
    assert params.top_p == 0.5 and params.logprobs is None, "the caller's own stay"
    turns = recorder.take("r").turns
    assert [turn.token_ids for turn in turns] == [[1, 2, END]] * 2
    assert all(turn.prompt_ids == [4] and turn.token_versions == [(0, 3)] for turn in turns)
    assert recorder.take("r").turns == [], "taken once"
    assert log.spans.look_up([completion_digest([1, 2, END], [-0.5] * 3)]) != [None]


async def test_requests_without_a_name_pass_through() -> None:
    from vllm.sampling_params import SamplingParams

    engine = _Engine([1])
    recorder, _ = _recorder(engine)
    params = SamplingParams(top_p=0.5)
    await _ask(recorder, engine, "", params)
    assert engine.seen[0][1] is params and recorder.take("").turns == []


async def test_a_completion_that_a_publish_aborted_is_made_again() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = _Engine([1, END])
    engine.aborts = 1
    recorder, _ = _recorder(engine)
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = await _ask(recorder, engine, "r", params)
    assert output.outputs[0].finish_reason == "stop" and len(engine.seen) == 2
    assert [turn.finish_reason for turn in recorder.take("r").turns] == ["stop"]


async def test_a_rollout_may_be_taken_while_a_turn_runs() -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = _Engine([1, END])
    recorder, _ = _recorder(engine)
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    await _ask(recorder, engine, "r", params)
    generate = recorder.wrap(engine.generate)

    async def second(*_: Any) -> None:
        stream = generate({"prompt_token_ids": [4, 1, END, 5]}, params, "id")
        async for output in stream:
            assert output.finished
            assert recorder.take("r").turns == []

    engine.before = lambda: len(recorder.take("r").turns)
    scope = {"type": "http", "headers": [(b"x-atropos-rollout", b"r")]}
    await NamedRollouts(second)(scope, None, None)  # type: ignore[arg-type]
    assert engine.taken == 1


async def test_the_oldest_rollouts_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import SamplingParams

    # Each rollout has a prompt of one token and an answer of two.
    each = 3 * rollouts.TOKEN_BYTES + rollouts.PROMPT_BYTES
    monkeypatch.setattr(rollouts, "MOST_BYTES", 2 * each)
    engine = _Engine([1, END])
    recorder, _ = _recorder(engine, as_asked=True)
    for name in "abc":
        await _ask(recorder, engine, name, SamplingParams(top_p=0.5))
    assert [len(recorder.take(name).turns) for name in "abc"] == [0, 1, 1]
    assert engine.seen[0][1].top_p == 0.5, "as asked"
