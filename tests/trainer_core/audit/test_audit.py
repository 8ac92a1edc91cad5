"""The audit against servers that answer from a torch model in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_common.protocol import audit as causes
from atropos_common.protocol import trainer_records as records
from atropos_common.protocol.audit import Audit
from benchmarks.silent_bugs import models
from tests.trainer_core.audit.torch_engine import Row, SGLangLike, TorchEngine, served
from trainer_core.audit import questions
from trainer_core.audit.__main__ import main
from trainer_core.audit.program import Settings, audit
from trainer_core.audit.reference import Reference, halved
from trainer_core.objective.causes import sampling
from trainer_core.objective.causes.sampling import PLAIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder, device="cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than in an audit: this server decodes one at a time."""
    for name, value in {
        "PROMPTS": 3,
        "DRAWN": 32,
        "DEFAULT_DRAWN": 32,
        "CACHED_PROMPTS": 1,
        "CACHED_TOKENS": 40,
        "CACHED_DRAWN": 16,
    }.items():
        monkeypatch.setattr(questions, name, value)
    # The whole grid has 950 settings. The neighbours of the planted ones stay.
    monkeypatch.setattr(sampling, "TEMPERATURES", (0.6, 0.7, 0.8, 1.0))
    monkeypatch.setattr(sampling, "TOP_KS", (0, 10, 20, 30))
    monkeypatch.setattr(sampling, "TOP_PS", (1.0, 0.7, 0.8, 0.9))


def asked(
    engine: TorchEngine | SGLangLike, folder: Path, reference: Any = None, **settings: Any
) -> Audit:
    with served(engine) as url:
        chosen = Settings(weights=folder, engine=url, device="cpu", seed=3)
        return audit(replace(chosen, **settings), reference)


def test_an_engine_of_the_folder_serves_it(folder: Path, reference: Reference) -> None:
    engine = TorchEngine(models.build("llama"))
    result = asked(engine, folder, reference, prompt_logprobs=True)
    assert result.verdict == "serves" and result.exit_code == 0, result
    assert {group.name for group in result.groups} == {"prompt", "sampled", "default", "cached"}
    assert all(group.difference < 1e-4 for group in result.groups)
    assert result.logprobs == "processed" and not result.notes


def test_a_server_that_knows_few_parameters(folder: Path, reference: Reference) -> None:
    engine = TorchEngine(models.build("llama"))
    engine.processed = False
    engine.refuse = ("cache_salt", "min_p", "prompt_logprobs", "top_k")
    result = asked(engine, folder, reference, prompt_logprobs=True)
    assert result.verdict == "serves" and result.logprobs == "raw"
    assert any("prompt logprobs" in note for note in result.notes)


def test_a_server_that_speaks_as_sglang(folder: Path, reference: Reference) -> None:
    result = asked(SGLangLike(TorchEngine(models.build("llama"))), folder, reference)
    assert result.verdict == "serves" and result.engine.startswith("SGLang"), result


def test_without_token_ids_nothing_can_be_told(folder: Path, reference: Reference) -> None:
    engine = TorchEngine(models.build("llama"))
    engine.without_ids = True
    result = asked(engine, folder, reference)
    assert result.exit_code == 3 and "token ids" in result.evidence


def _rolled(row: Any) -> Any:
    prompt, drawn, logprobs = row
    return prompt, drawn, [*logprobs[1:], logprobs[0]]


def _sampling(**changes: Any) -> Callable[[TorchEngine], None]:
    return lambda engine: setattr(engine, "default", PLAIN._replace(**changes))


def _renormalised(engine: TorchEngine) -> None:
    scores = engine._scores
    engine._scores = (  # type: ignore[method-assign]
        lambda logits, asked: scores(logits, PLAIN._replace(top_k=20))
    )


SLOW = pytest.mark.slow
"""Seconds of a processor for each; the bench of silent bugs has them too."""


@pytest.mark.parametrize(
    ("plant", "cause", "words"),
    [
        (lambda engine: setattr(engine, "alter", _rolled), records.SHIFTED, "next token"),
        (_sampling(temperature=0.7), records.TEMPERATURE, "temperature 0.7"),
        (_sampling(top_p=0.8), records.SAMPLING, "top-p 0.8"),
        pytest.param(
            _sampling(temperature=0.7, top_k=20), records.SAMPLING, "top-k 20", marks=SLOW
        ),
        pytest.param(_renormalised, records.SAMPLING, "top-k 20", marks=SLOW),
        (
            lambda engine: setattr(engine, "old_prefix", models.build("llama", seed=5)),
            records.STALE_PREFIX,
            "cached",
        ),
    ],
    ids=["shifted", "temperature", "top-p", "temperature and top-k", "forced top-k", "old prefix"],
)
def test_what_happens_after_the_logits_is_named(
    folder: Path,
    reference: Reference,
    plant: Callable[[TorchEngine], None],
    cause: str,
    words: str,
) -> None:
    engine = TorchEngine(models.build("llama"))
    plant(engine)
    result = asked(engine, folder, reference)
    assert (result.verdict, result.cause) == ("does not", cause), result
    assert words in result.evidence and result.fix


def test_raw_logprobs_at_another_temperature(folder: Path, reference: Reference) -> None:
    engine = TorchEngine(models.build("llama"))
    engine.processed = False
    result = asked(engine, folder, reference, sampler=PLAIN._replace(temperature=0.6))
    assert result.cause == records.TEMPERATURE and "raw" in result.evidence


def test_a_tokenizer_of_another_model(folder: Path, reference: Reference) -> None:
    engine = TorchEngine(models.build("llama"))
    engine.tokenizer = models.tokenizer(shift=1)
    assert asked(engine, folder, reference).cause == causes.TOKENIZER
    engine.tokenizer = models.tokenizer()
    assert asked(engine, folder, reference).verdict == "serves"


def _layer(model: Any, other: Any, at: int) -> None:
    model.model.layers[at].load_state_dict(other.model.layers[at].state_dict())


def _emptied(model: Any) -> None:
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _rope(model: Any) -> None:
    buffer = model.model.rotary_emb.inv_freq
    buffer.copy_(10_000.0 ** -(torch.arange(len(buffer)) / len(buffer)))


def _int8(model: Any) -> None:
    from trainer_core.objective.causes.weights import SCHEMES

    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(SCHEMES["int8 with a scale for each row"](module.weight))


@pytest.mark.parametrize(
    ("plant", "cause", "words"),
    [
        (lambda m: m.load_state_dict(models.build("llama", seed=9).state_dict()), "stale", "every"),
        pytest.param(
            lambda m: _layer(m, models.build("llama", seed=9), 2),
            causes.HALF_LOADED,
            "layer 2",
            marks=SLOW,
        ),
        (_emptied, causes.HALF_LOADED, "layers 2 to 3"),
        (_rope, causes.ROTARY, "10,000"),
        pytest.param(_int8, causes.QUANTISED, "int8", marks=SLOW),
        pytest.param(lambda m: m.to(torch.bfloat16), causes.DTYPE, "bfloat16", marks=SLOW),
        pytest.param(
            lambda m: m.lm_head.weight.copy_(m.model.embed_tokens.weight),
            causes.TIED_HEAD,
            "head",
            marks=SLOW,
        ),
    ],
    ids=["older", "one layer older", "empty layers", "rotary", "int8", "bfloat16", "tied"],
)
def test_other_weights_are_named(
    folder: Path, tmp_path: Path, plant: Callable[[Any], Any], cause: str, words: str
) -> None:
    older = models.save(models.build("llama", seed=9), tmp_path / "older")
    model = models.build("llama")
    with torch.no_grad():
        plant(model)
    result = asked(TorchEngine(model), folder, older=older)
    expected = records.STALE_WEIGHTS if cause == "stale" else cause
    assert (result.verdict, result.cause) == ("does not", expected), result
    assert words in result.evidence


def test_weights_that_nobody_knows_are_other_weights(folder: Path, reference: Reference) -> None:
    result = asked(TorchEngine(models.build("llama", seed=4)), folder, reference)
    assert result.cause == records.OTHER_WEIGHTS and result.tried


def test_tokens_beyond_the_vocabulary_are_padding(folder: Path, reference: Reference) -> None:
    model = models.build("llama")
    for module in (model.model.embed_tokens, model.lm_head):
        rows = torch.zeros(models.VOCABULARY + 64, module.weight.shape[1])
        rows[: models.VOCABULARY] = module.weight.detach()
        module.weight = torch.nn.Parameter(rows)
    result = asked(TorchEngine(model), folder, reference)
    assert result.cause == causes.PADDING and "rows" in result.evidence, result


def test_an_adapter_that_never_arrives(folder: Path, tmp_path: Path) -> None:
    adapter = models.write_adapter(folder, tmp_path / "adapter")
    engine = TorchEngine(models.build("llama"), names=("tiny", "mine"))
    result = asked(engine, folder, adapter=adapter)
    assert result.cause == causes.ADAPTER and "base model" in result.evidence


@SLOW
def test_an_adapter_of_twice_its_scale(folder: Path, tmp_path: Path) -> None:
    adapter = models.write_adapter(folder, tmp_path / "adapter")
    twice = models.write_adapter(folder, tmp_path / "twice", alpha=32.0)
    model = Reference(folder, twice, device="cpu").model
    engine = TorchEngine(model, names=("tiny", "mine"))
    result = asked(engine, folder, adapter=adapter)
    assert result.cause == causes.ADAPTER and "twice" in result.evidence
    assert asked(engine, folder, adapter=twice).verdict == "serves"


def test_experts_in_half_precision(tmp_path: Path) -> None:
    """Tokens near a tie of a router jump; that is no fault, and faults are named beside it."""
    folder = models.save(models.build("moe"), tmp_path / "moe", dtype="bfloat16")
    reference = Reference(folder, device="cpu")
    engine = TorchEngine(halved(reference.model, torch.bfloat16))
    with served(engine) as url, ThreadPoolExecutor(2) as pool:
        one = Settings(weights=folder, engine=url, device="cpu")
        # Both use one reference, whose routers and copy in half precision are state.
        results = list(pool.map(lambda seed: audit(replace(one, seed=seed), reference), (3, 4)))
        other = models.copied(folder, tmp_path / "one", num_experts_per_tok=1)
        wrong = audit(replace(one, weights=other, seed=3))
    assert [result.verdict for result in results] == ["serves", "serves"], results
    # Without regard to ties the bound is 0.1 nats.
    assert max(group.largest for result in results for group in result.groups) > 0.2
    assert wrong.cause == causes.CONFIG and "2 experts" in wrong.evidence, wrong


class _UnsteadyByDefault(TorchEngine):
    """Answers without sampling parameters carry noise in their logprobs."""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        noise = 0.0 if "temperature" in body else 0.05
        values = torch.randn(64, generator=torch.Generator().manual_seed(1)).tolist()

        def shaken(row: Row) -> Row:
            prompt, tokens, logprobs = row
            return prompt, tokens, [a + noise * b for a, b in zip(logprobs, values, strict=False)]

        self.alter = shaken
        return super().complete(body)


def test_noise_in_a_few_answers_names_no_cause(folder: Path, reference: Reference) -> None:
    """The other answers are of these weights, so no hypothesis about weights explains it."""
    result = asked(_UnsteadyByDefault(models.build("llama")), folder, reference)
    assert (result.verdict, result.cause) == ("cannot tell", ""), result
    assert result.evidence.startswith("only answers without sampling parameters differ"), result
    assert "default 0.0" in result.evidence


def test_the_program_prints_json_and_its_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(TorchEngine(models.build("llama", seed=4))) as url:
        words = ["--engine", url, "--weights", str(folder), "--device", "cpu", "--json"]
        assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "does not" and found["cause"] == records.OTHER_WEIGHTS
    assert main(["--engine", "http://127.0.0.1:9", "--weights", str(folder)]) == 3
    assert main(["--weights", str(folder)]) == 2
    assert main(["--weights", str(folder / "no"), "--rollouts", str(folder / "config.json")]) == 2
