"""Objectives as pure functions that return sums over tokens, never means.

The caller divides by the one denominator of an optimizer step, so loss and gradient are equal for
every split into micro-batches, packed rows and ranks. Below, r = pi / pi_base, where pi_base is the
rollout policy or the trainer at batch start (`correct`); sg() stops the gradient; A is the
advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import nn

from trainer_core.errors import LossError, UsageError

# Limit of |log ratio|: exp of more would overflow, and its gradient is meaningless.
MAX_LOG_RATIO = 20.0
# Limit of one token's k3 in nats, as verl's `kl_penalty`: beyond it the gradient is 0, not e^20.
MOST_K3 = 10.0
# Probability of tokens that a teacher does not name: log 0 would be an infinite penalty, and
# float32 cannot tell 1 - 1e-8 from 1.
LEAST_TAIL = 1e-6


class Sequences(NamedTuple):
    """Assignment of T tokens to S sequences."""

    ids: torch.Tensor
    """[T] int64, 0 to S - 1"""
    size: int
    """S"""

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """[S] sums of `values` [T]."""
        return values.new_zeros(self.size).index_add(0, self.ids, values)

    def sizes(self, kept: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """[T] kept tokens of each token's sequence, at least 1."""
        ones = torch.ones_like(like) if kept is None else kept.to(like.dtype)
        return self.totals(ones.detach()).clamp(min=1.0)[self.ids]

    def mean(self, values: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """[T] mean of `values` over the kept tokens of each token's sequence."""
        # Masked values may be infinite, so replace them before summing.
        known = values if kept is None else torch.where(kept, values, 0.0)
        return self.totals(known)[self.ids] / self.sizes(kept, values)


class Correction(NamedTuple):
    """Importance correction of T tokens, without gradient."""

    base: torch.Tensor
    """[T] trainer logprobs at batch start"""
    # The ratio against `base` measures only the policy's movement; `weight` corrects the gap to the
    # policy that sampled. Without a correction one ratio covers both: they are never combined.
    weight: torch.Tensor
    """[T] min(pi_base / pi_rollout, cap)"""
    truncated: torch.Tensor
    """[T] bool, True where the cap applied"""
    keep: torch.Tensor | None
    """[T] bool, tokens that train; None: all"""


class LossSums(NamedTuple):
    """Sums, and a maximum, over the tokens that `correction` keeps. Only `loss` has a gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """Tokens with a ratio outside [1 - clip_eps, 1 + clip_eps_high]."""
    # TRL and verl count only those whose advantage makes the clipped term the active one.
    kl_k3: torch.Tensor
    tokens: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    dual_clipped: torch.Tensor
    """Tokens with A < 0 and a ratio above `dual_clip`."""
    ratio_max: torch.Tensor
    """Largest ratio; 0 without kept tokens."""


class Common(TypedDict, total=False):
    """Keywords of every objective besides its clip range."""

    kl_coef: float
    """Weight of k3 against the rollout policy; default 0."""
    dual_clip: float | None
    """Bound on the ratio of tokens with A < 0; default: none."""
    sequences: Sequences | None
    """Required by gspo and `per_sequence`."""
    penalty: torch.Tensor | None
    """[T] further terms of each token's loss, with gradient, without importance weight."""
    correction: Correction | None
    """Default: the ratio is against the rollout policy."""


class _Terms(NamedTuple):
    loss: torch.Tensor
    ratio: torch.Tensor


def grpo_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    per_sequence: bool = False,
    **common: Unpack[Common],
) -> LossSums:
    """Sum over tokens of -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef k3.

    PPO's pessimistic bound (Schulman et al. 2017, eq. 7) with group-relative advantages
    (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, eq. 3). With `dual_clip` = c, a token with A
    < 0 loses at most c |A| (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    Args:
        logprobs: [T] float32 of the policy, with gradient.
        rollout_logprobs: [T] float32 of the policy that sampled, at the same temperature.
        advantages: [T] float32.
        clip_eps_high: upper half of the clip range; default: `clip_eps`.
        per_sequence: weight every token by 1 / (trained tokens of its sequence).
    """
    # By all trained tokens: verl's `compute_policy_loss` (vanilla) with `token-mean`; `dual_clip`
    # is its `clip_ratio_c` and TRL's `delta`. With `per_sequence`, by sequences: TRL's "grpo".
    _check(logprobs, rollout_logprobs, advantages, common)
    log_ratio = _log_ratio(logprobs, rollout_logprobs, common)
    low, high = _range(clip_eps, clip_eps_high)
    terms = _clipped(log_ratio.exp(), advantages, low, high, common.get("dual_clip"))
    return _sums(terms, logprobs, rollout_logprobs, advantages, low, high, per_sequence, common)


def gspo_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_eps: float = 3e-4,
    clip_eps_high: float | None = 4e-4,
    per_sequence: bool = True,
    **common: Unpack[Common],
) -> LossSums:
    """Sum over sequences of the mean over their tokens of -min(s A, clip(s, 1 - low, 1 + high) A).

    s = (pi(y) / pi_base(y)) ** (1 / |y|) is one ratio for the whole sequence (GSPO, Zheng et al.
    2025, arXiv:2507.18071, eq. 5-7; clip range of section 5.1).

    Raises:
        ValueError: `sequences` is missing.
    """
    _check(logprobs, rollout_logprobs, advantages, common)
    sequences = common.get("sequences")
    if sequences is None:
        raise ValueError("gspo_loss needs `sequences`: its ratio is one for each whole sequence")
    log_ratio = _log_ratio(logprobs, rollout_logprobs, common)
    mean = sequences.mean(log_ratio.detach(), _kept(common))
    # sg(s) pi / sg(pi) at every token (eq. 13-14): advantages, and a weight, may differ within a
    # sequence. Otherwise value and gradient equal eq. 5, and, by sequences, verl's
    # `compute_policy_loss_gspo` and TRL's `importance_sampling_level="sequence"`.
    ratio = (mean + log_ratio - log_ratio.detach()).exp()
    low, high = _range(clip_eps, clip_eps_high)
    terms = _clipped(ratio, advantages, low, high, common.get("dual_clip"))
    return _sums(terms, logprobs, rollout_logprobs, advantages, low, high, per_sequence, common)


def cispo_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_eps: float = 1.0,
    clip_eps_high: float | None = 4.0,
    per_sequence: bool = False,
    **common: Unpack[Common],
) -> LossSums:
    """Sum over tokens of -sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps its gradient.

    MiniMax-M1 (2025, arXiv:2506.13585, eq. 4-5); upper bound 5 as in ScaleRL (arXiv:2510.13786).
    `dual_clip` has no effect on the loss.
    """
    _check(logprobs, rollout_logprobs, advantages, common)
    ratio = _log_ratio(logprobs, rollout_logprobs, common).exp()
    low, high = _range(clip_eps, clip_eps_high)
    # By all tokens: TRL's `loss_type="cispo"` (its bound 5 is absolute), verl's
    # `compute_policy_loss_cispo`. The paper leaves the lower bound open: 1 here.
    terms = _Terms(-ratio.detach().clamp(low, high) * advantages * _wide(logprobs), ratio.detach())
    return _sums(terms, logprobs, rollout_logprobs, advantages, low, high, per_sequence, common)


Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequences], "torch.Tensor | LossSums"]
"""Map (logprobs [T] with gradient, base of the ratio [T], advantages [T], sequences) to losses,
[T]."""


def from_function(formula: Formula, name: str) -> Callable[..., LossSums]:
    """Wrap `formula` as an objective with the arguments of those above.

    Its losses by token are weighted, masked and summed as theirs; `LossSums` are returned
    unchanged.

    Raises (the returned function):
        LossError: `formula` raised, or returned something else.
    """

    def own(
        logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        *,
        clip_eps: float = 0.2,
        clip_eps_high: float | None = None,
        per_sequence: bool = False,
        **common: Unpack[Common],
    ) -> LossSums:
        _check(logprobs, rollout_logprobs, advantages, common)
        sequences, correction = common.get("sequences"), common.get("correction")
        if sequences is None:
            raise ValueError("a custom loss function needs `sequences`")
        base = rollout_logprobs if correction is None else correction.base
        try:
            made = formula(logprobs, base, advantages, sequences)
        except Exception as error:
            if (
                isinstance(error, RuntimeError) and logprobs.is_cuda
            ):  # out of memory, or a lost server
                raise
            raise LossError(f"{name} raised {type(error).__name__}: {error}") from error
        if isinstance(made, LossSums):
            return made
        if not isinstance(made, torch.Tensor) or made.shape != logprobs.shape:
            got = (
                f"shape {list(made.shape)}"
                if isinstance(made, torch.Tensor)
                else type(made).__name__
            )
            wanted = f"the loss of each token, [{len(logprobs)}], or LossSums"
            raise LossError(f"{name} returned {got}; it must return {wanted}")
        low, high = _range(clip_eps, clip_eps_high)
        terms = _Terms(made, _bounded(logprobs, base).exp().detach())
        return _sums(terms, logprobs, rollout_logprobs, advantages, low, high, per_sequence, common)

    return own


def _check(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor, common: Common
) -> None:
    if unknown := sorted(common.keys() - Common.__annotations__.keys()):
        raise TypeError(
            f"no objective takes {', '.join(unknown)}; choose from "
            f"{', '.join(Common.__annotations__)}"
        )
    given = {"logprobs": logprobs, "rollout_logprobs": rollout_logprobs, "advantages": advantages}
    if (sequences := common.get("sequences")) is not None:
        given["sequences.ids"] = sequences.ids
    if (correction := common.get("correction")) is not None:
        given |= {f"correction.{k}": v for k, v in correction._asdict().items() if v is not None}
    wrong = [
        f"{name} {list(value.shape)}"
        for name, value in given.items()
        if value.shape != logprobs.shape
    ]
    if wrong or logprobs.ndim != 1:
        raise ValueError(
            f"one value for each of T tokens is expected: logprobs are {list(logprobs.shape)}"
            + (f", but {', '.join(wrong)}" if wrong else ", which is not [T]")
        )


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> _Terms:
    """-min(r A, clip(r) A); for A < 0 at most dual_clip |A|."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        # A large ratio with A < 0 makes the loss unbounded; this bounds it, and stops its gradient.
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return _Terms(loss, ratio.detach())


def _sums(
    terms: _Terms,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
    per_sequence: bool,
    common: Common,
) -> LossSums:
    correction, loss = common.get("correction"), terms.loss
    if correction is not None:
        # Before KL and penalty, which are not importance-sampled.
        loss = loss * correction.weight
    log_ratio = _bounded(logprobs, rollout_logprobs)
    # Unbiased for KL(rollout || policy) on tokens of the rollout policy (Schulman, "Approximating
    # KL divergence"); always against the rollout policy, whatever the base of the ratio.
    k3 = bounded_k3(log_ratio)
    if common.get("kl_coef"):
        loss = loss + common["kl_coef"] * k3
    if (penalty := common.get("penalty")) is not None:
        loss = loss + penalty
    kept = _kept(common)
    if per_sequence:
        sequences = common.get("sequences")
        if sequences is None:
            raise ValueError("`per_sequence` needs `sequences`")
        loss = loss / sequences.sizes(kept, loss)
    keep = torch.ones_like(terms.ratio, dtype=torch.bool) if kept is None else kept
    under, above = (terms.ratio < low) & keep, (terms.ratio > high) & keep
    bound = common.get("dual_clip")
    dual = (
        torch.zeros_like(keep) if bound is None else (terms.ratio > bound) & (advantages < 0) & keep
    )

    def of_kept(values: torch.Tensor) -> torch.Tensor:
        # `where` instead of a product: a masked token may be NaN or infinite.
        return values if kept is None else torch.where(kept, values, 0.0)

    return LossSums(
        loss=of_kept(loss).sum(),
        ratio=of_kept(terms.ratio).sum(),
        clipped=under.sum() + above.sum(),
        kl_k3=of_kept(k3.detach()).sum(),
        tokens=keep.sum(dtype=loss.dtype),
        clipped_low=under.sum(),
        clipped_high=above.sum(),
        dual_clipped=dual.sum(),
        # The appended 0 covers a row without kept tokens.
        ratio_max=torch.cat([of_kept(terms.ratio), terms.ratio.new_zeros(1)]).max(),
    )


def _log_ratio(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, common: Common
) -> torch.Tensor:
    correction = common.get("correction")
    return _bounded(logprobs, rollout_logprobs if correction is None else correction.base)


def bounded_k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d of each log ratio d, at most `MOST_K3`."""
    return (log_ratio.expm1() - log_ratio).clamp(max=MOST_K3)


def _bounded(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return (_wide(logprobs) - _wide(base)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _range(clip_eps: float, clip_eps_high: float | None) -> tuple[float, float]:
    return 1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)


def _kept(common: Common) -> torch.Tensor | None:
    correction = common.get("correction")
    return None if correction is None else correction.keep


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True)
class Bounds:
    """Limits of the importance weight, and the tokens that it masks."""

    cap: float = 2.0
    """Upper bound of the importance weight (TIS)."""
    mask: str = "none"
    """none, token or sequence: unit that is masked outside of [low, high]."""
    low: float = 0.5
    high: float = 2.0


def correct(
    base: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    bounds: Bounds,
    sequences: Sequences | None = None,
) -> Correction:
    """Compute weight and mask of T tokens.

    Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"); the mask is rejection sampling. Masked tokens
    count in no denominator.

    Args:
        base: [T] trainer logprobs at batch start; detached.
        rollout_logprobs: [T].
        sequences: required if `bounds.mask` is sequence.
    """
    base = base.detach()
    # verl's `rollout_is="token"` and TRL's `vllm_importance_sampling_correction` by token.
    gap = (base - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = gap.exp()
    keep = None
    if bounds.mask == "token":
        keep = (weight >= bounds.low) & (weight <= bounds.high)
    elif bounds.mask == "sequence":
        if sequences is None:
            raise ValueError("a mask over sequences needs `sequences`")
        # verl's `rollout_rs`: a geometric mean, so its bounds do not depend on the length.
        whole = sequences.mean(gap).exp()
        keep = (whole >= bounds.low) & (whole <= bounds.high)
    return Correction(base, weight.clamp(max=bounds.cap), weight > bounds.cap, keep)


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """k3 of KL(policy || reference) at each token, [T], in nats, with gradient; 0 at NaN.

    exp(d) - 1 - d with d = log pi_reference - log pi: DeepSeekMath's eq. 4 (arXiv:2402.03300). A
    token above `MOST_K3` has no gradient.

    Args:
        logprobs: [T] float32 of the policy, with gradient.
        reference: [T] float32 at the same temperature.
    """
    # verl's `low_var_kl`, TRL's `beta`. The value is unbiased on tokens of the policy itself; the
    # gradient is that of KL(reference || policy).
    known = ~reference.isnan()
    # Replace NaN before the arithmetic: `where` alone would still give NaN gradients.
    gap = (torch.where(known, reference, 0.0) - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(known, bounded_k3(gap), 0.0)


def teacher_kl(logprobs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Reverse KL(policy || teacher) at each of T positions, [T], in nats, with gradient.

    GKD (Agarwal et al. 2024, arXiv:2306.13649) on the student's own sequences; 0 without a teacher.

    Args:
        logprobs: [T, K] float32 of the policy for the teacher's tokens, with gradient.
        teacher: [T, K] float32; -inf where the teacher names fewer than K.
    """
    # All other tokens count as one more outcome with the remaining probability: a divergence of two
    # distributions over K + 1 outcomes, never negative, 0 if they agree.
    # [T, K]: padding has -inf.
    named = teacher > -torch.inf
    ours, theirs = torch.where(named, logprobs, -torch.inf), teacher
    inside = torch.where(
        named, logprobs.exp() * (logprobs - torch.where(named, theirs, 0.0)), 0.0
    ).sum(1)
    tail = (1.0 - ours.exp().sum(1)).clamp(min=LEAST_TAIL)
    left = (1.0 - theirs.exp().sum(1)).clamp(min=LEAST_TAIL)
    return torch.where(named.any(1), inside + tail * (tail.log() - left.log()), 0.0)


def balance_coefficient(model: nn.Module, asked: float | None) -> float:
    """Weight of the balance loss: `asked`, else that of config.json, else 0.

    Raises:
        UsageError: the model has no experts to balance.
    """
    config = model.config
    own = (
        getattr(config, "router_aux_loss_coef", None)
        if getattr(config, "output_router_logits", False)
        else 0.0
    )
    wanted = own or 0.0 if asked is None else asked
    if wanted and "router_logits" not in (
        getattr(model.base_model, "_can_record_outputs", None) or {}
    ):
        name = type(model).__name__
        raise UsageError(
            f"--router-aux-loss-coef {wanted:g}: {name} has no experts to balance. fix: drop "
            f"the flag"
        )
    return wanted


def balance_loss(router_logits: Sequence[torch.Tensor], chosen: int) -> torch.Tensor:
    """Imbalance of the experts' load: experts * sum of (share of tokens * mean probability), [].

    Over all tokens and layers together (Fedus et al. 2021, Switch Transformer, equations 4 to 6).
    Balanced loads give `chosen`.

    Args:
        router_logits: of each sparse layer, [N, experts].
        chosen: experts per token.
    """
    # As transformers' `load_balancing_loss_func`.
    logits = torch.cat([layer.reshape(-1, layer.shape[-1]) for layer in router_logits])
    shares = logits.float().softmax(-1)
    experts = shares.shape[1]
    # Shares of chosen tokens have no gradient; it flows through the mean probabilities.
    loads = torch.bincount(shares.topk(chosen, dim=-1).indices.flatten(), minlength=experts) / len(
        shares
    )
    return experts * (loads * shares.mean(0)).sum()
