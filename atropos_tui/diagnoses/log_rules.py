"""Rules for log lines of components; an entry in `LOG_RULES` each.

At an exit the first rule with a matching line explains it: put specific rules first.
"""

from __future__ import annotations

from atropos_common.protocol.control import Role
from atropos_tui.diagnoses.machine_rules import MACHINE_RULES
from atropos_tui.diagnoses.model import Diagnosis, Ends, Layer, LogMatch, LogPattern, LogRule
from atropos_tui.diagnoses.node_rules import LAUNCHER_RULES, NODE_SILENT
from atropos_tui.diagnoses.roots import VANISHED, root_error

ASKS = (Role.TRAINER, Role.ENV)
REPEATED_S = 75.0
"""`LogRule.quiet_s` of warnings that the trainer repeats at most once a minute."""
ALIGNMENT_FIX = (
    "a `cause` in the evidence names it. Without one: restart the engine, so that both have "
    "the same weights "
    "(atropos-tui restart {engine}); sample with plain temperature (no top-p, top-k, min-p); "
    "and set enforce-eager = "
    "true under [vllm.args] once, to see if CUDA graphs or an architecture that rebinds its "
    "weights is the cause"
)
GRADIENT_FIX = (
    "frozen lower layers and reentrant checkpointing cut the graph: set use_reentrant=False in "
    "gradient_checkpointing_kwargs, or call model.enable_input_require_grads(); check that "
    "[trainer] "
    "train_layer_indices names layers of the model"
)
NO_LOGPROBS_FIX = (
    'set openai.server_type = "vllm" under [env.args] (a profile derives it), and use an '
    "engine with POST /generate: "
    "python -m vllm_server, the default when `command` is left out under [vllm]"
)


def _engine_dead(match: LogMatch) -> Diagnosis:
    """Use the dying process's own error, not later lines about its death."""
    root = root_error(match.around) or match.line  # the matched line may be a wrapper
    fix = (
        "read its traceback and the lines above it: atropos-tui logs {engine} --grep "
        "'Error|ERROR' -n 40"
    )
    if VANISHED.search(root):
        fix = (
            "it printed no error, so a signal ended it. If nobody killed it, the kernel's "
            "out-of-memory killer did: "
            "see dmesg, and use less memory (atropos-tui ps shows it)"
        )
    return Diagnosis("vLLM's engine process died", root, match.fill(fix))


LOG_RULES: tuple[LogRule, ...] = (
    *MACHINE_RULES,
    LogRule(
        "gloo_stuck",
        "the process group of trainer and engine is not complete: stuck at Gloo",
        "check that {engine} was started with ATROPOS_WEIGHT_UPDATES=1 (a profile's mode "
        "sets it) and reaches "
        "{trainer} at MASTER_ADDR and MASTER_PORT; atropos-tui logs {engine} --grep "
        "'broadcast|ERROR' shows if its "
        "side started",
        (
            LogPattern(
                "the broadcast broke (phase rendezvous)",
                r"the broadcast broke \(phase rendezvous\): (.*)",
            ),
            LogPattern("waiting for clients", r"Timed out after \d+ seconds waiting for clients"),
            LogPattern(
                "reating Gloo process group",
                patience_s=120,
                cleared_by=("Gloo group created",),
                waits_for=(Role.ENGINE,),
            ),
        ),
        roles=(Role.ENGINE, Role.TRAINER),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "broadcast_broke",
        "a broadcast of weights broke off",
        "wait: the trainer forms a new group without the failed server and sends the weights "
        "again. If it keeps "
        "happening, restart the server in the evidence: atropos-tui restart {engine}. On a "
        "slow link raise "
        "trainer.broadcast_timeout",
        (
            LogPattern(
                "the broadcast broke", r"the broadcast broke \(phase (?!rendezvous)\w+\): (.*)"
            ),
        ),
        roles=(Role.TRAINER,),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "nccl_failed",
        "the NCCL connection between trainer and engine was not made",
        "give [vllm] gpus and [trainer] gpus different GPUs; set NCCL_DEBUG=INFO under "
        "[trainer.env] and [vllm.env] "
        "for details; with several network cards set NCCL_SOCKET_IFNAME",
        (
            LogPattern("NCCL error", r"NCCL error"),
            LogPattern("NCCL Error"),
            LogPattern("ncclSystemError"),
            LogPattern("ncclUnhandledCudaError"),
            LogPattern("Duplicate GPU detected"),
            LogPattern("Watchdog caught collective operation timeout"),
            # NCCL follows Gloo: its silence after Gloo's success is the failure.
            LogPattern(
                "Gloo group created",
                patience_s=120,
                cleared_by=("NCCL group created",),
                waits_for=(Role.ENGINE,),
            ),
        ),
        roles=(Role.ENGINE, Role.TRAINER),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "no_logprobs",
        "the rollouts come without logprobs: wrong server_type",
        NO_LOGPROBS_FIX,
        (
            LogPattern("GRPO requires inference_logprobs"),
            LogPattern("returns no logprobs"),
            LogPattern("answers without logprobs"),
            LogPattern("Tokens and logprobs not supported by base OpenAI API"),
            LogPattern("OpenAI endpoints do not support token IDs or logprobs"),
            LogPattern("response missing 'prompt_logprobs'"),
        ),
        roles=(Role.ENV, Role.TRAINER),
    ),
    LogRule(
        "generate_404",
        "404 on /generate: this server has no such route",
        "leave out `command` under [vllm] (stock vLLM has only /v1; python -m vllm_server "
        "has /generate with "
        "logprobs), and leave out openai.base_url, which atropos-tui sets",
        (
            LogPattern('"POST /generate HTTP/1.1" 404'),
            LogPattern("/generate has no such route"),
            LogPattern("/generate: HTTP 404"),
            LogPattern("404, message=", r"404, message=.*/generate"),
        ),
        roles=(Role.ENGINE, Role.ENV, Role.TRAINER),
        layer=Layer.LINK,
    ),
    LogRule(
        "logprobs_positive",
        "the rollouts' logprobs are positive: they are placeholders",
        "1.0 marks masked tokens, and got into the generated ones: " + NO_LOGPROBS_FIX,
        (
            LogPattern("should be negative", r"ref_logprobs.*should be negative"),
            LogPattern("inference_logprobs alignment is wrong"),
        ),
        roles=(Role.TRAINER,),
    ),
    LogRule(
        "registration_refused",
        "run-api refused a registration (422): a field is None that must be text",
        'set unused Weights & Biases fields to "" instead of None: wandb_project and '
        "wandb_group of the "
        "trainer, env.wandb_name under [env.args] of the environment (mandatory even with "
        "env.use_wandb = false)",
        (
            LogPattern('" 422 ', r'"POST /register(?:-env)? HTTP/[\d.]+" 422'),
            LogPattern("422 Client Error", r"422 Client Error: .*/register"),
            LogPattern("refused the registration (422"),
        ),
        roles=(Role.API, *ASKS),
        layer=Layer.LINK,
    ),
    LogRule(
        "lora_not_enabled",
        "vLLM runs without --enable-lora",
        'use mode = "lora_only", which sets it; for a server of your own set enable-lora = '
        "true and max-lora-rank "
        'under [vllm.args] and VLLM_ALLOW_RUNTIME_LORA_UPDATING = "True" under [vllm.env], '
        "then atropos-tui restart "
        "{engine}",
        (
            LogPattern("LoRA is not enabled"),
            LogPattern("without --enable-lora", r"started without --enable-lora"),
            LogPattern('"POST /v1/load_lora_adapter HTTP/1.1" 404'),
            LogPattern("/v1/load_lora_adapter: HTTP 404"),
            LogPattern('"POST /lora/load HTTP/1.1" 404'),
            LogPattern("Hot-swap failed", r"Hot-swap failed.*(?:Not Found|not enabled)"),
        ),
        roles=(Role.ENGINE, Role.TRAINER),
    ),
    LogRule(
        "manifest_missing",
        "the engine's manifest vllm_bridge_config.json is missing",
        "it is written only with VLLM_ENABLE_SHARED_WEIGHTS=1 and LOGDIR: mode = "
        '"shared_vllm" sets both for `python '
        "-m vllm_server`; with a `command` of your own under [vllm] set them in [vllm.env]. "
        "Then: atropos-tui restart "
        "{engine}",
        (
            LogPattern("Could not find vllm_bridge_config.json"),
            LogPattern("no manifest. Start the server with", r"no manifest\. .*\(waited \d+ s\)"),
            LogPattern(
                "no manifest. Start the server with",
                r"^Waiting for",
                patience_s=60,
                waits_for=(Role.ENGINE,),
                cleared_by=("Attached to", "does not answer", "has a copy of the weights"),
            ),
        ),
        roles=(Role.TRAINER,),
        passing=True,
    ),
    LogRule(
        "manifest_empty",
        "the engine's manifest has no weights for this model",
        "see what the server exported, nothing or another model: atropos-tui logs {engine} "
        "--grep Exported. Set "
        "VLLM_ENABLE_SHARED_WEIGHTS=1 before it starts (python -m vllm_server and the "
        "profile's mode do), then "
        "atropos-tui restart {engine}",
        (
            LogPattern("No IPC handles found in bridge config"),
            LogPattern("Single-copy mode not available", r"single_copy_enabled=False"),
            LogPattern("Exported 0 param"),
            LogPattern("Mapped 0/"),
            LogPattern("the server's tensors do not fit the model"),
            LogPattern("vllm_bridge_config", r"not a manifest \("),
        ),
        roles=(Role.ENGINE, Role.TRAINER),
    ),
    LogRule(
        "manifest_stale",
        "the manifest belongs to a server that is gone",
        "atropos-tui restart {engine}: it writes a new manifest, and the trainer restarts "
        "with it if necessary",
        (
            LogPattern("is gone; start vLLM again"),
            LogPattern("the server's weights are gone"),
            LogPattern("the manifest says", r"\d+ bytes, the manifest says"),
        ),
        roles=(Role.TRAINER,),
        passing=True,
    ),
    LogRule(
        "served_in_part",
        "vLLM has no place for a part of the model's weights, and would answer without them",
        "check that both sides use one model: `model` at the top of a profile sets it for "
        "both. If they do, this "
        "release of vLLM does not support all of its weights (for example a Qwen3 with "
        "attention_bias): train another "
        "model, or install another vLLM",
        (
            LogPattern(
                "of the tensors, such as", r"vLLM's (\S+) has no place for \d+ of the tensors"
            ),
        ),
        roles=(Role.ENGINE, Role.TRAINER),
    ),
    LogRule(
        "tokenizer_missing",
        "the tokenizer was not found",
        "set `model` in the profile to a hub id, or to a folder that also has the tokenizer "
        "files (it becomes "
        "env.tokenizer_name and openai.model_name)",
        (
            LogPattern("Can't load tokenizer for"),
            LogPattern("no tokenizer at"),
            LogPattern("Couldn't instantiate the backend tokenizer"),
            LogPattern("has no chat template", r"has no chat template"),
        ),
    ),
    LogRule(
        "dataset_unreachable",
        "a data set or model hub cannot be reached",
        "check the network or HF_ENDPOINT; with a filled cache set HF_HUB_OFFLINE=1 under "
        "[env.env]; or use local "
        "files (env.dataset_path under [env.args])",
        (
            LogPattern("Couldn't reach", r"Couldn't reach '?\S+'? on the Hub"),
            LogPattern("cannot be loaded", r"the data set \S+ cannot be loaded"),
            LogPattern("We couldn't connect to", r"couldn't connect to '?https://\S+"),
            LogPattern("thrown while requesting"),
            LogPattern(
                "Max retries exceeded",
                r"Max retries exceeded.*(?:huggingface|/datasets/|/resolve/)",
            ),
            LogPattern("LocalEntryNotFoundError", r"LocalEntryNotFoundError: "),
            LogPattern("Cannot access gated repo"),
        ),
        passing=True,
        severity="alarm",
        layer=Layer.LINK,
    ),
    LogRule(
        "wandb_failed",
        "Weights & Biases cannot be used",
        "log in (wandb login, or WANDB_API_KEY), keep it on this machine (WANDB_MODE = "
        '"offline" under [trainer.env]), '
        "or leave it out: [trainer] use_wandb = false and env.use_wandb = false",
        (
            LogPattern("No API key configured"),
            LogPattern("api_key not configured"),
            LogPattern("Weights & Biases failed"),
            LogPattern("Error initializing wandb"),
            LogPattern("wandb: ERROR"),
        ),
        severity="advice",
        ends=Ends.ATTEMPT,
    ),
    LogRule(
        "lost_gradients",
        "gradients are lost on the way to the trained layers",
        GRADIENT_FIX,
        (
            LogPattern("Gradients will be None", r"None of the inputs have requires_grad=True"),
            LogPattern("does not require grad", r"element 0 of tensors does not require grad"),
        ),
        roles=(Role.TRAINER,),
    ),
    LogRule(
        "non_finite",
        "NaN in the model's output: its weights are broken",
        "go back to the last good checkpoint: atropos-tui up PROFILE --resume RUN; lower "
        "[trainer] lr and keep "
        "clip_eps at 0.2",
        (
            LogPattern("the model answers with NaN"),
            LogPattern("UPDATE SKIPPED (gradient not finite)", patience_s=5),
        ),
        roles=(Role.ENGINE, Role.TRAINER),
        severity="alarm",
    ),
    LogRule(
        "trainer_not_registered",
        "run-api has no registration of the trainer",
        "atropos-tui restart {api}: run-api keeps its state in memory, so the components "
        "that use it restart as well",
        # Our trainer registers again by itself; the same line then contains "Registering again".
        (LogPattern("Trainer not registered", r"Trainer not registered(?!.*Registering again)"),),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "other_trainer_registered",
        "another trainer is registered with run-api, which accepts only one",
        "atropos-tui restart {api}: it drops all registrations, and {name} registers first. "
        "If it happens again, two "
        "trainers use one run-api: give each stack a port of its own ([api] port)",
        (LogPattern("holds another trainer's registration"),),
        roles=(Role.TRAINER,),
        at_exit=False,
        layer=Layer.LINK,
    ),
    LogRule(
        "api_unreachable",
        "{name} does not reach run-api",
        "check that it is up: atropos-tui ps. If not: atropos-tui restart {api} (dependent "
        "components restart with "
        "it). If it is, {name} uses another address: leave out [trainer] atropos_url and "
        "env.rollout_server_url, they "
        "are derived",
        (
            LogPattern(
                "Atropos API not reachable at",
                r"not reachable at \S+ for \d+ s|RuntimeError: Atropos API not",
            ),
            LogPattern(
                "Atropos API not reachable at",
                r"\); waiting$",
                patience_s=20,
                cleared_by=("run-api is back after",),
                waits_for=(Role.API,),
            ),
            LogPattern("Atropos API server not reachable at"),
            LogPattern(
                "waiting for run-api at",
                patience_s=20,
                cleared_by=("registered as environment", "says: "),
                waits_for=(Role.API,),
            ),
            LogPattern("run-api at ", r"run-api at \S+ is gone"),
            LogPattern("Error registering env:"),
            LogPattern(
                "Max retries exceeded with url", r"with url: /(?:batch|register|info|status)\b"
            ),
        ),
        roles=ASKS,
        passing=True,
        severity="alarm",
        layer=Layer.LINK,
    ),
    LogRule(
        "engine_unreachable",
        "{name} does not reach the inference server",
        "check that it is up: atropos-tui ps, atropos-tui why {engine}. If not: atropos-tui "
        "start {engine}. If it is, "
        "{name} uses another port: leave out openai.base_url under [env.args] and [trainer] "
        "vllm_port, they are "
        "derived",
        (
            LogPattern("vLLM server not running on port"),
            LogPattern("External vLLM server required on port"),
            LogPattern(
                "waiting for the inference server at",
                patience_s=60,
                cleared_by=("answers after",),
                waits_for=(Role.ENGINE,),
            ),
            LogPattern(
                "Waiting for the inference server: the",
                r"does not answer",
                patience_s=60,
                cleared_by=(
                    "Attached to",
                    "answers with weight version",
                    "has a copy of the weights",
                ),
                waits_for=(Role.ENGINE,),
            ),
            LogPattern(
                "Error in collect_trajectories",
                r"collect_trajectories: (?:Connection error|Cannot connect to host)",
            ),
        ),
        roles=ASKS,
        passing=True,
        severity="alarm",
        layer=Layer.LINK,
    ),
    LogRule(
        "env_not_registered",
        "run-api does not register {name}",
        "see why the trainer is not ready: atropos-tui why {trainer} (run-api registers "
        "environments only after the "
        "trainer's first GET /batch). If {trainer} trains, they use different run-apis: leave out "
        "env.rollout_server_url and [trainer] atropos_url",
        tuple(
            LogPattern(
                anchor,
                patience_s=60,
                waits_for=(Role.TRAINER, Role.ENGINE),
                cleared_by=("registered as environment", "Initialized env with id"),
            )
            for anchor in (
                "says: wait for trainer to start",
                "Waiting to register the env due to status",
            )
        ),
        roles=(Role.ENV,),
        passing=True,
        layer=Layer.LINK,
    ),
    LogRule(
        "health_timeout",
        "vLLM did not become healthy in time",
        "read its log: atropos-tui logs {engine} -n 100. If a large model or a first "
        "compilation only needs longer, "
        "raise start_timeout_s under [vllm]",
        (
            LogPattern("vLLM server failed to start within"),
            LogPattern("vLLM not ready after"),
            LogPattern("vLLM failed to start after"),
        ),
        passing=True,
        layer=Layer.PROCESS,
    ),
    LogRule(
        "api_reloaded",
        "run-api is restarted by its file watcher",
        "leave out --reload from `command` under [api] (the derived command has none), then "
        "atropos-tui restart {api}: "
        "each file saved in its folder makes it lose trainer, environments and queue",
        (
            LogPattern(
                "detected changes in",
                r"(?:WatchFiles|StatReload|WatchGodReload) detected changes in",
            ),
            LogPattern("Started reloader process"),
        ),
        roles=(Role.API,),
        severity="advice",
        ends=Ends.ATTEMPT,
    ),
    LogRule(
        "rollouts_left_out",
        "rollouts are left out that cannot be trained on",
        "correct or stop the environment in the evidence, which has the reason and an "
        "example (left_out of each step "
        "has the counts). Token ids outside of the vocabulary come from another model's "
        "tokenizer; limits of length "
        "and lag are seq_len, max_completion_tokens and max_policy_lag under [trainer]",
        (
            LogPattern("nothing to train on in the last"),
            LogPattern("sequences left out: lost in run-api"),
        ),
        roles=(Role.TRAINER,),
        at_exit=False,
        quiet_s=REPEATED_S,
        layer=Layer.ROLLOUTS,
    ),
    LogRule(
        "worker_timeout",
        "rollouts are cancelled after their time limit ({0} s)",
        "the engine cannot keep up: lower env.max_num_workers_per_node under [env.args], "
        "shorten env.max_token_length, "
        "or raise env.worker_timeout (600 s by default)",
        (LogPattern("has timed out after", r"Worker \S+ has timed out after (\d+)"),),
        roles=(Role.ENV,),
        at_exit=False,
        layer=Layer.ROLLOUTS,
    ),
    LogRule(
        "use_cache_with_checkpointing",
        "use_cache and gradient checkpointing exclude each other",
        "set model.config.use_cache = False before training; transformers does so for this "
        "call and warns. The "
        "gradients are correct",
        (
            LogPattern(
                "is incompatible with gradient checkpointing",
                r"use_cache=True` is incompatible|Caching is incompatible",
            ),
        ),
        roles=(Role.TRAINER,),
        at_exit=False,
        severity="advice",
        ends=Ends.ATTEMPT,
    ),
    LogRule(
        "alignment_mismatch",
        "trainer and engine disagree about the same tokens: alignment MISMATCH",
        ALIGNMENT_FIX,
        # Patience, because the first record comes only at the end of the first step.
        (LogPattern("MISMATCH", r"LogProb Alignment: \[?MISMATCH|\[MISMATCH!\]", patience_s=5),),
        roles=(Role.TRAINER,),
        at_exit=False,
        severity="alarm",
        event="mismatch",
        recorded=True,
    ),
    # The rules from here on are general, so they come last.
    LogRule(
        "out_of_host_memory",
        "the machine's memory is exhausted",
        "run fewer other programs (atropos-tui ps shows memory), use a smaller model or "
        "context, or add memory or swap",
        (
            LogPattern("DefaultCPUAllocator: can't allocate memory"),
            LogPattern(
                "Cannot allocate memory", r"\[?[Ee]rr(?:no|or) 12\]?|Cannot allocate memory"
            ),
            LogPattern("MemoryError", r"^(?:numpy\.\S*)?MemoryError\b"),
        ),
        passing=True,
        layer=Layer.MACHINE,
    ),
    LogRule(
        "engine_dead",
        "vLLM's engine process died",
        "",
        (
            LogPattern("EngineCore encountered a fatal error"),
            LogPattern("EngineDeadError"),
            LogPattern("EngineCore failed to start"),
            LogPattern("the engine died; its own log lines"),
        ),
        roles=(Role.ENGINE,),
        # These explain the death of the engine process better.
        unless=(
            "kv_cache_too_small",
            "out_of_memory",
            "out_of_host_memory",
            "shm_full",
            "gpu_unusable",
        ),
        tell=_engine_dead,
        settle_s=2.0,
        severity="alarm",
        layer=Layer.PROCESS,
    ),
    LogRule(
        "sampling_adjusted",
        "{engine} ignores {0} in rollouts: they use plain sampling",
        'do nothing if plain sampling is right; else set sampling = "as_asked" under [vllm] '
        "(logprobs are then those "
        'of the whole distribution), or sampling = "refuse"',
        (
            LogPattern(
                "left out: changes the distribution",
                r"adjusted \d+ requests? to \S+: (.+?) left out: changes",
            ),
        ),
        roles=(Role.ENGINE,),
        at_exit=False,
        severity="advice",
        ends=Ends.ATTEMPT,
    ),
    LogRule(
        "logprobs_recomputed",
        "rollouts come without logprobs: the trainer requests them from the engine, else "
        "uses its own",
        "let the environment send inference_logprobs (atroposlib's ManagedServer has them); "
        "set missing_logprobs = "
        '"refuse" under [trainer] to end the run instead',
        (LogPattern("sequences came without inference_logprobs"),),
        roles=(Role.TRAINER,),
        at_exit=False,
        severity="advice",
        quiet_s=REPEATED_S,
    ),
    *LAUNCHER_RULES,
    NODE_SILENT,
)
