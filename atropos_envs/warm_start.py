"""Teach the tiny model to add, badly, so that reinforcement learning has something to select.

    python -m atropos_envs.warm_start --output runs/warm-start --seed 0 [--vocab-rows 128]

Takes about 22 seconds on one thread; the same seed gives the same model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from atropos_common.system.files import made_aside
from atropos_envs.arithmetic import MAX_NEW_TOKENS, Sum, Task, make_task, write_task
from atropos_envs.tiny_model import EOS_ID, PAD_ID, VOCABULARY, build_tiny_model, save_model

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

STEPS = 400
BATCH = 64
PEAK_LR = 1.5e-3
WARMUP_STEPS = 20
# Learning rate of the last step, as a share of the peak.
FINAL_LR = 0.05
# Tight, for a better start. Mean reward of the last 5 of 60 GRPO steps (plain torch, lag 1): 0.93,
# 0.94, 0.96 (seeds 0 to 2) at 0.1; 0.94, 0.95, 0.93 at 0.3; 0.86 and 0.87 (seeds 0 and 2) without
# clipping.
MAX_GRAD_NORM = 0.1
# Share of the teacher's answers without the carry: the model then samples the right answer to three
# carries out of ten, and never answers them right greedily.
FORGETS = 0.7
# torch's `ignore_index` of the cross entropy.
IGNORED = -100


class Examples(NamedTuple):
    """The teacher's answers to each of Q questions, padded to W tokens."""

    right: torch.Tensor
    """int64 [Q, W]: prompt, right answer, end."""
    wrong: torch.Tensor
    """int64 [Q, W]: prompt, answer without its carry, end."""
    prompt_lengths: torch.Tensor
    """int64 [Q]."""


def encode(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def make_examples(questions: Sequence[Sum]) -> Examples:
    import torch

    width = max(len(question.prompt) + len(question.answer) + 1 for question in questions)

    def rows(answers: Sequence[str]) -> torch.Tensor:
        pairs = zip(questions, answers, strict=True)
        # Ragged, then padded on the right to the longest row.
        full = [[*encode(question.prompt + answer), EOS_ID] for question, answer in pairs]
        return torch.tensor([row + [PAD_ID] * (width - len(row)) for row in full])

    return Examples(
        right=rows([question.answer for question in questions]),
        wrong=rows([question.without_carry for question in questions]),
        prompt_lengths=torch.tensor([len(question.prompt) for question in questions]),
    )


def sample_batch(
    examples: Examples, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, int64 [BATCH, W]; labels are `IGNORED` on prompt and padding."""
    import torch

    picked = torch.randint(len(examples.right), (BATCH,), generator=generator)
    forgets = torch.rand(BATCH, 1, generator=generator) < FORGETS
    tokens = torch.where(forgets, examples.wrong[picked], examples.right[picked])
    # [W], compared with [BATCH, 1]: the tokens behind each prompt.
    position = torch.arange(tokens.shape[1])
    answered = (position >= examples.prompt_lengths[picked, None]) & (tokens != PAD_ID)
    return tokens, torch.where(answered, tokens, IGNORED)


def learning_rate_factor(step: int) -> float:
    """Return the share of the peak."""
    # Linear up, then linear down.
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 1 - (1 - FINAL_LR) * (step - WARMUP_STEPS) / max(1, STEPS - 1 - WARMUP_STEPS)


def teach(model: Qwen3ForCausalLM, task: Task) -> None:
    """Train `model` in place on the teacher's answers."""
    import torch

    generator = torch.Generator().manual_seed(task.seed)
    examples = make_examples(task.training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    started = time.monotonic()
    for step in range(1, STEPS + 1):
        # int64 [BATCH, W]
        tokens, labels = sample_batch(examples, generator)
        # [BATCH, W - 1, vocabulary]: position t predicts token t + 1.
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            seconds = time.monotonic() - started
            print(f"step {step:3d}/{STEPS}  loss {loss.item():.3f}  {seconds:.1f} s", flush=True)


def answer_questions(
    model: Qwen3ForCausalLM, questions: Sequence[Sum], generator: torch.Generator | None = None
) -> list[list[int]]:
    """Return one completion for each question; greedy without a generator."""
    import torch

    answers: list[list[int]] = [[] for _ in questions]
    by_length: dict[int, list[int]] = {}
    for index, question in enumerate(questions):
        # Questions of one prompt length make a batch without padding.
        by_length.setdefault(len(question.prompt), []).append(index)
    for indices in by_length.values():
        tokens = torch.tensor([encode(questions[index].prompt) for index in indices])
        prompt_length = tokens.shape[1]
        for _ in range(MAX_NEW_TOKENS):
            with torch.no_grad():
                # [n, vocabulary] of the next token. No KV cache: prompts are a few tokens long.
                logits = model(input_ids=tokens).logits[:, -1].float()
            if generator is None:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
        for index, row in zip(indices, tokens[:, prompt_length:].tolist(), strict=True):
            # Cut behind the first end token; rows go on until `MAX_NEW_TOKENS`.
            answers[index] = row[: row.index(EOS_ID) + 1] if EOS_ID in row else row
    return answers


def accuracy(
    model: Qwen3ForCausalLM, questions: Sequence[Sum], generator: torch.Generator | None = None
) -> float:
    """Return the share of questions with the exact digits and the end token."""
    answers = answer_questions(model, questions, generator)
    right = [
        tokens == [*encode(question.answer), EOS_ID]
        for tokens, question in zip(answers, questions, strict=True)
    ]
    return sum(right) / len(right)


def measure(model: Qwen3ForCausalLM, task: Task) -> dict[str, float]:
    """Return the accuracies before reinforcement learning."""
    import torch

    generator = torch.Generator().manual_seed(task.seed)
    model.eval()
    return {
        # Four samples of each question, for a smaller error of the mean.
        "sampled": accuracy(model, [*task.training] * 4, generator),
        "greedy": accuracy(model, task.training),
        "held_out": accuracy(model, task.held_out),
        "carries": accuracy(model, task.carries),
    }


def warm_start(
    output: Path, *, seed: int = 0, vocab_rows: int = len(VOCABULARY)
) -> dict[str, float]:
    """Write the demo's model to the new folder `output`; return its accuracies, 0 to 1.

    Raises:
        FileExistsError: `output` exists.
    """
    if output.exists():
        raise FileExistsError(_exists(output))
    # Written aside and renamed, so that a folder of this name is always complete.
    with made_aside(output) as aside:
        task = make_task(seed)
        model = build_tiny_model(seed=seed, vocab_rows=vocab_rows)
        teach(model, task)
        result = measure(model, task)
        save_model(model, aside)
        write_task(task, aside, result)
    return result


def _exists(output: Path) -> str:
    return f"{output} exists; delete it to warm-start again, or name another folder"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m atropos_envs.warm_start", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the model; must not exist yet"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vocab-rows",
        type=int,
        default=len(VOCABULARY),
        help="rows of the embeddings, unused ones last; vLLM 0.26 on GPUs needs 128 for LoRA "
        "(default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    # Before the import of torch, which takes seconds.
    if options.output.exists():
        print(f"warm start: {_exists(options.output)}", file=sys.stderr)
        return 2
    if options.vocab_rows < len(VOCABULARY):
        needed = f"the {len(VOCABULARY)} tokens need a row each"
        parser.error(f"--vocab-rows {options.vocab_rows}: {needed}")
    import torch

    # The matrices are tiny: a second thread gains a third on an idle machine and loses tenfold on a
    # busy one.
    torch.set_num_threads(1)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    try:
        result = warm_start(options.output, seed=options.seed, vocab_rows=options.vocab_rows)
    except FileExistsError:
        print(f"{options.output}: another process has just made it", flush=True)
        return 0
    shown = "  ".join(f"{name} {value:.2f}" for name, value in result.items())
    print(f"{options.output}: accuracy {shown}  ({time.monotonic() - started:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
