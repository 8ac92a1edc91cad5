"""Builder of the trainer: its ranks, and trainers of other programs."""

from __future__ import annotations

from typing import Any

from atropos_common.protocol import stages
from atropos_common.protocol.control import Role
from atropos_common.system.run_dir import (
    ENV_API_URL,
    ENV_CHECKPOINTS,
    ENV_ENGINE_URLS,
    ENV_MODEL,
    ENV_RANKS_DIR,
    GAVE_UP_CODE,
    NO_UPDATE_CODE,
)
from atropos_tui.profile.builders.commands import (
    gpu_variables,
    module_command,
    node_address,
    program_command,
    reached,
    spec_of,
    tracking_variables,
)
from atropos_tui.profile.placement import host_names
from atropos_tui.profile.site import (
    Site,
    engine_urls,
    trainer_gpus,
    trainer_nodes,
    trainer_placements,
    trainer_ranks,
)
from atropos_tui.profile.spec import (
    ComponentSpec,
    Stage,
    StopPolicy,
)
from trainer_core.config import TrainingConfig

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


def _any_trainer(site: Site, after: list[str], **derived: Any) -> ComponentSpec:
    return spec_of(
        site,
        site.profile.trainer,
        name="trainer",
        role=Role.TRAINER,
        depends_on={"api": "healthy"} | dict.fromkeys(after, "completed"),
        place=site.place(trainer_nodes(site.profile)[0]),
        scratch=True,
        # It finishes the step and writes a checkpoint; one of 8 billion parameters has
        # about 110 GB (14 bytes a parameter).
        stop=StopPolicy(grace_s=600),
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
        site,
        after,
        command=program_command(site.texts(command)),
        env=gpu_variables(gpus) | contract,
        gpus=gpus,
    )


def trainer_specs(site: Site, settings: TrainingConfig, after: list[str]) -> list[ComponentSpec]:
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
        env=gpu_variables(gpus)
        | site.met_at
        | _ranks_meet(site, 0)
        | tracking_variables(site, settings),
        probes=reached(stages.ATTACHED, "attached to the engine"),
        gpus=gpus,
        stages=TRAINER_STAGES,
        restart_with=names[1:],
        final_codes=[NO_UPDATE_CODE, GAVE_UP_CODE],
        start_timeout_s=1800,
    )
    parts = [spec]
    for rank, name in enumerate(names[1:], 1):
        update = {
            "name": name,
            "command": [*_ranks_of(site, rank), *settings.to_args()],
            "env": spec.env | gpu_variables(placements[rank].gpus) | _ranks_meet(site, rank),
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
    return {ENV_RANKS_DIR: str(site.run.root / "ranks")} | node_address(site, placements, number)


def ranked(ranks: int, nodes: int = 1, node: int = 0) -> list[str]:
    if ranks == nodes == 1:
        return module_command("trainer_core")
    place = ["--nnodes", str(nodes), "--node-rank", str(node)] if nodes > 1 else []
    return [*module_command("trainer_core.ranks.launch"), *place, str(ranks)]
