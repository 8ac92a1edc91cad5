"""Copies noted once from the model's own loader: they do what it did, or it is said that they cannot."""

from __future__ import annotations

import torch

from trainer_core.contracts.transfer import SentTensor, chunks
from vllm_server.direct_copies import Recorder, addresses, named_views


class Fused(torch.nn.Module):
    """As a vLLM model: two tensors in one parameter, a padded vocabulary, a loader of its own."""

    def __init__(self, *, scales: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.full((8, 4), -1.0), requires_grad=False)
        self.both = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.scales = scales

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)
            else:
                rows = slice(0, 4) if name == "first" else slice(4, 6)
                self.both.data[rows].copy_(tensor * 2 if self.scales else tensor)


SENT = [
    SentTensor(name="embed", dtype="float32", shape=[5, 4]), SentTensor(name="first", dtype="float32", shape=[4, 4]),
    SentTensor(name="second", dtype="float32", shape=[2, 4]),
]  # fmt: skip


def loaded(model: Fused, sent: list[SentTensor]) -> tuple[Recorder, torch.Tensor]:
    (whole,) = chunks(sent, 1 << 20)
    buffer = torch.empty(whole.nbytes, dtype=torch.uint8)
    for _, view in named_views(whole, buffer):
        view.normal_()
    recorder = Recorder([buffer], model)
    with recorder, torch.no_grad():
        model.load_weights(named_views(whole, buffer))
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
    before = addresses(model.parameters())
    model.both.data = model.both.data.clone()
    assert addresses(model.parameters()) != before, "noted copies would lead nowhere"


def test_a_loader_that_computes_is_not_taken_for_copies() -> None:
    recorder, _ = loaded(Fused(scales=True), SENT)
    assert not recorder.whole


def test_a_tensor_that_does_not_come_is_a_gap() -> None:
    recorder, _ = loaded(Fused(), SENT[:2])
    assert recorder.gaps() == ["both (16 of 24 elements)"]
