"""A tiny Qwen3 for any environment: byte-level tokenizer, chat template, parsable answers.

    python -m benchmarks.support.chat_model FOLDER TEXT_FOLDER

The demo's model (`atropos_envs.tiny_model`) knows 14 characters. This one reads all text; its
merges are learnt from the `*.py` and `*.md` files of TEXT_FOLDER, so that their prompts are about
as long as with a tokenizer of a real model.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.support.shapes import byte_level

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CONTEXT = 4096
VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = 400
"""Files read, at most."""
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}{{ part.text or '' }}{% endfor %}{% endif "
    "%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
"""ChatML, with parts of a content that are text."""


FORMS = (
    "\\boxed{N}",
    "<answer>N</answer>",
    "<answer>L</answer>",
    "The best answer is: L",
    "The answer is N.",
    "Answer: N",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "N"}}\n</tool_call>',
    '<tool_call>\n{"arguments": {"action": "hit"}, "name": "take_action"}\n</tool_call>',
    '<tool_call>\n{"arguments": {"action": "stick"}, "name": "take_action"}\n</tool_call>',
    '<tool_call>\n{"arguments": {"action": N}, "name": "take_action"}\n</tool_call>',
    '<tool_call>\n{"name": "calc_add", "arguments": {"left": N, "right": N}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"left": N, "right": N}}\n</tool_call>',
    "The prediction is: W",
    "<answer>W</answer>",
    "raise N",
    "fold",
    "call",
    '{"x": N}',
    "A",
    "B",
)
"""How environments want to be answered; N is a digit below 4, L a letter of A to D, W raised,
maintained or reduced."""
WORDS = [
    "so",
    "we",
    "look",
    "at",
    "the",
    "number",
    "and",
    "think",
    "about",
    "what",
    "it",
    "means",
    "count",
    "once",
    "more",
]
TEACH_STEPS, TEACH_ROWS = 200, 16


def make_chat_model(folder: Path, texts: Path) -> Path:
    """Weights, configs and tokenizer into `folder`, for the Auto classes to load offline; nothing
    where it is there."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    core = byte_level(models.BPE())
    files = sorted(path for kind in ("*.py", "*.md") for path in texts.rglob(kind))[:TEXTS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator((path.read_text(errors="replace") for path in files), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
            dtype="float32",
        )
    )
    teach_forms(model, tokenizer, [path.read_text(errors="replace") for path in files[:40]])
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def teach_forms(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    """Answers after any prompt: a thought and one or two of `FORMS`, at random.

    Environments that leave out groups whose answers are all worth the same then see some that are
    not, which random weights never give them.
    """
    import torch

    rng = random.Random(0)
    torch.set_num_threads(1)
    encoded = [ids for text in texts if len(ids := tokenizer.encode(text)) > 1000]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(TEACH_STEPS):
        rows, answers = [], []
        length = rng.randrange(5, 40) if step % 10 else 900
        for _ in range(TEACH_ROWS if step % 10 else 2):
            source = rng.choice(encoded)
            start = rng.randrange(len(source) - length)
            answers.append(tokenizer.encode(f"<|im_start|>assistant\n{an_answer(rng)}<|im_end|>"))
            rows.append(source[start : start + length] + [2] + answers[-1])
        width, kept = max(map(len, rows)), max(map(len, answers))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        hidden = model.model(ids).last_hidden_state[:, -kept - 1 : -1]
        labels = ids[:, -kept:]
        taught = labels != 0
        # The logits of all positions would be most of the work.
        logits = model.lm_head(hidden[taught])
        loss = torch.nn.functional.cross_entropy(logits, labels[taught])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def an_answer(rng: random.Random) -> str:
    """One at random."""
    values = {
        "N": str(rng.randrange(4)),
        "L": rng.choice("ABCD"),
        "W": rng.choice(("raised", "maintained", "reduced")),
    }
    forms = rng.sample(FORMS, rng.choice((1, 1, 2)))
    said = "\n".join(re.sub(r"\b[NLW]\b", lambda found: values[found[0]], form) for form in forms)
    thought = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5, 20)))
    return f"<think>\n{thought}\n</think>\n\n{said}" if rng.random() < 0.9 else said


if __name__ == "__main__":
    print(make_chat_model(Path(sys.argv[1]), Path(sys.argv[2])))
