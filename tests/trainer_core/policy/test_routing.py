"""Routers that replay the engine's choice of experts, and the requests to servers for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atropos_common.models.model_math import sparse_layers, why_not_replayed
from atropos_common.protocol.bridge import prompt_digest
from benchmarks.support.model_zoo import ZOO, build
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy.attention import register
from trainer_core.policy.logprobs import completions_logprobs, row_logprobs, row_scores, whole_row
from trainer_core.policy.routing import own_experts, replay_in
from trainer_core.policy.speed import use_checkpointing
from trainer_core.probe import ProbeAnswers, compare
from trainer_core.rollouts.asking import RouterShape, RoutingAsker
from trainer_core.rollouts.batch import Batch, Rollout, Selection
from trainer_core.rollouts.packing import PackedRow, pack, packed_experts
from trainer_core.rollouts.source import BatchSource, LagMeter
from trainer_core.server.client import GeneratedTokens
from trainer_core.telemetry import Telemetry

REPLAYED = ["Qwen3-MoE", "Qwen2-MoE", "Mixtral", "OLMoE", "GLM-4-MoE", "DeepSeek-V3", "GPT-OSS"]
SEQUENCES = [torch.arange(3, 33) * 7 % 120, torch.arange(3, 20) * 11 % 120]
COUNT = sum(map(len, SEQUENCES))


def _made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build(name, dtype=dtype)
    model.set_attn_implementation(register())
    return model


def _foreign(shape: RouterShape, seed: int = 0) -> torch.Tensor:
    """Different experts for every token, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.rand(COUNT, len(shape.sparse), shape.experts, generator=generator)
    return ranks.topk(shape.chosen).indices.to(torch.int16)


def _replaying(experts: torch.Tensor | None) -> PackedRow:
    return replace(whole_row(SEQUENCES), experts=experts)


def _gradients(model: nn.Module, row: PackedRow) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    row_logprobs(model, row).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REPLAYED)
def test_its_own_choice_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    model = _made(name, dtype)
    plain, gradients = (
        row_logprobs(model, _replaying(None)).detach(),
        _gradients(model, _replaying(None)),
    )
    shape = replay_in(model)
    own = own_experts(model, _replaying(None))
    assert own.shape == (COUNT, len(shape.sparse), shape.chosen) and list(
        shape.sparse
    ) == sparse_layers(model.config.to_dict())
    for experts in (None, own, torch.full_like(own, -1)):
        assert torch.equal(row_logprobs(model, _replaying(experts)), plain)
        again = _gradients(model, _replaying(experts))
        assert again.keys() == gradients.keys()
        # Half precision does not tell a softmax of what is chosen from shares of all, which are
        # rounded elsewhere.
        ambiguous = (name, dtype) == ("GPT-OSS", torch.bfloat16)
        for n in again:
            atol = 0.02 * gradients[n].abs().max().item() if ambiguous else 0.0
            torch.testing.assert_close(again[n], gradients[n], atol=atol, rtol=0)


def _renormalised(values: torch.Tensor, router: Any) -> torch.Tensor:
    return values / values.sum(-1, keepdim=True)


BY_HAND: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]] = {
    "Qwen3-MoE": lambda logits, at, r: _plain_or_renormalised(logits.softmax(-1).gather(1, at), r),
    "Qwen2-MoE": lambda logits, at, r: _plain_or_renormalised(logits.softmax(-1).gather(1, at), r),
    "OLMoE": lambda logits, at, r: _plain_or_renormalised(logits.softmax(-1).gather(1, at), r),
    "Mixtral": lambda logits, at, r: _renormalised(logits.softmax(-1).gather(1, at), r),
    "GPT-OSS": lambda logits, at, r: logits.gather(1, at).softmax(-1),
    "GLM-4-MoE": lambda logits, at, r: (
        r.routed_scaling_factor * _plain_or_renormalised(logits.sigmoid().gather(1, at), r)
    ),
    "DeepSeek-V3": lambda logits, at, r: (
        r.routed_scaling_factor * _plain_or_renormalised(logits.sigmoid().gather(1, at), r)
    ),
}


def _plain_or_renormalised(values: torch.Tensor, router: Any) -> torch.Tensor:
    return _renormalised(values, router) if router.norm_topk_prob else values


def _plain(name: str, experts: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs and gradients by transformers' own code, a sequence at a time, with routers written
    out here."""
    model = build(name)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    assert len(routers) == experts.shape[1]
    given: list[torch.Tensor] = []

    def written_out(place: int, router: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            at = given[-1][:, place].long()
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T + getattr(
                router, "bias", 0
            )
            return logits, BY_HAND[name](logits, at, router), at

        return forward

    for place, router in enumerate(routers):
        router.forward = written_out(place, router)  # type: ignore[method-assign]
    parts = []
    for tokens, chosen in zip(SEQUENCES, experts.split([len(s) for s in SEQUENCES]), strict=True):
        given.append(chosen)
        shares = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts.append(shares.gather(1, tokens[1:, None])[:, 0])
    values = torch.cat(parts)
    values.sum().backward()
    return values.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", REPLAYED)
def test_another_choice_is_computed_as_by_hand(name: str) -> None:
    """Two sequences in a row, logprobs and all gradients, those of the routers among them."""
    model = _made(name)
    experts = _foreign(replay_in(model))
    wanted, gradients = _plain(name, experts)
    torch.testing.assert_close(
        row_logprobs(model, _replaying(experts)).detach(), wanted, atol=2e-5, rtol=1e-4
    )
    assert (row_logprobs(model, _replaying(None)).detach() - wanted).abs().max() > 0.01, (
        "it is another choice"
    )
    mine = _gradients(model, _replaying(experts))
    assert any("router" in n or "gate.weight" in n for n in mine), "routers learn"
    for n, gradient in gradients.items():
        torch.testing.assert_close(mine[n], gradient, atol=5e-5, rtol=1e-3)


def test_what_is_not_known_is_chosen_as_before() -> None:
    """Token by token: the second half of each sequence has no choice to take."""
    model = _made("Qwen3-MoE")
    shape = replay_in(model)
    known = _foreign(shape)
    parts = [part.clone() for part in known.split([len(s) for s in SEQUENCES])]
    for part in parts:
        part[len(part) // 2 :] = -1
    half = torch.cat(parts)
    own = own_experts(model, _replaying(half))
    assert not torch.equal(own[half[:, 0, 0] < 0], known[half[:, 0, 0] < 0])
    filled = torch.where(half >= 0, half, own)
    assert torch.equal(
        row_logprobs(model, _replaying(half)), row_logprobs(model, _replaying(filled))
    )


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GLM-4-MoE"])
def test_layers_computed_anew_take_the_same_experts(name: str) -> None:
    """Gradient checkpointing, beside the balance loss, whose logits are the routers' own."""
    model = _made(name)
    row = _replaying(_foreign(replay_in(model)))
    wanted = _gradients(model, row)
    use_checkpointing(model, "on", tokens=64, optimizer="adamw", device=torch.device("cpu"))
    again = _gradients(model, row)
    assert all(torch.equal(again[n], wanted[n]) for n in wanted)
    routing: list[torch.Tensor] = []
    row_scores(model, row, routing=routing)
    assert [each.shape for each in routing] == [(COUNT, model.config.num_local_experts)] * len(
        routing
    )


def test_rows_side_by_side_do_not_mix_up_their_experts() -> None:
    """Threads share one model; a step with them is the step without."""
    model = _made("Qwen3-MoE")
    shape = replay_in(model)
    config = TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "max_grad_norm": 0}
    )
    experts = [part.numpy() for part in _foreign(shape).split([len(s) for s in SEQUENCES])]
    rollouts = []
    for i, (tokens, mine) in enumerate(
        itertools.islice(itertools.cycle(zip(SEQUENCES, experts, strict=True)), 8)
    ):
        zeros = np.zeros(len(tokens), np.float32)
        trained = np.arange(len(tokens)) > 3
        rollouts.append(
            Rollout(
                tokens.numpy(),
                trained,
                zeros,
                zeros + (-1.0) ** i,
                1.0,
                0.0,
                "",
                (),
                experts=np.roll(mine, i, 0),
            )
        )
    found = []
    for threads, room in ((1, 400), (3, 40)):
        rows = pack(rollouts, room)
        assert len(rows) > 1 or threads == 1
        objective = Objective(config)
        outcome = accumulate(model, Stepper(model, config), rows, objective, 1, threads=threads)
        found.append((outcome.metrics["loss"], outcome.metrics["grad_norm"], outcome.diffs.train))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    plain = accumulate(
        model,
        Stepper(model, config),
        pack([replace(r, experts=None) for r in rollouts], 400),
        Objective(config),
        1,
    )
    assert plain.diffs.train != pytest.approx(found[0][2], rel=1e-4)


def test_a_rounded_engine_is_met_again_with_its_choice() -> None:
    """The engine computes in bfloat16, the trainer in float32: with its choice what is left is
    rounding."""
    trainer, engine = _made("Qwen3-MoE"), _made("Qwen3-MoE", torch.bfloat16)
    replay_in(trainer)
    replay_in(engine)
    row = whole_row(
        [
            torch.randint(3, 128, (200,), generator=torch.Generator().manual_seed(1))
            for _ in range(4)
        ]
    )
    with torch.no_grad():
        theirs = row_logprobs(engine, row)
        taken = own_experts(engine, row)
        assert (taken.sort(-1).values != own_experts(trainer, row).sort(-1).values).any(), (
            "some are nearly equal"
        )
        without = (row_logprobs(trainer, row) - theirs).abs()
        replayed = (row_logprobs(trainer, replace(row, experts=taken)) - theirs).abs()
    assert replayed.mean() < without.mean() and replayed.max() < without.max()


@pytest.mark.parametrize("name", [name for name in ZOO if name not in REPLAYED])
def test_other_models_are_refused_by_their_configuration(name: str) -> None:
    config = ZOO[name].build().to_dict()
    refused = why_not_replayed(config)
    assert refused is not None and "routing_replay" in refused[1]


def test_a_router_that_weighs_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its class is called: its weights are compared at the start."""
    model = _made("Qwen3-MoE")
    router = type(next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"))
    plain = router.forward

    def sharper(self: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = plain(self, hidden)
        return logits, weights**2, experts

    monkeypatch.setattr(router, "forward", sharper)
    with pytest.raises(UsageError, match="Qwen3MoeTopKRouter weighs experts by an unknown formula"):
        replay_in(model)


def test_the_probe_compares_with_the_engine_s_choice() -> None:
    model = _made("Qwen3-MoE")
    shape = replay_in(model)
    prompt, answer = SEQUENCES[0][:10].tolist(), SEQUENCES[0][10:].tolist()
    experts = _foreign(shape)[: len(SEQUENCES[0])].numpy()
    experts[-1] = -1
    (theirs,) = completions_logprobs(model, [(prompt, answer)], experts=[experts])
    done = GeneratedTokens(answer, theirs, 0, experts)
    asked = ProbeAnswers([(prompt, done, done)], (prompt, done))
    assert compare(model, asked).both.abs_mean == pytest.approx(0, abs=1e-6)
    blind = replace(done, experts=None)
    assert (
        compare(model, ProbeAnswers([(prompt, blind, blind)], (prompt, blind))).both.abs_mean > 0.01
    )


# Requests to servers


SHAPE = RouterShape(layers=3, sparse=(1, 2), chosen=2, experts=8)


@dataclass
class Server:
    """Knows some completions; counts questions."""

    known: dict[tuple[str, tuple[int, ...]], np.ndarray[Any, Any]] = field(default_factory=dict)
    error: Exception | None = None
    asked: int = 0

    def learn(
        self, prompt: list[int], completion: list[int], layers: int = 2, most: int = 8
    ) -> np.ndarray[Any, Any]:
        count = len(prompt) + len(completion) - 1
        dice = np.random.default_rng(count)
        experts = dice.random((count, layers, most)).argsort(-1)[..., :2].astype(np.uint8)
        self.known[prompt_digest(prompt), tuple(completion)] = experts
        return experts

    def __call__(
        self, prompts: list[str], completions: list[list[int]], starts: list[int]
    ) -> list[np.ndarray[Any, Any] | None]:
        self.asked += 1
        if self.error:
            raise self.error
        asked = zip(prompts, completions, starts, strict=True)
        found = [(self.known.get((p, tuple(c))), start) for p, c, start in asked]
        return [None if experts is None else experts[start:] for experts, start in found]


def _rollout(tokens: list[int], generated: list[tuple[int, int]]) -> Rollout:
    trained = np.zeros(len(tokens), bool)
    for a, b in generated:
        trained[a:b] = True
    zeros = np.zeros(len(tokens), np.float32)
    return Rollout(np.array(tokens), trained, zeros, zeros, 1.0, 0.0, "", ())


def test_turns_are_asked_for_one_by_one_and_put_together() -> None:
    """The second turn's request knows what came between; the last token of all has no experts."""
    server = Server()
    tokens = list(range(10, 22))
    first = server.learn(tokens[:3], tokens[3:6])
    second = server.learn(tokens[:8], tokens[8:12])
    batch = Batch([_rollout(tokens, [(3, 6), (8, 12)])])
    RoutingAsker([server], SHAPE).fill(batch)
    experts = batch.rollouts[0].experts
    assert experts is not None and experts.dtype == np.int16
    assert (
        (experts[:5] == first).all()
        and (experts[5:11] == second[5:]).all()
        and (experts[11] == -1).all()
    )
    assert batch.routing_replayed == 1.0 and server.asked == 1


def test_several_servers_are_asked_until_one_knows() -> None:
    left, right, gone, old = (
        Server(),
        Server(),
        Server(error=EngineGone("away")),
        Server(error=EngineError("no route")),
    )
    tokens = list(range(10, 20))
    right.learn(tokens[:4], tokens[4:])
    left.learn(tokens[:2], tokens[2:7])
    rollouts = [
        _rollout(tokens, [(4, 10)]),
        _rollout(tokens[:7], [(2, 7)]),
        _rollout([9, 9, 9, 9], [(1, 4)]),
    ]
    asker = RoutingAsker([gone, old, left, right], SHAPE)
    batch = Batch(rollouts)
    asker.fill(batch)
    assert [r.experts is not None for r in batch.rollouts] == [True, True, False]
    assert batch.routing_replayed == pytest.approx((9 + 6) / (9 + 6 + 3))
    asker.fill(Batch([rollouts[0]]))
    assert (gone.asked, old.asked, left.asked, right.asked) == (2, 1, 2, 2), (
        "one that cannot tell is not asked again"
    )
    assert Batch([]).routing_replayed is None, "nobody asked"


def test_a_batch_is_asked_for_as_it_is_read_and_little_is_said(tmp_path: Path, capsys: Any) -> None:
    """The warning has the share of its own batch, and comes once a minute."""
    known = {
        "tokens": [[5, 6], [5, 7]],
        "masks": [[-100, 6], [-100, 7]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -1.0], [1.0, -1.0]],
    }
    unknown = known | {"tokens": [[8, 6], [8, 7]]}
    server = Server()
    server.learn([5], [6])
    server.learn([5], [7])
    batches = iter([[known], [known, unknown], [unknown]])
    api: Any = SimpleNamespace(next_batch=lambda step, on_idle=None: next(batches))
    source = BatchSource(
        TrainingConfig(model_name="m", save_path=str(tmp_path), batch_size=2),
        api,
        Telemetry(tmp_path / "t.jsonl"),
        selection=Selection(),
        advantage_std=True,
        lag_meter=LagMeter([]),
        while_waiting=lambda: None,
        routing=RoutingAsker([server], SHAPE),
    )
    assert [source.next_batch(step, 0)[0].routing_replayed for step in range(3)] == [1.0, 0.5, 0.0]
    said = [line for line in capsys.readouterr().out.splitlines() if "little routing" in line]
    assert len(said) == 1 and "50% of the tokens of this one" in said[0]


def test_dense_layers_that_a_server_records_are_left_out() -> None:
    server = Server()
    whole = server.learn([1, 2, 3], [4, 5], layers=3)
    found = RoutingAsker([server], SHAPE).of_answer([1, 2, 3], [4, 5])
    assert found is not None and (found[:4] == whole[:, 1:]).all()


def test_tokens_that_an_engine_left_empty_are_not_known() -> None:
    """As those of a cached prefix in some releases of vLLM: zeros, an expert taken twice."""
    server = Server()
    server.learn([1, 2, 3], [4, 5])[:2] = 0
    found = RoutingAsker([server], SHAPE).of_answer([1, 2, 3], [4, 5])
    assert found is not None and (found[:, 0, 0] < 0).tolist() == [True, True, False, False, True]


def test_tokens_that_a_chat_template_appended_have_none() -> None:
    server = Server()
    known = server.learn([1, 2, 3], [4, 5])
    server.known[prompt_digest([1, 2, 3]), (4, 5, 6)] = known
    found = RoutingAsker([server], SHAPE).of_answer([1, 2, 3], [4, 5, 6])
    assert found is not None and (found[:4] == known).all() and (found[4:] == -1).all()


@pytest.mark.parametrize("wrong", [{"layers": 4}, {"most": 200}])
def test_experts_of_another_model_are_not_taken(
    wrong: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    server.learn([1, 2, 3], [4, 5, 6, 7], **wrong)
    assert RoutingAsker([server], SHAPE).of_answer([1, 2, 3], [4, 5, 6, 7]) is None
    assert "this model takes 2 of 8 in 2 layers" in capsys.readouterr().out


def test_what_is_known_of_a_sequence_lies_at_its_place_in_the_row() -> None:
    part = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    packed = packed_experts([None, part, part[:1]], [2, 2, 3])
    assert packed is not None and packed[:, 0, 0].tolist() == [-1, -1, 0, 4, 0, -1, -1]
    assert packed_experts([None, None], [1, 2]) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollouts": "r.jsonl"}, "trains without a server"),
        ({"weight_bridge_mode": "lora_restart"}, "use lora_only"),
        ({"engine_reload": "restart"}, "leave out --engine-reload restart"),
    ],
)
def test_settings_that_contradict_it(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingConfig.model_validate({"model_name": "m", "routing_replay": True} | settings)
