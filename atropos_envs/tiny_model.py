"""A tiny Qwen3 with random weights and a character tokenizer, to run a whole stack on a CPU.

Nothing is downloaded. The demo warm-starts this model; tests use it as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+="
# A digit d has id d + 2.
VOCABULARY = {token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, *CHARACTERS])}

# Tokens; the demo's sequences have fewer than ten.
MAX_POSITIONS = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id for each character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # BPE without merges is a character model. Unknown characters become padding, so a warm-up
    # prompt such as "Hello" has tokens: vLLM refuses an empty one.
    core = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token=PAD_TOKEN))
    # Joins the characters; the default decoder puts spaces between them.
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=PAD_TOKEN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(dtype: str = "float32", vocab_rows: int = len(VOCABULARY)) -> Qwen3Config:
    """Return the config of a Qwen3 with 0.79 M parameters.

    Args:
        vocab_rows: rows of the embeddings; those beyond the 14 tokens are unused.

    Raises:
        ValueError: fewer rows than tokens.
    """
    from transformers import Qwen3Config

    # vLLM 0.26 on a GPU allocates an adapter's head for at least 128 rows, and does not start with
    # adapters if the model has fewer. So callers may ask for more.
    if vocab_rows < len(VOCABULARY):
        raise ValueError(f"{vocab_rows} rows are too few: there are {len(VOCABULARY)} tokens")
    return Qwen3Config(
        vocab_size=vocab_rows,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype=dtype,
    )


def build_tiny_model(
    *, seed: int = 0, dtype: str = "float32", vocab_rows: int = len(VOCABULARY)
) -> Qwen3ForCausalLM:
    """Build the model with random weights; the caller's random state is unchanged."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config(dtype, vocab_rows)).to(getattr(torch, dtype))
    # transformers' `generate` and vLLM take the end token from here.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def save_model(model: Qwen3ForCausalLM, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
