"""Cause of an audit -> what to do about it, in any stack."""

from __future__ import annotations

from atropos_common.protocol import audit as causes
from atropos_common.protocol import trainer_records as records

FIXES: dict[str, str] = {
    causes.ADAPTER: (
        "name the adapter in each request (the model's name in vLLM, lora_path in SGLang), and "
        "compare rank, alpha and target modules with adapter_config.json"
    ),
    causes.TIED_HEAD: (
        "export the tied tensor once, and update lm_head whenever the embedding is updated"
    ),
    causes.HALF_LOADED: (
        "compare the names that the loader takes with those that are sent; restart the engine"
    ),
    causes.ROTARY: "compare rope_theta and rope_scaling with config.json (rope_parameters)",
    causes.WINDOW: "compare sliding_window and the attention backend; update the engine",
    causes.PADDING: "cut the logits to the vocabulary before the softmax",
    causes.QUANTISED: "serve the folder without quantization, or audit the quantized folder",
    causes.DTYPE: "give the engine the folder's dtype (--dtype), or audit with --dtype",
    causes.TOKENIZER: "give the engine this folder's tokenizer and chat template",
    causes.ROUTING: "record the experts in the engine and replay them in the trainer",
    causes.PROMPT: "send token ids, and turn off added start tokens and truncation",
    causes.CONFIG: "compare the engine's config with config.json; remove overrides",
    records.STALE_WEIGHTS: "publish the weights again, then audit again; restart the engine if not",
    records.STALE_PREFIX: "reset the prefix cache after each update (POST /reset_prefix_cache)",
    records.TEMPERATURE: (
        "vLLM: --logprobs-mode processed_logprobs, or sample at temperature 1; send the "
        "temperature with each request"
    ),
    records.SAMPLING: (
        "send top_p = 1, top_k = -1 and no penalties with each request, and start vLLM with "
        "--generation-config vllm"
    ),
    records.SHIFTED: "logprob i belongs to the token i that the engine drew",
    records.BROKEN_WEIGHTS: "go back to a checkpoint; the weights hold NaN or infinite values",
    records.OTHER_WEIGHTS: (
        "compare the folder with the one that the engine was started with; name an earlier "
        "checkpoint with --older"
    ),
}
