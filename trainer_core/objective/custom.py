"""Custom loss functions: find one by name, and test it before training.

    def my_loss(logprobs, rollout_logprobs, advantages, sequences):
        '''Loss of each of T tokens, [T], in float32, with gradient only through `logprobs`.

        Args:
            logprobs: [T] of the policy, in nats.
            rollout_logprobs: [T], the base of the ratio: as they came with the rollouts, or, with
                `ratio_base = proximal`, the trainer's own before the batch's first optimizer step.
            advantages: [T]
            sequences: `Sequences`, which of them each token belongs to.
        '''

The T tokens are those of one packed row. Several threads call the function, so it must not keep
state between calls. The trainer applies sums, importance weights, masks, the denominator and the
terms of kl_coef, ref_kl_coef and distill_coef. A function that returns `LossSums` does all of that
itself, except for the denominator.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from trainer_core.config import TrainingConfig, flag
from trainer_core.errors import LossError
from trainer_core.objective.loss import Formula, LossSums, Sequences, from_function


def own_loss(
    config: TrainingConfig, function: Formula | None, device: torch.device
) -> Callable[..., LossSums] | None:
    """The function `config.loss` or `function`, as an objective; None if neither is set.

    Raises:
        LossError: it is missing, takes other arguments, raises, or does not return finite losses
            with a gradient.
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
    return from_function(found, name)


def find_function(name: str) -> Formula:
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
    found: Formula = getattr(imported, attribute)
    if not callable(found):
        raise LossError(f"--loss {name}: expected a function, found {type(found).__name__}")
    return found


def _try(function: Formula, name: str, device: torch.device) -> bool:
    """Call the function once on six tokens of two sequences; return True if it returns `LossSums`.

    Raises:
        LossError: as in `own_loss`.
    """
    logprobs = torch.linspace(-2.0, -0.1, 6, device=device).requires_grad_()
    rollout = logprobs.detach() - torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2, -0.2], device=device)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], device=device)
    sequences = Sequences(torch.tensor([0, 0, 0, 1, 1, 1], device=device), 2)
    # `from_function` hides what the function returned.
    given: list[bool] = []

    def noted(*values: Any) -> torch.Tensor | LossSums:
        made = function(*values)
        given.append(isinstance(made, LossSums))
        return made

    total = from_function(noted, f"{name}, tried on six tokens,")(
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
