"""Builder of the environments: their programs, flags and limits of concurrency."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from atropos_common.protocol import stages
from atropos_common.protocol.control import Role
from atropos_common.system.run_dir import (
    ENV_AHEAD,
    ENV_BESIDE_TRAINER,
    ENV_CONCURRENCY,
    ENV_CURRICULUM,
    ENV_ENGINE_SHARE,
    ENV_ENGINE_URLS,
    ENV_ON_ONE_GPU,
    ENV_REFILL,
    ENV_SEQUENCES,
)
from atropos_tui.profile.builders.commands import (
    PYTHON,
    SERVES_TILL_STOPPED,
    flag_arguments,
    is_ours,
    module_command,
    program_command,
    resolve_path,
    spec_of,
    tracking_variables,
)
from atropos_tui.profile.builders.engine import MOST_SEQUENCES
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.sections import ComponentOptions, EngineSection, EnvSection
from atropos_tui.profile.site import (
    Site,
    engine_model,
    env_engines,
    env_node,
    is_beside_trainer,
    on_one_gpu,
    traits_of,
)
from atropos_tui.profile.source import is_hostable
from atropos_tui.profile.spec import (
    ComponentSpec,
    HttpCheck,
    Probe,
    Probes,
    Stage,
    StopPolicy,
    is_hosted,
)
from trainer_core.config import TrainingConfig

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


def environment_spec(
    site: Site, section: EnvSection, after: list[str], settings: TrainingConfig
) -> ComponentSpec:
    urls = [f"{site.engine_url(engine)}/v1" for engine in env_engines(site.profile, section)]
    command = _command(site, section, settings)
    # Only the hosted runner reads the limit of sequences; a user's own worker flags have priority.
    derives_workers = RUNNER in command and not WORKER_FLAGS & section.args.keys()
    steered = concurrency_variables(site, section, settings) if is_hosted(command) else {}
    return spec_of(
        site,
        section,
        name=section.name,
        role=Role.ENV,
        command=command,
        env=tracking_variables(site, settings, section.name)
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


def _command(site: Site, section: EnvSection, settings: TrainingConfig) -> list[str]:
    if section.command:
        return program_command(site.texts(section.command))
    program = _environment_program(section, site)
    config = ["--config", str(config_file(site.path(section.config)))] if section.config else []
    flags = flag_arguments(_serve_flags(site, section, settings), explicit_booleans=True)
    return [*program, "serve", *config, *site.texts(flags)]


def _serve_flags(site: Site, section: EnvSection, settings: TrainingConfig) -> dict[str, Any]:
    engine = env_engines(site.profile, section)[0]
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
        "openai.base_url": f"{site.engine_url(engine)}/v1",
        "openai.server_type": "vllm",
        "openai.model_name": engine_model(site, engine),
        "openai.api_key": "local",
    }
    # atroposlib's default is 3 batches ahead, whose lag such a bound does not allow.
    most = settings.max_policy_lag
    if most and _batches_within(most) == 1 and AHEAD_FLAG not in _env_settings(site, section):
        flags[AHEAD_FLAG] = 1
    # Only our own environments have the flag `env.seed`.
    if (
        section.verifiers
        or section.openenv
        or section.agent
        or ((section.module or "").startswith("atropos_envs.") and section.module != RUNNER)
    ) and not section.config:
        flags["env.seed"] = site.profile.seed
    return flags | _kind_flags(site, section, engine)


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


def _batches_within(lag: int) -> int:
    """Return how many batches ahead a bound of `lag` versions allows: each may add two."""
    return max(1, lag // 2)


def concurrency_variables(site: Site, env: EnvSection, settings: TrainingConfig) -> dict[str, str]:
    """Variables of an environment's concurrency control; empty if atroposlib's rules apply."""
    profile, given = site.profile, _env_settings(site, env)
    ahead = given.get(AHEAD_FLAG, MOST_AHEAD)
    if most := settings.max_policy_lag:
        ahead = min(ahead, _batches_within(most))
    by_hand = (WORKER_FLAGS | {SHARE_FLAG}) & given.keys()
    # A custom trainer may not correct for lag. An engine that restarts every few steps aborts the
    # completions in flight.
    unfit = profile.trainer.command or traits_of(profile).restarts_engine
    if by_hand or unfit or ahead == 1 or not env.refill or settings.max_policy_lag == 0:
        return {}
    engines, users = env_engines(profile, env), _engine_users(profile)
    share = sum(1.0 / users[engine.name] for engine in engines) / len(engines)
    beside = (site.engine_url(each) for each in engines if is_beside_trainer(profile, each))
    groups = (each for each in on_one_gpu(profile) if all(engine in engines for engine in each))
    return {
        ENV_CONCURRENCY: str(env.concurrency),
        ENV_AHEAD: str(ahead),
        ENV_ENGINE_SHARE: f"{share:g}",
        ENV_BESIDE_TRAINER: " ".join(beside),
        ENV_ON_ONE_GPU: " ".join(",".join(map(site.engine_url, group)) for group in groups),
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
            scorer = json.dumps(program_command(site.texts(list(scorer))))
        own = {
            "env.agent": json.dumps(program_command(site.texts(list(section.agent)))),
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


def openenv_spec(site: Site, section: EnvSection, port: int, after: list[str]) -> ComponentSpec:
    app, folder = openenv_app(site.path(section.openenv or ""))
    place = [app, *(["--app-dir", str(folder)] if folder else [])]
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    answers = [HttpCheck(url=f"http://127.0.0.1:{port}/health")]
    return spec_of(
        site,
        ComponentOptions(),
        name=section.openenv_name,
        role=Role.OTHER,
        command=[*module_command("uvicorn"), *place, *options],
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
        return module_command(VERIFIERS_SERVER)
    if section.openenv or section.agent:
        return module_command(OPENENV_SERVER if section.openenv else PROGRAM_SERVER)
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
        return [*module_command(RUNNER), target]
    return module_command(target) if section.module else [PYTHON, target]


def config_file(text: str) -> Path:
    path = Path(text).expanduser()
    beside = [shipped.parent / text for shipped in list(shipped_profiles().values())[:1]]
    return next((place for place in [path, *beside] if place.is_file()), path)
