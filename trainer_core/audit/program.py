"""The audit as one function: ask, compare, explain, within a time limit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atropos_common.protocol.audit import TOKENIZER, Audit
from atropos_common.protocol.trainer_records import OTHER_WEIGHTS
from trainer_core.audit.diagnosis import Diagnosis
from trainer_core.audit.engine import CannotTell, Engine
from trainer_core.audit.fixes import FIXES
from trainer_core.audit.questions import OTHER_TEMPERATURE, Observed, Questions
from trainer_core.audit.reference import Reference
from trainer_core.audit.rollouts import PROMPTS_ASKED, Recorded, audit_rollouts, read_rollouts
from trainer_core.objective.causes.sampling import PLAIN, Sampler
from trainer_core.objective.causes.scores import gap

# Shares of the time limit after which no further hypothesis begins.
HYPOTHESES_UNTIL = 0.85


@dataclass
class Settings:
    """Arguments of one audit."""

    weights: Path
    engine: str = ""
    adapter: Path | None = None
    older: Path | None = None
    rollouts: Path | None = None
    model: str = ""
    token: str = ""
    dtype: str = ""
    device: str = "auto"
    sampler: Sampler = field(default_factory=lambda: PLAIN)
    seed: int | None = None
    prompt_logprobs: bool = False
    """Ask for the logprobs of prompts as well. vLLM on a CPU crashes on it with LoRA enabled."""
    timeout_s: float = 60.0


def audit(settings: Settings, reference: Reference | None = None) -> Audit:
    """Audit an engine, recorded rollouts, or both.

    Args:
        reference: a loaded one, for many audits of the same folder; threads may share it.

    Raises:
        UsageError: a folder or file cannot be read.
    """
    begun = time.monotonic()
    until = begun + HYPOTHESES_UNTIL * settings.timeout_s
    result = Audit("cannot tell", settings.engine, str(settings.weights))
    recorded = read_rollouts(settings.rollouts) if settings.rollouts else []
    engine = None
    try:
        if settings.engine:
            engine = Engine(
                settings.engine,
                model=settings.model,
                adapter=str(settings.adapter or ""),
                token=settings.token,
                timeout_s=settings.timeout_s,
            )
            result.engine = engine.title
        reference = reference or Reference(
            settings.weights,
            settings.adapter,
            settings.older,
            device=settings.device,
            dtype=settings.dtype,
        )
        if engine is not None:
            _of_engine(result, settings, engine, reference, recorded, until)
        if settings.rollouts is not None:
            with reference.lock:
                result.rollouts = audit_rollouts(settings.rollouts, recorded, reference)
            _of_rollouts(result)
    except CannotTell as error:
        result.verdict, result.evidence = "cannot tell", str(error)
    finally:
        if engine is not None:
            result.requests, result.tokens = engine.count.requests, engine.count.tokens
            engine.close()
    result.fix = FIXES.get(result.cause, "")
    result.seconds = time.monotonic() - begun
    return result


def _of_engine(
    result: Audit,
    settings: Settings,
    engine: Engine,
    reference: Reference,
    recorded: list[Recorded],
    until: float,
) -> None:
    with reference.lock:
        tokenizer = reference.tokenizer
    questions = Questions(
        engine,
        reference.config,
        reference.vocabulary,
        tokenizer=tokenizer,
        seed=settings.seed,
        sampler=settings.sampler,
        prompt_logprobs=settings.prompt_logprobs,
    )
    observed = questions.ask()
    observed += questions.on_prompts([one.prompt for one in recorded[:PROMPTS_ASKED]])
    with reference.lock:
        diagnosis = Diagnosis(reference, observed, until=until)
        finding = diagnosis.find()
        agrees = finding.cause is None and not finding.unsure
        by_default = diagnosis.sampled_by_default() if agrees else None
    result.groups, result.tried = finding.groups, finding.tried
    template = questions.template()
    if finding.cause is not None:
        result.verdict, (result.cause, result.evidence) = "does not", finding.cause
        if template and result.cause == OTHER_WEIGHTS:
            result.evidence += f"; {template}"
    elif finding.unsure:
        result.evidence = finding.unsure
    elif template:
        result.verdict, result.cause, result.evidence = "does not", TOKENIZER, template
    else:
        result.verdict = "serves"
        tokens = sum(group.tokens for group in finding.groups)
        worst = max(finding.groups, key=lambda group: group.difference / group.bound)
        result.evidence = (
            f"{tokens} tokens differ by at most {worst.difference:.2g} nats on average; rounding "
            f"explains {worst.bound:.2g}"
        )
        _meaning(result, questions, reference)
        if diagnosis.tied_tokens:
            result.notes.append(diagnosis.tied_tokens)
        if by_default:
            result.notes.append(
                f"requests without sampling parameters are not drawn plainly: {by_default}. Send "
                f"temperature, top_p and top_k with each request, or start vLLM with "
                f"--generation-config vllm"
            )
    if settings.prompt_logprobs and all(group.name != "prompt" for group in finding.groups):
        result.notes.append("the engine gives no prompt logprobs: only drawn tokens were compared")


def _meaning(result: Audit, questions: Questions, reference: Reference) -> None:
    """Learn whether logprobs stand before or after the temperature."""
    try:
        observed: list[Observed] = questions.meaning()
    except CannotTell:
        return
    if not observed:
        return
    with reference.lock:
        distribution = reference.distribution([one.span for one in observed])
    theirs = torch.tensor([v for one in observed for v in one.logprobs])
    raw = gap(distribution.logprobs(PLAIN).cpu(), theirs)
    cooler = PLAIN._replace(temperature=OTHER_TEMPERATURE)
    processed = gap(distribution.logprobs(cooler).cpu(), theirs)
    if not math.isclose(raw, processed, rel_tol=0.5):
        result.logprobs = "raw" if raw < processed else "processed"


def _of_rollouts(result: Audit) -> None:
    found = result.rollouts
    assert found is not None
    agrees = found.difference <= found.bound
    if result.verdict == "does not" or (result.engine and result.verdict == "cannot tell"):
        return
    if agrees:
        result.verdict = "serves"
        result.evidence = result.evidence or (
            f"{found.tokens} recorded tokens differ by {found.difference:.2g} nats on average; "
            f"rounding explains {found.bound:.2g}"
        )
        return
    kind, _, text = found.explained_by.partition(": ")
    result.verdict, result.cause = "does not", kind or OTHER_WEIGHTS
    result.evidence = (
        f"{found.foreign:.0%} of {found.tokens} recorded tokens are not of these weights"
        f"{f': {text}' if text else ''}"
    )
