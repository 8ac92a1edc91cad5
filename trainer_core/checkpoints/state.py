"""State of a trainer for an exact resume: optimizer, master weights, random generators.

Each rank writes its rows to a file of its own. Another number of ranks can resume: each reads only
its own rows. torch is imported only where tensors are used.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from atropos_common.system.run_dir import STATE_JSON
from trainer_core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from trainer_core.optimization.optimizers import Stepper
    from trainer_core.policy.sharding import Rows
    from trainer_core.ranks.world import World

T = TypeVar("T")

STATE_TENSORS = "trainer_state/tensors.safetensors"
_OF_RANKS = re.compile(r"tensors-(\d+)-of-\d+\.safetensors")
# Keys that stand for a tensor and for a dict in `trainer_state.json`.
_TENSOR, _ITEMS = "$tensor", "$items"


def state_file(world: World) -> str:
    return (
        STATE_TENSORS
        if world.size == 1
        else f"trainer_state/tensors-{world.rank}-of-{world.size}.safetensors"
    )


def on_all(world: World, work: Callable[[], T]) -> T:
    """Like `World.together`, with safetensors' errors as OSError."""
    from safetensors import SafetensorError

    def plain() -> T:
        try:
            return work()
        except SafetensorError as error:
            raise OSError(str(error)) from error

    return world.together(plain)


def restore(path: Path, stepper: Stepper) -> None:
    """Restore optimizer, master weights and random generators on each rank."""
    on_all(stepper.world, lambda: _restore(path, stepper))


def _restore(path: Path, stepper: Stepper) -> None:
    import numpy as np
    import torch

    state = _saved_state(path, stepper)
    stepper.load_state_dict(state["stepper"])

    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        # The checkpoint may be of a process that saw more GPUs; each trains on its first one.
        torch.cuda.set_rng_state_all(state["cuda_rng"][: torch.cuda.device_count()])
    # JSON turned tuples into lists, and `setstate` accepts only tuples.
    random.setstate(_tuples(json.loads(state["python_rng"])))
    name, keys, *rest = json.loads(state["numpy_rng"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _saved_state(path: Path, stepper: Stepper) -> dict[str, Any]:
    """Load this rank's state: its own file, or its rows of another number of ranks.

    Raises:
        UsageError: the state belongs to another number of tensor-parallel parts or another dtype.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    facts = json.loads((path / STATE_JSON).read_text())
    if (parts := facts["parts"]) != stepper.parts:
        raise UsageError(
            f"--resume {path}: its optimizer state belongs to a policy in {parts} parts, and this "
            f"run has {stepper.parts}. fix: continue with single copy and vllm.tensor_parallel = "
            f"{parts}, or start from its weights alone with --model-name {path} --resume never"
        )
    # bfloat16 and float16 state can be exchanged; float32 weights have no master weights at all.
    was = facts["dtype"]
    if was != stepper.dtype and "float32" in (was, stepper.dtype):
        raise UsageError(
            f"--resume {path}: its optimizer state belongs to {was} weights, and this run trains "
            f"{stepper.dtype}. fix: resume with --dtype {was}, or start from its weights alone "
            f"with --model-name {path} --resume never"
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


def write_state(path: Path, plain: Any, tensors: dict[str, torch.Tensor], world: World) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(exist_ok=True)
    # Rank 0's plain state is in trainer_state.json; the others carry theirs in the file's metadata.
    save_file(tensors, path, metadata={"state": json.dumps(plain)} if world.rank else None)


def state_of(
    stepper: Stepper, copies: dict[str, torch.Tensor] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Collect the state for an exact resume, except weights; tensors are copied.

    Args:
        copies: of a write that has ended; their memory is used again.
    """
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
    return split_tensors(state, copies)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def split_tensors(
    tree: Any, copies: dict[str, torch.Tensor] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Replace the tensors of a tree by names; return the tree, and the tensors on the CPU by name.

    Args:
        copies: of a write that has ended; their memory is used again.

    Raises:
        TypeError: a value that JSON cannot hold.
    """
    import torch

    from trainer_core.policy.sharding import host_copy

    # Tensors that share memory (as tables of 8-bit optimizers) are kept once.
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
            tensors[path] = host_copy(value, path, copies)
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


class SavedTensor:
    """A tensor across the ranks' files of a checkpoint."""

    def __init__(self, name: str, files: Sequence[Any]) -> None:
        self._name = name
        # A rank without a row of a parameter has no state for it, so not every file has every name.
        self._files = [file for file in files if name in file.keys()]  # noqa: SIM118
        self.shapes = [tuple(file.get_slice(name).get_shape()) for file in self._files]

    def whole(self) -> torch.Tensor:
        tensor: torch.Tensor = self._files[0].get_tensor(self._name)
        return tensor

    def like(self, rows: Rows) -> torch.Tensor:
        """Return the part for `rows` if laid out like the parameter; else `whole`."""
        # A single file holds the whole tensor. A scalar (empty shape) cannot be cut.
        if self.shapes[0] == rows.shape:
            return self._cut(rows.first, rows.count, 1) if rows.shape else self.whole()
        # Only if all files together have exactly the parameter's rows are they row-wise parts of
        # it.
        pieces = [
            shape
            for shape in self.shapes
            if len(shape) == len(rows.shape) and shape[1:] == rows.shape[1:]
        ]
        if len(pieces) < len(self.shapes) or sum(shape[0] for shape in pieces) != rows.shape[0]:
            return self.whole()
        return self._cut(rows.first, rows.count, len(pieces))

    def scales(self, rows: Rows, of: SavedTensor) -> torch.Tensor:
        """Return the part for `rows` of the block scales of `of`.

        Raises:
            UsageError: a block would have to be split.
        """
        # bitsandbytes does not store the block size; it is the power of two that explains both
        # shapes.
        block = 1 << math.ceil(math.log2(math.prod(of.shapes[0]) / self.shapes[0][0]))
        width = math.prod(rows.shape[1:])
        # Elements at which the new ranks and the old files are cut.
        edges = [rows.first * width, *(math.prod(shape) for shape in of.shapes[:-1])]
        if rows.first + rows.count < rows.shape[0]:
            edges.append((rows.first + rows.count) * width)
        if any(edge % block for edge in edges):
            raise UsageError(
                f"the 8-bit optimizer state of a parameter {list(rows.shape)} cannot be "
                f"split for another number of "
                "ranks: use as many ranks as wrote the checkpoint, or --resume never"
            )
        parts = 1 if of.shapes[0] == rows.shape else len(self.shapes)
        return self._cut(rows.first * width // block, -(-rows.count * width // block), parts)

    def _cut(self, first: int, count: int, pieces: int) -> torch.Tensor:
        # `get_slice` reads only the requested rows from the disk.
        found, begin = [], 0
        for file, shape in zip(self._files[:pieces], self.shapes, strict=False):
            low, high = max(first, begin), min(first + count, begin + shape[0])
            if low < high:
                found.append(file.get_slice(self._name)[low - begin : high - begin])
            begin += shape[0]
        import torch

        # An empty tensor with the right dtype and trailing shape, for a rank without rows.
        return torch.cat(found or [self._files[0].get_slice(self._name)[0:0]])


def cut(stepper: Mapping[str, Any], rows: Sequence[Rows], halves: Sequence[int]) -> dict[str, Any]:
    """Cut the state of a `Stepper` for one rank.

    Args:
        stepper: the saved state, with `SavedTensor` in place of tensors.
        rows: rows of each trained parameter on this rank.
        halves: indices of the parameters that have an entry in "weights", in that order.
    """
    optimizer, weights = stepper["optimizer"], stepper["weights"]
    return dict(stepper) | {
        "optimizer": optimizer
        | {"state": {i: _entry(entry, rows[i]) for i, entry in optimizer["state"].items()}},
        "weights": {
            name: [value.like(rows[i]) for value, i in zip(values, halves, strict=True)]
            if isinstance(values, list)
            else values
            for name, values in weights.items()
        },
    }


def _entry(entry: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found[name] = _entry(value, rows)
        # bitsandbytes: absmax1 holds the scales of state1, and so on.
        elif isinstance(value, SavedTensor) and name.startswith("absmax"):
            found[name] = value.scales(rows, entry[name.replace("absmax", "state")])
        else:
            found[name] = value.like(rows) if isinstance(value, SavedTensor) else value
    return found
