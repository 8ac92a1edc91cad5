"""Copies recorded once from the model's own loader: they repeat its effect, or the recorder reports
that they cannot."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from atropos_common.broadcast.transfer import SentTensor, chunks
from vllm_server.weights.copy_recorder import CopyRecorder, named_views


class Fused(torch.nn.Module):
    """As a vLLM model: two tensors in one parameter, a padded vocabulary, a loader of its own."""

    def __init__(self, *, scales: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((8, 4), -1.0), requires_grad=False)
        self.both = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.scales = scales

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "bias":
                continue
            if name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)
            else:
                rows = slice(0, 4) if name == "first" else slice(4, 6)
                self.both.data[rows].copy_(tensor * 2 if self.scales else tensor)


SENT = [
    SentTensor(name="embed", dtype="float32", shape=[5, 4]),
    SentTensor(name="first", dtype="float32", shape=[4, 4]),
    SentTensor(name="second", dtype="float32", shape=[2, 4]),
]


def loaded(model: Fused, sent: list[SentTensor]) -> tuple[CopyRecorder, torch.Tensor]:
    (whole,) = chunks(sent, 1 << 20)
    buffer = torch.empty(whole.nbytes, dtype=torch.uint8)
    for _, view in named_views(whole, buffer):
        view.normal_()
    recorder = CopyRecorder(model)
    with recorder, torch.no_grad():
        model.load_weights(recorder.give(named_views(whole, buffer)))
    return recorder, buffer


def test_noted_copies_do_what_the_loader_did() -> None:
    model, other = Fused(), Fused()
    recorder, buffer = loaded(model, SENT)
    assert recorder.whole and not recorder.gaps()
    targets, sources = recorder.take()
    (whole,) = chunks(SENT, 1 << 20)
    for _, view in named_views(whole, buffer):
        view.normal_()
    torch._foreach_copy_(targets, sources)
    other.load_weights(named_views(whole, buffer))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_loader_that_computes_is_not_taken_for_copies() -> None:
    recorder, _ = loaded(Fused(scales=True), SENT)
    assert not recorder.whole


def test_a_tensor_that_does_not_come_is_a_gap() -> None:
    recorder, _ = loaded(Fused(), SENT[:2])
    assert recorder.gaps() == ["both (16 of 24 elements)"] and recorder.untouched() == []
    assert loaded(Fused(), SENT[:1])[0].untouched() == ["both"]


def test_every_tensor_that_was_copied_as_it_is_has_its_view() -> None:
    model = Fused()
    recorder, _ = loaded(model, SENT)
    views, without = recorder.views()
    assert not without
    assert {
        name: (view.parameter, view.offset, view.shape, view.stride) for name, view in views.items()
    } == {
        "embed": ("embed", 0, [5, 4], [4, 1]),
        "first": ("both", 0, [4, 4], [4, 1]),
        "second": ("both", 16, [2, 4], [4, 1]),
    }


def test_a_tensor_of_which_this_rank_has_nothing_is_a_part_without_rows() -> None:
    class Last(torch.nn.Module):
        """The last of four ranks, of a vocabulary of 5 that is padded to 8."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.full((2, 4), -1.0), requires_grad=False)

        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            rows = weights[0][1].narrow(0, 5, 0)
            self.embed.data[: len(rows)].copy_(rows)
            self.embed.data[len(rows) :].fill_(0)

    recorder, _ = loaded(Last(), SENT[:1])  # type: ignore[arg-type]
    views, without = recorder.views()
    assert not without and not recorder.gaps()
    assert (views["embed"].shape, views["embed"].begin, views["embed"].whole) == (
        [0, 4],
        [0, 0],
        [5, 4],
    )


def test_every_tensor_without_a_view_is_told_why() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (
                torch.nn.Parameter(torch.zeros(4, 4)),
                torch.nn.Parameter(torch.zeros(4, 4)),
            )
            self.wide = torch.nn.Parameter(torch.zeros(2, 4))
            self.register_buffer("scale", torch.zeros(4))

        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            given = dict(weights)
            self.one.data[:2].copy_(given["twice"])
            self.two.data[:2].copy_(given["twice"])
            self.one.data[2:].copy_(given["halved"])
            self.one.data[2:].mul_(0.5)
            self.scale.copy_(given["buffer"])
            self.two.data[2:].copy_(given["spread"])
            self.wide.data[:, :1].copy_(given["backwards"][2:].view(2, 1))
            self.wide.data[:, 1:2].copy_(given["backwards"][:2].view(2, 1))

    shapes = {
        "twice": (2, 4),
        "halved": (2, 4),
        "buffer": (4,),
        "spread": (1, 4),
        "backwards": (4,),
        "unread": (3,),
    }
    recorder = CopyRecorder(model := Odd())
    with recorder, torch.no_grad():
        model.load_weights(
            recorder.give([(name, torch.ones(shape)) for name, shape in shapes.items()])
        )
    views, without = recorder.views()
    assert not views
    assert without == {
        "backwards": "does not lie evenly in wide",
        "buffer": "is a buffer of the model, scale",
        "halved": "is computed with while it is loaded into one",
        "spread": "is not copied into the model as it is",
        "twice": "goes into several parameters (one, two)",
        "unread": "is not copied into the model as it is",
    }


BIAS = SentTensor(name="bias", dtype="float32", shape=[4])


def test_a_tensor_without_a_place_is_named() -> None:
    recorder, _ = loaded(Fused(), SENT)
    assert recorder.without_place() is None
    recorder, _ = loaded(Fused(), [*SENT[:1], BIAS, *SENT[1:]])
    assert not recorder.gaps() and recorder.passed_over() == ["bias"]
    assert str(recorder.without_place()).startswith(
        "vLLM's Fused has no place for 1 of the tensors, such as bias, and "
    )
    computing, _ = loaded(Fused(scales=True), [*SENT, BIAS])
    assert computing.passed_over() == [], "what it computed from cannot be told"


def test_a_tied_head_and_another_rank_s_layers_are_no_such_tensors() -> None:
    head = SentTensor(name="lm_head.weight", dtype="float32", shape=[4])
    frequencies = SentTensor(name="layers.0.rotary_emb.inv_freq", dtype="float32", shape=[4])

    class PassingOver(Fused):
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(
                [pair for pair in weights if pair[0] in ("embed", "first", "second")]
            )

    model = PassingOver()
    model.config = SimpleNamespace(tie_word_embeddings=True)  # type: ignore[assignment]
    assert loaded(model, [*SENT, head, frequencies])[0].passed_over() == []
    model.config.tie_word_embeddings = False
    assert loaded(model, [*SENT, head, frequencies])[0].passed_over() == ["lm_head.weight"]
    model.add_module("other", type("PPMissingLayer", (torch.nn.Identity,), {})())
    assert loaded(model, [*SENT, head])[0].passed_over() == []


def test_one_by_one_holds_no_tensor_and_names_the_same() -> None:
    model = Fused()
    recorder = CopyRecorder(model)
    freed: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for sent in (*SENT, BIAS):
            assert all(each() is None for each in freed), "the last one is gone"
            tensor = torch.ones(sent.shape)
            freed.append(weakref.ref(tensor))
            pair = sent.name, tensor
            del tensor
            yield pair
            del pair

    with recorder, torch.no_grad():
        for one in recorder.one_by_one(tensors()):
            model.load_weights([one])
            del one
    assert recorder.passed_over() == ["bias"] and not recorder.gaps()


def test_an_empty_share_of_a_tensor_is_a_place() -> None:
    """As a rank of a tiny vocabulary has it: the rows begin where the tensor ends."""
    model, embed = Fused(), torch.ones(5, 4)
    recorder = CopyRecorder(model)
    with recorder, torch.no_grad():
        recorder.give([("embed", embed)])
        model.embed.data[:0].copy_(embed.narrow(0, 5, 0))
    assert recorder.passed_over() == [] and recorder.whole
