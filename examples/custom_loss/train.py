"""A loss of your own, trained on recorded rollouts: no server, no run-api, no GPU.

python examples/custom_loss/train.py
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer_core import TrainingConfig, train

STEPS, SIZE, NEW = 8, 16, 6
"""Batches, completions of a batch, and tokens of a completion."""


def soft_clip(logprobs, rollout_logprobs, advantages, sequences, low=0.2, high=0.3):
    """The loss of each token: a ratio outside of its range counts less, where PPO cuts it off.

    All tensors are [T]. `logprobs` has the gradient; `rollout_logprobs` is the base of the ratio.
    """
    ratio = (logprobs - rollout_logprobs).exp()
    outside = (ratio - ratio.clamp(1 - low, 1 + high)).abs().detach()
    return -ratio * advantages / (1 + 10 * outside)


def record(model, file):
    """Write a line for each step: one group of completions, scored by the share of even tokens."""
    with file.open("w") as lines:
        for step in range(STEPS):
            prompts = torch.tensor([[5, 6, 7 + step]] * SIZE)
            rows = model.generate(prompts, max_new_tokens=NEW, do_sample=True, pad_token_id=0)
            rows = rows.tolist()
            masks = [[-100] * 3 + row[3:] for row in rows]
            scores = [sum(token % 2 == 0 for token in row[3:]) / NEW for row in rows]
            group = {"tokens": rows, "masks": masks, "scores": scores}
            lines.write(json.dumps({"batch": [group]}) + "\n")


def even(model):
    """Share of even tokens among those that the model samples."""
    prompts = torch.tensor([[5, 6, 7 + step] for step in range(STEPS)] * SIZE)
    rows = model.generate(prompts, max_new_tokens=NEW, do_sample=True, pad_token_id=0)
    return (rows[:, 3:] % 2 == 0).float().mean().item()


def main(folder):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "tiny")
    record(model, folder / "rollouts.jsonl")
    config = TrainingConfig(
        model_name=str(folder / "tiny"),
        dtype="float32",
        training_steps=STEPS,
        batch_size=SIZE,
        gradient_accumulation_steps=1,
        minibatches=2,  # several optimizer steps a batch, so that ratios leave 1
        epochs=2,
        ratio_base="proximal",
        lr=1e-3,
        save_path=str(folder / "checkpoints"),
    )
    result = train(config, rollouts=folder / "rollouts.jsonl", loss_fn=soft_clip)
    trained = Qwen3ForCausalLM.from_pretrained(result.path)
    print(f"largest ratio: {max(step['ratio_max'] for step in result.history):.2f}")
    print(f"even tokens: {even(model):.2f} before, {even(trained):.2f} after {result.step} steps")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
