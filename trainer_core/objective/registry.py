"""Objectives by name and with the settings of a run; custom loss functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from trainer_core.config import TrainingConfig, flag
from trainer_core.errors import LossError
from trainer_core.objective import loss
from trainer_core.objective.loss import Bounds, Correction, Sequences, correct
from trainer_core.rollouts.batch import Selection

Per = Literal["tokens", "sequences", "constant"]
MOST_UNCORRECTED = 1
"""Largest policy lag, in weight versions, whose clipped ratio needs no importance weight."""


@dataclass(frozen=True)
class PublishedObjective:
    """An objective as published: its loss and its defaults for missing settings."""

    loss: Callable[..., loss.LossSums]
    clip: tuple[float, float] | None = None
    """(clip_eps, clip_eps_high); None: the configuration's."""
    per: Per = "tokens"
    """Denominator of an optimizer step."""
    advantage_std: bool = True
    drops_flat_groups: bool = False
    overlong: float = 0.0
    """Width of the soft overlong punishment, as a share of the longest completion."""


OBJECTIVES: dict[str, PublishedObjective] = {
    "grpo": PublishedObjective(loss.grpo_loss),
    # "Understanding R1-Zero-like training" (Liu et al. 2025, arXiv:2503.20783, section 3.2):
    # advantages are scores minus their mean, and the sum over tokens is divided by sequences x a
    # constant, not by lengths: TRL's `loss_type="dr_grpo"` with `scale_rewards="none"`, whose
    # constant is its max_completion_length, and verl's `loss_agg_mode="seq-mean-token-sum-norm"`
    # with `norm_adv_by_std_in_grpo=False`.
    "dr_grpo": PublishedObjective(loss.grpo_loss, per="constant", advantage_std=False),
    # DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher and a token-level loss (eq. 8) here,
    # groups of equal scores left out and the soft overlong punishment (eq. 13) in
    # `rollouts/batch.py`. Equals TRL's `loss_type="dapo"` (divided by `num_items_in_batch`) and
    # verl's vanilla loss with `clip_ratio_high=0.28` and `token-mean`.
    "dapo": PublishedObjective(
        loss.grpo_loss, clip=(0.2, 0.28), drops_flat_groups=True, overlong=0.2
    ),
    "gspo": PublishedObjective(loss.gspo_loss, clip=(3e-4, 4e-4), per="sequences"),
    "cispo": PublishedObjective(loss.cispo_loss, clip=(1.0, 4.0)),
}


@dataclass(frozen=True)
class Counts:
    """Trained tokens and sequences of a step."""

    tokens: torch.Tensor
    sequences: torch.Tensor
    """float64 scalars, on one device"""

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)


class Objective:
    """A published objective with the settings of a run."""

    def __init__(
        self, config: TrainingConfig, formula: Callable[..., loss.LossSums] | None = None
    ) -> None:
        """Args:
        formula: replaces the published loss; its other defaults stay.
        """
        published = OBJECTIVES[config.objective]
        self.published = published = (
            published if formula is None else replace(published, loss=formula)
        )
        self.per: Per = config.loss_denominator or published.per
        self.length = config.max_completion_tokens or config.seq_len
        self.clip = _clip(config, published)
        self.advantage_std = (
            published.advantage_std if config.advantage_std is None else config.advantage_std
        )
        self.bounds: Bounds | None = None
        """None: the ratio is against the rollout policy."""
        if config.ratio_base == "proximal":
            self.bounds = _bounds(config)
        self.ref_kl_coef, self.distill_coef = config.ref_kl_coef, config.distill_coef
        self.balance_coef = config.router_aux_loss_coef or 0.0
        self._config = config
        self._own_formula = formula is not None

    def for_lag(self, lag: int | None) -> Objective:
        """Return the objective of a batch whose oldest token has this policy lag."""
        config = self._config
        # The clipped ratio of cispo is a truncated importance weight itself, and a function of the
        # user gets the base that it was written for.
        fixed = config.ratio_base is not None or self._own_formula or config.objective == "cispo"
        if fixed or lag is None or lag <= MOST_UNCORRECTED:
            return self
        corrected = copy(self)
        corrected.bounds = _bounds(config)
        return corrected

    @property
    def ratio_base(self) -> Literal["rollout", "proximal"]:
        return "rollout" if self.bounds is None else "proximal"

    def selection(
        self, vocab_size: int | None = None, end_tokens: frozenset[int] = frozenset()
    ) -> Selection:
        """The choice of sequences for this objective.

        Args:
            vocab_size: exclusive upper bound of token ids.
            end_tokens: token ids that end a completion.
        """
        config, longest = self._config, self._config.max_completion_tokens
        buffer = config.overlong_buffer
        if buffer is None:
            buffer = round((longest or 0) * self.published.overlong)
        return Selection(
            self.published.drops_flat_groups,
            longest,
            buffer,
            config.overlong_penalty,
            config.overlong_mask,
            vocab_size,
            end_tokens,
            config.group_of_one,
            reference=config.ref_kl_coef > 0,
            teacher=config.distill_coef > 0,
        )

    def teaches(self, advantages: Any) -> bool:
        """True if tokens with these advantages may have a gradient."""
        # Advantage 0 has a gradient only from further terms; a custom formula may always have one.
        config = self._config
        terms = (config.kl_coef, config.ref_kl_coef, config.distill_coef, self.balance_coef)
        return bool(self._own_formula or any(terms) or advantages.any())

    def sums(
        self,
        logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        sequences: Sequences,
        correction: Correction | None,
        penalty: torch.Tensor | None = None,
    ) -> loss.LossSums:
        """Sums over the T tokens of one row."""
        low, high = self.clip
        return self.published.loss(
            logprobs,
            rollout_logprobs,
            advantages,
            clip_eps=low,
            clip_eps_high=high,
            kl_coef=self._config.kl_coef,
            dual_clip=self._config.dual_clip or None,
            sequences=sequences,
            correction=correction,
            penalty=penalty,
            per_sequence=self.per == "sequences",
        )

    def correction(
        self, base: torch.Tensor, rollout_logprobs: torch.Tensor, sequences: Sequences
    ) -> Correction | None:
        """Weight and mask against the trainer's logprobs `base` at batch start."""
        return (
            None if self.bounds is None else correct(base, rollout_logprobs, self.bounds, sequences)
        )

    def denominator(self, counts: Counts) -> torch.Tensor:
        """Divisor of the loss of a whole optimizer step, at least 1."""
        if self.per == "tokens":
            return counts.tokens.clamp(min=1.0)
        # `length` is the constant of Dr. GRPO: the longest completion, in tokens.
        return counts.sequences.clamp(min=1.0) * (self.length if self.per == "constant" else 1.0)


def objective_hint(config: TrainingConfig) -> str:
    """Advice about a missing setting that disables a part of the objective."""
    published = OBJECTIVES[config.objective]
    if (
        not published.overlong
        or config.max_completion_tokens is not None
        or config.overlong_buffer is not None
    ):
        return ""
    return (
        f"--objective {config.objective} without --max-completion-tokens does not punish "
        f"long completions. "
        "fix: set it to the environment's limit, or set --overlong-buffer 0 to accept this"
    )


def count(rows: Iterable[tuple[Sequences, Correction | None]], device: torch.device) -> Counts:
    """Count tokens and sequences that train, without masked ones."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    counts = Counts(zero, zero)
    for sequences, correction in rows:
        keep = None if correction is None else correction.keep
        ones = (
            torch.ones_like(sequences.ids, dtype=torch.float64) if keep is None else keep.double()
        )
        # A sequence counts if at least one of its tokens is kept.
        counts += Counts(ones.sum(), (sequences.totals(ones) > 0).sum().double())
    return counts


def _bounds(config: TrainingConfig) -> Bounds:
    return Bounds(config.tis_cap, config.tis_mask, config.tis_mask_low, config.tis_mask_high)


def _clip(config: TrainingConfig, published: PublishedObjective) -> tuple[float, float]:
    low, high = published.clip or (config.clip_eps, config.clip_eps)
    # `clip_eps` is for both sides unless `clip_eps_high` is set.
    # A user's value replaces the published range, even if it equals the default.
    if "clip_eps" in config.model_fields_set:
        low = high = config.clip_eps
    return low, high if config.clip_eps_high is None else config.clip_eps_high


def own_loss(
    config: TrainingConfig, function: loss.Formula | None, device: torch.device
) -> Callable[..., loss.LossSums] | None:
    """The function `config.loss` or `function`, as an objective; None if neither is set.

    Raises:
        LossError: it is missing, raises, or does not return finite losses with a gradient.
    """
    if function is None and config.loss is None:
        return None
    name = (
        f"--loss {config.loss}"
        if function is None
        else f"loss_fn {getattr(function, '__name__', function)}"
    )
    found = find_function(config.loss or "") if function is None else function
    try:
        inspect.signature(found).bind("logprobs", "rollout_logprobs", "advantages", "sequences")
    except (TypeError, ValueError) as error:
        wanted = "(logprobs, rollout_logprobs, advantages, sequences)"
        raise LossError(f"{name} must take {wanted}: {error}") from None
    sums = _try(found, name, device)
    alone = ("kl_coef", "ref_kl_coef", "distill_coef") if sums else ()
    lost = [flag(term) for term in alone if getattr(config, term)]
    lost += ["--ratio-base proximal"] if sums and config.ratio_base == "proximal" else []
    if lost:
        raise LossError(
            f"{name} returns LossSums, which excludes {', '.join(lost)}. fix: return losses "
            f"by token"
        )
    return loss.from_function(found, name)


def find_function(name: str) -> loss.Formula:
    """Import the function `package.module:function`.

    Raises:
        LossError: the module or function is missing, or the import raises.
    """
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that a local folder cannot hide one of our packages
    try:
        imported = import_module(module)
    except Exception as error:  # a foreign module may raise anything
        raise LossError(
            f"--loss {name}: cannot import {module} ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(imported, attribute):
        raise LossError(f"--loss {name}: the module {module} has no {attribute}")
    found: loss.Formula = getattr(imported, attribute)
    if not callable(found):
        raise LossError(f"--loss {name}: expected a function, found {type(found).__name__}")
    return found


def _try(function: loss.Formula, name: str, device: torch.device) -> bool:
    """Call it on six tokens of two sequences; return True if it returns `LossSums`."""
    logprobs = torch.linspace(-2.0, -0.1, 6, device=device).requires_grad_()
    rollout = logprobs.detach() - torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2, -0.2], device=device)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], device=device)
    sequences = Sequences(torch.tensor([0, 0, 0, 1, 1, 1], device=device), 2)
    # `from_function` hides what the function returned.
    given: list[bool] = []

    def noted(*values: Any) -> torch.Tensor | loss.LossSums:
        made = function(*values)
        given.append(isinstance(made, loss.LossSums))
        return made

    total = loss.from_function(noted, f"{name}, tried on six tokens,")(
        logprobs, rollout, advantages, sequences=sequences
    ).loss
    # A wrong result is reported below instead of as torch's own exception.
    if total.requires_grad and not total.ndim:
        total.backward()
    if total.ndim or not bool(total.isfinite()):
        raise LossError(f"{name}, tried on six tokens, returned a loss of {total.tolist()}")
    if logprobs.grad is None or not bool(logprobs.grad.isfinite().all()):
        got = "none" if logprobs.grad is None else "one with NaN or infinity"
        raise LossError(f"{name} must have a finite gradient through logprobs; it has {got}")
    return given[0]
