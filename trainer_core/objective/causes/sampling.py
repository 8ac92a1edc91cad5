"""Causes on the way from logits to logprobs: another token, temperature, filter or penalty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import torch

from atropos_common.protocol.trainer_records import HEAD_DTYPE, SAMPLING, SHIFTED, TEMPERATURE
from trainer_core.objective.alignment import Cause
from trainer_core.objective.causes.scores import (
    CLEARLY,
    FEWEST_TOKENS,
    LEFT,
    NEAREST_TEMPERATURE,
    NOISE,
    Scored,
    gap,
)


class Moved(NamedTuple):
    """Change of the policy's own logprobs by the updates since the rollouts."""

    factor: float = 1.0
    """Factor on the temperature that comes nearest to it: above 1 the policy is sharper now."""
    left: float = 0.0
    """Mean change in nats that this factor does not explain."""
    nats: float = 0.0
    """Mean change in nats."""

    def times(self, more: float) -> Moved:
        """Return the change by `more` times the updates, if each does as much."""
        return Moved(self.factor**more, self.left * more, self.nats * more)


UNMOVED = Moved()


def moved_by(own: Scored) -> Moved:
    """Measure the change; `own` has the trainer's earlier logprobs in place of the engine's."""
    factor = narrowed(own.left)
    return Moved(factor, own.left(factor), own.left(1.0))


def cause_in_rollouts(scored: Scored, moved: Moved | None = UNMOVED) -> Cause | None:
    """Return the cause of a difference that only sampled tokens show.

    Args:
        moved: by the updates since the rollouts; None: unknown.
    """
    # Verdicts come from rank 0: another rank's figures may lie just beyond a bound, and it would
    # then run the model once more than the others and hang.
    shifted = scored.share(lambda: shifted_by_one(scored))
    if shifted or moved is None or from_updates(scored, moved):
        return shifted
    return other_temperature(scored, moved) or scored.share(lambda: filtered(scored))


def from_updates(scored: Scored, moved: Moved) -> bool:
    """Tell whether the updates may be the whole cause."""
    # A policy that sharpens looks like another temperature, so that part is taken out on both
    # sides. The rest is measured on different tokens.
    rest = scored.left(moved.factor)
    return rest < max(CLEARLY * moved.left, scored.left(1.0) / CLEARLY)


def shifted_by_one(scored: Scored) -> Cause | None:
    train, theirs, ids = scored.train, scored.theirs, scored.sequences
    for mine, other, where in (
        (slice(1, None), slice(None, -1), "the token before"),
        (slice(None, -1), slice(1, None), "the next token"),
    ):
        # Compare only neighbours of the same sequence: [T - 1] bool.
        inside = ids[mine] == ids[other]
        if int(inside.sum()) < FEWEST_TOKENS:
            continue
        as_given = (train[mine] - theirs[mine]).abs()[inside].mean()
        moved = (train[other] - theirs[mine]).abs()[inside].mean()
        if float(moved) <= LEFT * float(as_given):
            return SHIFTED, f"each rollout logprob is that of {where}"
    return None


def other_temperature(scored: Scored, moved: Moved = UNMOVED) -> Cause | None:
    best = narrowed(scored.left)
    # The rollouts' temperature, without what the policy has sharpened since.
    factor = best / moved.factor
    before = max(scored.left(1.0), scored.left(moved.factor))
    most = min(LEFT * before + moved.left, before / CLEARLY)
    # A temperature close to ours may also be an update that sharpened the policy.
    if scored.left(best) > most or abs(factor - 1.0) < NEAREST_TEMPERATURE:
        return None
    # Near 1.0 the likely cause is a server that returns raw logprobs.
    assumed = scored.assumed
    raw = ": raw logprobs, or that temperature" if abs(factor * assumed - 1.0) < 0.02 else ""
    return (
        TEMPERATURE,
        f"the rollouts' logprobs fit {factor * assumed:.2f}{raw}; the trainer uses {assumed:.2f}",
    )


def narrowed(left: Callable[[float], float]) -> float:
    """Return the factor with the smallest `left`, between 1/40 and 40."""
    best, width = 1.0, 2.0
    # Search on a logarithmic grid that narrows around the best factor by a cube root each round.
    for _ in range(5):
        best = min((best * width ** (i / 3) for i in range(-6, 7)), key=left)
        width **= 1 / 3
    return best


def filtered(scored: Scored) -> Cause | None:
    # If every token is more likely on the server, a filter removed others.
    surplus = scored.theirs - scored.train
    # A filter rescales the kept tokens, so it can only raise their logprobs.
    if float(surplus.min()) < -NOISE or float(surplus.mean()) < NOISE:
        return None
    return (
        SAMPLING,
        f"every rollout logprob is above the trainer's, by {float(surplus.mean()):.2g} on "
        f"average: top-p, top-k or min-p removed the other tokens",
    )


def cause_in_head(left: Callable[[torch.dtype | None], float], own: torch.dtype) -> Cause | None:
    """Return the dtype of the server's head, if it explains the difference.

    Args:
        left: difference that remains with the head in a dtype; None: as it is.
    """
    before = left(None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype != own and left(dtype) <= LEFT * before:
            return (
                HEAD_DTYPE,
                f"the server computes with its head in {dtype_name(dtype)}, the trainer in "
                f"{dtype_name(own)}",
            )
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Sampler(NamedTuple):
    """Settings between logits and logprobs."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __str__(self) -> str:
        words = (
            ("temperature", self.temperature, 1.0),
            ("top-k", self.top_k, 0),
            ("top-p", self.top_p, 1.0),
            ("min-p", self.min_p, 0.0),
            ("repetition penalty", self.repetition, 1.0),
            ("presence penalty", self.presence, 0.0),
            ("frequency penalty", self.frequency, 0.0),
        )
        return ", ".join(f"{name} {value:g}" for name, value, off in words if value != off)

    @property
    def changed(self) -> int:
        """Number of settings that differ from plain sampling."""
        return sum(a != b for a, b in zip(self, Sampler(), strict=True))


PLAIN = Sampler()
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
TOP_KS = (0, 1, 5, 10, 20, 30, 40, 50, 64, 100)
TOP_PS = (1.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
MIN_PS = (0.01, 0.02, 0.05, 0.1, 0.2)
REPETITIONS = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
PENALTIES = (-1.0, -0.5, 0.2, 0.5, 1.0, 1.5, 2.0)
# Likeliest tokens of a position that a filter looks at; the rest counts as removed.
HEADMOST = 1024
# Positions on which every setting is tried, and settings that are then tried on all.
SCREENED, BEST = 48, 16
FITS = 1e-4
"""Difference in nats that needs no better fit."""


class Distribution:
    """Logits of T positions, their tokens, and how often each token came before."""

    def __init__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        before: list[list[int]],
        prompts: list[int],
    ) -> None:
        """Args:
        logits: [T, V] float32.
        tokens: [T] int64.
        before: the tokens before each position.
        prompts: how many of those are the prompt's.
        """
        self.logits, self.tokens, self.before, self.prompts = logits, tokens, before, prompts
        self._sorted: torch.Tensor | None = None
        self._totals: dict[float, torch.Tensor] = {}
        self._counts: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None = None

    def spread_out(self, count: int) -> Distribution:
        """Return about `count` of the positions, from everywhere."""
        step = max(1, len(self.tokens) // count)
        some = Distribution(
            self.logits[::step], self.tokens[::step], self.before[::step], self.prompts[::step]
        )
        if self._sorted is not None:
            some._sorted = self._sorted[::step]
        return some

    def logprobs(self, sampler: Sampler) -> torch.Tensor:
        """Return the logprobs of the tokens under `sampler`, [T]; -inf for a removed token."""
        if sampler[4:] != PLAIN[4:]:
            other = Distribution(self._penalised(sampler), self.tokens, self.before, self.prompts)
            return other.logprobs(sampler._replace(repetition=1.0, presence=0.0, frequency=0.0))
        temperature = sampler.temperature
        chosen = self.logits.gather(1, self.tokens[:, None])[:, 0] / temperature
        # The sum over a large vocabulary costs more than everything else.
        if temperature not in self._totals:
            self._totals[temperature] = (self.logits / temperature).logsumexp(1)
        total = self._totals[temperature]
        if sampler[1:4] == PLAIN[1:4]:
            return chosen - total
        top = self.headmost() / temperature
        kept = _kept(top, total, sampler)
        last = torch.where(kept, top, torch.inf).amin(1)
        total = torch.where(kept, top, -torch.inf).logsumexp(1)
        return torch.where(chosen >= last - 1e-5, chosen - total, -torch.inf)

    def headmost(self) -> torch.Tensor:
        """Return the largest logits of each position in order, [T, K]."""
        if self._sorted is None:
            self._sorted = self.logits.topk(min(HEADMOST, self.logits.shape[1]), dim=1).values
        return self._sorted

    def _penalised(self, sampler: Sampler) -> torch.Tensor:
        if self._counts is None:
            self._counts = self._count()
        every, drawn = self._counts
        logits = self.logits.clone()
        rows, tokens = every
        some = logits[rows, tokens]
        logits[rows, tokens] = torch.where(
            some > 0, some / sampler.repetition, some * sampler.repetition
        )
        # Presence and frequency count the completion alone.
        rows, tokens, times = drawn
        logits[rows, tokens] -= sampler.presence + sampler.frequency * times
        return logits

    def _count(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return position and token of each token before a position; drawn ones with a count."""
        every, drawn = [], []
        for row, (seen, prompt) in enumerate(zip(self.before, self.prompts, strict=True)):
            every += [(row, token) for token in set(seen)]
            drawn += [(row, token, n) for token, n in Counter(seen[prompt:]).items()]
        device = self.logits.device
        return (
            tuple(torch.tensor(every, device=device).reshape(-1, 2).T),
            tuple(torch.tensor(drawn, device=device).reshape(-1, 3).T),
        )


def _kept(top: torch.Tensor, total: torch.Tensor, sampler: Sampler) -> torch.Tensor:
    """Return the kept ones of the sorted scores `top`, [T, K] bool."""
    kept = torch.ones_like(top, dtype=torch.bool)
    if sampler.top_k:
        kept[:, sampler.top_k :] = False
        total = top[:, : sampler.top_k].logsumexp(1)
    mass = (top - total[:, None]).exp()
    if sampler.top_p < 1.0:
        # A token stays while those before it have less than top-p together.
        kept &= mass.cumsum(1) - mass < sampler.top_p
    if sampler.min_p:
        kept &= mass >= sampler.min_p * mass[:, :1]
    return kept


def samplers() -> Iterable[Sampler]:
    """Settings to try, the plainest first."""
    yield from (PLAIN._replace(temperature=t) for t in TEMPERATURES if t != 1.0)
    yield from (PLAIN._replace(top_p=p) for p in TOP_PS[1:])
    yield from (PLAIN._replace(top_k=k) for k in TOP_KS[1:])
    yield from (PLAIN._replace(min_p=p) for p in MIN_PS)
    yield from (PLAIN._replace(repetition=r) for r in REPETITIONS)
    yield from (PLAIN._replace(presence=p) for p in PENALTIES)
    yield from (PLAIN._replace(frequency=p) for p in PENALTIES)
    for temperature, top_k, top_p in product(TEMPERATURES, TOP_KS, TOP_PS):
        sampler = Sampler(temperature, top_k, top_p)
        if sampler.changed > 1:
            yield sampler


def best_sampler(distribution: Distribution, theirs: torch.Tensor) -> tuple[Sampler, float]:
    """Return the settings that fit the engine's logprobs best, and the difference that is left."""
    distribution.headmost()
    few = distribution.spread_out(SCREENED)
    some = theirs[:: max(1, len(theirs) // SCREENED)]
    every = [PLAIN, *samplers()]
    gaps = [gap(few.logprobs(sampler), some) for sampler in every]
    best = sorted(range(len(every)), key=gaps.__getitem__)[:BEST]
    found, left = PLAIN, gap(distribution.logprobs(PLAIN), theirs)
    for sampler in (every[i] for i in sorted(best)):
        now = gap(distribution.logprobs(sampler), theirs)
        # A setting more must halve what is left.
        if now < (0.5 if sampler.changed > found.changed else 0.98) * left:
            found, left = sampler, now
    return _refined(distribution, theirs, found, left) if found != PLAIN else (found, left)


def _refined(
    distribution: Distribution, theirs: torch.Tensor, found: Sampler, left: float
) -> tuple[Sampler, float]:
    """Add a repetition penalty if it helps, then move the numbers of `found` off the grid."""
    for repetition in REPETITIONS if found.repetition == 1.0 else ():
        other = found._replace(repetition=repetition)
        if (now := gap(distribution.logprobs(other), theirs)) < 0.5 * left:
            found, left = other, now
    for _ in range(2):
        if left < FITS:
            break
        for name, step in (("temperature", 0.01), ("top_p", 0.005), ("repetition", 0.01)):
            value = getattr(found, name)
            if value == getattr(PLAIN, name):
                continue
            for i in range(-10, 11):
                other = found._replace(**{name: round(value + i * step, 6)})
                if other.top_p <= 1.0 and (now := gap(distribution.logprobs(other), theirs)) < left:
                    found, left = other, now
    return found, left


def drawn_otherwise(distribution: Distribution) -> str | None:
    """Evidence that the tokens were not drawn from the plain distribution, or None."""
    top = distribution.headmost()
    total = distribution.logits.logsumexp(1)
    chosen = distribution.logits.gather(1, distribution.tokens[:, None])[:, 0]
    count = len(chosen)
    if count < FEWEST_TOKENS:
        return None
    # Probability of the tokens that are likelier than the drawn one, plus a random part of its
    # own: uniform in [0, 1] under plain sampling.
    above = torch.where(top > chosen[:, None] + 1e-5, (top - total[:, None]).exp(), 0.0).sum(1)
    own = torch.rand(count, generator=torch.Generator().manual_seed(count)).to(chosen.device)
    place = (above + own * (chosen - total).exp()).sort().values
    steps = torch.arange(1, count + 1, device=place.device) / count
    distance = float(torch.maximum(steps - place, place - steps + 1 / count).max())
    if distance * count**0.5 < UNLIKELY:
        return None

    def likelihood(temperature: float) -> float:
        scaled = distribution.logits / temperature
        return float((chosen / temperature - scaled.logsumexp(1)).sum())

    best = max((0.2 + 0.05 * i for i in range(37)), key=likelihood)
    fit = f"; their likelihood is largest at a temperature of {best:.2f}"
    return (
        f"{count} drawn tokens lie in the likeliest {float(place[-1]):.0%} of the probability"
        f"{fit if abs(best - 1.0) > 0.05 else ''}"
    )


# Kolmogorov's statistic that chance exceeds in one of 10^9 cases.
UNLIKELY = 3.3
