"""Verdict of an audit: which tokens differ, and which hypothesis explains them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from atropos_common.protocol.audit import (
    DTYPE,
    PADDING,
    PROMPT,
    QUANTISED,
    ROUTING,
    AuditGroup,
    AuditTried,
)
from atropos_common.protocol.trainer_records import (
    BROKEN_WEIGHTS,
    OTHER_WEIGHTS,
    SAMPLING,
    SHIFTED,
    STALE_PREFIX,
    STALE_WEIGHTS,
    TEMPERATURE,
)
from trainer_core.audit.questions import Observed
from trainer_core.audit.reference import HALVES, Reference, Span
from trainer_core.audit.routing import has_routers, router_ties
from trainer_core.objective.alignment import Cause, thresholds
from trainer_core.objective.causes.sampling import (
    PLAIN,
    Distribution,
    best_sampler,
    drawn_otherwise,
    shifted_by_one,
)
from trainer_core.objective.causes.scores import LEFT, gap
from trainer_core.objective.causes.weights import Hypothesis, hypotheses

# Factor on the difference between float32 and half precision, as this side computes both.
ROUNDING_FACTOR = 4.0
HALF_FLOOR = 2e-3
"""Smallest bound in half precision, in nats."""
DTYPE_SEQUENCES = 4
FEWEST = 32
"""Tokens of a group below which it proves nothing."""
# Share of a difference that a cause may leave if it is a rounding of the weights.
LEFT_INEXACT = 0.7
# Share that a cause may leave if it is named as a part of the truth.
LEFT_IN_PART = 0.6
UNSURE = 2.0
"""Factor on the bound below which an unexplained difference is no proof."""
# Share of the tokens of a mixture of experts that count as free from ties of a router.
CALM = 0.7
TIES = 0.2
"""Mean difference in nats, twice the gate's bound, from which ties of a router are a fault."""
SAMPLER_TOKENS = 256
TIE_TOKENS = 4 * SAMPLER_TOKENS
SHORTLIST = 6


@dataclass
class Finding:
    """Groups, and the cause of a difference between them and the reference."""

    groups: list[AuditGroup]
    cause: Cause | None = None
    unsure: str = ""
    """Reason why the difference proves nothing."""
    tried: list[AuditTried] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """Tokens that hypotheses are tested on."""

    observed: list[Observed]
    theirs: torch.Tensor

    @property
    def spans(self) -> list[Span]:
        return [one.span for one in self.observed]


class Diagnosis:
    """Comparison of one set of answers with the reference."""

    def __init__(
        self, reference: Reference, observed: Sequence[Observed], *, until: float = math.inf
    ) -> None:
        self.reference, self.until = reference, until
        whole = [one for one in observed if one.span.count == len(one.logprobs)]
        # Tokens that the folder has no row for end what can be compared.
        self.outside = max((t for one in whole for t in one.span.tokens), default=0)
        self.observed = [one for o in whole if (one := _within(o, reference.vocabulary))]
        plain = reference.logprobs(self._spans)
        self.ours = self._sampled(plain)
        self.routed = has_routers(reference.model)
        self._noise = self._rounding(plain)

    def expected(self) -> list[torch.Tensor]:
        """Return the logprobs that the engine should give to the observed tokens."""
        return self._sampled(self.reference.logprobs(self._spans))

    @property
    def _spans(self) -> list[Span]:
        return [one.span for one in self.observed]

    def _sampled(self, plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the logprobs after each span's sampler."""
        ours = list(plain)
        changed = [i for i, one in enumerate(self.observed) if one.sampler != PLAIN]
        for i in changed:
            one = self.observed[i]
            ours[i] = self.reference.distribution([one.span]).logprobs(one.sampler).cpu()
        return ours

    def _rounding(self, plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Differences between float32 and half precision on this side, for each observed span.

        They are of the same tokens as the engine's: some texts are more sensitive to rounding.
        """
        if self.reference.half is None:
            return [torch.zeros(1) for _ in self.observed]
        rounded = self.reference.in_half(self._spans, self.reference.half)
        return [(a - b).abs() for a, b in zip(rounded, plain, strict=True)]

    @property
    def bound(self) -> float:
        return self._bounds()[0]

    @property
    def calm_bound(self) -> float:
        """Bound for tokens free from ties of a router."""
        return self._bounds()[1]

    def _bounds(self, group: str = "") -> tuple[float, float]:
        """Bounds of a group, or of all: for the mean, and for tokens free from ties of a router."""
        if self.reference.half is None:
            return thresholds("float32").ok, thresholds("float32").ok
        of = [n for n, o in zip(self._noise, self.observed, strict=True) if o.group == group]
        gaps = [torch.cat(some) for some in (self._noise, of) if some]
        noise = max((float(each.mean()) for each in gaps), default=0.0)
        calm = max((_calm(each) for each in gaps), default=0.0) if self.routed else noise
        mean_bound, calm_bound = (max(HALF_FLOOR, ROUNDING_FACTOR * each) for each in (noise, calm))
        return mean_bound, calm_bound

    def find(self) -> Finding:
        """Return the groups and, where one differs, the cause."""
        groups = self._groups()
        finding = Finding(groups)
        values = [value for one in self.observed for value in one.logprobs]
        if not all(map(math.isfinite, values)):
            finding.cause = BROKEN_WEIGHTS, "a logprob of the engine is not a finite number"
            return finding
        bad = {group.name for group in groups if not group.agrees}
        counted = sum(group.tokens for group in groups)
        if counted < FEWEST:
            finding.unsure = f"only {counted} tokens have a logprob"
        elif bad:
            self._explain(finding, bad)
        if self.outside >= self.reference.vocabulary:
            self._beyond(finding)
        elif not bad and not finding.unsure:
            if self._mean() > TIES and (told := self._ties()):
                finding.cause = ROUTING, told
            elif told := self._drawn("sampled"):
                finding.cause = SAMPLING, f"the engine draws otherwise than requested: {told}"
        return finding

    def _ties(self) -> str | None:
        every = self._some(*dict.fromkeys(o.group for o in self.observed), tokens=TIE_TOKENS)
        return router_ties(self.reference, every.spans, every.theirs, self.calm_bound)

    @property
    def tied_tokens(self) -> str:
        """Note on tokens that ties of a router move; empty if there are none."""
        mean = self._mean() if self.routed else 0.0
        if mean <= self.calm_bound:
            return ""
        return (
            f"mixture of experts: {mean:.2g} nats over all tokens, most of it where both sides "
            f"take other experts at a tie; a trainer that replays the engine's routing is free "
            f"from it"
        )

    def _mean(self) -> float:
        """Mean difference over all tokens, in nats."""
        theirs, ours = self._of(*{one.group for one in self.observed})
        return gap(ours, theirs)

    def _beyond(self, finding: Finding) -> None:
        """Name an engine that draws tokens beyond the folder's vocabulary."""
        told = (
            f"the engine drew token {self.outside}; the folder's head has "
            f"{self.reference.vocabulary} rows"
        )
        if finding.cause is None:
            finding.cause, finding.unsure = (PADDING, told), ""
        else:
            finding.cause = finding.cause[0], f"{finding.cause[1]}; {told}"

    def _groups(self) -> list[AuditGroup]:
        found = []
        for name in dict.fromkeys(one.group for one in self.observed):
            theirs, ours = self._of(name)
            gaps = (ours - theirs).abs()
            mean_bound, calm_bound = self._bounds(name)
            pairs = [(float(gaps.mean()), mean_bound)]
            if self.routed:
                # Ties make few tokens jump, so a fault that moves all others may hide in the mean.
                pairs.append((_calm(gaps), calm_bound))
            mean, bound = max(pairs, key=lambda pair: pair[0] / pair[1])
            found.append(AuditGroup(name, len(gaps), mean, float(gaps.max()), bound))
        return found

    def _of(self, *groups: str) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [i for i, one in enumerate(self.observed) if one.group in groups]
        if not chosen:
            return torch.empty(0), torch.empty(0)
        theirs = torch.tensor([v for i in chosen for v in self.observed[i].logprobs])
        return theirs, torch.cat([self.ours[i] for i in chosen])

    def _explain(self, finding: Finding, bad: set[str]) -> None:
        present = {group.name for group in finding.groups}
        if told := self._ties():
            if self._mean() > TIES:
                finding.cause = ROUTING, told
            else:
                finding.unsure = told
            return
        if bad == {"cached"}:
            finding.cause = STALE_PREFIX, _means(finding, "only answers on a cached prefix differ")
            return
        drawn = bad & {"sampled", "default"}
        prompts_agree = "prompt" in present and "prompt" not in bad
        if drawn and (prompts_agree or drawn == {"default"}):
            group = "sampled" if "sampled" in drawn else "default"
            finding.cause, _ = self.in_sampling(group) or (None, 0.0)
            if finding.cause is None and bad == {"default"} and "sampled" in present:
                told = (
                    "only answers without sampling parameters differ, and no sampling explains it"
                )
                finding.unsure = _means(finding, told)
                return
            if finding.cause is None and "prompt" in present:
                finding.cause = (
                    STALE_WEIGHTS,
                    _means(
                        finding,
                        "prompts agree and drawn tokens differ: decoding uses other weights",
                    ),
                )
            if finding.cause:
                return
        if bad <= {"long", "cached"}:
            self._weights(finding, ("long", "cached"))
            return
        self._weights(finding, ("prompt", "sampled", "long"))

    def _some(self, *groups: str, tokens: int = SAMPLER_TOKENS) -> Panel:
        """Return whole spans of the groups, of about `tokens` tokens."""
        chosen: list[Observed] = []
        for one in self.observed:
            if one.group in groups and sum(c.span.count for c in chosen) < tokens:
                chosen.append(one)
        return Panel(chosen, torch.tensor([v for one in chosen for v in one.logprobs]))

    def _drawn(self, group: str) -> str | None:
        panel = self._some(group)
        if not panel.observed or panel.observed[0].sampler != PLAIN:
            return None
        return drawn_otherwise(self.reference.distribution(panel.spans))

    def sampled_by_default(self) -> str | None:
        """Evidence that the server has sampling parameters of its own, or None."""
        return self._drawn("default")

    def in_sampling(self, group: str) -> tuple[Cause, float] | None:
        """Return a cause between logits and logprobs, and the difference that it leaves."""
        panel = self._some(group)
        if not panel.observed:
            return None
        distribution = self.reference.distribution(panel.spans)
        theirs = panel.theirs.to(distribution.logits.device)
        asked = panel.observed[0].sampler
        before = gap(distribution.logprobs(asked), theirs)
        if shifted := shifted_by_one(_OnePanel(panel, distribution)):
            return shifted, 0.0
        likeliest = gap(distribution.logits.log_softmax(1).amax(1), theirs)
        if likeliest <= LEFT * before:
            what = "each logprob is that of the likeliest token, not of the drawn one"
            return (SHIFTED, what), likeliest
        if padded := self._padded(distribution, theirs, before):
            return padded
        sampler, left = best_sampler(distribution, theirs)
        if left > max(LEFT * before, self.bound) or sampler == asked:
            return None
        # Logprobs of temperature 1 although another was requested: the raw ones.
        if sampler == PLAIN:
            return (TEMPERATURE, f"the logprobs are raw; {asked} was requested"), left
        kind = TEMPERATURE if sampler == PLAIN._replace(temperature=sampler[0]) else SAMPLING
        who = "requests without sampling parameters" if group == "default" else "the logprobs"
        should = asked if asked != PLAIN else "plain sampling"
        evidence = f"{who} fit {sampler}, not {should}: {left:.2g} of {before:.2g} nats remain"
        return (kind, evidence), left

    def _padded(
        self, distribution: Distribution, theirs: torch.Tensor, before: float
    ) -> tuple[Cause, float] | None:
        """Empty rows of a padded head each add exp(0) to the sum of the softmax."""
        chosen = distribution.logits.gather(1, distribution.tokens[:, None])[:, 0].double()
        total = distribution.logits.double().logsumexp(1)
        more = ((chosen - theirs).exp() - total.exp()).median()
        rows = round(float(more))
        if not 1 <= rows <= 2 * self.reference.vocabulary:
            return None
        predicted = chosen - torch.logaddexp(total, torch.tensor(math.log(rows)).to(total))
        left = gap(predicted, theirs.double())
        if left > LEFT * before:
            return None
        evidence = (
            f"the softmax has about {rows} empty rows more than the {self.reference.vocabulary} of "
            f"the folder: {left:.2g} of {before:.2g} nats remain"
        )
        return (PADDING, evidence), left

    def _weights(self, finding: Finding, groups: tuple[str, ...]) -> None:
        """Test hypotheses about weights, first on few tokens, then the best on more."""
        full = self._some(*groups, tokens=4 * SAMPLER_TOKENS)
        longest = sorted(full.observed, key=lambda one: -one.span.count)
        few = self._panel(longest[: 2 if len(longest) > 2 else len(longest)])
        before = gap(torch.cat(self.reference.logprobs(full.spans)), full.theirs)
        if (simple := self.in_sampling("prompt" if "prompt" in groups else "long")) or (
            simple := self.in_sampling("sampled")
        ):
            finding.cause, _ = simple
            return
        tried = self._tested(self._all(), few)
        ordered = sorted(tried, key=lambda pair: pair[1])[:SHORTLIST]
        order = {id(h): i for i, (h, _) in enumerate(tried)}
        final = self._tested(sorted((h for h, _ in ordered), key=lambda h: order[id(h)]), full)
        finding.tried = [
            AuditTried(h.kind, h.evidence, left) for h, left in sorted(final, key=lambda p: p[1])
        ]
        finding.cause, finding.unsure = self._chosen(final, before, full)

    def _panel(self, observed: list[Observed]) -> Panel:
        return Panel(observed, torch.tensor([v for one in observed for v in one.logprobs]))

    def _all(self) -> Iterable[Hypothesis]:
        yield from hypotheses(self.reference.model, self.reference.known)
        start = getattr(self.reference.config, "bos_token_id", None)
        if isinstance(start, int):
            yield _Edited(PROMPT, "the server puts a start token before the prompt", [start], 0)
        for count in (1, 2):
            why = f"the server drops the first {count} tokens of the prompt"
            yield _Edited(PROMPT, why, [], count)

    def _tested(self, some: Iterable[Hypothesis], panel: Panel) -> list[tuple[Hypothesis, float]]:
        found: list[tuple[Hypothesis, float]] = []
        for hypothesis in some:
            if time.monotonic() > self.until and found:
                break
            edit: Callable[[Span], Span] = getattr(hypothesis, "edit", lambda span: span)
            with hypothesis.change():
                try:
                    ours = self.reference.logprobs([edit(span) for span in panel.spans])
                except (RuntimeError, ValueError, IndexError):
                    continue  # the model cannot compute so: it is not that
            found.append((hypothesis, gap(torch.cat(ours), panel.theirs)))
        return found

    def _chosen(
        self, tried: list[tuple[Hypothesis, float]], before: float, panel: Panel
    ) -> tuple[Cause | None, str]:
        best = min((left for _, left in tried), default=math.inf)
        near = [(h, left) for h, left in tried if left <= max(1.2 * best, 0.25 * self.bound)]
        # A model that says nothing about a token is nearer to a wrong one than another wrong one.
        whole = min(before, gap(panel.theirs.median(), panel.theirs))
        fitting = next(
            ((h, left) for h, left in near if left <= max(self.bound, self._allowed(h) * whole)),
            None,
        )
        if fitting is not None and (fitting[1] <= self.bound or fitting[0].kind != DTYPE):
            h, left = fitting
            return (h.kind, f"{h.evidence}: {left:.2g} of {before:.2g} nats remain"), ""
        if told := self._other_dtype(panel, before):
            return (DTYPE, told), ""
        if best <= LEFT_IN_PART * whole:
            h, left = min(tried, key=lambda pair: pair[1])
            return (
                h.kind,
                f"most likely, and not all of it: {h.evidence}; {left:.2g} of {before:.2g} nats "
                f"remain",
            ), ""
        if before <= UNSURE * self.bound:
            return None, (
                f"the difference of {before:.2g} nats is near the bound of {self.bound:.2g}, and "
                f"no cause explains it"
            )
        return (
            OTHER_WEIGHTS,
            f"{before:.2g} nats on average, and no hypothesis explains more than "
            f"{max(0.0, 1 - best / before):.0%} of it",
        ), ""

    def _allowed(self, hypothesis: Hypothesis) -> float:
        return LEFT_INEXACT if hypothesis.kind == QUANTISED else LEFT

    def _other_dtype(self, panel: Panel, before: float) -> str | None:
        """Evidence that the engine computes in half precision although the folder says float32."""
        if self.reference.half is not None:
            return None
        spans = panel.spans[:DTYPE_SEQUENCES]
        exact = torch.cat(self.reference.logprobs(spans))
        for name, dtype in reversed(HALVES.items()):
            noise = gap(torch.cat(self.reference.in_half(spans, dtype)), exact)
            if before <= 3.0 * noise:
                return (
                    f"{before:.2g} nats are the rounding of {name} ({noise:.2g} on this side); "
                    f"the folder says float32"
                )
        return None


def _calm(gaps: torch.Tensor) -> float:
    """Mean of the smaller differences, without those that ties of a router make."""
    return float(gaps.sort().values[: max(1, int(CALM * len(gaps)))].mean())


def _within(one: Observed, vocabulary: int) -> Observed | None:
    """Return the part before the first token beyond the vocabulary; None if nothing is left."""
    tokens = one.span.tokens
    end = next((i for i, token in enumerate(tokens) if token >= vocabulary), len(tokens))
    if end <= one.span.start:
        return None
    span = replace(one.span, tokens=tokens[:end])
    return replace(one, span=span, logprobs=one.logprobs[: span.count])


@dataclass(frozen=True)
class _Edited(Hypothesis):
    """The engine computes with another prompt."""

    def __init__(self, kind: str, evidence: str, before: list[int], dropped: int) -> None:
        super().__init__(kind, evidence, nullcontext)
        object.__setattr__(self, "_parts", (before, dropped))

    def edit(self, span: Span) -> Span:
        before, dropped = self._parts  # type: ignore[attr-defined]
        start = span.start + len(before) - dropped
        if start < 1:
            raise ValueError("no token is left before the span")
        return replace(span, tokens=[*before, *span.tokens[dropped:]], start=start)


class _OnePanel:
    """A panel as `shifted_by_one` reads it."""

    def __init__(self, panel: Panel, distribution: Distribution) -> None:
        self.distribution = distribution
        self.train = self.at(1.0)
        self.theirs = panel.theirs.to(self.train.device)
        self.sequences = torch.tensor(
            [i for i, one in enumerate(panel.observed) for _ in range(one.span.count)],
            device=self.train.device,
        )
        self.assumed = panel.observed[0].sampler.temperature

    def at(self, factor: float) -> torch.Tensor:
        return self.distribution.logprobs(PLAIN._replace(temperature=factor))

    def left(self, factor: float) -> float:
        return gap(self.at(factor), self.theirs)

    def share(self, cause: Callable[[], Cause | None]) -> Cause | None:
        return cause()


def _means(finding: Finding, text: str) -> str:
    means = ", ".join(f"{g.name} {g.difference:.2g}" for g in finding.groups)
    return f"{text} (mean nats: {means}; bound {finding.groups[0].bound:.2g})"
