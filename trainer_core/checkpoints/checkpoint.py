"""Checkpoints: a model folder that plain transformers loads, plus the state for an exact resume.

    save_path/step_N/          model.safetensors, config.json, tokenizer;
                               trainer_state/tensors.safetensors: optimizer, master weights, random
                               generators (in a folder, since vLLM takes every *.safetensors beside
                               config.json for weights);
                               trainer_state.json: step, weight version and other plain values
    save_path/adapter_step_N/  for adapters: adapter_model.safetensors and adapter_config.json (peft
                               and vLLM) instead of the model; the same trainer state; with
                               `ref_kl_coef` also reference/, the adapter that the run started from
    save_path/final_model/     model or adapter without optimizer state; with `lora_merged_export`
                               the whole model, and final_adapter/ beside it

With several ranks, each rank writes its rows of the state to
trainer_state/tensors-R-of-N.safetensors and rank 0 writes everything else. Another number of ranks
can resume (`resharding.py`).

A checkpoint is written under a temporary name, flushed to the disk and renamed, so a folder with
its final name is complete even after a crash. `trainer_state.json` holds a checksum of each file
and of itself; a resume skips damaged checkpoints. torch is imported only where tensors are used:
the starting point is found before torch is loaded.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from atropos_common.protocol.bridge import ADAPTER_CONFIG
from atropos_common.system.files import read_regular
from trainer_core.checkpoints.durable import damage, seal, sync, why_full
from trainer_core.config import TrainingConfig, flag
from trainer_core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from trainer_core.optimization.optimizers import Stepper
    from trainer_core.policy.reference import Reference
    from trainer_core.ranks.world import World

T = TypeVar("T")

STATE_JSON = "trainer_state.json"
STATE_TENSORS = "trainer_state/tensors.safetensors"
_OF_RANKS = re.compile(r"tensors-(\d+)-of-\d+\.safetensors")
_TENSOR, _ITEMS = "$tensor", "$items"
"""Keys that stand for a tensor and for a dict in `trainer_state.json`."""
TRAINED_SECTIONS = ("Essential", "Objective", "Optimizer", "LoRA")
"""Sections of `TrainingConfig` whose settings decide what a run trains."""
NOT_TRAINED = {
    "weight_bridge_mode",
    "checkpoint_in_background",
    "checkpoint_interval",
    "optimizer_offload",
}
"""Settings of these sections that do not affect training."""
_STEP = re.compile(r"(adapter_)?step_(\d+)")
_WRITING, _OLD = re.compile(r"\.(.+)\.writing"), re.compile(r"\.(.+)\.old")
"""Folders left by interrupted writes."""


@dataclass(frozen=True)
class StartingPoint:
    """Start of a run: optimizer steps done, weight version, and the checkpoint (None: the base
    model)."""

    step: int = 0
    version: int = 0
    path: Path | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    """State of the stop conditions, the updates and the batch source."""
    settings: dict[str, Any] = field(default_factory=dict)
    """`trained_settings` of the run that wrote the checkpoint."""
    exact: bool = True
    """True if the checkpoint also holds the optimizer state."""


@dataclass(frozen=True)
class Saved:
    """A written checkpoint: folder, duration in seconds and size."""

    path: Path
    seconds: float
    bytes: int


def complete_checkpoints(save_path: Path, adapters: bool = False) -> list[Path]:
    """Return the complete step_N/ (or adapter_step_N/) folders in `save_path`, oldest first."""
    return [
        path for path in _numbered(save_path, adapters) if _why_damaged(path, deep=False) is None
    ]


def starting_point(config: TrainingConfig) -> StartingPoint:
    """Find the checkpoint for `resume`. `auto` skips damaged ones with a warning, and continues
    from the final model (without optimizer state) if the run ended after its last checkpoint.

    Raises:
        UsageError: the named checkpoint is missing or damaged, or `save_path` is not writable.
    """
    _require_writable(Path(config.save_path))
    if config.resume == "never":
        return StartingPoint()
    if config.resume != "auto":
        return _point(Path(config.resume), config)
    save_path = Path(config.save_path)
    _clear_interrupted(save_path)
    numbered = [
        (_step_of(path), True, path) for path in _numbered(save_path, config.trains_adapters)
    ]
    # Highest step first. At equal steps the numbered checkpoint wins: True sorts after False.
    for _, exact, path in sorted(
        [*numbered, *_ends(save_path, config.trains_adapters)], reverse=True
    ):
        try:
            return _point(path, config, exact=exact)
        except UsageError as error:
            print(f"[WARNING] passed over: {error}")
    return StartingPoint()


def _require_writable(save_path: Path) -> None:
    """Write a file now: failing at the first checkpoint would lose the steps before it."""
    try:
        save_path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save_path).close()
    except OSError as error:
        # A full disk is no reason to refuse: training pauses at a checkpoint until there is space.
        if why_full(error):
            return
        raise UsageError(
            f"--save-path {save_path}: checkpoints cannot be written there "
            f"({error.strerror}). fix: choose a folder "
            "that you can write to"
        ) from None


def _ends(save_path: Path, adapters: bool) -> Iterator[tuple[int, bool, Path]]:
    """Yield the final model or adapter of an earlier attempt: its step, False (not exact), its
    path."""
    for path in (save_path / "final_adapter", save_path / "final_model"):
        whole = _why_damaged(path, deep=False, exact=False) is None
        if whole and (path / ADAPTER_CONFIG).is_file() == adapters:
            yield _read_facts(path)["step"], False, path


def _numbered(save_path: Path, adapters: bool) -> list[Path]:
    if not save_path.is_dir():
        return []
    names = ((path, _STEP.fullmatch(path.name)) for path in save_path.iterdir())
    return sorted((path for path, m in names if m and bool(m[1]) == adapters), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _point(path: Path, config: TrainingConfig, *, exact: bool = True) -> StartingPoint:
    if reason := _why_damaged(path, deep=True, exact=exact):
        raise UsageError(f"--resume {path}: {reason}")
    if (path / ADAPTER_CONFIG).is_file() != config.trains_adapters:
        theirs, ours = (
            ("a whole model", "adapters")
            if config.trains_adapters
            else ("an adapter", "the whole model")
        )
        raise UsageError(
            f"--resume {path}: a checkpoint of {theirs}, and --weight-bridge-mode "
            f"{config.weight_bridge_mode} trains "
            f"{ours}"
        )
    facts = _read_facts(path)
    settings = dict(facts.get("settings", {}))
    return StartingPoint(
        facts["step"], facts["weight_version"], path, facts.get("progress", {}), settings, exact
    )


FACTS: dict[str, type] = {"step": int, "weight_version": int, "files": dict, "sha256": str}
"""Fields of every `trainer_state.json`, with their types."""
EXACT_FACTS: dict[str, type] = {"state": dict}
"""More fields that an exact resume needs."""
OPTIONAL_FACTS: dict[str, type] = {"progress": dict, "settings": dict}


def _read_facts(path: Path) -> dict[str, Any]:
    """Read a checkpoint's `trainer_state.json`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a JSON object.
    """
    try:
        facts = json.loads(read_regular(path / STATE_JSON, unlinked=0))
    except RecursionError:
        raise ValueError(f"{STATE_JSON} is nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{STATE_JSON} is not a JSON object")
    return facts


def _why_damaged(path: Path, *, deep: bool, exact: bool = True) -> str | None:
    """Return the reason why `path` cannot be resumed; None if it can. `exact`: with optimizer
    state."""
    needed = FACTS | (EXACT_FACTS if exact else {})
    try:
        facts = _read_facts(path)
        if not needed.keys() <= facts.keys():
            return (
                f"not a checkpoint of this trainer: {STATE_JSON} lacks fields that an exact "
                f"resume needs"
            )
        # `type(...) is not kind`: a bool must not pass as an int. Missing optional fields get a
        # default.
        known = needed | OPTIONAL_FACTS
        if wrong := [
            name for name, kind in known.items() if type(facts.get(name, kind())) is not kind
        ]:
            return (
                f"not a checkpoint of this trainer: {STATE_JSON} has wrong types in "
                f"{', '.join(wrong)}"
            )
        # `pop`: the digest covers everything but itself.
        if facts.pop("sha256") != _facts_digest(facts):
            return f"the content of {STATE_JSON} is not what was written"
        return damage(path, facts["files"], deep=deep)
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        # The file may hold anything, so any of these can come from a wrong shape of its content.
        return f"not a checkpoint of this trainer ({error})"


def _facts_digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _clear_interrupted(save_path: Path) -> None:
    """Remove folders of interrupted writes; restore an older folder that a write had moved
    aside."""
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
    """Describe in one line where the run starts and why; a second line lists changed settings."""
    save_path = Path(config.save_path)
    if point.path is not None:
        optimizer = (
            ""
            if point.exact
            else "; the optimizer restarts: a finished run keeps no optimizer state"
        )
        start = (
            f"Resuming from {point.path}: step {point.step}, weight version "
            f"{point.version}{optimizer}"
        )
        changed = _differences(point, config)
        return f"{start}\n[NOTE] Differs from the checkpoint: {changed}" if changed else start
    if config.resume == "auto":
        return f"Starting from the base model {config.model_name}: no checkpoint in {save_path}"
    old = complete_checkpoints(save_path, config.trains_adapters)
    ignored = (
        f"; {len(old)} checkpoints in {save_path} are ignored (--resume auto continues)"
        if old
        else ""
    )
    return f"Starting from the base model {config.model_name}{ignored}"


def trained_settings(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings that decide what a run trains, as JSON values."""
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
    return (
        f"Last checkpoint: {saved[-1]}"
        if saved
        else "There is no checkpoint: a restart starts from the base model"
    )


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
        merged: `model` is a whole model with the adapters merged in.
        reference: its frozen adapter goes into the checkpoint (`ref_kl_coef`).
        wait_for_room: called on rank 0 when the disk is full, with the folder and the system's
            message, after the partial checkpoint is removed; then the write is repeated. Without it
            the error is raised.

    Raises:
        OSError: the checkpoint cannot be written or read back; the partial folder is removed.
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
    """Temporary folder for writing the checkpoint `target`."""
    return target.with_name(f".{target.name}.writing")


def begin(aside: Path) -> None:
    """Create an empty folder to write in."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def on_all(world: World, work: Callable[[], T]) -> T:
    """Like `World.together`, with safetensors' errors as OSError: they concern the disk or a
    file."""
    from safetensors import SafetensorError

    def plain() -> T:
        try:
            return work()
        except SafetensorError as error:
            raise OSError(str(error)) from error

    return world.together(plain)


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


def state_file(world: World) -> str:
    """Path of this rank's state inside a checkpoint."""
    return (
        STATE_TENSORS
        if world.size == 1
        else f"trainer_state/tensors-{world.rank}-of-{world.size}.safetensors"
    )


def kept_of(stepper: Stepper | None, progress: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return the part of `trainer_state.json` that only a resume needs."""
    exact = (
        {} if stepper is None else {"state": state, "parts": stepper.parts, "dtype": stepper.dtype}
    )
    return {"progress": progress, **exact}


def complete(
    config: TrainingConfig, aside: Path, step: int, version: int, kept: dict[str, Any]
) -> None:
    """Flush the whole folder to the disk; `trainer_state.json`, which marks it complete, comes
    last.

    Args:
        kept: the JSON part of an exact resume (`kept_of`); no state if only the model is kept.
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
    version: int,
    progress: dict[str, Any] | None = None,
    reference: Reference | None = None,
    wait_for_room: Callable[[Path, str], None] | None = None,
    world: World | None = None,
) -> Saved:
    """Write step_N/ or adapter_step_N/, then apply `keep_checkpoints`; damaged checkpoints do not
    count."""
    saved = save(
        model,
        config,
        step_folder(config, step),
        step=step,
        version=version,
        stepper=stepper,
        progress=progress,
        reference=reference,
        wait_for_room=wait_for_room,
        world=world,
    )
    # Rank 0 alone deletes; `world` is None for a single rank.
    if not (world and world.rank):
        drop_old(config)
    return saved


def step_folder(config: TrainingConfig, step: int) -> Path:
    """Folder for the checkpoint of `step`."""
    return Path(config.save_path) / f"{'adapter_' if config.trains_adapters else ''}step_{step}"


def drop_old(config: TrainingConfig) -> None:
    """Remove the checkpoints that exceed `keep_checkpoints`."""
    if config.keep_checkpoints:
        for old in complete_checkpoints(Path(config.save_path), config.trains_adapters)[
            : -config.keep_checkpoints
        ]:
            shutil.rmtree(old, ignore_errors=True)


def save_final(
    model: torch.nn.Module,
    config: TrainingConfig,
    *,
    step: int,
    version: int,
    progress: dict[str, Any] | None = None,
    wait_for_room: Callable[[Path, str], None] | None = None,
    world: World | None = None,
) -> Saved:
    """Write final_model/; with `lora_merged_export` first the adapter as final_adapter/."""

    def write(what: torch.nn.Module | None, name: str, *, merged: bool = False) -> Saved:
        return save(
            what,
            config,
            Path(config.save_path) / name,
            step=step,
            version=version,
            stepper=None,
            progress=progress,
            merged=merged,
            wait_for_room=wait_for_room,
            world=world,
        )

    if not config.lora_merged_export:
        return write(model, "final_model")
    from trainer_core.policy.lora import merged_model
    from trainer_core.ranks.world import ALONE

    # The adapter first: the merge reads it from the disk, and it survives if the merge fails.
    adapter = write(model, "final_adapter")
    merged = (world or ALONE).first(lambda: merged_model(model, config, adapter.path))
    return write(merged, "final_model", merged=True)


def restore(path: Path, stepper: Stepper) -> None:
    """Restore optimizer, master weights and random generators on each rank; the weight strategy
    loads the weights."""
    on_all(stepper.world, lambda: _restore(path, stepper))


def _restore(path: Path, stepper: Stepper) -> None:
    import numpy as np
    import torch

    state = _saved_state(path, stepper)
    stepper.load_state_dict(state["stepper"])

    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    # JSON turned tuples into lists, and `setstate` accepts only tuples.
    random.setstate(_tuples(json.loads(state["python_rng"])))
    name, keys, *rest = json.loads(state["numpy_rng"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _saved_state(path: Path, stepper: Stepper) -> dict[str, Any]:
    """Load this rank's state: its own file, or its rows of what another number of ranks wrote.

    Raises:
        UsageError: the state belongs to another number of tensor-parallel parts or another dtype.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    from trainer_core.checkpoints.resharding import SavedTensor, cut

    facts = json.loads((path / STATE_JSON).read_text())
    if (parts := facts.get("parts", 1)) != stepper.parts:
        raise UsageError(
            f"--resume {path}: its optimizer state belongs to a policy in {parts} parts, and "
            f"this run has "
            f"{stepper.parts}. fix: continue with single copy and vllm.tensor_parallel = "
            f"{parts}, or start from its "
            f"weights alone with --model-name {path} --resume never"
        )
    # bfloat16 and float16 state can be exchanged; float32 weights have no master weights at all.
    was = facts.get("dtype", stepper.dtype)
    if was != stepper.dtype and "float32" in (was, stepper.dtype):
        raise UsageError(
            f"--resume {path}: its optimizer state belongs to {was} weights, and this run "
            f"trains {stepper.dtype}. fix: "
            f"resume with --dtype {was}, or start from its weights alone with --model-name "
            f"{path} --resume never"
        )
    plain = facts["state"]
    # Numbers, not names, give the order: tensors-10 sorts before tensors-2.
    found = [
        (int(m[1]), file)
        for file in (path / STATE_TENSORS).parent.iterdir()
        if (m := _OF_RANKS.match(file.name))
    ]
    files = [file for _, file in sorted(found)] or [path / STATE_TENSORS]
    world = stepper.world
    # Same number of ranks: each rank reads exactly its own file.
    if len(files) == world.size:
        mine = files[world.rank]
        if world.rank:
            plain = json.loads(safe_open(mine, "pt").metadata()["state"])
        return cast(dict[str, Any], join_tensors(plain, load_file(mine)))
    # Another number of ranks: tensors are opened lazily, and `cut` reads only this rank's rows.
    handles = [safe_open(file, "pt") for file in files]
    state = join_tensors(plain, {name: SavedTensor(name, handles) for name in handles[0].keys()})  # noqa: SIM118
    # Generators are not row-wise: every rank takes rank 0's.
    return state | {
        "stepper": cut(state["stepper"], stepper.rows, stepper.halves),
        "torch_rng": state["torch_rng"].whole(),
        "cuda_rng": [part.whole() for part in state["cuda_rng"]],
    }


def write_model(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], config: TrainingConfig, target: Path
) -> None:
    """Write weights, config and tokenizer, so that the folder loads as a model."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, target)
    model.config.save_pretrained(target)
    _save_companions(config.model_name, target)


def _save_state(path: Path, stepper: Stepper) -> Any:
    plain, tensors = state_of(stepper)
    write_state(path, plain, tensors, stepper.world)
    return plain


def write_state(path: Path, plain: Any, tensors: dict[str, torch.Tensor], world: World) -> None:
    """Write the result of `state_of` as this rank's file."""
    from safetensors.torch import save_file

    path.parent.mkdir(exist_ok=True)
    # Rank 0's plain state is in trainer_state.json; the others carry theirs in the file's metadata.
    save_file(tensors, path, metadata={"state": json.dumps(plain)} if world.rank else None)


def state_of(stepper: Stepper) -> tuple[Any, dict[str, torch.Tensor]]:
    """Collect the state for an exact resume, except weights: JSON values, and copies of the
    tensors."""
    import numpy as np
    import torch

    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "stepper": stepper.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        # As a string: 625 numbers would fill as many lines of the indented JSON.
        "python_rng": json.dumps(random.getstate()),
        "numpy_rng": json.dumps([name, np.asarray(keys).tolist(), *rest]),
    }
    return split_tensors(state)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _save_companions(model_name: str, target: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    # A model without a tokenizer or generation config is fine: rollouts hold token ids.
    for read in (
        partial(AutoTokenizer.from_pretrained, trust_remote_code=False),
        GenerationConfig.from_pretrained,
    ):
        try:
            read(model_name).save_pretrained(target)
        except (OSError, ValueError, ImportError, KeyError):
            continue


def replace_folder(target: Path, aside: Path) -> int:
    """Move the complete folder to its final name, remove an older one last; return its size in
    bytes."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    # Two renames instead of a deletion first: at every moment one complete folder exists.
    if target.exists():
        target.rename(old)
    aside.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def split_tensors(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Replace the tensors of a tree by names; return the tree, and the tensors by name, on the CPU
    and contiguous.

    Tensors that share memory (such as the tables of 8-bit optimizers) are kept once. Dict keys may
    have any JSON type.

    Raises:
        TypeError: a value that JSON cannot hold.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}

    def name(value: torch.Tensor, path: str) -> str:
        # Same memory, shape and strides: one tensor. Empty tensors share pointers, so they use the
        # path.
        key = (
            (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if value.numel()
            else path
        )
        if key not in names:
            names[key] = path
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return names[key]

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {_TENSOR: name(value, path)}
        if isinstance(value, dict):
            # As pairs: JSON would turn keys that are integers into strings.
            return {_ITEMS: [[key, walk(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{path}: {type(value).__name__} cannot be kept in a checkpoint")

    return walk(tree, "state"), tensors


def join_tensors(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the tree; tuples come back as lists."""
    if isinstance(plain, list):
        return [join_tensors(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    return {key: join_tensors(item, tensors) for key, item in plain[_ITEMS]}
