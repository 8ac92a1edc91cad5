"""Several stacks on one machine at once: each with ports and GPUs of its own. A function from profiles to changes.

What a later stack shares with an earlier one is moved: ports to the next free ones, GPUs to ones that nobody has yet.
Where there are not enough GPUs, or a command of the user's own may name a port, that is a problem, and one stack after
another is a way out. Processors are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from atropos_tui.errors import Problem
from atropos_tui.profile import ports
from atropos_tui.profile.modes import TRAITS
from atropos_tui.profile.plan import trainer_gpus
from atropos_tui.profile.sections import Profile


@dataclass
class Changes:
    """What each stack must change to stand beside the others."""

    sets: dict[str, list[str]] = field(default_factory=dict)
    """By stack: overrides in the form of --set."""
    lines: list[str] = field(default_factory=list)
    """The same in words, a line each."""
    problems: list[Problem] = field(default_factory=list)


def separate(
    profiles: Mapping[str, Profile], gpu_count: int, is_free: Callable[[int], bool] = ports.is_free
) -> Changes:
    """Changes that give every stack in `profiles`, by name, its own ports and GPUs; the earlier ones keep theirs."""
    changes = Changes({name: [] for name in profiles})
    _separate_ports(profiles, changes, is_free)
    _separate_gpus(profiles, gpu_count, changes)
    return changes


def _own_commands(profile: Profile) -> list[str]:
    """Keys of commands that the profile spells out, ports included: nothing can be changed in them."""
    keys = ["api.command"] if profile.api.command else []
    keys += [f"{env.name}.command" for env in profile.env if env.command]
    return keys + [f"component.{name}.command" for name, part in profile.component.items() if part.port]


def _separate_ports(profiles: Mapping[str, Profile], changes: Changes, is_free: Callable[[int], bool]) -> None:
    given = {port for profile in profiles.values() for _, port in profile.used_ports()}
    holder: dict[int, str] = {}
    for name, profile in profiles.items():
        own = profile.used_ports()
        for key, port in own:
            if port not in holder:
                continue
            if fixed := _own_commands(profile):
                reason = f"port {port} of {name} is also used by {holder[port]}, and {', '.join(fixed)} may name it"
                fix = f"move both: --set {name}:{key}=PORT and the command in a profile of its own; or add --sequential"
                changes.problems.append(Problem(reason, fix, key=key))
                continue
            free = next((p for p in range(port + 1, 65536) if p not in given and is_free(p)), None)
            if free is None:
                changes.problems.append(Problem(f"no port above {port} is free", "add --sequential", key=key))
                continue
            given.add(free)
            changes.sets[name].append(f"{key}={free}")
            changes.lines.append(f"{name}: {key} is {free}, since {holder[port]} has {port}")
        holder |= {port: name for _, port in own if port not in holder}


def _separate_gpus(profiles: Mapping[str, Profile], count: int, changes: Changes) -> None:
    holder: dict[int, str] = {}
    for name, profile in profiles.items():
        wanted = _gpus(profile, count)
        others = sorted({holder[gpu] for gpu in wanted if gpu in holder})
        if others:
            free = [gpu for gpu in range(count) if gpu not in holder]
            if len(free) < len(wanted):
                needs = f"{name} needs {len(wanted)} GPU{'s' if len(wanted) > 1 else ''} of its own beside "
                left = f"{', '.join(others)}, and {len(free) or 'none'} of {count} is left"
                fix = "add --sequential: one stack after another"
                changes.problems.append(Problem(needs + left, fix, key="gpus"))
                continue
            moved = dict(zip(wanted, free, strict=False))
            changes.sets[name] += _gpu_sets(profile, moved)
            text = ", ".join(f"{old} -> {new}" for old, new in moved.items())
            changes.lines.append(f"{name}: GPUs {text}, since {', '.join(others)} has the same")
            wanted = list(moved.values())
        holder |= dict.fromkeys(wanted, name)


def _gpus(profile: Profile, count: int) -> list[int]:
    """GPUs that a stack takes; the first ones where the profile leaves them to the programs."""
    named = {gpu for engine in profile.vllm for gpu in engine.gpus} | set(trainer_gpus(profile))
    if named or not count or profile.trainer.settings.get("device") == "cpu":
        return sorted(named)
    return list(range(max(engine.tensor_parallel for engine in profile.vllm)))


def _gpu_sets(profile: Profile, moved: Mapping[int, int]) -> Iterator[str]:
    for index, engine in enumerate(profile.vllm):
        own = engine.gpus or range(engine.tensor_parallel)
        yield f"vllm.{index}.gpus={[moved[gpu] for gpu in own]}"
    if profile.trainer.gpus or not TRAITS[profile.mode].shares_memory:
        yield f"trainer.gpus={[moved[gpu] for gpu in profile.trainer.gpus or [min(moved)]]}"
