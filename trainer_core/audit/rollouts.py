"""Recorded rollouts under audit: our JSONL, and what TRL, verl and prime-rl write.

One JSON object a line: `prompt_ids`, `completion_ids`, `logprobs`, and optionally
`completion_mask`, `temperature`, `top_p`, `top_k`, `version`. docs/guides/audit.md has the table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from atropos_common.protocol.audit import RolloutsAudit
from atropos_common.protocol.trainer_records import STALE_WEIGHTS
from trainer_core.audit.diagnosis import Diagnosis
from trainer_core.audit.questions import Observed
from trainer_core.audit.reference import Reference, Span
from trainer_core.errors import UsageError
from trainer_core.objective.causes.sampling import PLAIN, Sampler
from trainer_core.objective.causes.scores import LEFT, gap
from trainer_core.objective.causes.weights import swapped

MOST_ROLLOUTS = 64
MOST_TOKENS = 2048
# Factor on the bound above which a single token is not of the stated weights.
FOREIGN = 5.0
PROMPTS_ASKED = 4

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """One rollout with the logprobs of its completion."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    mask: list[bool]
    """Tokens of the completion that the engine drew."""
    sampler: Sampler = PLAIN
    version: str = ""


def read_rollouts(path: Path) -> list[Recorded]:
    """Read at most `MOST_ROLLOUTS` rollouts, spread over the file.

    Raises:
        UsageError: the file has another format.
    """
    try:
        rows = list(_rows(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"--rollouts {path}: {error}") from error
    found = [one for row in rows for one in _of_row(row) if any(one.mask)]
    if not found:
        keys = ", ".join(sorted(rows[0])) if rows else "none"
        raise UsageError(
            f"--rollouts {path}: no token ids with logprobs (keys: {keys}); fix: "
            f"docs/guides/audit.md lists the formats"
        )
    return found[:: max(1, len(found) // MOST_ROLLOUTS)][:MOST_ROLLOUTS]


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix in (".pt", ".pth"):
        found = torch.load(path, map_location="cpu", weights_only=True)
        yield from found if isinstance(found, list) else [found]
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.strip():
                continue
            row = json.loads(line)
            # A recording of our trainer has a batch of groups on each line.
            yield from row["batch"] if isinstance(row, dict) and "batch" in row else [row]


def _of_row(row: Row) -> Iterator[Recorded]:
    for keys, read in (
        (("prompts", "responses", "rollout_log_probs"), _verl),
        (("prompt_ids", "completion_ids", "completion_logprobs"), _prime),
        (("prompt_ids", "completion_ids", "sampling_per_token_logps"), _trl),
        (("prompt_ids", "completion_ids", "logprobs"), _trl),
        (("tokens", "masks", "inference_logprobs"), _atropos),
    ):
        if all(key in row and row[key] is not None for key in keys):
            yield from read(row)
            return


def _trl(row: Row) -> Iterator[Recorded]:
    """Ours and TRL's: lists, or lists of lists for a batch."""
    values = row.get("sampling_per_token_logps", row.get("logprobs"))
    batch = (row["prompt_ids"], row["completion_ids"], values)
    prompts, completions, logprobs = (_plain(value) for value in batch)
    masks = _plain(row.get("completion_mask"))
    if completions and not isinstance(completions[0], list):
        prompts, completions, logprobs = [prompts], [completions], [logprobs]
        masks = [masks] if masks is not None else None
    for i, (prompt, completion, values) in enumerate(
        zip(prompts, completions, logprobs, strict=True)
    ):
        # vLLM's client gives one list of alternatives for each token; the first is the drawn one.
        flat = [value[0] if isinstance(value, list) else value for value in values]
        mask = masks[i] if masks else [1] * len(completion)
        prompt_mask = _plain(row.get("prompt_mask"))
        if prompt_mask and isinstance(prompt_mask[0], list):
            prompt = [t for t, kept in zip(prompt, prompt_mask[i], strict=True) if kept]
        yield _recorded(row, prompt, completion, flat, mask)


def _prime(row: Row) -> Iterator[Recorded]:
    mask = row.get("completion_mask") or [1] * len(row["completion_ids"])
    temperatures = row.get("completion_temperatures") or [row.get("temperature", 1.0)]
    named = {**row, "temperature": temperatures[0]}
    yield _recorded(
        named, row["prompt_ids"], row["completion_ids"], row["completion_logprobs"], mask
    )


def _verl(row: Row) -> Iterator[Recorded]:
    """A batch of padded tensors: prompts on the right, responses on the left."""
    keys = ("prompts", "responses", "rollout_log_probs", "attention_mask", "response_mask")
    prompts, responses, logprobs, attended, answered = (_plain(row.get(key)) for key in keys)
    if prompts and not isinstance(prompts[0], list):
        prompts, responses, logprobs = [prompts], [responses], [logprobs]
        attended = [attended] if attended else None
        answered = [answered] if answered else None
    for i, (prompt, response, values) in enumerate(zip(prompts, responses, logprobs, strict=True)):
        seen = attended[i] if attended else [1] * (len(prompt) + len(response))
        length = sum(seen[len(prompt) :])
        mask = (answered[i] if answered else seen[len(prompt) :])[:length]
        kept = [t for t, here in zip(prompt, seen, strict=False) if here]
        yield _recorded(row, kept, response[:length], values[:length], mask)


def _atropos(row: Row) -> Iterator[Recorded]:
    given = row.get("generation_params") or {}
    for tokens, masks, values in zip(
        row["tokens"], row["masks"], row["inference_logprobs"], strict=True
    ):
        start = next((i for i, mask in enumerate(masks) if mask != -100), len(masks))
        named = {**row, **given, "version": given.get("weight_version")}
        mask = [int(m != -100 and v <= 0) for m, v in zip(masks, values, strict=True)][start:]
        yield _recorded(named, tokens[:start], tokens[start:], values[start:], mask)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _recorded(
    row: Row,
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float],
    mask: Sequence[int],
) -> Recorded:
    count = min(len(completion), len(logprobs), len(mask))
    sampler = Sampler(
        float(row.get("temperature") or 1.0),
        max(0, int(row.get("top_k") or 0)),
        float(row.get("top_p") or 1.0),
    )
    version = next((row[k] for k in ("version", "step", "ckpt_step") if row.get(k) is not None), "")
    return Recorded(
        [int(t) for t in prompt],
        [int(t) for t in completion[:count]],
        [float(v) for v in logprobs[:count]],
        [bool(m) and math.isfinite(v) for m, v in zip(mask[:count], logprobs, strict=False)],
        sampler,
        str(version),
    )


def audit_rollouts(path: Path, rollouts: Sequence[Recorded], reference: Reference) -> RolloutsAudit:
    """Compare recorded logprobs with the reference, and look for what explains a difference.

    Raises:
        UsageError: the rollouts are of another vocabulary.
    """
    largest = max(token for one in rollouts for token in [*one.prompt, *one.completion])
    if largest >= reference.vocabulary:
        raise UsageError(
            f"--rollouts {path}: token {largest} is beyond the {reference.vocabulary} of the "
            f"weights; fix: give the folder of the model that made them"
        )
    chosen: list[tuple[str, Observed]] = []
    total = 0
    for one in rollouts:
        if total < MOST_TOKENS:
            runs = _runs(one)
            chosen += [(one.version, run) for run in runs]
            total += sum(run.span.count for run in runs)
    diagnosis = Diagnosis(reference, [run for _, run in chosen])
    theirs = torch.tensor([v for _, run in chosen for v in run.logprobs])
    ours = torch.cat(diagnosis.ours)
    gaps = (ours - theirs).abs().nan_to_num(50.0, 50.0, 50.0)
    mean = gap(ours, theirs)
    found = RolloutsAudit(
        file=str(path),
        rollouts=len(rollouts),
        tokens=len(gaps),
        foreign=float((gaps > FOREIGN * diagnosis.bound).float().mean()),
        difference=mean,
        bound=diagnosis.bound,
        explained_by="",
        left=mean,
        by_version=_by_version([v for v, run in chosen for _ in run.logprobs], ours, theirs),
    )
    if not found.difference <= found.bound:
        _explain(found, diagnosis, theirs)
    return found


def _runs(one: Recorded) -> list[Observed]:
    """Runs of drawn tokens, each with everything before it."""
    tokens = [*one.prompt, *one.completion]
    # Settings other than a temperature are tested, not assumed.
    sampler = PLAIN._replace(temperature=one.sampler.temperature)
    found, at = [], 0
    for drawn, group in groupby(one.mask):
        count = len(list(group))
        start, end = len(one.prompt) + at, len(one.prompt) + at + count
        if drawn and start:
            values = one.logprobs[at : at + count]
            span = Span(tokens[:end], start, len(one.prompt))
            found.append(Observed("sampled", span, values, sampler))
        at += count
    return found


def _by_version(
    versions: Sequence[str], ours: torch.Tensor, theirs: torch.Tensor
) -> dict[str, float]:
    found = {}
    for version in dict.fromkeys(name for name in versions if name):
        of = torch.tensor([name == version for name in versions])
        found[version] = gap(ours[of], theirs[of])
    return found


def _explain(found: RolloutsAudit, diagnosis: Diagnosis, theirs: torch.Tensor) -> None:
    reference = diagnosis.reference
    if (explained := diagnosis.in_sampling("sampled")) is not None:
        (kind, evidence), found.left = explained
        found.explained_by = f"{kind}: {evidence}"
    elif reference.known.older:
        with swapped(reference.model, reference.known.older):
            older = gap(torch.cat(diagnosis.expected()), theirs)
        if older < LEFT * found.difference:
            found.explained_by, found.left = f"{STALE_WEIGHTS}: those of --older", older
