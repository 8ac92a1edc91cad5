"""Log rules about parts that do not find each other: run-api, engine, manifest, adapters, registration."""

from __future__ import annotations

from atropos_common.control import Role
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Sighting
from atropos_tui.supervisor.diagnoses.roots import VANISHED, root_error
from atropos_tui.supervisor.diagnoses.signs import LogRule, Sign

BOTH_SERVERS = (Role.API, Role.ENGINE)
ASKS = (Role.TRAINER, Role.ENV)

API_UNREACHABLE = LogRule(
    "api_unreachable",
    "{name} does not reach run-api",
    "is it up? atropos-tui ps. If not: atropos-tui restart {api} (it takes what depends on it along). If it is: "
    "{name} asks at another address; leave out [trainer] atropos_url and env.rollout_server_url, they are derived",
    (
        Sign("Atropos API not reachable at", r"not reachable at \S+ for \d+ s|RuntimeError: Atropos API not"),
        Sign(
            "Atropos API not reachable at", r"\); waiting$", patience_s=20, cleared_by=("run-api is back after",),
            waits_for=(Role.API,),
        ),
        Sign("Atropos API server not reachable at"),
        Sign(
            "waiting for run-api at", patience_s=20, cleared_by=("registered as environment", "says: "),
            waits_for=(Role.API,),
        ),
        Sign("run-api at ", r"run-api at \S+ is gone"),
        Sign("Error registering env:"),
        Sign("Max retries exceeded with url", r"with url: /(?:batch|register|info|status)\b"),
    ),
    roles=ASKS,
)  # fmt: skip
TRAINER_NOT_REGISTERED = LogRule(
    "trainer_not_registered",
    "run-api has forgotten the trainer",
    "run-api keeps its state in memory: restart it with its partners (atropos-tui restart {api})",
    # Our trainer registers again by itself, and says so in the same line.
    (Sign("Trainer not registered", r"Trainer not registered(?!.*Registering again)"),),
)
OTHER_TRAINER = LogRule(
    "other_trainer_registered",
    "run-api belongs to another trainer, and takes no second one",
    "atropos-tui restart {api}: it forgets everybody, and {name} registers as the first. It comes back? Two trainers "
    "ask one run-api: give each stack a port of its own ([api] port)",
    (Sign("holds another trainer's registration"),),
    roles=(Role.TRAINER,),
    at_exit=False,
)
ENGINE_UNREACHABLE = LogRule(
    "engine_unreachable",
    "{name} does not reach the inference server",
    "is it up? atropos-tui ps, atropos-tui why {engine}. If not: atropos-tui start {engine}. If it is: {name} asks "
    "at another port; leave out openai.base_url under [env.args] and [trainer] vllm_port, they are derived",
    (
        Sign("vLLM server not running on port"),
        Sign("External vLLM server required on port"),
        Sign(
            "waiting for the inference server at", patience_s=60, cleared_by=("answers after",),
            waits_for=(Role.ENGINE,),
        ),
        Sign(
            "Waiting for the inference server: the", r"does not answer", patience_s=60,
            cleared_by=("Attached to", "answers with weight version"), waits_for=(Role.ENGINE,),
        ),
        Sign("Error in collect_trajectories", r"collect_trajectories: (?:Connection error|Cannot connect to host)"),
    ),
    roles=ASKS,
)  # fmt: skip
HEALTH_TIMEOUT = LogRule(
    "health_timeout",
    "vLLM did not become healthy in time",
    "its own log tells why: atropos-tui logs {engine} -n 100. A large model or cold compile caches need longer: raise "
    "start_timeout_s under [vllm]",
    (
        Sign("vLLM server failed to start within"),
        Sign("vLLM not ready after"),
        Sign("vLLM failed to start after"),
    ),
)


def _engine_dead(found: Sighting) -> Diagnosis:
    """The evidence is what the dying process said, not what others say of its death."""
    root = root_error(found.around) or found.line
    fix = "its traceback, and what led to it: atropos-tui logs {engine} --grep 'Error|ERROR' -n 40"
    if VANISHED.search(root):
        fix = (
            "it said nothing before, so a signal ended it. If nobody killed it, the kernel's out-of-memory killer did: "
            "see dmesg, and use less memory (atropos-tui ps shows it)"
        )
    return Diagnosis("vLLM's engine process died", root, found.fill(fix))


ENGINE_DEAD = LogRule(
    "engine_dead",
    "vLLM's engine process died",
    "",
    (
        Sign("EngineCore encountered a fatal error"),
        Sign("EngineDeadError"),
        Sign("EngineCore failed to start"),
        Sign("the engine died; its own log lines"),
    ),
    roles=(Role.ENGINE,),
    unless=("kv_cache_too_small", "out_of_memory", "out_of_host_memory", "shm_full", "gpu_unusable"),
    tell=_engine_dead,
    settle_s=2.0,
)
MANIFEST_MISSING = LogRule(
    "manifest_missing",
    "the engine's manifest vllm_bridge_config.json is not there",
    'it is written only with VLLM_ENABLE_SHARED_WEIGHTS=1 and LOGDIR: mode = "shared_vllm" sets both for `python '
    "-m vllm_server`; with a `command` of your own under [vllm] set them in [vllm.env]. Then: atropos-tui restart "
    "{engine}",
    (
        Sign("Could not find vllm_bridge_config.json"),
        Sign("no manifest. Start the server with", r"no manifest\. .*\(waited \d+ s\)"),
        Sign(
            "no manifest. Start the server with", r"^Waiting for", patience_s=60, waits_for=(Role.ENGINE,),
            cleared_by=("Attached to", "does not answer"),
        ),
    ),
    roles=(Role.TRAINER,),
)  # fmt: skip
MANIFEST_EMPTY = LogRule(
    "manifest_empty",
    "the engine's manifest holds no weights that fit",
    "the server exported nothing, or another model: atropos-tui logs {engine} --grep Exported. "
    "VLLM_ENABLE_SHARED_WEIGHTS=1 must be set before it starts (python -m vllm_server and the profile's mode see "
    "to it); then atropos-tui restart {engine}",
    (
        Sign("No IPC handles found in bridge config"),
        Sign("Single-copy mode not available", r"single_copy_enabled=False"),
        Sign("Exported 0 param"),
        Sign("Mapped 0/"),
        Sign("the server's tensors do not fit the model"),
        Sign("vllm_bridge_config", r"not a manifest \("),
    ),
    roles=(Role.ENGINE, Role.TRAINER),
)
MANIFEST_STALE = LogRule(
    "manifest_stale",
    "the manifest speaks of a server that is gone",
    "atropos-tui restart {engine}: it writes a new one, and the trainer comes along where it must",
    (
        Sign("is gone; start vLLM again"),
        Sign("the server's weights are gone"),
        Sign("the manifest says", r"\d+ bytes, the manifest says"),
    ),
    roles=(Role.TRAINER,),
)
SERVED_IN_PART = LogRule(
    "served_in_part",
    "vLLM has no place for a part of the model's weights, and would answer without them",
    "two different models? `model` at the top of a profile names one for both sides. One and the same: this release of "
    "vLLM does not serve it whole (a Qwen3 with attention_bias is such a model): train another, or try another vLLM",
    (Sign("of the tensors, such as", r"vLLM's (\S+) has no place for \d+ of the tensors"),),
    roles=(Role.ENGINE, Role.TRAINER),
)
LORA_NOT_ENABLED = LogRule(
    "lora_not_enabled",
    "vLLM runs without --enable-lora",
    'mode = "lora_only" sets it; for a server of your own: enable-lora = true and max-lora-rank under [vllm.args], '
    'VLLM_ALLOW_RUNTIME_LORA_UPDATING = "True" under [vllm.env], then atropos-tui restart {engine}',
    (
        Sign("LoRA is not enabled"),
        Sign("without --enable-lora", r"started without --enable-lora"),
        Sign('"POST /v1/load_lora_adapter HTTP/1.1" 404'),
        Sign("/v1/load_lora_adapter: HTTP 404"),
        Sign('"POST /lora/load HTTP/1.1" 404'),
        Sign("Hot-swap failed", r"Hot-swap failed.*(?:Not Found|not enabled)"),
    ),
    roles=(Role.ENGINE, Role.TRAINER),
)
ENV_NOT_REGISTERED = LogRule(
    "env_not_registered",
    "run-api does not take {name} in",
    "run-api takes environments only after the trainer's first GET /batch: atropos-tui why {trainer}. If {trainer} "
    "trains: both must use one run-api; leave out env.rollout_server_url and [trainer] atropos_url",
    tuple(
        Sign(
            anchor, patience_s=60, waits_for=(Role.TRAINER, Role.ENGINE),
            cleared_by=("registered as environment", "Initialized env with id"),
        )
        for anchor in ("says: wait for trainer to start", "Waiting to register the env due to status")
    ),
    roles=(Role.ENV,),
)  # fmt: skip
REGISTRATION_REFUSED = LogRule(
    "registration_refused",
    "run-api refused a registration (422): a field is None that must be text",
    'Weights & Biases fields must be "" and not None when they are not used: wandb_project and wandb_group of the '
    "trainer, env.wandb_name under [env.args] of the environment (mandatory even with env.use_wandb = false)",
    (
        Sign('" 422 ', r'"POST /register(?:-env)? HTTP/[\d.]+" 422'),
        Sign("422 Client Error", r"422 Client Error: .*/register"),
        Sign("refused the registration (422"),
    ),
    roles=(Role.API, *ASKS),
)
API_RELOADED = LogRule(
    "api_reloaded",
    "run-api is restarted by its file watcher",
    "each file that is saved in its folder makes it forget trainer, environments and queue: leave out --reload "
    "from `command` under [api] (the derived command has none), then atropos-tui restart {api}",
    (
        Sign("detected changes in", r"(?:WatchFiles|StatReload|WatchGodReload) detected changes in"),
        Sign("Started reloader process"),
    ),
    roles=(Role.API,),
)
