"""The folder's model in plain transformers: logprobs of any tokens, in float32."""

from __future__ import annotations

import copy
import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_core.errors import UsageError
from trainer_core.objective.causes.sampling import Distribution
from trainer_core.objective.causes.weights import Known

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Span:
    """Tokens of a sequence whose logprobs are wanted: from `start` to the end."""

    tokens: list[int]
    start: int
    prompt: int = 0
    """Tokens of the prompt."""

    @property
    def count(self) -> int:
        return len(self.tokens) - self.start


class Reference:
    """Model of a folder, with its adapter merged, and what it takes to test hypotheses."""

    def __init__(
        self,
        weights: Path,
        adapter: Path | None = None,
        older: Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "",
    ) -> None:
        self.weights = weights
        # Hypotheses change the model for a moment: audits in several threads take turns.
        self.lock = threading.RLock()
        self.model: Any = load(weights)
        self.config = self.model.config
        self.dtype = dtype or _stated(weights)
        factors = {} if adapter is None else read_adapter(adapter, self.model)
        base = {n: dict(self.model.named_parameters())[n].detach().clone() for n in factors}
        with torch.no_grad():
            for name, (a, b, scale) in factors.items():
                dict(self.model.named_parameters())[name].add_(scale * (b @ a))
        self.device = torch.device(chosen_device(device, self.model))
        self.model.to(self.device)
        self.known = Known(
            base={n: t.to(self.device) for n, t in base.items()},
            factors={
                n: (a.to(self.device), b.to(self.device), s) for n, (a, b, s) in factors.items()
            },
            older=self._older(older),
            stored_head=_stored_head(weights, self.model, self.device),
            shards=_shards(weights, self.model),
        )
        self._half: tuple[torch.dtype, nn.Module] | None = None

    def _older(self, folder: Path | None) -> Mapping[str, torch.Tensor]:
        if folder is None:
            return {}
        other = dict(load(folder).named_parameters())
        own = dict(self.model.named_parameters())
        if any(n not in other or other[n].shape != t.shape for n, t in own.items()):
            raise UsageError(f"--older {folder}: not a checkpoint of the same model")
        return {name: other[name].detach().to(self.device) for name in own}

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer; None if it has none."""
        from transformers import AutoTokenizer

        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        if not any((self.weights / name).is_file() for name in names):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.weights, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError):
            return None

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def half(self) -> torch.dtype | None:
        """Half precision in which the engine is expected to compute; None: float32."""
        return HALVES.get(self.dtype)

    def logprobs(self, spans: Sequence[Span], model: nn.Module | None = None) -> list[torch.Tensor]:
        """Return the logprobs of each span's tokens, float32 on the CPU."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(spans)
        for rows, logits in self._logits(spans, model or self.model):
            tokens = torch.tensor([spans[row].tokens[spans[row].start :] for row in rows])
            chosen = logits.gather(2, tokens.to(logits.device)[..., None])[..., 0]
            logprobs = (chosen - logits.logsumexp(2)).cpu()
            for row, one in zip(rows, logprobs, strict=True):
                found[row] = one
        return found

    def distribution(self, spans: Sequence[Span]) -> Distribution:
        """Return the whole distributions at the spans' tokens."""
        logits: list[torch.Tensor] = [torch.empty(0)] * len(spans)
        for rows, some in self._logits(spans, self.model):
            for row, one in zip(rows, some, strict=True):
                logits[row] = one
        return Distribution(
            torch.cat(logits),
            torch.tensor([t for s in spans for t in s.tokens[s.start :]], device=self.device),
            [s.tokens[:at] for s in spans for at in range(s.start, len(s.tokens))],
            [s.prompt for s in spans for _ in range(s.count)],
        )

    @torch.inference_mode()
    def _logits(
        self, spans: Sequence[Span], model: nn.Module
    ) -> list[tuple[list[int], torch.Tensor]]:
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, span in enumerate(spans):
            if span.count:
                alike[len(span.tokens), span.start].append(row)
        found = []
        for (length, start), rows in alike.items():
            ids = torch.tensor([spans[row].tokens for row in rows], device=self.device)
            # Only the positions that predict a wanted token pass the head.
            keep = torch.arange(start - 1, length - 1, device=self.device)
            output = model(input_ids=ids, use_cache=False, logits_to_keep=keep)
            found.append((rows, output.logits.float()))
        return found

    def in_half(self, spans: Sequence[Span], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the logprobs as this model computes them in half precision."""
        if self._half is None or self._half[0] != dtype:
            self._half = (dtype, halved(self.model, dtype))
        return self.logprobs(spans, self._half[1])


def halved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model in half precision, as engines compute it."""
    half = copy.deepcopy(model).to(dtype)
    # Rotary frequencies stay in float32 in every engine.
    for own, other in zip(model.modules(), half.modules(), strict=True):
        for name, buffer in own.named_buffers(recurse=False):
            setattr(other, name, buffer.clone())
    return half


def load(folder: Path) -> nn.Module:
    """Load a folder in float32 on the CPU.

    Raises:
        UsageError: it is not a model's folder.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json; fix: give a Hugging Face folder")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.eval().requires_grad_(False)
    return model  # type: ignore[no-any-return]


def read_adapter(
    folder: Path, model: nn.Module
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Return an adapter in peft's format as parameter name -> A [r, in], B [out, r], scale.

    Raises:
        UsageError: it is no plain LoRA adapter of this model.
    """
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is not an adapter in peft's format: {error}") from error
    if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora"):
        raise UsageError(f"{folder}: only plain LoRA adapters can be audited")
    own = dict(model.named_parameters())
    found = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
        b = tensors[key.replace(".lora_A.", ".lora_B.")]
        if f"{module}.weight" not in own:
            raise UsageError(f"{folder}: the model has no {module}")
        rank = _pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found[f"{module}.weight"] = (a.float(), b.float(), scale)
    if not found or len(found) * 2 != len(tensors):
        raise UsageError(f"{folder}: it has other tensors than LoRA matrices of linear layers")
    return found


def _pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.search(rf"(^|\.){pattern}$", module):
            return value
    return default


def chosen_device(wanted: str, model: nn.Module) -> str:
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "cpu"
    free, _ = torch.cuda.mem_get_info()
    needed = sum(p.numel() for p in model.parameters()) * 4
    # The model, its copy in half precision, and logits. The engine may hold the rest of the card.
    return "cuda" if free > 2 * needed + 2**31 else "cpu"


def _stated(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or {}
    found = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32"
    return str(found).removeprefix("torch.")


def _stored_head(folder: Path, model: Any, device: torch.device) -> torch.Tensor | None:
    """Head in the files of a model that ties it to its embedding, if it is another one."""
    from safetensors import safe_open

    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        return None
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if "lm_head.weight" in tensors.keys():  # noqa: SIM118
                head = tensors.get_tensor("lm_head.weight").float().to(device)
                other = head.shape == embedding.shape and not torch.equal(head, embedding)
                return head if other else None
    return None


def _shards(folder: Path, model: nn.Module) -> list[list[str]]:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return []
    files: dict[str, list[str]] = defaultdict(list)
    own = {name for name, _ in model.named_parameters()}
    for name, file in json.loads(path.read_text())["weight_map"].items():
        if name in own:
            files[file].append(name)
    return [files[file] for file in sorted(files)]
