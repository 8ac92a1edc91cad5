"""Profile to `StackSpec`: commands, order, ports, probes, who restarts with whom. A function from data to data.

One builder per role makes a `ComponentSpec` of its section; what they share about a run is a `Site` (site.py).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from atropos_common import stages
from atropos_common.bridge import ENV_OPEN_GENERATION, ENV_SAMPLING, ROUTING_FLAG, few_graph_sizes, server_rank
from atropos_common.control import Role
from atropos_common.run_dir import (
    ENV_API_URL,
    ENV_CHECKPOINTS,
    ENV_ENGINE_URLS,
    ENV_HOLD_GENERATION,
    ENV_MODEL,
    ENV_NODE_ADDRESS,
    ENV_RANKS_DIR,
    ENV_REFILL,
    ENV_SEQUENCES,
    ENV_TRAINER_HOSTS,
    NO_UPDATE_CODE,
)
from atropos_common.transfer import is_loopback
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.redact import hide_tree
from atropos_tui.profile.seats import Seat, host_names, part_names
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
    make_site,
    meeting_address,
    node_of,
    trainer_gpus,
    trainer_nodes,
    trainer_ranks,
    trainer_seats,
    training_config,
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
OUR_PACKAGES = ("atropos_tui", "atropos_api", "atropos_envs", "trainer_core", "vllm_server", "atroposlib")
"""Are installed: a folder of one of these names where atropos-tui is started is none of them."""
SERVES_TILL_STOPPED = RestartPolicy(policy="always")
"""For servers: an end that nobody asked for is a crash, whatever the exit code."""
GRAPH_FLAGS = ("cudagraph-capture-sizes", "max-cudagraph-capture-size", "compilation-config", "enforce-eager")
"""Whoever sets one of these has chosen the sizes of CUDA graphs."""
MOST_SEQUENCES = 1024
"""vLLM's own --max-num-seqs on a large GPU."""
HOST = "atropos_envs.runner"
"""Runs environments that nobody here wrote."""
WORKER_FLAGS = {"env.max_num_workers", "env.max_num_workers_per_node"}
"""Whoever sets one of these has chosen how many groups are under way."""
LORA_SLOTS = 2
"""Adapters that an engine computes with at a time: the newest, and the one on which completions in flight end."""
WANDB_ID_LENGTH = 64
"""Longer ids of runs are refused there."""

TRAINER_STAGES = [
    Stage(
        name=stages.REGISTERED,
        usually="run-api does not answer yet, or another trainer has registered there: see `logs api`",
    ),
    Stage(
        name=stages.ATTACHED,
        usually="vLLM is still loading the model, which takes up to two minutes on a GPU: see `why` and `logs` of the "
        "engine",
    ),
    Stage(
        name=stages.FIRST_BATCH,
        usually="no batch is full yet: rollouts are slow, or all groups had equal scores and were dropped "
        "(--env.ensure_scores_are_not_same false keeps them): see `logs` of the environment",
    ),
]
ENGINE_STAGES = [
    Stage(name="its imports", pattern=r"non-default args|Resolved architecture", usually="vLLM imports for 10 to 30 s"),
    Stage(
        name="its weights",
        pattern=r"Loading weights took|Model loading took",
        usually="a large model is read from its disk, or first comes from the hub",
    ),
    Stage(
        name="its KV cache",
        pattern=r"KV cache size|# GPU blocks",
        usually="the model is compiled, the first time for some minutes, and its memory measured",
    ),
    Stage(
        name="its CUDA graphs",
        pattern=r"Graph capturing finished|init engine \(",
        usually="one graph a batch size; [vllm.args] enforce-eager = true leaves them out, and decodes slower",
    ),
    Stage(
        name=stages.READY,
        pattern=r"Application startup complete",  # a server of another program
        usually="it proves on a token that each kind of layer follows new weights",
    ),
]
HOSTED_STAGE = Stage(
    name=stages.SET_UP,
    usually="its setup() has not ended: it loads data, or waits for a service: see its `logs`",
)
"""Environments that `atropos_envs` hosts say when it is over."""
ENV_STAGES = [
    Stage(
        name=stages.REGISTERED,
        pattern=r"Initialized env with id \d+",  # an environment of another program, in atroposlib's words
        usually="run-api takes environments only after the trainer's first request for a batch, and the trainer waits "
        "for vLLM: see `why trainer`",
    ),
]


def build_stack(profile: Profile, run_dir: Path, *, run_id: str) -> StackSpec:
    """The complete stack in start order: prepare steps, run-api, engines, environments, extras, trainer."""
    return stack_of(make_site(profile, run_dir, run_id=run_id))


def stack_of(site: Site) -> StackSpec:
    """As `build_stack`, with what `.env` files say to the references of the profile."""
    profile = site.profile
    settings = training_config(site)
    after = [section.name for section in profile.prepare]
    stack = [
        *(_prepare(site, section, after[:index]) for index, section in enumerate(profile.prepare)),
        _api(site, profile.api, after),
        *(part for seated in profile.seated for each in seated for part in _engine(site, *each, after, settings)),
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
        survive=profile.survive,
        launcher=profile.cluster.launcher if profile.cluster else "local",
        nodes=list(site.hosts.nodes),
    )
    named = {name: site.dotenv[name] for name in references(spec.model_dump_json()) if name in site.dotenv}
    return spec.model_copy(update={"variables": named})


def _with_python(spec: ComponentSpec) -> ComponentSpec:
    """With the interpreter of the machine where it runs."""
    if spec.place is None or spec.command[0] != PYTHON or spec.place.python == PYTHON:
        return spec
    return spec.model_copy(update={"command": [spec.place.python, *spec.command[1:]]})


def redacted(stack: StackSpec) -> dict[str, Any]:
    """The plan as data that may be written to a file."""
    data: dict[str, Any] = hide_tree(stack.model_dump(mode="json", exclude={"variables"}))
    return data


def _spec(site: Site, options: ComponentOptions, **derived: Any) -> ComponentSpec:
    """Derived values, overridden by what the profile says."""
    probes: Probes = derived.pop("probes", Probes())
    chosen = {name: getattr(options, name) for name in ("startup", "readiness", "liveness")}
    said = {name: _runnable(probe) for name, probe in chosen.items() if probe is not None}
    derived["probes"] = probes.model_copy(update=said)
    for name in ("restart", "stop"):
        if (policy := getattr(options, name)) is not None:
            given = {field: getattr(policy, field) for field in policy.model_fields_set}
            derived[name] = derived[name].model_copy(update=given) if name in derived else policy
    for name in ("start_timeout_s", "depends_on"):
        if getattr(options, name) is not None:
            derived[name] = getattr(options, name)
    if options.cwd is not None:
        derived["cwd"] = site.path(options.cwd)
    derived["env"] = derived.get("env", {}) | {key: site.text(value) for key, value in options.env.items()}
    return ComponentSpec(**derived)


def _reached(stage: str, label: str) -> Probes:
    """Healthy once the program records that stage, however long that takes."""
    return Probes(startup=Probe(checks=[StageCheck(stage=stage, label=label)], failure_threshold=1_000_000))


def _prepare(site: Site, section: PrepareSection, before: list[str]) -> ComponentSpec:
    return ComponentSpec(
        name=section.name,
        role=Role.PREPARE,
        command=_program(site.texts(section.command)),
        env={key: site.text(value) for key, value in section.env.items()},
        depends_on=dict.fromkeys(before, "completed"),
        creates=site.path(section.creates) if section.creates else None,
        restart=RestartPolicy(policy="never"),
        start_timeout_s=24 * 3600,
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
            liveness=Probe(checks=answers, interval_s=5, timeout_s=10, failure_threshold=6),
        ),
        port=section.port,
        port_held=section.command is None and _is_held(place, site.api_address),
        place=place,
        # Its state is in memory only: environments must register anew, and the trainer does so by itself.
        restart_with=names,
        scratch=True,  # wandb, which atroposlib imports, leaves folders there when its process is killed
        restart=SERVES_TILL_STOPPED,
        stop=StopPolicy(grace_s=5),
    )


def _engine(
    site: Site, section: EngineSection, seats: list[Seat], after: list[str], settings: TrainingConfig
) -> list[ComponentSpec]:
    """The server; on several machines a part of it on each, the first of which serves."""
    names = part_names(section.name, len(seats))
    fed, url = is_fed(site, section), site.engine_url(section)
    place = site.place(section.node if site.profile.is_spread else None)
    environment = {"LOGDIR": str(site.run.engine_bridge(section.name))} | _gpus(section.gpus)
    if section.sampling != "plain":
        environment[ENV_SAMPLING] = section.sampling
    if section.open:
        environment[ENV_OPEN_GENERATION] = "1"
    checks: list[Any] = [HttpCheck(url=f"{url}/health_generate")]
    clears: list[str] = []
    if fed:
        environment |= _fed_environment(site, section, settings)
    if fed and site.traits.shares_memory:
        manifest = str(site.run.manifest(section.name))
        checks.append(FileCheck(path=manifest))
        clears = [manifest, *_shm_files(site, section)]
    spec = _spec(
        site,
        section,
        name=section.name,
        role=Role.ENGINE,
        command=_engine_command(site, section, settings, _engine_part(site, section, seats, 0)),
        env=environment | _node_address(site, seats, 0),
        depends_on=dict.fromkeys(after, "completed"),
        probes=Probes(
            readiness=Probe(checks=checks, interval_s=0.25, timeout_s=15),
            liveness=Probe(checks=[HttpCheck(url=f"{url}/health")], interval_s=2, timeout_s=10, failure_threshold=5),
        ),
        port=section.port,
        port_held=_is_held(place, site.engine_address(section)),
        place=place,
        gpus=section.gpus,
        clears=clears,
        scratch=True,  # vLLM leaves sockets and files of its groups there
        stages=ENGINE_STAGES,
        restart_with=[*names[1:], *(["trainer"] if fed and site.traits.trainer_follows_engine else [])],
        restart=SERVES_TILL_STOPPED,
        stop=StopPolicy(grace_s=15),
        start_timeout_s=1800,
        standby=fed and site.traits.restarts_engine and len(names) == 1,
    )
    ready = _reached(stages.READY, "its workers are ready")
    return [
        spec,
        *(
            spec.model_copy(
                update={
                    "name": names[rank],
                    "command": _engine_command(site, section, settings, _engine_part(site, section, seats, rank)),
                    "env": spec.env | _gpus(seats[rank].gpus) | _node_address(site, seats, rank),
                    "probes": ready,
                    "port": None,
                    "port_held": False,
                    "place": site.place(seats[rank].node),
                    "gpus": seats[rank].gpus,
                    "restart_with": [section.name],
                }
            )
            for rank in range(1, len(seats))
        ),
    ]


def _engine_part(site: Site, section: EngineSection, seats: list[Seat], rank: int) -> dict[str, Any]:
    """Flags that tell a part of a server over several machines which it is, and where all of them meet."""
    if len(seats) < 2:
        return {}
    return {
        "nnodes": len(seats),
        "node-rank": rank,
        "master-addr": site.hosts.node(seats[0].node).address,
        "master-port": site.profile.meeting_ports[section.name],
        "headless": rank > 0,
    }


def _node_address(site: Site, seats: list[Seat], number: int) -> dict[str, str]:
    """The address of one of several machines, by which the others of a component reach it."""
    return {ENV_NODE_ADDRESS: site.hosts.node(seats[number].node).address} if len(seats) > 1 else {}


def _is_held(place: Place | None, address: str) -> bool:
    """Whether the supervisor can hold the port: one of the loopback of its own machine."""
    return is_loopback(address) and (place is None or not place.prefix)


def _fed_environment(site: Site, section: EngineSection, settings: TrainingConfig) -> dict[str, str]:
    """What the mode asks of an engine that gets the trainer's weights."""
    environment: dict[str, str] = {}
    if site.traits.shares_memory:
        environment |= {"VLLM_ENABLE_SHARED_WEIGHTS": "1", "ATROPOS_SHM_NAME": _shm_name(site, section)}
    if site.traits.updates_weights:
        environment["ATROPOS_WEIGHT_UPDATES"] = "1"
    if site.traits.other_gpus and not is_loopback(address := meeting_address(site, settings)):
        environment[ENV_TRAINER_HOSTS] = address
    if site.traits.holds_generation:
        environment[ENV_HOLD_GENERATION] = "1"
    return environment


def _shm_files(site: Site, section: EngineSection) -> list[str]:
    """Where the weights of each of its ranks lie on a CPU."""
    first = f"/dev/shm/{_shm_name(site, section)}"
    return [first, *(f"{first}.{rank}" for rank in range(1, section.tensor_parallel))]


def _shm_name(site: Site, section: EngineSection) -> str:
    return f"atropos-{site.run_id}-{section.name}"


def _engine_command(site: Site, section: EngineSection, settings: TrainingConfig, part: dict[str, Any]) -> list[str]:
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
    if site.traits.lora and is_fed(site, section):
        flags["enable-lora"] = True
        if section.flag("max-lora-rank") is None:
            flags["max-lora-rank"] = server_rank(settings.lora_r)
        if section.flag("max-loras") is None:
            flags["max-loras"] = LORA_SLOTS
    if site.traits.restarts_engine and not any(section.flag(name) is not None for name in GRAPH_FLAGS):
        flags["cudagraph-capture-sizes"] = few_graph_sizes(section.flag_number("max-num-seqs", MOST_SEQUENCES))
    if settings.routing_replay and is_fed(site, section):
        flags[ROUTING_FLAG] = True
    flags |= section.args | part
    return [*_module("vllm_server"), *site.texts(_flags(flags))]


def _environment(site: Site, section: EnvSection, after: list[str], settings: TrainingConfig) -> ComponentSpec:
    engines = env_engines(site.profile, section)
    urls = [f"{site.engine_url(engine)}/v1" for engine in engines]
    flags: dict[str, Any] = {
        "slurm": False,
        "env.rollout_server_url": site.api_url,
        "env.tokenizer_name": site.model,
        "env.use_wandb": settings.use_wandb,
        "env.wandb_name": f"{site.profile.name}-{section.name}",
        # run-api counts drained batches, and the environment leaves when they exceed this; the trainer ends the run.
        "env.total_steps": 1_000_000_000,
        "env.inference_weight": section.weight,
        "openai.base_url": urls[0],
        "openai.server_type": "vllm",
        "openai.model_name": engine_model(site, engines[0]),
        "openai.api_key": "local",
    }
    if (section.module or "").startswith("atropos_envs.") and section.module != HOST and not section.config:
        flags["env.seed"] = site.profile.seed
    flags |= section.args
    if section.command:
        command = _program(site.texts(section.command))
    else:
        program = _environment_program(section, site)
        config = ["--config", str(config_file(site.path(section.config)))] if section.config else []
        command = [*program, "serve", *config, *site.texts(_flags(flags, explicit_booleans=True))]
    derives_workers = HOST in command and not WORKER_FLAGS & section.args.keys()
    return _spec(
        site,
        section,
        name=section.name,
        role=Role.ENV,
        command=command,
        env=_tracked(site, settings, section.name)
        | {ENV_ENGINE_URLS: " ".join(urls)}
        | ({ENV_SEQUENCES: str(sequences_in_flight(site, section))} if derives_workers else {})
        | ({} if section.refill else {ENV_REFILL: "0"}),
        depends_on={"api": "healthy"} | dict.fromkeys(after, "completed"),
        stages=[HOSTED_STAGE, *ENV_STAGES] if is_hosted(command) else ENV_STAGES,
        place=site.place(env_node(site.profile, section)),
        scratch=True,  # importing wandb, as atroposlib does, leaves two folders there
        stop=StopPolicy(signal="TERM", grace_s=5),
    )


def sequences_in_flight(site: Site, env: EnvSection) -> int:
    """How many completions an environment may have under way: its share of what its engines compute at a time. How
    many it begins is for places in the queue, and for groups that come out flat (`atropos_envs/places.py`)."""
    asked = Counter(engine.name for each in site.profile.env for engine in env_engines(site.profile, each))
    engines = env_engines(site.profile, env)
    return sum(engine.flag_number("max-num-seqs", MOST_SEQUENCES) // asked[engine.name] for engine in engines)


def _environment_program(section: EnvSection, site: Site) -> list[str]:
    """Environments of ours are programs of the stack; any other of atroposlib's is hosted by one. What does not mention
    atroposlib at all, not even in a file beside it that it imports, runs as it is."""
    target = site.text(section.module) if section.module else site.path(section.script or "")
    path = target.partition(":")[0]  # FILE.py:ClassName
    files = (
        [Path(folder) / f"{path.replace('.', '/')}.py" for folder in ("", *sys.path)]
        if section.module
        else [Path(path)]
    )
    source = next((file for file in files if file.is_file()), None)
    if not (section.module and is_ours(target)) and source and is_hostable(source):
        return [*_module(HOST), target]
    return _module(target) if section.module else [PYTHON, target]


def config_file(text: str) -> Path:
    """An environment's YAML file: a path, else one that comes with the shipped profiles."""
    path = Path(text).expanduser()
    beside = [shipped.parent / text for shipped in list(shipped_profiles().values())[:1]]
    return next((place for place in [path, *beside] if place.is_file()), path)


def _any_trainer(site: Site, after: list[str], **derived: Any) -> ComponentSpec:
    """What a trainer is, ours or another: its end is that of the run."""
    return _spec(
        site,
        site.profile.trainer,
        name="trainer",
        role=Role.TRAINER,
        depends_on={"api": "healthy"} | dict.fromkeys(after, "completed"),
        place=site.place(trainer_nodes(site.profile)[0]),
        scratch=True,
        stop=StopPolicy(grace_s=120),  # on its signal the trainer finishes the step and writes a checkpoint
        ends_run=True,
        **derived,
    )


def _other_trainer(site: Site, command: list[str], after: list[str]) -> ComponentSpec:
    """A trainer that is not ours: what it must know stands in its environment, and it is well while it runs."""
    gpus = site.profile.trainer.gpus
    told = {
        ENV_API_URL: site.api_url,
        ENV_ENGINE_URLS: engine_urls(site),
        ENV_MODEL: site.model,
        ENV_CHECKPOINTS: str(site.run.checkpoints),
    }
    return _any_trainer(site, after, command=_program(site.texts(command)), env=_gpus(gpus) | told, gpus=gpus)


def _trainer(site: Site, settings: TrainingConfig, after: list[str]) -> list[ComponentSpec]:
    """The trainer; on several machines a launcher of its ranks on each, the first of which speaks for all."""
    section, seats = site.profile.trainer, trainer_seats(site.profile)
    if section.command:
        return [_other_trainer(site, section.command, after)]
    names = host_names("trainer", len(seats) or 1)
    gpus = seats[0].gpus if seats else trainer_gpus(site.profile)
    spec = _any_trainer(
        site,
        after,  # it imports and registers while vLLM loads, and waits for the manifest by itself
        command=[*_ranks_of(site, 0), *settings.to_args()],
        env=_gpus(gpus) | site.met_at | _ranks_meet(site, 0) | _tracked(site, settings),
        probes=_reached(stages.ATTACHED, "attached to the engine"),
        gpus=gpus,
        stages=TRAINER_STAGES,
        restart_with=names[1:],
        final_codes=[NO_UPDATE_CODE],
        start_timeout_s=1800,
    )
    return [
        spec,
        *(
            spec.model_copy(
                update={
                    "name": name,
                    "command": [*_ranks_of(site, rank), *settings.to_args()],
                    "env": spec.env | _gpus(seats[rank].gpus) | _ranks_meet(site, rank),
                    "gpus": seats[rank].gpus,
                    "place": site.place(seats[rank].node),
                    "stages": [],
                    "restart_with": ["trainer"],
                    "ends_run": False,
                }
            )
            for rank, name in enumerate(names[1:], 1)
        ),
    ]


def _ranks_of(site: Site, number: int) -> list[str]:
    """The trainer's ranks on the machine with that number of several."""
    seats, ranks = trainer_seats(site.profile), trainer_ranks(site.profile)
    return ranked(ranks) if len(seats) < 2 else ranked(ranks // len(seats), nodes=len(seats), node=number)


def _ranks_meet(site: Site, number: int) -> dict[str, str]:
    """Where the ranks of several machines meet, and the address of the one with that number."""
    seats = trainer_seats(site.profile)
    if len(seats) < 2:
        return {}
    return {ENV_RANKS_DIR: str(site.run.root / "ranks")} | _node_address(site, seats, number)


def _tracked(site: Site, settings: TrainingConfig, environment: str = "") -> dict[str, str]:
    """What makes all attempts of a component one run of Weights & Biases, and those of a run one group."""
    if not settings.use_wandb:
        return {}
    return {
        "WANDB_RUN_ID": "-".join(filter(None, [site.run_id, environment]))[-WANDB_ID_LENGTH:],
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": str(settings.wandb_group),
        "WANDB_DIR": str(site.run.root),
    }


def ranked(ranks: int, nodes: int = 1, node: int = 0) -> list[str]:
    """The trainer, or torchrun over that many of it; on several nodes on each of them."""
    if nodes == 1:
        return _module("trainer_core") if ranks == 1 else [*_module("trainer_core.launch"), str(ranks)]
    return [*_module("trainer_core.launch"), "--nnodes", str(nodes), "--node-rank", str(node), str(ranks)]


def _extra(site: Site, name: str, section: ExtraSection) -> ComponentSpec:
    return _spec(
        site, section, name=name, role=section.role, command=_program(site.texts(section.command)), port=section.port,
        place=site.place(node_of(site.profile, section.node)),
    )  # fmt: skip


def _gpus(gpus: list[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


def _program(command: list[str]) -> list[str]:
    """`command` with `python` replaced by the interpreter that runs atropos-tui, as docs/profiles.md says of every
    `command`: a profile then works without an activated environment, and all components have the same packages."""
    if command[:1] not in (["python"], ["python3"]):
        return command
    if command[1:2] == ["-m"] and len(command) > 2:
        return [*_module(command[2]), *command[3:]]
    return [PYTHON, *command[1:]]


def _runnable(probe: Probe) -> Probe:
    """`probe` with the commands of its `exec` checks as `_program` makes them."""
    checks = [
        check.model_copy(update={"command": _program(check.command)}) if isinstance(check, ExecCheck) else check
        for check in probe.checks
    ]
    return probe.model_copy(update={"checks": checks})


def _module(name: str) -> list[str]:
    """Python running a module. Ours never comes from the working directory (-P), which may be somebody else's; one of
    the user's own is looked for there first, as Python does."""
    return [PYTHON, *(["-P"] if is_ours(name) else []), "-m", name]


def is_ours(module: str) -> bool:
    """Whether the module comes with atropos-tui, or is atroposlib's."""
    return module.partition(".")[0] in OUR_PACKAGES


def _flags(values: dict[str, Any], *, explicit_booleans: bool = False) -> list[str]:
    """Flags from a table; None is left out, a boolean is a bare flag or `--flag true`."""
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
    """`path` as an absolute one, with `~` put in and links followed."""
    return Path(os.path.expanduser(path)).resolve()  # noqa: PTH111
