"""Builder of the engines: flags and variables of vLLM, and servers on several machines."""

from __future__ import annotations

import math
from itertools import pairwise
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
    ENV_HOLD_GENERATION,
    ENV_LOADS_AFTER,
    ENV_LOGDIR,
    ENV_SHARED_WEIGHTS,
    ENV_TRAINER_HOSTS,
    ENV_WEIGHT_UPDATES,
)
from atropos_tui.profile.builders.commands import (
    SERVES_TILL_STOPPED,
    flag_arguments,
    gpu_variables,
    is_held,
    module_command,
    node_address,
    reached,
    spec_of,
)
from atropos_tui.profile.placement import Placement, part_names
from atropos_tui.profile.sections import (
    EngineSection,
)
from atropos_tui.profile.site import (
    Site,
    engine_model,
    is_fed,
    is_mapped,
    meeting_address,
    receivers,
)
from atropos_tui.profile.spec import (
    ComponentSpec,
    FileCheck,
    HttpCheck,
    Probe,
    Probes,
    Stage,
    StopPolicy,
)
from trainer_core.config import TrainingConfig

GRAPH_FLAGS = (
    "cudagraph-capture-sizes",
    "max-cudagraph-capture-size",
    "compilation-config",
    "enforce-eager",
)
"""vLLM flags that choose graph sizes; if one is set, the plan chooses none."""
MOST_SEQUENCES = 1024
"""Default of vLLM's --max-num-seqs on a large GPU."""
LORA_SLOTS = 2
"""The newest adapter, and the one of completions still in flight."""
START_TIMEOUT_S = 1800
"""Loading and compiling a large model takes up to half an hour."""
ENV_READY_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
"""Limit of vLLM itself for a start; its default is 600 s."""
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
        name="its warm-up",
        pattern=r"Graph capturing finished|init engine \(",
        usually="vLLM computes once at each batch size, on a GPU for a CUDA graph; [vllm.args] "
        "enforce-eager = true skips the graphs, but decodes slower",
    ),
    Stage(
        name=stages.READY,
        pattern=r"Application startup complete",  # a server that is not ours
        usually="the server tests on one token that each kind of layer follows new weights",
    ),
]


def engine_specs(
    site: Site,
    section: EngineSection,
    placements: list[Placement],
    after: list[str],
    settings: TrainingConfig,
) -> list[ComponentSpec]:
    # On several machines one part for each, of which the first serves.
    names = part_names(section.name, len(placements))
    commands = [
        _engine_command(site, section, settings, _engine_part(site, section, placements, rank))
        for rank in range(len(names))
    ]
    place = site.place(section.node if site.profile.is_spread else None)
    shared = is_mapped(site.profile, section)
    manifest = str(site.run.manifest(section.name))
    before = _on_the_same_gpus_before(site, section)
    limit_s = section.start_timeout_s or START_TIMEOUT_S
    first = spec_of(
        site,
        section,
        name=section.name,
        role=Role.ENGINE,
        command=commands[0],
        env=_variables(site, section, settings)
        | node_address(site, placements, 0)
        | ({ENV_LOADS_AFTER: site.engine_url(before)} if before else {})
        | {ENV_READY_TIMEOUT: f"{math.ceil(limit_s)}"},
        depends_on=dict.fromkeys(after, "completed"),
        probes=_probes(site.engine_url(section), [FileCheck(path=manifest)] if shared else []),
        port=section.port,
        port_held=is_held(place, site.engine_address(section)),
        place=place,
        gpus=section.gpus,
        # A manifest of an earlier attempt would point the trainer at memory that no longer exists.
        clears=[manifest, *_shm_files(site, section)] if shared else [],
        scratch=True,  # vLLM leaves sockets and files of its process groups there
        stages=_stages(before),
        # The parts of one server restart together. In single copy the trainer maps this engine's
        # memory.
        restart_with=[
            *names[1:],
            *(["trainer"] if shared and site.traits.trainer_follows_engine else []),
        ],
        restart=SERVES_TILL_STOPPED,
        stop=StopPolicy(grace_s=15),
        start_timeout_s=limit_s,
    )
    others = (
        _without_api(site, first, names[rank], commands[rank], placements, rank)
        for rank in range(1, len(names))
    )
    return [first, *others]


def _on_the_same_gpus_before(site: Site, section: EngineSection) -> EngineSection | None:
    """Return the engine before this one on the same GPUs; both are of one [[vllm]] table."""
    # At its start vLLM measures the GPU's free memory, which nobody else may change meanwhile.
    for made in site.profile.placed if section.gpus else ():
        engines = [engine for engine, _ in made if engine.gpus == section.gpus]
        for before, engine in pairwise(engines):
            if engine.name == section.name:
                return before
    return None


def _stages(before: EngineSection | None) -> list[Stage]:
    if before is None:
        return ENGINE_STAGES
    turn = Stage(
        name=stages.GPU_TURN,
        usually=f"engines of one GPU load one after another: see `logs {before.name}`",
    )
    return [ENGINE_STAGES[0], turn, *ENGINE_STAGES[1:]]


def _variables(site: Site, section: EngineSection, settings: TrainingConfig) -> dict[str, str]:
    found = {ENV_LOGDIR: str(site.run.engine_bridge(section.name))} | gpu_variables(section.gpus)
    if section.sampling != "plain":
        found[ENV_SAMPLING] = section.sampling
    if section.open:
        found[ENV_OPEN_GENERATION] = "1"
    return found | (_fed_variables(site, section, settings) if is_fed(site, section) else {})


def _probes(url: str, files: list[FileCheck]) -> Probes:
    # /health_generate answers only when the engine core can generate, not when HTTP alone works.
    generates = [HttpCheck(url=f"{url}/health_generate"), *files]
    answers = [HttpCheck(url=f"{url}/health")]
    return Probes(
        readiness=Probe(checks=generates, interval_s=0.25, timeout_s=15),
        liveness=Probe(checks=answers, interval_s=2, timeout_s=10, failure_threshold=5),
    )


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
        "env": first.env | gpu_variables(here.gpus) | node_address(site, placements, rank),
        "probes": reached(stages.READY, "its workers are ready"),
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


def _fed_variables(site: Site, section: EngineSection, settings: TrainingConfig) -> dict[str, str]:
    environment: dict[str, str] = {}
    if is_mapped(site.profile, section):
        environment |= {
            ENV_SHARED_WEIGHTS: "1",
            "ATROPOS_SHM_NAME": _shm_name(site, section),
        }
    receives = section.name in {each.name for each in receivers(site.profile)}
    if site.traits.updates_weights or receives:
        environment[ENV_WEIGHT_UPDATES] = "1"
    # A server joins only groups at addresses that it was given: a request must not send it
    # elsewhere.
    if receives and not is_loopback(address := meeting_address(site, settings)):
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
        "gpu-memory-utilization": section.memory_flag,
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
    return [*module_command("vllm_server"), *site.texts(flag_arguments(flags))]
