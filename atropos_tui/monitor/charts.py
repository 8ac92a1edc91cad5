"""Charts: the catalogue, their curves, colours and axis limits.

To add a metric, add it to `CHARTS`; a view of the screen (`ui/views.py`) and `PAGE` decide where it
is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from atropos_common.protocol.records import (
    HEALTHY_CLIP_FRACTION,
    HEALTHY_LOGPROB_DIFF,
    HEALTHY_RATIO,
)
from atropos_tui.monitor.format import bytes_text, number, seconds_text

# Formatter of curve values, by unit.
WRITERS: dict[str, Callable[[float | None], str]] = {
    "": number,
    "s": seconds_text,
    "bytes": bytes_text,
}
Range = tuple[float | None, float | None]  # lower and upper bound; None: open


@dataclass(frozen=True)
class CurveSpec:
    """One curve: its label, and the field of the trainer's records."""

    label: str
    metric: str
    colour: str = "primary"
    """Theme colour."""
    scatter: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """Curves with one vertical axis."""

    name: str
    curves: tuple[CurveSpec, ...]
    about: str = ""
    """Description in one sentence, for the report."""
    short: str = ""
    """Name for narrow places."""
    unit: str = ""
    low: float | None = None
    """Lower end of the axis, unless a value is lower."""
    high: float | None = None
    log: bool = False
    healthy: Range | None = None
    over_seconds: bool = False
    """Over seconds before now instead of steps."""

    @property
    def health(self) -> str:
        """Healthy range in words."""
        if self.healthy is None:
            return ""
        low, high = self.healthy
        return f"healthy below {high:g}" if low is None else f"healthy from {low:g} to {high:g}"


# Curves that are no fields of a trainer's record: accuracy by environment and split, and groups
# queued in run-api.
HELD_OUT, QUEUE = "held-out", "queue"

# Batch means and durations are smoothed. Learning rate, maxima, policy lag and counts are exact:
# their averages would be values that never occurred.
NOISY = frozenset(
    {
        "reward_mean",
        "reward_std",
        "loss",
        "logprob_diff_abs_mean",
        "probe_diff_abs_mean",
        "inference_mean",
        "train_mean",
        "kl_k3",
        "useful_groups",
        "ratio_mean",
        "clip_fraction",
        "entropy_mean",
        "completion_tokens_mean",
        "truncated_fraction",
        "grad_norm",
        "step_s",
        "data_wait_s",
        "train_s",
        "sync_s",
        "tokens_per_s",
    }
)

CHARTS = {
    "reward": ChartSpec(
        "Reward",
        (CurveSpec("mean", "reward_mean"), CurveSpec("held-out", HELD_OUT, "accent", scatter=True)),
        "Mean reward of the batch; held-out accuracy by split, where an environment evaluates",
        low=0.0,
        high=1.0,
    ),
    "diff": ChartSpec(
        "Logprob |diff|",
        (
            CurveSpec("rollout", "logprob_diff_abs_mean"),
            CurveSpec("probe", "probe_diff_abs_mean", "success"),
        ),
        short="|diff|",
        high=1.0,
        log=True,
        healthy=(None, HEALTHY_LOGPROB_DIFF),
    ),
    "diff-max": ChartSpec(
        "Logprob |diff| max",
        (
            CurveSpec("rollout", "logprob_diff_abs_max", "warning"),
            CurveSpec("probe", "probe_diff_abs_max", "success"),
        ),
        short="|diff| max",
        log=True,
    ),
    "logprobs": ChartSpec(
        "Mean logprob",
        (CurveSpec("inference", "inference_mean"), CurveSpec("training", "train_mean", "accent")),
        short="logprob",
    ),
    "kl": ChartSpec(
        "KL", (CurveSpec("k3", "kl_k3"),), "Estimate k3 of KL(rollout policy || trainer)", low=0.0
    ),
    "useful": ChartSpec(
        "Useful groups",
        (CurveSpec("share", "useful_groups"),),
        "Share of a step's groups that teach something: in the others all scores are equal",
        short="Useful",
        low=0.0,
        high=1.0,
    ),
    "lr": ChartSpec(
        "Learning rate", (CurveSpec("lr", "lr"),), "Of the optimizer", short="lr", low=0.0
    ),
    "loss": ChartSpec("Loss", (CurveSpec("loss", "loss"),), "Of the objective, per token"),
    "ratio": ChartSpec(
        "Ratio",
        (CurveSpec("mean", "ratio_mean"),),
        "A token's probability under the trainer over that under the rollout policy",
        healthy=HEALTHY_RATIO,
    ),
    "clip": ChartSpec(
        "Clip fraction",
        (CurveSpec("clipped", "clip_fraction"),),
        "Share of tokens whose ratio the objective clips",
        short="Clip",
        low=0.0,
        healthy=(None, HEALTHY_CLIP_FRACTION),
    ),
    "ratio-max": ChartSpec(
        "Ratio max",
        (CurveSpec("max", "ratio_max", "warning"),),
        "The largest ratio of a token, before anything is clipped",
        log=True,
    ),
    "entropy": ChartSpec(
        "Entropy",
        (CurveSpec("mean", "entropy_mean"),),
        "How undecided the policy is at a trained token, in nats; near 0 it has stopped exploring",
        low=0.0,
    ),
    "length": ChartSpec(
        "Completion tokens",
        (CurveSpec("mean", "completion_tokens_mean"),),
        "Generated tokens of a sequence",
        short="Length",
        low=0.0,
    ),
    "truncated": ChartSpec(
        "Cut off",
        (CurveSpec("share", "truncated_fraction", "warning"),),
        "Share of completions that were cut off",
        low=0.0,
        high=1.0,
    ),
    "grad": ChartSpec(
        "Gradient norm",
        (CurveSpec("norm", "grad_norm"),),
        "Before clipping",
        short="Gradient",
        low=0.0,
    ),
    "lag": ChartSpec(
        "Policy lag",
        (CurveSpec("mean", "policy_lag_mean"), CurveSpec("max", "policy_lag_max", "warning")),
        "Weight versions between the generation of a completion and its training",
        short="Lag",
        low=0.0,
    ),
    "time": ChartSpec(
        "Step time",
        (
            CurveSpec("step", "step_s"),
            CurveSpec("wait", "data_wait_s", "warning"),
            CurveSpec("sync", "sync_s", "success"),
        ),
        short="Step",
        unit="s",
        low=0.0,
    ),
    "queue": ChartSpec(
        "run-api queue", (CurveSpec("groups", QUEUE),), short="Queue", low=0.0, over_seconds=True
    ),
    "tokens": ChartSpec("Tokens/s", (CurveSpec("trained", "tokens_per_s"),), low=0.0),
}


def chart_of(metric: str) -> ChartSpec:
    """Return a chart for any curve of `RunState.metric`."""
    is_time = (metric.endswith("_s") and not metric.endswith("_per_s")) or metric.startswith(
        "sync/"
    )
    unit = "s" if is_time else "bytes" if metric.endswith("_bytes") else ""
    return ChartSpec(metric, (CurveSpec("value", metric),), unit=unit)


PAGE = (
    replace(
        CHARTS["reward"],
        curves=(
            CurveSpec("mean reward", "reward_mean"),
            CurveSpec("held-out", HELD_OUT, scatter=True),
        ),
    ),
    *(CHARTS[name] for name in ("useful", "loss", "lr", "ratio", "ratio-max", "clip")),
    *(CHARTS[name] for name in ("entropy", "length", "truncated", "grad", "lag")),
    ChartSpec(
        "Logprobs",
        (CurveSpec("trainer", "train_mean"), CurveSpec("engine", "inference_mean")),
        "Mean logprob of the rollouts' tokens, by trainer and by engine; one line means aligned",
    ),
    replace(
        CHARTS["diff"],
        high=None,
        curves=(
            CurveSpec("rollouts, mean", "logprob_diff_abs_mean"),
            CurveSpec("rollouts, max", "logprob_diff_abs_max"),
            CurveSpec("probe, mean", "probe_diff_abs_mean"),
        ),
        about="Trainer against engine: over rollouts, policy lag included, and by the probe at "
        "the same weights",
    ),
    replace(CHARTS["kl"], low=None),
    replace(
        CHARTS["tokens"],
        name="Tokens per second",
        curves=(CurveSpec("tokens/s", "tokens_per_s"),),
        about="Of training, over the whole step",
    ),
    ChartSpec(
        "Trainer memory",
        (
            CurveSpec("main memory", "rss_bytes"),
            CurveSpec("GPU allocated", "allocated_bytes"),
            CurveSpec("GPU peak", "peak_bytes"),
        ),
        "Main memory of the process (RSS) and GPU memory of PyTorch's allocator",
        unit="bytes",
        low=0.0,
    ),
)
"""Charts of a report, in reading order."""
