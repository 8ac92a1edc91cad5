"""Profile to `StackSpec`: commands, order, ports, health checks, restarts. Pure.

`builders` has one module for each role; the small ones are here.
"""

from __future__ import annotations

from typing import Any

from atropos_common.protocol.control import Role
from atropos_tui.profile.builders.commands import (
    PYTHON,
    SERVES_TILL_STOPPED,
    is_held,
    module_command,
    program_command,
    spec_of,
)
from atropos_tui.profile.builders.engine import engine_specs
from atropos_tui.profile.builders.environment import environment_spec, openenv_spec
from atropos_tui.profile.builders.trainer import trainer_specs
from atropos_tui.profile.redact import hide_tree
from atropos_tui.profile.sections import (
    ApiSection,
    ExtraSection,
    PrepareSection,
)
from atropos_tui.profile.site import (
    Site,
    node_of,
    training_config,
)
from atropos_tui.profile.spec import (
    ComponentSpec,
    HttpCheck,
    Probe,
    Probes,
    RestartPolicy,
    StackSpec,
    StopPolicy,
    references,
)


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
            for part in engine_specs(site, *each, after, settings)
        ),
        *(openenv_spec(site, *server, after) for server in profile.openenv_servers),
        *(environment_spec(site, section, after, settings) for section in profile.env),
        *(_extra(site, name, section) for name, section in profile.component.items()),
        *trainer_specs(site, settings, after),
    ]
    spec = StackSpec(
        run_id=site.run_id,
        name=profile.name,
        mode=profile.mode,
        run_dir=str(site.run.root),
        components=[_with_python(part) for part in stack],
        logs=profile.logs,
        notify=profile.notify.model_copy(
            update={"command": program_command(profile.notify.command)}
        ),
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


def _prepare(site: Site, section: PrepareSection, before: list[str]) -> ComponentSpec:
    return ComponentSpec(
        name=section.name,
        role=Role.PREPARE,
        command=program_command(site.texts(section.command)),
        env={key: site.text(value) for key, value in section.env.items()},
        # Steps run one after another, in the order of the profile.
        depends_on=dict.fromkeys(before, "completed"),
        creates=site.path(section.creates) if section.creates else None,
        restart=RestartPolicy(policy="never"),
        start_timeout_s=24 * 3600,  # a step may download a model or a data set
        place=site.place(node_of(site.profile, None)),
    )


def _api(site: Site, section: ApiSection, after: list[str]) -> ComponentSpec:
    command = [
        *module_command("atropos_api"),
        "--host",
        site.api_address,
        "--port",
        str(section.port),
    ]
    names = [env.name for env in site.profile.env]
    place = site.place(node_of(site.profile, section.node))
    answers = [HttpCheck(url=f"{site.api_url}/info")]
    return spec_of(
        site,
        section,
        name="api",
        role=Role.API,
        command=program_command(site.texts(section.command)) if section.command else command,
        depends_on=dict.fromkeys(after, "completed"),
        probes=Probes(
            readiness=Probe(checks=answers, interval_s=0.25),
            # Slow to fail: run-api is one thread, and a large request body blocks it for seconds.
            liveness=Probe(checks=answers, interval_s=5, timeout_s=10, failure_threshold=6),
        ),
        port=section.port,
        # A custom command may not know how to bind a held port.
        port_held=section.command is None and is_held(place, site.api_address),
        place=place,
        # Its state is only in memory: after a restart the environments must register again, so they
        # restart too. The trainer registers again without a restart.
        restart_with=names,
        # atroposlib imports wandb, which leaves temporary folders if its process is killed
        scratch=True,
        restart=SERVES_TILL_STOPPED,
        stop=StopPolicy(grace_s=5),
    )


def _extra(site: Site, name: str, section: ExtraSection) -> ComponentSpec:
    return spec_of(
        site,
        section,
        name=name,
        role=section.role,
        command=program_command(site.texts(section.command)),
        port=section.port,
        place=site.place(node_of(site.profile, section.node)),
    )
