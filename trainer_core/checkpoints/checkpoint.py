"""Checkpoints: a model folder that plain transformers loads, plus the state for an exact resume.

    save_path/step_N/          model.safetensors, config.json, tokenizer
                               trainer_state/tensors.safetensors (of ranks: tensors-R-of-N)
                               trainer_state.json: step, weight version and other plain values
    save_path/adapter_step_N/  the same with adapter_model.safetensors and adapter_config.json;
                               with `ref_kl_coef` reference/, the adapter at the run's start
    save_path/final_model/     model or adapter without optimizer state
    save_path/final_adapter/   with `lora_merged_export`, beside the whole model

A folder with its final name is complete even after a crash: it is written under a temporary name,
flushed and renamed. A resume skips damaged checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from atropos_common.protocol.bridge import ADAPTER_CONFIG
from atropos_common.system.files import read_regular, why_full
from atropos_common.system.run_dir import STATE_JSON, STEP_FOLDER
from trainer_core.checkpoints.companions import write_companions
from trainer_core.checkpoints.state import on_all, state_file, state_of, write_state
from trainer_core.config import TrainingConfig, flag
from trainer_core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from trainer_core.optimization.optimizers import Stepper
    from trainer_core.policy.reference import Reference
    from trainer_core.ranks.world import World

PART_BYTES = 1 << 28
_READ_BYTES = 1 << 22
# Sections of `TrainingConfig` that decide what a run trains, but for the settings below.
TRAINED_SECTIONS = ("Essential", "Objective", "Optimizer", "LoRA")
NOT_TRAINED = {
    "weight_bridge_mode",
    "checkpoint_in_background",
    "checkpoint_interval",
    "optimizer_offload",
}
# Folders of interrupted writes.
_WRITING, _OLD = re.compile(r"\.(.+)\.writing"), re.compile(r"\.(.+)\.old")


@dataclass(frozen=True)
class StartingPoint:
    step: int = 0
    version: int = 0
    path: Path | None = None
    # State of the stop conditions, the updates and the batch source.
    progress: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """`trained_settings` of the run that wrote it."""
    exact: bool = True
    """The checkpoint has the optimizer state."""


@dataclass(frozen=True)
class Saved:
    """A written checkpoint."""

    path: Path
    seconds: float
    bytes: int


def complete_checkpoints(save_path: Path, adapters: bool = False) -> list[Path]:
    """Return the undamaged step_N/ (or adapter_step_N/) folders, oldest first."""
    return [
        path for path in _numbered(save_path, adapters) if _why_damaged(path, deep=False) is None
    ]


def starting_point(config: TrainingConfig) -> StartingPoint:
    """Find the checkpoint for `resume`; `auto` skips damaged ones with a warning.

    Raises:
        UsageError: the named checkpoint is missing or damaged, it has more than `training_steps`,
            or `save_path` is not writable.
    """
    point = _starting_point(config)
    if point.step > config.training_steps:
        raise UsageError(
            f"--training-steps {config.training_steps}: {point.path} has {point.step} already. "
            f"fix: set more, or go back by moving that checkpoint away"
        )
    return point


def _starting_point(config: TrainingConfig) -> StartingPoint:
    _require_writable(Path(config.save_path))
    if config.resume == "never":
        return StartingPoint()
    if config.resume != "auto":
        path = Path(config.resume)
        return _point(path, config, exact=not _is_final(path))
    save_path = Path(config.save_path)
    _clear_interrupted(save_path)
    adapters = config.trains_adapters
    numbered = [(_step_of(path), True, path) for path in _numbered(save_path, adapters)]
    # A final model has no optimizer state; it is newest if a run ended after its last checkpoint.
    # Highest step first. At equal steps the numbered checkpoint wins: True sorts after False.
    for _, exact, path in sorted([*numbered, *_ends(save_path, adapters)], reverse=True):
        try:
            return _point(path, config, exact=exact)
        except UsageError as error:
            print(f"[WARNING] passed over: {error}")
    return StartingPoint()


def _require_writable(save_path: Path) -> None:
    # Fail now: at the first checkpoint the steps before it would be lost.
    try:
        save_path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save_path).close()
    except OSError as error:
        # A full disk is no reason to refuse: training pauses at a checkpoint until there is space.
        if why_full(error):
            return
        raise UsageError(
            f"--save-path {save_path}: checkpoints cannot be written there ({error.strerror}). "
            f"fix: choose a folder that you can write to"
        ) from None


def _ends(save_path: Path, adapters: bool) -> Iterator[tuple[int, bool, Path]]:
    """Yield step, False (not exact) and path of an earlier attempt's final model or adapter."""
    for path in (save_path / "final_adapter", save_path / "final_model"):
        whole = _why_damaged(path, deep=False, exact=False) is None
        if whole and (path / ADAPTER_CONFIG).is_file() == adapters:
            yield _read_facts(path)["step"], False, path


def _is_final(path: Path) -> bool:
    """True for a final model or adapter, which has no optimizer state."""
    with suppress(OSError, ValueError):
        return not EXACT_FACTS.keys() & _read_facts(path).keys()
    return False


def _numbered(save_path: Path, adapters: bool) -> list[Path]:
    if not save_path.is_dir():
        return []
    names = ((path, STEP_FOLDER.fullmatch(path.name)) for path in save_path.iterdir())
    return sorted((path for path, m in names if m and bool(m[1]) == adapters), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _point(path: Path, config: TrainingConfig, *, exact: bool = True) -> StartingPoint:
    if reason := _why_damaged(path, deep=True, exact=exact):
        raise UsageError(f"--resume {path}: {reason}")
    if (path / ADAPTER_CONFIG).is_file() != config.trains_adapters:
        whole, adapters = ("a whole model", "the whole model"), ("an adapter", "adapters")
        found, wanted = (whole, adapters) if config.trains_adapters else (adapters, whole)
        raise UsageError(
            f"--resume {path}: a checkpoint of {found[0]}, and --weight-bridge-mode "
            f"{config.weight_bridge_mode} trains {wanted[1]}"
        )
    facts = _read_facts(path)
    return StartingPoint(
        facts["step"], facts["weight_version"], path, facts["progress"], facts["settings"], exact
    )


FACTS: dict[str, type] = {
    "step": int,
    "weight_version": int,
    "progress": dict,
    "settings": dict,
    "files": dict,
    "sha256": str,
}
"""Fields of every `trainer_state.json`."""
EXACT_FACTS: dict[str, type] = {"state": dict, "parts": int, "dtype": str}
"""Further fields for an exact resume."""


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_regular(path / STATE_JSON, unlinked=0))
    except RecursionError:
        raise ValueError(f"{STATE_JSON} is nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{STATE_JSON} is not a JSON object")
    return facts


def _why_damaged(path: Path, *, deep: bool, exact: bool = True) -> str | None:
    """Return the reason why `path` cannot be resumed; None if it can."""
    needed, foreign = FACTS | (EXACT_FACTS if exact else {}), "not a checkpoint of this trainer"
    try:
        facts = _read_facts(path)
        if not needed.keys() <= facts.keys():
            return f"{foreign}: {STATE_JSON} lacks fields that an exact resume needs"
        # `type(...) is not kind`: a bool must not pass as an int.
        if wrong := [name for name, kind in needed.items() if type(facts[name]) is not kind]:
            return f"{foreign}: {STATE_JSON} has wrong types in {', '.join(wrong)}"
        # `pop`: the digest covers everything but itself.
        if facts.pop("sha256") != _facts_digest(facts):
            return f"the content of {STATE_JSON} is not what was written"
        return damage(path, facts["files"], deep=deep)
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        # The file may hold anything, so any of these can come from a wrong shape of its content.
        return f"{foreign} ({error})"


def _facts_digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _clear_interrupted(save_path: Path) -> None:
    for path in save_path.iterdir() if save_path.is_dir() else ():
        # `replace_folder` was interrupted between its two renames: put the older folder back.
        if match := _OLD.fullmatch(path.name):
            target = path.with_name(match[1])
            if not target.exists():
                path.rename(target)
                continue
        if match or _WRITING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def describe(point: StartingPoint, config: TrainingConfig) -> str:
    """Describe where the run starts; a second line lists changed settings."""
    save_path = Path(config.save_path)
    if point.path is not None:
        start = f"Resuming from {point.path}: step {point.step}, weight version {point.version}"
        if not point.exact:
            start += "; the optimizer restarts: a finished run keeps no optimizer state"
        changed = _differences(point, config)
        return f"{start}\n[NOTE] Differs from the checkpoint: {changed}" if changed else start
    if config.resume == "auto":
        return f"Starting from the base model {config.model_name}: no checkpoint in {save_path}"
    start = f"Starting from the base model {config.model_name}"
    if old := complete_checkpoints(save_path, config.trains_adapters):
        start += f"; {len(old)} checkpoints in {save_path} are ignored (--resume auto continues)"
    return start


def trained_settings(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings that decide what a run trains."""
    section, found = "", {"dtype", "head_dtype"}
    for name in TrainingConfig.model_fields:
        section = TrainingConfig.SECTIONS.get(name, section)
        found |= {name} if section in TRAINED_SECTIONS else set()
    return config.model_dump(mode="json", include=found - NOT_TRAINED)


def _differences(point: StartingPoint, config: TrainingConfig) -> str:
    now = trained_settings(config)
    changed = [name for name, old in point.settings.items() if name in now and now[name] != old]
    return "; ".join(f"{flag(name)} {point.settings[name]} -> {now[name]}" for name in changed)


def describe_last(config: TrainingConfig) -> str:
    """Describe the checkpoint that a later attempt would resume."""
    saved = complete_checkpoints(Path(config.save_path), config.trains_adapters)
    none = "There is no checkpoint: a restart starts from the base model"
    return f"Last checkpoint: {saved[-1]}" if saved else none


def save(
    model: torch.nn.Module | None,
    config: TrainingConfig,
    target: Path,
    *,
    step: int,
    version: int,
    stepper: Stepper | None,
    progress: dict[str, Any] | None = None,
    merged: bool = False,
    reference: Reference | None = None,
    wait_for_room: Callable[[Path, str], None] | None = None,
    world: World | None = None,
) -> Saved:
    """Write a checkpoint to `target`, all ranks together; without `stepper` only the model.

    Args:
        model: needed on rank 0, and on all ranks if it is sharded.
        merged: `model` has the adapters merged in.
        reference: its frozen adapter goes into the checkpoint.
        wait_for_room: called on rank 0 before a retry on a full disk, with folder and message.

    Raises:
        OSError: the checkpoint cannot be written; the partial folder is removed.
    """
    from trainer_core.policy.sharding import weights
    from trainer_core.ranks.world import ALONE

    world = world or ALONE
    began = time.perf_counter()
    aside = written_in(target)
    adapters = config.trains_adapters and not merged
    # A collective when the model is sharded, so it must not be inside `share`.
    tensors = {} if adapters or model is None else weights(model)
    while True:
        try:
            world.share(lambda: begin(aside))
            # Every rank writes its own rows, so a full disk may hit any of them; all of them leave
            # together.
            state = on_all(
                world,
                lambda: _write(model, tensors, config, aside, stepper, world, adapters=adapters),
            )
            if reference is not None:
                world.share(lambda: reference.write(aside))
            kept = kept_of(stepper, progress or {}, state)
            # `kept=kept` binds the value now: the loop would otherwise rebind the variable (ruff
            # B023).
            world.share(lambda kept=kept: complete(config, aside, step, version, kept))  # type: ignore[misc]
            break
        except OSError as error:
            world.share(lambda: shutil.rmtree(aside, ignore_errors=True))
            if wait_for_room is None or not (words := why_full(error)):
                raise
            world.share(lambda words=words: wait_for_room(target.parent, words))  # type: ignore[misc]
    size = world.share(lambda: replace_folder(target, aside))
    return Saved(target, time.perf_counter() - began, size)


def written_in(target: Path) -> Path:
    return target.with_name(f".{target.name}.writing")


def begin(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write(
    model: torch.nn.Module | None,
    tensors: dict[str, torch.Tensor],
    config: TrainingConfig,
    aside: Path,
    stepper: Stepper | None,
    world: World,
    *,
    adapters: bool,
) -> Any:
    if world.rank == 0 and model is not None:
        if adapters:
            from trainer_core.policy.lora import write_adapter

            write_adapter(model, aside)
        else:
            write_model(model, tensors, config, aside)
    if stepper is None:
        return None
    return _save_state(aside / state_file(world), stepper)


def kept_of(stepper: Stepper | None, progress: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return the part of `trainer_state.json` that only a resume needs."""
    if stepper is None:
        return {"progress": progress}
    return {
        "progress": progress,
        "state": state,
        "parts": stepper.parts,
        "dtype": stepper.dtype,
    }


def complete(
    config: TrainingConfig, aside: Path, step: int, version: int, kept: dict[str, Any]
) -> None:
    """Flush the folder to the disk, `trainer_state.json` last: it marks the folder complete.

    Args:
        kept: result of `kept_of`.
    """
    facts = {"step": step, "weight_version": version, "settings": trained_settings(config)} | kept
    facts["files"] = seal(aside)
    facts = json.loads(json.dumps(facts))  # as it will be read: tuples are lists, keys are strings
    facts["sha256"] = _facts_digest(facts)
    # Written after `seal`: a crash before this line leaves a folder without it, which is not
    # resumed.
    (aside / STATE_JSON).write_text(json.dumps(facts, indent=1) + "\n")
    sync(aside / STATE_JSON)
    sync(aside)


def save_step(
    model: torch.nn.Module,
    config: TrainingConfig,
    stepper: Stepper,
    *,
    step: int,
    world: World | None = None,
    **more: Any,
) -> Saved:
    """Write step_N/ or adapter_step_N/, then apply `keep_checkpoints`. Keywords as in `save`."""
    target = step_folder(config, step)
    saved = save(model, config, target, step=step, stepper=stepper, world=world, **more)
    # Rank 0 alone deletes; `world` is None for a single rank.
    if not (world and world.rank):
        drop_old(config, step)
    return saved


def step_folder(config: TrainingConfig, step: int) -> Path:
    return Path(config.save_path) / f"{'adapter_' if config.trains_adapters else ''}step_{step}"


def drop_old(config: TrainingConfig, step: int) -> None:
    """Remove undamaged checkpoints up to `step` that exceed `keep_checkpoints`.

    Those of later steps are another run's, and the one that `resume` names is still needed.
    """
    if config.keep_checkpoints:
        saved = complete_checkpoints(Path(config.save_path), config.trains_adapters)
        own = [path for path in saved if _step_of(path) <= step]
        for old in own[: -config.keep_checkpoints]:
            if old.resolve() != Path(config.resume).resolve():
                shutil.rmtree(old, ignore_errors=True)


def save_final(
    model: torch.nn.Module, config: TrainingConfig, *, world: World | None = None, **more: Any
) -> Saved:
    """Write final_model/; with `lora_merged_export` first final_adapter/. Keywords as in `save`."""

    def write(what: torch.nn.Module | None, name: str, *, merged: bool = False) -> Saved:
        target = Path(config.save_path) / name
        return save(what, config, target, stepper=None, merged=merged, world=world, **more)

    if not config.lora_merged_export:
        return write(model, "final_model")
    from trainer_core.policy.lora import merged_model
    from trainer_core.ranks.world import ALONE

    # The adapter first: the merge reads it from the disk, and it survives if the merge fails.
    adapter = write(model, "final_adapter")
    merged = (world or ALONE).first(lambda: merged_model(model, config, adapter.path))
    return write(merged, "final_model", merged=True)


def write_model(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], config: TrainingConfig, target: Path
) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, target)
    model.config.save_pretrained(target)
    write_companions(config.model_name, target)


def _save_state(path: Path, stepper: Stepper) -> Any:
    plain, tensors = state_of(stepper)
    write_state(path, plain, tensors, stepper.world)
    return plain


def replace_folder(target: Path, aside: Path) -> int:
    """Move the complete folder to its final name; return its size in bytes."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    # Two renames instead of a deletion first: at every moment one complete folder exists.
    if target.exists():
        target.rename(old)
    aside.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


class Sealed(TypedDict):
    bytes: int
    sha256: str
    """Hexadecimal, over the SHA-256 digests of parts of `PART_BYTES`."""


def seal(folder: Path) -> dict[str, Sealed]:
    """Flush all files below `folder` to the disk and return their seals by relative path.

    Raises:
        OSError: the disk does not take them.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = checksums(paths)
    # Folders come after files: an entry must not reach the disk before the content it names.
    for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)
    return {
        path.relative_to(folder).as_posix(): Sealed(bytes=path.stat().st_size, sha256=sums[path])
        for path in paths
    }


def damage(folder: Path, files: dict[str, Sealed], *, deep: bool = True) -> str | None:
    """Describe what differs from the seals in `folder`; None if nothing does.

    Args:
        deep: compare checksums, besides existence and size.
    """
    for name, sealed in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if size != sealed["bytes"]:
            return f"{name} has {size:,} bytes, and {sealed['bytes']:,} were written"
    if not deep:
        return None
    try:
        sums = checksums([folder / name for name in files])
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    changed = [name for name, sealed in files.items() if sums[folder / name] != sealed["sha256"]]
    return f"the content of {', '.join(changed)} is not what was written" if changed else None


def checksums(paths: Iterable[Path]) -> dict[Path, str]:
    paths = list(paths)
    # max(..., 1): an empty file has one empty part, so it gets a checksum too.
    parts = [
        (path, start)
        for path in paths
        for start in range(0, max(path.stat().st_size, 1), PART_BYTES)
    ]
    # Threads suffice: hashlib releases the GIL for large buffers.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda part: _part_digest(*part), parts))
    whole = {path: hashlib.sha256() for path in paths}
    for (path, _), digest in zip(parts, digests, strict=True):
        whole[path].update(digest)
    return {path: each.hexdigest() for path, each in whole.items()}


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _part_digest(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = PART_BYTES
        while left and (chunk := file.read(min(left, _READ_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()
