"""Checks of this machine before a start: ports, packages, models, GPUs, memory. `separate` lets
several stacks run side by side."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from atropos_common.models.engine_release import installed, why_not_served, why_not_supported
from atropos_common.models.model_math import (
    why_not_replayed,
    why_not_shared,
    why_not_spread,
    why_refused,
)
from atropos_common.system.installation import install_stack, pip_install
from atropos_common.system.run_dir import (
    ENV_ATTEMPT,
    ENV_COMPONENT,
    ENV_CONTROL_SOCKET,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_TOKEN,
)
from atropos_tui.cluster.machines import Hosts, allocated, hosts_of
from atropos_tui.errors import LEAST_FILES, Problem
from atropos_tui.gpu import VISIBLE, given_here
from atropos_tui.profile import ports
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.fit import nearest
from atropos_tui.profile.budget.inventory import Hardware, Model, is_hub_id
from atropos_tui.profile.budget.memory import Inventory
from atropos_tui.profile.builders.commands import resolve_path
from atropos_tui.profile.checks.episodes import episode_files
from atropos_tui.profile.checks.programs import (
    environment_faults,
    environment_files,
    python_path,
    unknown_flags,
    user_module,
)
from atropos_tui.profile.errors import counted, in_braces
from atropos_tui.profile.load import CACHE
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.sections import EngineSection
from atropos_tui.profile.site import (
    Site,
    engine_model,
    node_of,
    trainer_gpus,
    trainer_ranks,
    training_config,
    traits_of,
)
from atropos_tui.profile.source import names_in
from atropos_tui.profile.spec import StackSpec, expand, references
from trainer_core.config import TrainingConfig

LAUNCHED_BY = {
    "slurm": ("srun", "SLURM's commands (Debian: slurm-client)"),
    "ssh": ("ssh", "an ssh client (Debian: openssh-client)"),
    "kubernetes": ("kubectl", "kubectl"),
    "ray": ("ray", "Ray (pip install ray)"),
}
"""Launcher -> its program and package."""
SCONTROL_S = 10.0
"""Seconds; SLURM's controller answers at once or is down."""
UNSEEN = "a process of another user"
ON_THE_CPU = (
    'on the CPU, set vllm.gpus = [], trainer.gpus = [], trainer.device = "cpu", '
    'trainer.dtype = "float32", as the '
    "demo profile does"
)


def preflight(site: Site, stack: StackSpec, inventory: Inventory) -> list[Problem]:
    return [
        *lacks(site, stack, inventory.machine),
        *mismatches(site, inventory),
        *unfit(site, inventory),
    ]


def lacks(site: Site, stack: StackSpec, machine: Hardware) -> list[Problem]:
    """Ports, packages, programs, models and variables that this machine lacks."""
    return [
        *_open_files(),
        *_nodes(site),
        *_taken_ports(site),
        *_packages(site, training_config(site), machine),
        *_programs(site, stack),
        *_loss_function(site),
        *_models(site),
        *_launches(site, stack),
    ]


def mismatches(site: Site, inventory: Inventory) -> list[Problem]:
    """Contradictions between the profile and the files of models, environments and vLLM."""
    found = [*_model_fits(site, training_config(site), inventory)]
    for index, env in enumerate(site.profile.env):
        found += environment_faults(site, env, f"env.{index}")
    # Other machines may have another vLLM.
    for index, engine in enumerate(site.profile.vllm if not site.profile.is_spread else []):
        found += unknown_flags(engine, f"vllm.{index}")
    return found


def unfit(site: Site, inventory: Inventory) -> list[Problem]:
    return [*_gpus(site, inventory.machine), *_memory(site, training_config(site), inventory)]


def made_for_gpus(site: Site, machine: Hardware) -> list[str]:
    """Warn of a profile without the settings of a CPU on a machine without a GPU."""
    dtype = training_config(site).dtype
    # float32 is what a profile for a CPU has in any case; other machines are not known here.
    if machine.gpus or site.profile.is_spread or dtype in ("float32", "auto"):
        return []
    return [
        f"this machine has no GPU, so trainer and engine compute in {dtype} on the CPU. "
        "atropos-tui init writes a profile for it; here set at least trainer.dtype = "
        '"float32", enforce-eager = true and kv-cache-memory-bytes under [vllm.args]'
    ]


def _open_files() -> Iterator[Problem]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield Problem(
            f"a process here may open {soft} files; the supervisor needs {LEAST_FILES}",
            "ulimit -n 4096",
        )


def _places(site: Site) -> Iterator[Problem]:
    """`creates` paths that a `prepare` step cannot write."""
    for step in site.profile.prepare:
        made = Path(site.path(step.creates or ""))
        # The nearest existing folder decides whether the rest can be created.
        there = next((folder for folder in (made, *made.parents) if folder.exists()), made)
        if (
            step.creates
            and there != made
            and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK))
        ):
            fix = (
                f"set {CACHE} to a writable folder"
                if CACHE in step.creates
                else "name a path in a writable folder"
            )
            section = site.profile.section_of(step.name)
            yield Problem(
                f"{made} cannot be created: {there} is not writable", fix, key=f"{section}.creates"
            )


def _launches(site: Site, stack: StackSpec) -> Iterator[Problem]:
    yield from _places(site)
    known = stack.variables | os.environ
    # The supervisor sets these for every component.
    variables = {
        *known,
        ENV_TOKEN,
        ENV_RUN_DIR,
        ENV_RUN_ID,
        ENV_CONTROL_SOCKET,
        ENV_COMPONENT,
        ENV_ATTEMPT,
    }
    named: set[tuple[str, str]] = set()
    for component in stack.components:
        section = site.profile.section_of(component.name)
        texts = [(f"{section}.env.{name}", value) for name, value in component.env.items()]
        texts += [
            (f"{section}.cwd", component.cwd or ""),
            (f"{section}.creates", component.creates or ""),
        ]
        texts += [(f"{section}.command", part) for part in component.command]
        for key, text in texts:
            for name in references(text):
                # The model's variable appears in many commands; report it once, at the key `model`.
                place = (
                    "model"
                    if name in references(site.profile.model) and key.endswith(".command")
                    else key
                )
                if name not in variables and (place, name) not in named:
                    named.add((place, name))
                    fix = f"export {name}=..., or put it into the .env file beside the profile"
                    fix += (
                        f"; for a shell variable in the command write ${name}"
                        if key.endswith(".command")
                        else ""
                    )
                    yield Problem(f"environment variable {name} is not set", fix, key=place)
        cwd = expand(component.cwd or ".", known)
        if not references(cwd) and not Path(cwd).is_dir():
            fix = in_braces(cwd) or "create it, or change cwd"
            yield Problem(f"working directory {cwd} does not exist", fix, key=f"{section}.cwd")


def machines_of(profile: Profile) -> Hosts:
    """Machines of a profile; in a SLURM job with SLURM's addresses."""
    hosts = [host for group in allocated(os.environ) for host in group]
    if not hosts or profile.cluster is None or profile.cluster.launcher != "slurm":
        return hosts_of(profile, os.environ)
    return hosts_of(profile, os.environ, _slurm_addresses(hosts), binds=_slurm_binds())


def _slurm_addresses(hosts: list[str]) -> dict[str, str]:
    output = _scontrol("--oneliner", "show", "node", ",".join(hosts))
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in output.splitlines()]
    return {
        row["NodeName"]: row["NodeAddr"]
        for row in rows
        if row.get("NodeName") and row.get("NodeAddr")
    }


def _slurm_binds() -> bool:
    # Only the affinity plugin binds tasks to processors.
    plugins = re.search(r"^TaskPlugin\s*=(.*)$", _scontrol("show", "config"), re.MULTILINE)
    return plugins is None or "affinity" in plugins[1]


def _scontrol(*words: str) -> str:
    try:
        return subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=SCONTROL_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nodes(site: Site) -> Iterator[Problem]:
    """A missing launcher program, and a start from another machine than the profile's first."""
    cluster = site.profile.cluster
    if cluster is None or not site.profile.is_spread:
        return
    program, package = LAUNCHED_BY[cluster.launcher]
    if (
        importlib.util.find_spec("ray") if cluster.launcher == "ray" else shutil.which(program)
    ) is None:
        fix = f"install {package}, go to a machine that has it, or use another launcher"
        yield Problem(
            f"launcher {cluster.launcher!r} needs {program}, which is not on this machine",
            fix,
            key="cluster.launcher",
        )
    # The supervisor starts components on the first machine without a launcher.
    first = site.hosts.nodes[0]
    if cluster.launcher != "slurm" and not is_this_machine(first.address):
        where = first.host if cluster.launcher != "kubernetes" else f"the pod {first.host}"
        yield Problem(
            f"{first.address}, the first machine of the profile, is not this machine, but the "
            "supervisor has to run there",
            f"log in to {where} and run atropos-tui up there, or put this machine first as a "
            f"[[node]]",
            key="node.0.hosts",
        )


def is_this_machine(address: str) -> bool:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            # Binding succeeds only for an address of this machine.
            probe.bind(where)
    except OSError:
        return False
    return True


def _taken_ports(site: Site) -> Iterator[Problem]:
    elsewhere = _ports_elsewhere(site)
    for key, port in site.profile.used_ports():
        if port in elsewhere or ports.is_free(port):
            continue
        holder = ports.holder(port)
        # A process of this run itself is stopped when the run resumes.
        if holder is None or holder.run_id != site.run_id:
            key = site.profile.short_key(key)
            yield Problem(
                f"port {port} is taken by {holder or UNSEEN}",
                f"{holder.way_out if holder else 'stop it'}; or use another port: --set "
                f"{key}={ports.free_port()}",
                key=key,
            )


def _ports_elsewhere(site: Site) -> set[int]:
    profile = site.profile
    if profile.cluster and profile.cluster.launcher == "slurm" and not allocated(os.environ):
        return {port for _, port in profile.used_ports()}  # SLURM has not chosen the machines yet
    # Node of each port; None is the first machine.
    places = {engine.port: engine.node for engine in profile.engines} | {
        profile.api.port: profile.api.node
    }
    places |= {
        at: each.node for each in profile.engines if (at := profile.meeting_ports.get(each.name))
    }
    places |= {part.port: part.node for part in profile.component.values() if part.port}
    return {
        port
        for port, node in places.items()
        if profile.is_spread
        and site.hosts.node(str(node_of(profile, node))).host != site.hosts.here
    }


def _packages(site: Site, settings: TrainingConfig, machine: Hardware) -> Iterator[Problem]:
    needed = {"vllm": "vllm", "atroposlib": "api", "torch": "trainer", "transformers": "trainer"}
    for package, key in needed.items():
        if importlib.util.find_spec(package) is None:
            # `find_spec` does not import: torch and vLLM take many seconds.
            yield Problem(f"Python package {package!r} is not installed", install_stack(), key=key)
    if (release := installed()) and (reason := why_not_supported(release)):
        yield Problem(reason, install_stack(), key="vllm")
    # The default optimizer depends on the device.
    on_gpu = not memory.is_host(memory.trainer_devices(site.profile, settings, machine)[0])
    eight_bit = memory.effective_optimizer(settings, on_gpu=on_gpu) == "adamw_8bit"
    if eight_bit and importlib.util.find_spec("bitsandbytes") is None:
        yield Problem(
            "optimizer adamw_8bit needs the Python package 'bitsandbytes', which is not installed",
            f'{pip_install()} bitsandbytes, or set trainer.optimizer = "adamw" (more memory) or '
            '"adafactor" (no momentum)',
            key="trainer.optimizer",
        )


def _programs(site: Site, stack: StackSpec) -> Iterator[Problem]:
    for index, env in enumerate(site.profile.env):
        yield from environment_files(site, env, f"env.{index}")
        yield from episode_files(site, env, f"env.{index}")
    for number, component in enumerate(stack.components):
        program = component.command[0]
        # A `prepare` step may create the program, or another machine has it.
        made_before = bool(site.profile.prepare) and number > 0 and os.sep in program
        if (component.place and component.place.prefix) or references(program) or made_before:
            continue
        # A path is relative to the component's working directory, as the process is started there.
        folder, path = component.cwd or ".", component.env.get("PATH", os.environ.get("PATH"))
        found = os.path.join(folder, program) if os.sep in program else program  # noqa: PTH118
        if not references(f"{folder}{path}") and shutil.which(found, path=path) is None:
            key = f"{site.profile.section_of(component.name)}.command"
            yield Problem(f"no such program: {program}", "install it or give its path", key=key)


def _loss_function(site: Site) -> Iterator[Problem]:
    section = site.profile.trainer
    name, _, function = site.text(section.settings.get("loss") or "").partition(":")
    if not name:
        return
    # The same search path as in the trainer's process.
    found = user_module(name, [section.cwd or ".", *python_path(site, section.env)])
    if found is None:
        fix = (
            f"check the name; your own modules are searched in {Path(section.cwd or '.').resolve()}"
        )
        yield Problem(f"no module {name!r}", fix, key="trainer.loss")
        return
    known = names_in(Path(found.origin), ast.FunctionDef) if found.origin else None
    if known is not None and function not in known:
        fix = f"it has: {', '.join(sorted(known)) or 'none'}"
        yield Problem(f"{found.origin} has no function {function}", fix, key="trainer.loss")


def _models(site: Site) -> Iterator[Problem]:
    made = {site.path(step.creates) for step in site.profile.prepare if step.creates}
    named: set[str] = set()
    for index, engine in enumerate(site.profile.vllm):
        model = engine_model(site, engine)
        if model in made or model in named or is_hub_id(model) or references(model):
            continue  # `_launches` reports a variable without a value
        named.add(model)
        key = f"vllm.{index}.model" if engine.model else "model"
        folder = resolve_path(model)
        if not folder.is_dir():
            fix = in_braces(model) or "give a directory with config.json, or a hub id"
            yield Problem(f"no such model directory: {model}", fix, key=key)
        elif not (folder / "config.json").is_file():
            fix = "give the folder that `save_pretrained` wrote"
            yield Problem(f"{model} contains no config.json, so it is not a model", fix, key=key)


def _model_fits(site: Site, settings: TrainingConfig, inventory: Inventory) -> Iterator[Problem]:
    first = inventory.models[site.profile.vllm[0].name]
    for index, engine in enumerate(site.profile.vllm):
        if isinstance(model := inventory.models[engine.name], Model):
            yield from _engine_fits(engine, model, index)
            release = None if site.profile.is_spread else installed()
            if release and (refused := why_not_served(release, model.config)):
                yield Problem(*refused, key=f"vllm.{index}.model" if engine.model else "model")
    if not isinstance(first, Model):
        return
    # The first engine's model is the one that trains.
    traits = site.traits
    if refused := why_refused(first.config, frozen=traits.lora, shared=traits.shares_memory):
        yield Problem(*refused, key="model")
    spread = trainer_ranks(site.profile) > 1 and not traits.shares_memory
    if spread and (refused := why_not_spread(first.config)):
        yield Problem(*refused, key="model")
    if refused := why_not_shared(first.config, settings.context_parallel):
        yield Problem(*refused, key="trainer.context_parallel")
    if settings.routing_replay and (refused := why_not_replayed(first.config)):
        yield Problem(*refused, key="trainer.routing_replay")
    beyond = [
        layer for layer in settings.train_layer_indices or [] if layer >= first.dimensions.layers
    ]
    if beyond:
        reason = (
            f"the model has layers 0-{first.dimensions.layers - 1}, but no "
            f"{', '.join(map(str, beyond[:5]))}"
        )
        yield Problem(
            reason,
            f"name layers up to {first.dimensions.layers - 1}",
            key="trainer.train_layer_indices",
        )


def _engine_fits(engine: EngineSection, model: Model, index: int) -> Iterator[Problem]:
    parallel = engine.tensor_parallel
    heads, keys = model.dimensions.heads, model.dimensions.kv_heads
    # vLLM divides query heads evenly, and divides or replicates key/value heads.
    odd = keys % parallel if keys >= parallel else parallel % keys
    if heads % parallel or odd:
        possible = [
            n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)
        ]
        yield Problem(
            f"{heads} attention heads with {keys} key/value heads cannot be divided among "
            f"{parallel} GPUs",
            f"use one of: {', '.join(map(str, possible))}",
            key=f"vllm.{index}.tensor_parallel",
        )
    if engine.max_model_len and model.max_length and engine.max_model_len > model.max_length:
        yield Problem(
            f"the model's limit is {model.max_length} tokens",
            f"set it to {model.max_length} or less",
            key=f"vllm.{index}.max_model_len",
        )


def _gpus(site: Site, machine: Hardware) -> Iterator[Problem]:
    present = len(machine.gpus)
    for index, group in enumerate(
        site.profile.node if site.profile.is_spread and not machine.is_here else []
    ):
        if group.gpus > present:
            reason = f"{group.gpus} GPUs on each machine, but the given machine has {present}"
            yield Problem(
                reason, f"lower it, or name machines with {group.gpus}", key=f"node.{index}.gpus"
            )
    if site.profile.is_spread:
        return
    wanted = {f"vllm.{index}.gpus": engine.gpus for index, engine in enumerate(site.profile.vllm)}
    wanted["trainer.gpus"] = site.profile.trainer.gpus
    if site.traits.other_gpus and present and not any(wanted.values()):
        yield Problem(
            "a broadcast needs separate GPUs, but no section names any",
            'name vllm.gpus and trainer.gpus, or set trainer.device = "cpu" with a vLLM for '
            "the CPU",
            key="trainer.gpus",
        )
    for index, engine in enumerate(site.profile.vllm):
        count, on_cpu = len(engine.engines), site.profile.trainer.settings.get("device") == "cpu"
        if count > 1 and present and not engine.gpus and not on_cpu:
            yield Problem(
                f"{count} engines would all take GPU 0, since none is named",
                f"name {count * engine.gpus_needed}, such as "
                f"{list(range(count * engine.gpus_needed))}",
                key=f"vllm.{index}.gpus",
            )
    where = "this machine" if machine.is_here else "that machine"
    given = given_here() if machine.is_here else None
    if given is not None:
        where = f"{VISIBLE}={given}"
    for key, gpus in wanted.items():
        missing = ", ".join(str(gpu) for gpu in sorted(set(gpus)) if gpu >= present)
        if missing and given == "":
            reason = f"GPU {missing} does not exist: {VISIBLE} is set, and shows no GPU"
            yield Problem(reason, f"unset {VISIBLE}; {ON_THE_CPU}", key=key)
        elif missing and not present:
            reason = f"GPU {missing} does not exist: no NVIDIA driver answers on this machine"
            yield Problem(reason, f"run it on a machine with GPUs; {ON_THE_CPU}", key=key)
        elif missing:
            there = "GPU 0" if present == 1 else f"GPUs 0-{present - 1}"
            yield Problem(
                f"GPU {missing} does not exist: {where} has {there}", f"use {there}", key=key
            )


def _memory(site: Site, settings: TrainingConfig, inventory: Inventory) -> Iterator[Problem]:
    """Devices that are certainly too small; `plan` warns about likely ones."""
    # Estimates are left out here: a wrong one must not refuse a stack that fits.
    small = [
        each
        for each in memory.alike(memory.site_budget(site, inventory).devices)
        if each.is_too_small
    ]
    found = nearest(site, inventory, most=1) if small else []
    for device in small:
        yield Problem(
            f"{device.name}: {memory.size_text(device.certain)} are needed without activations, "
            f"but only {memory.size_text(device.total or 0)} exist",
            f"set {found[0].text}"
            if found
            else "; ".join(memory.ways_out(device, site.profile, settings)),
            key=memory.given_cache(device, site.profile)
            or ("trainer.optimizer" if trainer_gpus(site.profile) else "model"),
        )


@dataclass
class Changes:
    """Changes of each stack that let it run beside the others."""

    sets: dict[str, list[str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def separate(
    profiles: Mapping[str, Profile], gpu_count: int, is_free: Callable[[int], bool] = ports.is_free
) -> Changes:
    """Give every stack its own ports and GPUs; earlier stacks keep theirs.

    A custom command may contain a port, and GPUs may not suffice: both are problems, whose fix is
    to run the stacks in turn.
    """
    changes = Changes({name: [] for name in profiles})
    _separate_ports(profiles, changes, is_free)
    _separate_gpus(profiles, gpu_count, changes)
    return changes


def _own_commands(profile: Profile) -> list[str]:
    keys = ["api.command"] if profile.api.command else []
    keys += [f"{env.name}.command" for env in profile.env if env.command]
    return keys + [
        f"component.{name}.command" for name, part in profile.component.items() if part.port
    ]


def _separate_ports(
    profiles: Mapping[str, Profile], changes: Changes, is_free: Callable[[int], bool]
) -> None:
    # Ports of all stacks, also of those that come later: a moved port must avoid them.
    given = {port for profile in profiles.values() for _, port in profile.used_ports()}
    holder: dict[int, str] = {}
    for name, profile in profiles.items():
        own = profile.used_ports()
        for key, ports_of in groupby(own, lambda one: one[0]):
            block = [port for _, port in ports_of]
            port = next((port for port in block if port in holder), None)
            if port is None:
                continue
            # A port in a custom command cannot be changed by a key.
            if fixed := _own_commands(profile):
                reason = (
                    f"port {port} of {name} is also used by {holder[port]}, and "
                    f"{', '.join(fixed)} may name it"
                )
                fix = (
                    f"change both: --set {name}:{key}=PORT, and the command in its own profile; "
                    f"or add --sequential"
                )
                changes.problems.append(Problem(reason, fix, key=key))
                continue
            # A section with several engines needs consecutive ports.
            blocks = (
                range(first, first + len(block)) for first in range(port + 1, 65537 - len(block))
            )
            found = next((b for b in blocks if not given & {*b} and all(map(is_free, b))), None)
            if found is None:
                changes.problems.append(
                    Problem(f"no port above {port} is free", "add --sequential", key=key)
                )
                continue
            given.update(found)
            free = found[0]
            changes.sets[name].append(f"{key}={free}")
            changes.lines.append(f"{name}: {key} is {free}, since {holder[port]} uses {port}")
        holder |= {port: name for _, port in own if port not in holder}


def _separate_gpus(profiles: Mapping[str, Profile], count: int, changes: Changes) -> None:
    holder: dict[int, str] = {}
    for name, profile in profiles.items():
        wanted = _taken_gpus(profile, count)
        others = sorted({holder[gpu] for gpu in wanted if gpu in holder})
        if others:
            free = [gpu for gpu in range(count) if gpu not in holder]
            # Not enough idle GPUs: the stacks cannot run at the same time.
            if len(free) < len(wanted):
                needs = f"{name} needs {counted(len(wanted), 'more GPU')} beside "
                left = f"{', '.join(others)}, and {len(free) or 'none'} of {count} is left"
                fix = "add --sequential: one stack after another"
                changes.problems.append(Problem(needs + left, fix, key="gpus"))
                continue
            moved = dict(zip(wanted, free, strict=False))
            changes.sets[name] += _gpu_sets(profile, moved)
            text = ", ".join(f"{old} -> {new}" for old, new in moved.items())
            changes.lines.append(f"{name}: GPUs {text}, since {', '.join(others)} uses the same")
            wanted = list(moved.values())
        holder |= dict.fromkeys(wanted, name)


def _taken_gpus(profile: Profile, count: int) -> list[int]:
    """All GPUs if the stack divides the machine, the first ones if it names none."""
    if profile.inference_gpus is not None:
        return list(range(count))
    named = {gpu for engine in profile.vllm for gpu in engine.gpus} | set(trainer_gpus(profile))
    # An unnamed engine takes the first GPUs that its process sees.
    if named or not count or profile.trainer.settings.get("device") == "cpu":
        return sorted(named)
    return list(range(max(engine.gpus_needed for engine in profile.vllm)))


def _gpu_sets(profile: Profile, moved: Mapping[int, int]) -> Iterator[str]:
    for index, engine in enumerate(profile.vllm):
        own = engine.gpus or range(engine.tensor_parallel)
        yield f"vllm.{index}.gpus={[moved[gpu] for gpu in own]}"
    if profile.trainer.gpus or not traits_of(profile).shares_memory:
        yield f"trainer.gpus={[moved[gpu] for gpu in profile.trainer.gpus or [min(moved)]]}"
