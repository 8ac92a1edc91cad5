"""Profile to `StackSpec`: commands, order, ports, health checks, restarts. Pure.

One builder for each role turns its section into a `ComponentSpec`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from atropos_common.net.ports import is_loopback
from atropos_common.protocol import stages
from atropos_common.protocol.bridge import (
    ENV_OPEN_GENERATION,
    ENV_SAMPLING,
    ROUTING_FLAG,
    few_graph_sizes,
    server_rank,
)
from atropos_common.protocol.control import Role
from atropos_common.system.run_dir import (
    ENV_AHEAD,
    ENV_API_URL,
    ENV_CHECKPOINTS,
    ENV_CONCURRENCY,
    ENV_CURRICULUM,
    ENV_ENGINE_SHARE,
    ENV_ENGINE_URLS,
    ENV_HOLD_GENERATION,
    ENV_LOGDIR,
    ENV_MODEL,
    ENV_NODE_ADDRESS,
    ENV_RANKS_DIR,
    ENV_REFILL,
    ENV_SEQUENCES,
    ENV_TRAINER_HOSTS,
    ENV_WEIGHT_UPDATES,
    NO_UPDATE_CODE,
)
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.placement import Placement, host_names, part_names
from atropos_tui.profile.redact import hide_tree
from atropos_tui.profile.sections import (
    ApiSection,
    ComponentOptions,
    EngineSection,
    EnvSection,
    ExtraSection,
    PrepareSection,
    Profile,
)
from atropos_tui.profile.site import (
    Site,
    engine_model,
    engine_urls,
    env_engines,
    env_node,
    is_fed,
    meeting_address,
    node_of,
    trainer_gpus,
    trainer_nodes,
    trainer_placements,
    trainer_ranks,
    training_config,
    traits_of,
)
from atropos_tui.profile.source import is_hostable
from atropos_tui.profile.spec import (
    ComponentSpec,
    ExecCheck,
    FileCheck,
    HttpCheck,
    Place,
    Probe,
    Probes,
    RestartPolicy,
    StackSpec,
    Stage,
    StageCheck,
    StopPolicy,
    is_hosted,
    references,
)
from trainer_core.config import TrainingConfig

PYTHON = sys.executable
OUR_PACKAGES = (
    "atropos_tui",
    "atropos_api",
    "atropos_envs",
    "trainer_core",
    "vllm_server",
    "atroposlib",
)
"""`python -m` must not take a folder of the same name in the working directory."""
SERVES_TILL_STOPPED = RestartPolicy(policy="always")
"""Any exit that was not requested is a crash, even with code 0."""
GRAPH_FLAGS = (
    "cudagraph-capture-sizes",
    "max-cudagraph-capture-size",
    "compilation-config",
    "enforce-eager",
)
"""vLLM flags that choose graph sizes; if one is set, the plan chooses none."""
MOST_SEQUENCES = 1024
"""Default of vLLM's --max-num-seqs on a large GPU."""
RUNNER = "atropos_envs.hosting.runner"
"""Program that runs environments of other packages."""
VERIFIERS_SERVER = "atropos_envs.verifiers_server"
"""Program that runs environments of the package verifiers."""
OPENENV_SERVER, PROGRAM_SERVER = "atropos_envs.openenv_server", "atropos_envs.program_server"
"""Programs that run OpenEnv environments, and `agent`."""
FLAG_PARTS = ("env.", "openai.")
"""Beginnings of the flags of `serve`; other keys are settings of an environment of verifiers."""
WORKER_FLAGS = {"env.max_num_workers", "env.max_num_workers_per_node"}
"""Flags that limit the groups in flight; if one is set, the plan sets no limit."""
AHEAD_FLAG, SHARE_FLAG = "env.max_batches_offpolicy", "env.min_batch_allocation"
MOST_AHEAD = 8
"""Default of `AHEAD_FLAG` where the number of sequences in flight follows the engine."""
LORA_SLOTS = 2
"""The newest adapter, and the one of completions still in flight."""
WANDB_ID_LENGTH = 64

TRAINER_STAGES = [
    Stage(
        name=stages.REGISTERED,
        usually="run-api does not answer yet, or another trainer has registered there: see `logs "
        "api`",
    ),
    Stage(
        name=stages.ATTACHED,
        usually="vLLM is still loading the model (up to two minutes on a GPU): see `why` and "
        "`logs` of the engine",
    ),
    Stage(
        name=stages.FIRST_BATCH,
        usually="no batch is full yet: rollouts are slow, or all groups had equal scores and were "
        "dropped "
        "(--env.ensure_scores_are_not_same false keeps them): see `logs` of the environment",
    ),
]
ENGINE_STAGES = [
    Stage(
        name="its imports",
        pattern=r"non-default args|Resolved architecture",
        usually="vLLM imports for 10 to 30 s",
    ),
    Stage(
        name="its weights",
        pattern=r"Loading weights took|Model loading took",
        usually="vLLM reads a large model from disk, or downloads it from the hub first",
    ),
    Stage(
        name="its KV cache",
        pattern=r"KV cache size|# GPU blocks",
        usually="vLLM compiles the model (minutes the first time) and measures its memory",
    ),
    Stage(
        name="its CUDA graphs",
        pattern=r"Graph capturing finished|init engine \(",
        usually="vLLM captures one graph for each batch size; [vllm.args] enforce-eager = true "
        "skips them, but decodes slower",
    ),
    Stage(
        name=stages.READY,
        pattern=r"Application startup complete",  # a server that is not ours
        usually="the server tests on one token that each kind of layer follows new weights",
    ),
]
HOSTED_STAGE = Stage(
    name=stages.SET_UP,
    usually="its setup() has not returned: it loads data or waits for a service; see its `logs`",
)
ENV_STAGES = [
    Stage(
        name=stages.REGISTERED,
        # atroposlib's own log line, of an environment that we do not host
        pattern=r"Initialized env with id \d+",
        usually="run-api takes environments only after the trainer's first request for a batch, "
        "and the trainer waits for vLLM: see `why trainer`",
    )
]


def stack_of(site: Site) -> StackSpec:
    profile = site.profile
    settings = training_config(site)
    after = [section.name for section in profile.prepare]
    stack = [
        *(_prepare(site, section, after[:index]) for index, section in enumerate(profile.prepare)),
        _api(site, profile.api, after),
        *(
            part
            for placed in profile.placed
            for each in placed
            for part in _engine(site, *each, after, settings)
        ),
        *(_openenv(site, *server, after) for server in profile.openenv_servers),
        *(_environment(site, section, after, settings) for section in profile.env),
        *(_extra(site, name, section) for name, section in profile.component.items()),
        *_trainer(site, settings, after),
    ]
    spec = StackSpec(
        run_id=site.run_id,
        name=profile.name,
        mode=profile.mode,
        run_dir=str(site.run.root),
        components=[_with_python(part) for part in stack],
        logs=profile.logs,
        notify=profile.notify.model_copy(update={"command": _program(profile.notify.command)}),
        metrics=profile.metrics,
        alerts=list(profile.alert),
        launcher=profile.cluster.launcher if profile.cluster else "local",
        nodes=list(site.hosts.nodes),
    )
    # Only the variables that this stack refers to: the supervisor needs no other secret of the
    # `.env` files.
    named = {
        name: site.dotenv[name]
        for name in references(spec.model_dump_json())
        if name in site.dotenv
    }
    return spec.model_copy(update={"variables": named})


def _with_python(spec: ComponentSpec) -> ComponentSpec:
    if spec.place is None or spec.command[0] != PYTHON or spec.place.python == PYTHON:
        return spec
    return spec.model_copy(update={"command": [spec.place.python, *spec.command[1:]]})


def redacted(stack: StackSpec) -> dict[str, Any]:
    data: dict[str, Any] = hide_tree(stack.model_dump(mode="json", exclude={"variables"}))
    return data


def _spec(site: Site, options: ComponentOptions, **derived: Any) -> ComponentSpec:
    probes: Probes = derived.pop("probes", Probes())
    chosen = {name: getattr(options, name) for name in ("startup", "readiness", "liveness")}
    given_probes = {name: _runnable(probe) for name, probe in chosen.items() if probe is not None}
    derived["probes"] = probes.model_copy(update=given_probes)
    # A policy merges field by field; `start_timeout_s` and `depends_on` replace the derived value.
    for name in ("restart", "stop"):
        if (policy := getattr(options, name)) is not None:
            # Only the keys that the user wrote: the others keep the default of the role.
            given = {field: getattr(policy, field) for field in policy.model_fields_set}
            derived[name] = derived[name].model_copy(update=given) if name in derived else policy
    for name in ("start_timeout_s", "depends_on"):
        if getattr(options, name) is not None:
            derived[name] = getattr(options, name)
    if options.cwd is not None:
        derived["cwd"] = site.path(options.cwd)
    derived["env"] = derived.get("env", {}) | {
        key: site.text(value) for key, value in options.env.items()
    }
    return ComponentSpec(**derived)


def _reached(stage: str, label: str) -> Probes:
    return Probes(
        startup=Probe(checks=[StageCheck(stage=stage, label=label)], failure_threshold=1_000_000)
    )


def _prepare(site: Site, section: PrepareSection, before: list[str]) -> ComponentSpec:
    return ComponentSpec(
        name=section.name,
        role=Role.PREPARE,
        command=_program(site.texts(section.command)),
        env={key: site.text(value) for key, value in section.env.items()},
        # Steps run one after another, in the order of the profile.
        depends_on=dict.fromkeys(before, "completed"),
        creates=site.path(section.creates) if section.creates else None,
        restart=RestartPolicy(policy="never"),
        start_timeout_s=24 * 3600,  # a step may download a model or a data set
        place=site.place(node_of(site.profile, None)),
    )


def _api(site: Site, section: ApiSection, after: list[str]) -> ComponentSpec:
    command = [*_module("atropos_api"), "--host", site.api_address, "--port", str(section.port)]
    names = [env.name for env in site.profile.env]
    place = site.place(node_of(site.profile, section.node))
    answers = [HttpCheck(url=f"{site.api_url}/info")]
    return _spec(
        site,
        section,
        name="api",
        role=Role.API,
        command=_program(site.texts(section.command)) if section.command else command,
        depends_on=dict.fromkeys(after, "completed"),
        probes=Probes(
            readiness=Probe(checks=answers, interval_s=0.25),
            # Slow to fail: run-api is one thread, and a large request body blocks it for seconds.
            liveness=Probe(checks=answers, interval_s=5, timeout_s=10, failure_threshold=6),
        ),
        port=section.port,
        # A custom command may not know how to bind a held port.
        port_held=section.command is None and _is_held(place, site.api_address),
        place=place,
        # Its state is only in memory: after a restart the environments must register again, so they
        # restart too. The trainer registers again without a restart.
        restart_with=names,
        # atroposlib imports wandb, which leaves temporary folders if its process is killed
        scratch=True,
        restart=SERVES_TILL_STOPPED,
        stop=StopPolicy(grace_s=5),
    )


def _engine(
    site: Site,
    section: EngineSection,
    placements: list[Placement],
    after: list[str],
    settings: TrainingConfig,
) -> list[ComponentSpec]:
    # On several machines one part for each, of which the first serves.
    names = part_names(section.name, len(placements))
    fed, url = is_fed(site, section), site.engine_url(section)
    place = site.place(section.node if site.profile.is_spread else None)
    environment = {ENV_LOGDIR: str(site.run.engine_bridge(section.name))} | _gpus(section.gpus)
    if section.sampling != "plain":
        environment[ENV_SAMPLING] = section.sampling
    if section.open:
        environment[ENV_OPEN_GENERATION] = "1"
    # /health_generate answers only when the engine core can generate, not when HTTP alone works.
    checks: list[Any] = [HttpCheck(url=f"{url}/health_generate")]
    clears: list[str] = []
    if fed:
        environment |= _fed_environment(site, section, settings)
    if fed and site.traits.shares_memory:
        # A manifest of an earlier attempt would point the trainer at memory that no longer exists.
        manifest = str(site.run.manifest(section.name))
        checks.append(FileCheck(path=manifest))
        clears = [manifest, *_shm_files(site, section)]
    spec = _spec(
        site,
        section,
        name=section.name,
        role=Role.ENGINE,
        command=_engine_command(
            site, section, settings, _engine_part(site, section, placements, 0)
        ),
        env=environment | _node_address(site, placements, 0),
        depends_on=dict.fromkeys(after, "completed"),
        probes=Probes(
            readiness=Probe(checks=checks, interval_s=0.25, timeout_s=15),
            liveness=Probe(
                checks=[HttpCheck(url=f"{url}/health")],
                interval_s=2,
                timeout_s=10,
                failure_threshold=5,
            ),
        ),
        port=section.port,
        port_held=_is_held(place, site.engine_address(section)),
        place=place,
        gpus=section.gpus,
        clears=clears,
        scratch=True,  # vLLM leaves sockets and files of its process groups there
        stages=ENGINE_STAGES,
        # The parts of one server restart together. In single copy the trainer computes on this
        # engine's memory.
        restart_with=[
            *names[1:],
            *(["trainer"] if fed and site.traits.trainer_follows_engine else []),
        ],
        restart=SERVES_TILL_STOPPED,
        stop=StopPolicy(grace_s=15),
        start_timeout_s=1800,  # loading and compiling a large model takes up to half an hour
    )
    parts = [spec]
    for rank in range(1, len(placements)):
        flags = _engine_part(site, section, placements, rank)
        command = _engine_command(site, section, settings, flags)
        parts.append(_without_api(site, spec, names[rank], command, placements, rank))
    return parts


def _without_api(
    site: Site,
    first: ComponentSpec,
    name: str,
    command: list[str],
    placements: list[Placement],
    rank: int,
) -> ComponentSpec:
    """A further part of the server `first`: it has no port, and is ready by a stage."""
    here = placements[rank]
    update = {
        "name": name,
        "command": command,
        "env": first.env | _gpus(here.gpus) | _node_address(site, placements, rank),
        "probes": _reached(stages.READY, "its workers are ready"),
        "port": None,
        "port_held": False,
        "place": site.place(here.node),
        "gpus": here.gpus,
        "restart_with": [first.name],
    }
    return first.model_copy(update=update)


def _engine_part(
    site: Site, section: EngineSection, placements: list[Placement], rank: int
) -> dict[str, Any]:
    if len(placements) < 2:
        return {}
    return {
        "nnodes": len(placements),
        "node-rank": rank,
        "master-addr": site.hosts.node(placements[0].node).address,
        "master-port": site.profile.meeting_ports[section.name],
        "headless": rank > 0,
    }


def _node_address(site: Site, placements: list[Placement], number: int) -> dict[str, str]:
    return (
        {ENV_NODE_ADDRESS: site.hosts.node(placements[number].node).address}
        if len(placements) > 1
        else {}
    )


def _is_held(place: Place | None, address: str) -> bool:
    return is_loopback(address) and (place is None or not place.prefix)


def _fed_environment(
    site: Site, section: EngineSection, settings: TrainingConfig
) -> dict[str, str]:
    environment: dict[str, str] = {}
    if site.traits.shares_memory:
        environment |= {
            "VLLM_ENABLE_SHARED_WEIGHTS": "1",
            "ATROPOS_SHM_NAME": _shm_name(site, section),
        }
    if site.traits.updates_weights:
        environment[ENV_WEIGHT_UPDATES] = "1"
    # A server joins only groups at addresses that it was given: a request must not send it
    # elsewhere.
    if site.traits.other_gpus and not is_loopback(address := meeting_address(site, settings)):
        environment[ENV_TRAINER_HOSTS] = address
    if site.traits.holds_generation:
        environment[ENV_HOLD_GENERATION] = "1"
    return environment


def _shm_files(site: Site, section: EngineSection) -> list[str]:
    first = f"/dev/shm/{_shm_name(site, section)}"
    return [first, *(f"{first}.{rank}" for rank in range(1, section.tensor_parallel))]


def _shm_name(site: Site, section: EngineSection) -> str:
    return f"atropos-{site.run_id}-{section.name}"


def _engine_command(
    site: Site, section: EngineSection, settings: TrainingConfig, part: dict[str, Any]
) -> list[str]:
    flags: dict[str, Any] = {
        "model": engine_model(site, section),
        "host": site.engine_address(section),
        "port": section.port,
        "dtype": section.dtype or settings.dtype,
        "seed": site.profile.seed,
        "tensor-parallel-size": section.tensor_parallel if section.tensor_parallel > 1 else None,
        "gpu-memory-utilization": section.gpu_memory_utilization,
        "max-model-len": section.max_model_len,
    }
    # vLLM allots adapter memory at the start, for this rank and this number of adapters.
    if site.traits.lora and is_fed(site, section):
        flags["enable-lora"] = True
        if section.flag("max-lora-rank") is None:
            flags["max-lora-rank"] = server_rank(settings.lora_r)
        if section.flag("max-loras") is None:
            flags["max-loras"] = LORA_SLOTS
    # Fewer graph sizes make the restarts faster, which happen every few steps here.
    if site.traits.restarts_engine and not any(
        section.flag(name) is not None for name in GRAPH_FLAGS
    ):
        flags["cudagraph-capture-sizes"] = few_graph_sizes(
            section.flag_number("max-num-seqs", MOST_SEQUENCES)
        )
    if settings.routing_replay and is_fed(site, section):
        flags[ROUTING_FLAG] = True
    # `args` override what is derived; `checks` refuses those that would break the stack.
    flags |= section.args | part
    return [*_module("vllm_server"), *site.texts(_flags(flags))]


def _environment(
    site: Site, section: EnvSection, after: list[str], settings: TrainingConfig
) -> ComponentSpec:
    engines = env_engines(site.profile, section)
    urls = [f"{site.engine_url(engine)}/v1" for engine in engines]
    flags: dict[str, Any] = {
        "slurm": False,
        "env.rollout_server_url": site.api_url,
        "env.tokenizer_name": site.model,
        "env.use_wandb": settings.use_wandb,
        "env.wandb_name": f"{site.profile.name}-{section.name}",
        # The environment exits after this many batches of run-api. Unreachable, because the trainer
        # ends the run.
        "env.total_steps": 1_000_000_000,
        "env.inference_weight": section.weight,
        "openai.base_url": urls[0],
        "openai.server_type": "vllm",
        "openai.model_name": engine_model(site, engines[0]),
        "openai.api_key": "local",
    }
    # Only our own environments have the flag `env.seed`.
    if (
        section.verifiers
        or section.openenv
        or section.agent
        or ((section.module or "").startswith("atropos_envs.") and section.module != RUNNER)
    ) and not section.config:
        flags["env.seed"] = site.profile.seed
    flags |= _kind_flags(site, section, engines[0])
    if section.command:
        command = _program(site.texts(section.command))
    else:
        program = _environment_program(section, site)
        config = ["--config", str(config_file(site.path(section.config)))] if section.config else []
        command = [*program, "serve", *config, *site.texts(_flags(flags, explicit_booleans=True))]
    # Only the hosted runner reads the limit of sequences; a user's own worker flags have priority.
    derives_workers = RUNNER in command and not WORKER_FLAGS & section.args.keys()
    steered = concurrency_variables(site, section, settings) if is_hosted(command) else {}
    return _spec(
        site,
        section,
        name=section.name,
        role=Role.ENV,
        command=command,
        env=_tracked(site, settings, section.name)
        | {ENV_ENGINE_URLS: " ".join(urls)}
        | ({ENV_SEQUENCES: str(sequences_in_flight(site, section))} if derives_workers else {})
        | ({} if section.refill else {ENV_REFILL: "0"})
        | ({} if section.curriculum == "none" else {ENV_CURRICULUM: section.curriculum})
        | steered,
        depends_on={"api": "healthy"}
        | dict.fromkeys(after, "completed")
        | ({section.openenv_name: "healthy"} if section.starts_openenv else {}),
        stages=[HOSTED_STAGE, *ENV_STAGES] if is_hosted(command) else ENV_STAGES,
        place=site.place(env_node(site.profile, section)),
        scratch=True,  # atroposlib imports wandb, which leaves two folders there
        stop=StopPolicy(signal="TERM", grace_s=5),
    )


def sequences_in_flight(site: Site, env: EnvSection) -> int:
    """Limit of completions in flight for an environment: its share of what its engines compute
    at a time."""
    users = _engine_users(site.profile)
    return sum(
        engine.flag_number("max-num-seqs", MOST_SEQUENCES) // users[engine.name]
        for engine in env_engines(site.profile, env)
    )


# Environments that share an engine share its sequences equally.
def _engine_users(profile: Profile) -> Counter[str]:
    return Counter(engine.name for each in profile.env for engine in env_engines(profile, each))


def concurrency_variables(site: Site, env: EnvSection, settings: TrainingConfig) -> dict[str, str]:
    """Variables of an environment's concurrency control; empty if atroposlib's rules apply."""
    profile, given = site.profile, _env_settings(site, env)
    ahead = given.get(AHEAD_FLAG, MOST_AHEAD)
    if most := settings.max_policy_lag:
        # `ahead` batches give a lag bound of 2 * `ahead` versions.
        ahead = min(ahead, max(1, most // 2))
    by_hand = (WORKER_FLAGS | {SHARE_FLAG}) & given.keys()
    # A custom trainer may not correct for lag. An engine that restarts every few steps aborts the
    # completions in flight.
    unfit = profile.trainer.command or traits_of(profile).restarts_engine
    if by_hand or unfit or ahead == 1 or not env.refill or settings.max_policy_lag == 0:
        return {}
    engines, users = env_engines(profile, env), _engine_users(profile)
    share = sum(1.0 / users[engine.name] for engine in engines) / len(engines)
    return {
        ENV_CONCURRENCY: str(env.concurrency),
        ENV_AHEAD: str(ahead),
        ENV_ENGINE_SHARE: f"{share:g}",
    }


def _env_settings(site: Site, env: EnvSection) -> dict[str, Any]:
    """Settings of an environment by flag; the profile's override its YAML file's."""
    found: dict[str, Any] = {}
    if env.config:
        # The checks report a file that cannot be read.
        with suppress(ImportError, OSError, ValueError, RecursionError):
            data = read_yaml(config_file(site.path(env.config)))
            if isinstance(data, dict) and isinstance(data.get("env"), dict):
                found = {f"env.{key}": value for key, value in data["env"].items()}
    known = found | env.args
    # Drop an invalid number of batches ahead: the checks report it.
    return {
        key: value
        for key, value in known.items()
        if key != AHEAD_FLAG or (isinstance(value, int) and value >= 1)
    }


def read_yaml(path: Path) -> Any:
    """Return the contents of an environment's YAML file.

    Raises:
        ImportError: PyYAML is missing, which comes with atroposlib.
        OSError: the file cannot be read.
        ValueError: it is not YAML, or not UTF-8.
        RecursionError: it is nested too deep.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _kind_flags(site: Site, section: EnvSection, engine: EngineSection) -> dict[str, Any]:
    """Flags of the environment's own program, and the user's."""
    if section.verifiers:
        return _verifiers_flags(site, section, engine)
    if section.openenv:
        ports = [port for each, port in site.profile.openenv_servers if each is section]
        url = f"http://127.0.0.1:{ports[0]}" if ports else site.text(section.openenv)
        own: dict[str, Any] = {"env.openenv": url}
    elif section.agent:
        scorer = section.scorer
        if isinstance(scorer, list | tuple):
            scorer = json.dumps(_program(site.texts(list(scorer))))
        own = {
            "env.agent": json.dumps(_program(site.texts(list(section.agent)))),
            "env.tasks": site.path(section.tasks or ""),
            "env.scorer": site.text(scorer or ""),
        }
    else:
        return section.args
    # Episodes may fill the engine's context.
    return own | {"env.max_token_length": engine.max_model_len} | section.args


def openenv_app(target: str) -> tuple[str, Path | None]:
    """Return `module:app` of an OpenEnv server, and the folder that it is imported from."""
    folder = resolve_path(target)
    if folder.is_dir():
        return "server.app:app", folder
    return target if ":" in target else f"{target}.server.app:app", None


def _openenv(site: Site, section: EnvSection, port: int, after: list[str]) -> ComponentSpec:
    module, folder = openenv_app(site.path(section.openenv or ""))
    place = [module, *(["--app-dir", str(folder)] if folder else [])]
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    answers = [HttpCheck(url=f"http://127.0.0.1:{port}/health")]
    return _spec(
        site,
        ComponentOptions(),
        name=section.openenv_name,
        role=Role.OTHER,
        command=[*_module("uvicorn"), *place, *options],
        env={key: site.text(value) for key, value in section.env.items()},
        port=port,
        probes=Probes(
            readiness=Probe(checks=answers, interval_s=0.25),
            liveness=Probe(checks=answers, interval_s=5, timeout_s=10),
        ),
        restart=SERVES_TILL_STOPPED,
        depends_on=dict.fromkeys(after, "completed"),
        place=site.place(env_node(site.profile, section)),
    )


def _verifiers_flags(site: Site, section: EnvSection, engine: EngineSection) -> dict[str, Any]:
    own = {key: value for key, value in section.args.items() if not key.startswith(FLAG_PARTS)}
    flags = {
        "env.verifiers": site.path(section.verifiers or ""),
        "env.arguments": json.dumps(own),
        # Episodes may fill the engine's context.
        "env.max_token_length": engine.max_model_len,
    }
    return flags | {key: value for key, value in section.args.items() if key not in own}


def _environment_program(section: EnvSection, site: Site) -> list[str]:
    if section.verifiers:
        return _module(VERIFIERS_SERVER)
    if section.openenv or section.agent:
        return _module(OPENENV_SERVER if section.openenv else PROGRAM_SERVER)
    # Our own environments run directly; the runner hosts any other that uses atroposlib.
    target = site.text(section.module) if section.module else site.path(section.script or "")
    path = target.partition(":")[0]  # FILE.py:ClassName
    files = (
        [Path(folder) / f"{path.replace('.', '/')}.py" for folder in ("", *sys.path)]
        if section.module
        else [Path(path)]
    )
    # A module is searched in the working directory first, as `python -m` does.
    source = next((file for file in files if file.is_file()), None)
    if not (section.module and is_ours(target)) and source and is_hostable(source):
        return [*_module(RUNNER), target]
    return _module(target) if section.module else [PYTHON, target]


def config_file(text: str) -> Path:
    path = Path(text).expanduser()
    beside = [shipped.parent / text for shipped in list(shipped_profiles().values())[:1]]
    return next((place for place in [path, *beside] if place.is_file()), path)


def _any_trainer(site: Site, after: list[str], **derived: Any) -> ComponentSpec:
    return _spec(
        site,
        site.profile.trainer,
        name="trainer",
        role=Role.TRAINER,
        depends_on={"api": "healthy"} | dict.fromkeys(after, "completed"),
        place=site.place(trainer_nodes(site.profile)[0]),
        scratch=True,
        stop=StopPolicy(grace_s=120),  # it finishes the step and writes a checkpoint
        ends_run=True,
        **derived,
    )


def _other_trainer(site: Site, command: list[str], after: list[str]) -> ComponentSpec:
    gpus = site.profile.trainer.gpus
    contract = {
        ENV_API_URL: site.api_url,
        ENV_ENGINE_URLS: engine_urls(site),
        ENV_MODEL: site.model,
        ENV_CHECKPOINTS: str(site.run.checkpoints),
    }
    return _any_trainer(
        site, after, command=_program(site.texts(command)), env=_gpus(gpus) | contract, gpus=gpus
    )


def _trainer(site: Site, settings: TrainingConfig, after: list[str]) -> list[ComponentSpec]:
    # On several machines one launcher for each, of which the first reports for all.
    section, placements = site.profile.trainer, trainer_placements(site.profile)
    if section.command:
        return [_other_trainer(site, section.command, after)]
    names = host_names("trainer", len(placements) or 1)
    gpus = placements[0].gpus if placements else trainer_gpus(site.profile)
    spec = _any_trainer(
        site,
        after,  # not the engine: the trainer imports while vLLM loads, then waits for the manifest
        command=[*_ranks_of(site, 0), *settings.to_args()],
        env=_gpus(gpus) | site.met_at | _ranks_meet(site, 0) | _tracked(site, settings),
        probes=_reached(stages.ATTACHED, "attached to the engine"),
        gpus=gpus,
        stages=TRAINER_STAGES,
        restart_with=names[1:],
        # The engine cannot take weights: a restart would fail the same way.
        final_codes=[NO_UPDATE_CODE],
        start_timeout_s=1800,
    )
    parts = [spec]
    for rank, name in enumerate(names[1:], 1):
        update = {
            "name": name,
            "command": [*_ranks_of(site, rank), *settings.to_args()],
            "env": spec.env | _gpus(placements[rank].gpus) | _ranks_meet(site, rank),
            "gpus": placements[rank].gpus,
            "place": site.place(placements[rank].node),
            "stages": [],
            "restart_with": ["trainer"],
            "ends_run": False,
        }
        parts.append(spec.model_copy(update=update))
    return parts


def _ranks_of(site: Site, number: int) -> list[str]:
    placements, ranks = trainer_placements(site.profile), trainer_ranks(site.profile)
    if len(placements) < 2:
        return ranked(ranks)
    return ranked(ranks // len(placements), nodes=len(placements), node=number)


def _ranks_meet(site: Site, number: int) -> dict[str, str]:
    placements = trainer_placements(site.profile)
    if len(placements) < 2:
        return {}
    return {ENV_RANKS_DIR: str(site.run.root / "ranks")} | _node_address(site, placements, number)


def _tracked(site: Site, settings: TrainingConfig, environment: str = "") -> dict[str, str]:
    """Variables that make all attempts one Weights & Biases run, and the components of a run one
    group."""
    if not settings.use_wandb:
        return {}
    return {
        # The end of the id: its beginning is the profile's name, its end is unique.
        "WANDB_RUN_ID": "-".join(filter(None, [site.run_id, environment]))[-WANDB_ID_LENGTH:],
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": str(settings.wandb_group),
        "WANDB_DIR": str(site.run.root),
    }


def ranked(ranks: int, nodes: int = 1, node: int = 0) -> list[str]:
    if ranks == nodes == 1:
        return _module("trainer_core")
    place = ["--nnodes", str(nodes), "--node-rank", str(node)] if nodes > 1 else []
    return [*_module("trainer_core.ranks.launch"), *place, str(ranks)]


def _extra(site: Site, name: str, section: ExtraSection) -> ComponentSpec:
    return _spec(
        site,
        section,
        name=name,
        role=section.role,
        command=_program(site.texts(section.command)),
        port=section.port,
        place=site.place(node_of(site.profile, section.node)),
    )


def _gpus(gpus: list[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


def is_interpreter(program: str) -> bool:
    """True for names of the Python that runs atropos-tui; a path is the user's own choice."""
    return program in ("python", "python3")


def _program(command: list[str]) -> list[str]:
    if not command or not is_interpreter(command[0]):
        return command
    if command[1:2] == ["-m"] and len(command) > 2:
        return [*_module(command[2]), *command[3:]]
    return [PYTHON, *command[1:]]


def _runnable(probe: Probe) -> Probe:
    checks = [
        check.model_copy(update={"command": _program(check.command)})
        if isinstance(check, ExecCheck)
        else check
        for check in probe.checks
    ]
    return probe.model_copy(update={"checks": checks})


def _module(name: str) -> list[str]:
    # -P: the working directory may hold anybody's modules of our names.
    return [PYTHON, *(["-P"] if is_ours(name) else []), "-m", name]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OUR_PACKAGES


def _flags(values: dict[str, Any], *, explicit_booleans: bool = False) -> list[str]:
    argv: list[str] = []
    for name, value in values.items():
        if value is None or (value is False and not explicit_booleans):
            continue
        argv.append(f"--{name}")
        if isinstance(value, bool):
            argv += [str(value).lower()] if explicit_booleans else []
        elif isinstance(value, list):
            argv += [str(item) for item in value]
        else:
            argv.append(str(value))
    return argv


def resolve_path(path: str) -> Path:
    return Path(os.path.expanduser(path)).resolve()  # noqa: PTH111
