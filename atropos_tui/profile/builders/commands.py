"""Commands, variables and health checks that the builders of all roles share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from atropos_common.net.ports import is_loopback
from atropos_common.system.run_dir import (
    ENV_NODE_ADDRESS,
)
from atropos_tui.gpu import VISIBLE
from atropos_tui.profile.placement import Placement
from atropos_tui.profile.sections import (
    ComponentOptions,
)
from atropos_tui.profile.site import (
    Site,
)
from atropos_tui.profile.spec import (
    ComponentSpec,
    ExecCheck,
    Place,
    Probe,
    Probes,
    RestartPolicy,
    StageCheck,
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
WANDB_ID_LENGTH = 64


def spec_of(site: Site, options: ComponentOptions, **derived: Any) -> ComponentSpec:
    probes: Probes = derived.pop("probes", Probes())
    chosen = {name: getattr(options, name) for name in ("startup", "readiness", "liveness")}
    given_probes = {name: runnable(probe) for name, probe in chosen.items() if probe is not None}
    derived["probes"] = probes.model_copy(update=given_probes)
    # A policy merges field by field; `start_timeout_s` and `depends_on` replace the derived value.
    for name in ("restart", "stop"):
        if (policy := getattr(options, name)) is not None:
            # Only the keys that the user wrote: the others keep the default of the role.
            given = {field: getattr(policy, field) for field in policy.model_fields_set}
            derived[name] = derived[name].model_copy(update=given) if name in derived else policy
    if options.start_timeout_s is not None:
        derived["start_timeout_s"] = options.start_timeout_s
    if options.depends_on is not None:
        servers = site.profile.servers
        derived["depends_on"] = {
            server: condition
            for name, condition in options.depends_on.items()
            for server in servers.get(name, [name])
        }
    if options.cwd is not None:
        derived["cwd"] = site.path(options.cwd)
    derived["env"] = derived.get("env", {}) | {
        key: site.text(value) for key, value in options.env.items()
    }
    return ComponentSpec(**derived)


def reached(stage: str, label: str) -> Probes:
    return Probes(
        startup=Probe(checks=[StageCheck(stage=stage, label=label)], failure_threshold=1_000_000)
    )


def node_address(site: Site, placements: list[Placement], number: int) -> dict[str, str]:
    return (
        {ENV_NODE_ADDRESS: site.hosts.node(placements[number].node).address}
        if len(placements) > 1
        else {}
    )


def is_held(place: Place | None, address: str) -> bool:
    return is_loopback(address) and (place is None or not place.prefix)


def tracking_variables(
    site: Site, settings: TrainingConfig, environment: str = ""
) -> dict[str, str]:
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


def gpu_variables(gpus: list[int]) -> dict[str, str]:
    return {VISIBLE: ",".join(map(str, gpus))} if gpus else {}


def is_interpreter(program: str) -> bool:
    """True for names of the Python that runs atropos-tui; a path is the user's own choice."""
    return program in ("python", "python3")


def program_command(command: list[str]) -> list[str]:
    if not command or not is_interpreter(command[0]):
        return command
    if command[1:2] == ["-m"] and len(command) > 2:
        return [*module_command(command[2]), *command[3:]]
    return [PYTHON, *command[1:]]


def runnable(probe: Probe) -> Probe:
    checks = [
        check.model_copy(update={"command": program_command(check.command)})
        if isinstance(check, ExecCheck)
        else check
        for check in probe.checks
    ]
    return probe.model_copy(update={"checks": checks})


def module_command(name: str) -> list[str]:
    # -P: the working directory may hold anybody's modules of our names.
    return [PYTHON, *(["-P"] if is_ours(name) else []), "-m", name]


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OUR_PACKAGES


def flag_arguments(values: dict[str, Any], *, explicit_booleans: bool = False) -> list[str]:
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
