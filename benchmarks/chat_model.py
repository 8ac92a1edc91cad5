"""A tiny Qwen3 with random weights that any environment can talk to: a byte-level tokenizer and a chat template.

    python -m benchmarks.chat_model FOLDER TEXT_FOLDER

The demo's model (`atropos_envs.tiny_model`) knows 14 characters. This one reads all text; its merges are learnt from
the `*.py` and `*.md` files of TEXT_FOLDER, so that their prompts are about as long as with a tokenizer of a real model.
"""

from __future__ import annotations

import sys
from pathlib import Path

CONTEXT = 4096
VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_WEIGHT = 1.1
"""Gives the end a share of about one token in 150; without it, one in 4,096, and every answer fills the context."""
TEXTS = 400
"""Files read, at most."""
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}{{ part.text or '' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
"""ChatML, with parts of a content that are text."""


def make_chat_model(folder: Path, texts: Path) -> Path:
    """Weights, configs and tokenizer into `folder`, for the Auto classes to load offline; nothing where it is there."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    files = sorted(path for kind in ("*.py", "*.md") for path in texts.rglob(kind))[:TEXTS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator((path.read_text(errors="replace") for path in files), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2], model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=2, pad_token_id=0, dtype="float32",
        )
    )  # fmt: skip
    # The first channel is the same in every hidden state, so it is a bias of the tied head: of the end, here.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.1
        model.model.embed_tokens.weight[2, 0] = END_WEIGHT
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make_chat_model(Path(sys.argv[1]), Path(sys.argv[2])))
