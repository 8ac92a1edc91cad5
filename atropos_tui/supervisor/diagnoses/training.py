"""Log rules about what flows: rollouts and their logprobs, gradients, data sets, trackers."""

from __future__ import annotations

from atropos_common.control import Role
from atropos_common.records import (
    BROKEN_WEIGHTS,
    HEAD_DTYPE,
    MISSING,
    OTHER_WEIGHTS,
    SAMPLING,
    SHIFTED,
    STALE_PREFIX,
    STALE_WEIGHTS,
    TEMPERATURE,
)
from atropos_tui.supervisor.diagnoses.signs import LogRule, Sign

ALIGNMENT_FIX = (
    "a `cause` in the evidence names it. Else: was {engine} restarted behind the trainer's back? atropos-tui "
    "restart {engine} brings both to the same weights. Other sampling than plain temperature (top-p, top-k, min-p)? "
    "An architecture that rebinds its weights? Try enforce-eager = true under [vllm.args] once, to tell CUDA graphs "
    "from the rest"
)
GRADIENT_FIX = (
    "frozen layers below and reentrant checkpointing cut the graph: use_reentrant=False "
    "(gradient_checkpointing_kwargs), or model.enable_input_require_grads(); and check that train_layer_indices "
    "([trainer]) names layers the model has"
)

NO_LOGPROBS_FIX = (
    'openai.server_type = "vllm" under [env.args] (a profile derives it), and an engine with POST /generate: python -m '
    "vllm_server, the default when `command` is left out under [vllm]"
)

CAUSE_FIXES = {
    STALE_WEIGHTS: (
        "the engine generates with weights that the trainer has left behind: atropos-tui restart {engine} brings both "
        "to the same ones. If it comes back, a layer computes with a copy of its weights: enforce-eager = true under "
        "[vllm.args], or another mode (broadcast, lora_only)"
    ),
    STALE_PREFIX: (
        "keys and values of older weights are used again: atropos-tui restart {engine}. If it comes back, "
        "enable-prefix-caching = false under [vllm.args] until it is found"
    ),
    TEMPERATURE: (
        "let the environment say its sampling temperature (generation_params or group_overrides), or set [trainer] "
        "temperature to it; and leave logprobs-mode = processed_logprobs under [vllm.args], the default here"
    ),
    SHIFTED: (
        "the environment puts logprobs on the wrong tokens: inference_logprobs[i] belongs to tokens[i], prompt tokens "
        "have 1.0. atroposlib's ManagedServer does it right"
    ),
    MISSING: NO_LOGPROBS_FIX,
    HEAD_DTYPE: (
        "give both sides the same types: dtype under [trainer] and [vllm], and no head_dtype under [vllm.args] "
        "hf-overrides"
    ),
    BROKEN_WEIGHTS: (
        "NaN or infinity in the weights: atropos-tui up PROFILE --resume RUN goes back to the last checkpoint; lower "
        "[trainer] lr and keep clip_eps at 0.2"
    ),
    OTHER_WEIGHTS: (
        "trainer and engine began with different weights or types: is `model` the same for both, and dtype? "
        "atropos-tui restart {engine} writes the trainer's weights into it"
    ),
    SAMPLING: (
        "the rollouts were not sampled by plain temperature: no top_p, top_k, min_p or penalties in the environment's "
        "requests, no generation-config under [vllm.args], and its temperature in generation_params"
    ),
}
"""Cause of an alignment record -> what to do."""

ALIGNMENT_MISMATCH = LogRule(
    "alignment_mismatch",
    "trainer and engine disagree about the same tokens: alignment MISMATCH",
    ALIGNMENT_FIX,
    # The alignment record of the same step says it with numbers; the line alone speaks where there is none.
    (Sign("MISMATCH", r"LogProb Alignment: \[?MISMATCH|\[MISMATCH!\]", patience_s=5),),
    roles=(Role.TRAINER,),
    at_exit=False,
)
LOGPROBS_POSITIVE = LogRule(
    "logprobs_positive",
    "the rollouts' logprobs are positive: they are placeholders",
    "1.0 marks masked tokens and leaked into the generated ones. " + NO_LOGPROBS_FIX,
    (Sign("should be negative", r"ref_logprobs.*should be negative"), Sign("inference_logprobs alignment is wrong")),
    roles=(Role.TRAINER,),
)
GENERATE_404 = LogRule(
    "generate_404",
    "404 on /generate: this server has no such route",
    "stock vLLM has only /v1: leave out `command` under [vllm] (python -m vllm_server has /generate with "
    "logprobs), and let openai.base_url be derived",
    (
        Sign('"POST /generate HTTP/1.1" 404'),
        Sign("/generate has no such route"),
        Sign("/generate: HTTP 404"),
        Sign("404, message=", r"404, message=.*/generate"),
    ),
    roles=(Role.ENGINE, Role.ENV, Role.TRAINER),
)
NO_LOGPROBS = LogRule(
    "no_logprobs",
    "the rollouts come without logprobs: wrong server_type",
    NO_LOGPROBS_FIX,
    (
        Sign("GRPO requires inference_logprobs"),
        Sign("returns no logprobs"),
        Sign("answers without logprobs"),
        Sign("Tokens and logprobs not supported by base OpenAI API"),
        Sign("OpenAI endpoints do not support token IDs or logprobs"),
        Sign("response missing 'prompt_logprobs'"),
    ),
    roles=(Role.ENV, Role.TRAINER),
)
ROLLOUTS_LEFT_OUT = LogRule(
    "rollouts_left_out",
    "rollouts are left out that cannot be trained on",
    "the evidence names the reason, an example and its environment, and left_out of each step counts: mend that "
    "environment or stop it (atropos-tui logs {env} -n 50). Token ids outside of the vocabulary are from another "
    "model's tokenizer; lengths and lags from seq_len, max_completion_tokens and max_policy_lag under [trainer]",
    (
        Sign("nothing to train on in the last"),
        Sign("sequences left out: malformed"),
        Sign("sequences left out: token ids"),
        Sign("sequences left out: lost in run-api"),
    ),
    roles=(Role.TRAINER,),
    at_exit=False,
)
WORKER_TIMEOUT = LogRule(
    "worker_timeout",
    "rollouts are cancelled after their time limit ({0} s)",
    "the engine cannot keep up: lower env.max_num_workers_per_node under [env.args], shorten env.max_token_length, "
    "or raise env.worker_timeout (600 s by default)",
    (Sign("has timed out after", r"Worker \S+ has timed out after (\d+)"),),
    roles=(Role.ENV,),
    at_exit=False,
)
USE_CACHE = LogRule(
    "use_cache_with_checkpointing",
    "use_cache and gradient checkpointing exclude each other",
    "set model.config.use_cache = False before training; transformers does so for this call and warns. Nothing is "
    "wrong with the gradients",
    (Sign("is incompatible with gradient checkpointing", r"use_cache=True` is incompatible|Caching is incompatible"),),
    roles=(Role.TRAINER,),
    at_exit=False,
)
LOST_GRADIENTS = LogRule(
    "lost_gradients",
    "gradients are lost on the way to the trained layers",
    GRADIENT_FIX,
    (
        Sign("Gradients will be None", r"None of the inputs have requires_grad=True"),
        Sign("does not require grad", r"element 0 of tensors does not require grad"),
    ),
    roles=(Role.TRAINER,),
)
NON_FINITE = LogRule(
    "non_finite",
    "NaN in the model's answers: its weights are broken",
    "go back to the last good checkpoint: atropos-tui up PROFILE --resume RUN; lower [trainer] lr and keep "
    "clip_eps at 0.2",
    (Sign("the model answers with NaN"), Sign("UPDATE SKIPPED (gradient not finite)", patience_s=5)),
    roles=(Role.ENGINE, Role.TRAINER),
)
TOKENIZER_MISSING = LogRule(
    "tokenizer_missing",
    "the tokenizer was not found",
    "a model folder needs its tokenizer files, too. Name a whole folder or a hub id: `model` in the profile (it "
    "becomes env.tokenizer_name and openai.model_name)",
    (
        Sign("Can't load tokenizer for"),
        Sign("no tokenizer at"),
        Sign("Couldn't instantiate the backend tokenizer"),
        Sign("has no chat template", r"has no chat template"),
    ),
)
DATASET_UNREACHABLE = LogRule(
    "dataset_unreachable",
    "a data set or model hub cannot be reached",
    "check the network or HF_ENDPOINT; with a filled cache set HF_HUB_OFFLINE=1 under [env.env]; or use local files "
    "(env.dataset_path under [env.args])",
    (
        Sign("Couldn't reach", r"Couldn't reach '?\S+'? on the Hub"),
        Sign("cannot be loaded", r"the data set \S+ cannot be loaded"),
        Sign("We couldn't connect to", r"couldn't connect to '?https://\S+"),
        Sign("thrown while requesting"),
        Sign("Max retries exceeded", r"Max retries exceeded.*(?:huggingface|/datasets/|/resolve/)"),
        Sign("LocalEntryNotFoundError", r"LocalEntryNotFoundError: "),
        Sign("Cannot access gated repo"),
    ),
)
WANDB = LogRule(
    "wandb_failed",
    "Weights & Biases cannot be used",
    'log in (wandb login, or WANDB_API_KEY), keep it on this machine (WANDB_MODE = "offline" under [trainer.env]), '
    "or leave it out: [trainer] use_wandb = false and env.use_wandb = false",
    (
        Sign("No API key configured"),
        Sign("api_key not configured"),
        Sign("Weights & Biases failed"),
        Sign("Error initializing wandb"),
        Sign("wandb: ERROR"),
    ),
)
