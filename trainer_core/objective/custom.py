"""A loss function of one's own: found by its name, and tried before anything is trained with it.

    def my_loss(logprobs, rollout_logprobs, advantages, sequences):
        '''Loss of each of T tokens, [T], in float32, with gradient through `logprobs` alone.

        Args:
            logprobs: [T] of the policy, in nats.
            rollout_logprobs: [T] of the policy that the ratio is against: as they came with the rollouts, or, with
                `ratio_base = proximal`, the trainer's own before the batch's first optimizer step.
            advantages: [T]
            sequences: `Sequences`, which of them each token belongs to.
        '''

The T tokens are those of one packed row. It is called from several threads, and must not depend on what it was called
with before. Sums, importance weights, masks, denominator and the terms of kl_coef, ref_kl_coef and distill_coef are the
trainer's; a function that returns `LossSums` of its own does all of that itself, but for the denominator.
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
) -> Callable[..., LossSums] | None:  # fmt: skip
    """The function that `config.loss` names, or `function`, as an objective; null where there is neither.

    Raises:
        LossError: it is not found, takes other arguments, raises, or returns no finite losses with a gradient.
    """
    if function is None and config.loss is None:
        return None
    name = f"--loss {config.loss}" if function is None else f"loss_fn {getattr(function, '__name__', function)}"
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
        raise LossError(f"{name} returns LossSums, to which {', '.join(lost)} cannot be added: return losses by token")
    return from_function(found, name)


def find_function(name: str) -> Formula:
    """The function `package.module:function`.

    Raises:
        LossError: no such module or function, or the module raises as it is imported.
    """
    module, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last: nothing of ours is to be hidden by a folder of its name
    try:
        imported = import_module(module)
    except Exception as error:  # whatever a foreign module does as it is imported
        raise LossError(f"--loss {name}: cannot import {module} ({type(error).__name__}: {error})") from error
    if not hasattr(imported, attribute):
        raise LossError(f"--loss {name}: the module {module} has no {attribute}")
    found: Formula = getattr(imported, attribute)
    if not callable(found):
        raise LossError(f"--loss {name} is no function but {type(found).__name__}")
    return found


def _try(function: Formula, name: str, device: torch.device) -> bool:
    """Call it once on six tokens of two sequences; whether it returns sums.

    Raises:
        LossError: as in `own_loss`.
    """
    logprobs = torch.linspace(-2.0, -0.1, 6, device=device).requires_grad_()
    rollout = logprobs.detach() - torch.tensor([0.0, 0.1, -0.1, 0.0, 0.2, -0.2], device=device)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], device=device)
    sequences = Sequences(torch.tensor([0, 0, 0, 1, 1, 1], device=device), 2)
    given: list[bool] = []

    def noted(*values: Any) -> torch.Tensor | LossSums:
        made = function(*values)
        given.append(isinstance(made, LossSums))
        return made

    total = from_function(noted, f"{name}, tried on six tokens,")(
        logprobs, rollout, advantages, sequences=sequences
    ).loss  # fmt: skip
    if total.requires_grad and not total.ndim:
        total.backward()
    if total.ndim or not bool(total.isfinite()):
        raise LossError(f"{name}, tried on six tokens, returned a loss of {total.tolist()}")
    if logprobs.grad is None or not bool(logprobs.grad.isfinite().all()):
        got = "none" if logprobs.grad is None else "one with NaN or infinity"
        raise LossError(f"{name} must have a finite gradient through logprobs, and has {got}")
    return given[0]
