"""The faults: a plain description, the public report, the plant, and the causes that name it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from atropos_common.protocol import audit as causes
from atropos_common.protocol import trainer_records as records
from benchmarks.silent_bugs import models
from benchmarks.silent_bugs.engines import proxy
from trainer_core.audit.program import Settings, audit
from trainer_core.objective.causes.weights import SCHEMES

# vLLM serves a float32 folder in half precision without it.
EXACT = ("--dtype", "float32")
PROCESSED = ("--logprobs-mode", "processed_logprobs")
GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Engine:
    """One `vllm serve` that several faults share."""

    folder: Callable[[Path], Path]
    flags: Callable[[Path], list[str]] = lambda root: [*EXACT]


@dataclass(frozen=True)
class Fault:
    """One silent bug."""

    name: str
    text: str
    engine: str
    named: tuple[str, ...]
    """Causes that count as right."""
    report: str = ""
    """Public report; empty: none that is certain."""
    between: Callable[[str], AbstractContextManager[str]] = nullcontext
    """Proxy between the engine and its clients; gets and gives an address."""
    settings: Callable[[Path], dict[str, Any]] = lambda root: {}
    """Arguments of the audit that differ from the engine's own folder."""
    before: Callable[[str, Path], None] = lambda url, root: None
    """Change of the engine before the audit."""


def llama(root: Path) -> Path:
    return models.save(models.build("llama"), root / "llama")


def newer(root: Path) -> Path:
    """Folder that a trainer would have published: a later checkpoint of llama."""
    return _published(root, range(4), "newer")


def _published(root: Path, layers: range, name: str) -> Path:
    def change(model: Any) -> None:
        draw = torch.Generator().manual_seed(3)
        for key, weight in model.named_parameters():
            step = 0.02 * torch.randn(weight.shape, generator=draw)
            if any(f"layers.{i}." in key for i in layers) or "layers." not in key:
                weight.add_(step)

    return models.changed(root / "llama", root / name, change)


def _half_published(root: Path) -> dict[str, Any]:
    """The engine has the right layers 0 and 1, and the older layers 2 and 3."""

    def forget(model: Any) -> None:
        draw = torch.Generator().manual_seed(5)
        for key, weight in model.named_parameters():
            if "layers.0." in key or "layers.1." in key or "layers." not in key:
                weight.add_(0.02 * torch.randn(weight.shape, generator=draw))

    def step(model: Any) -> None:
        draw = torch.Generator().manual_seed(6)
        for key, weight in model.named_parameters():
            if "layers.2." in key or "layers.3." in key:
                weight.add_(0.05 * torch.randn(weight.shape, generator=draw))

    return {
        "weights": models.changed(root / "llama", root / "half-new", step),
        "older": models.changed(root / "llama", root / "half-old", forget),
    }


def _adapters(root: Path) -> list[str]:
    base = root / "llama"
    good = models.write_adapter(base, root / "adapter")
    twice = models.write_adapter(base, root / "adapter-twice", alpha=32.0)
    plain = models.write_adapter(base, root / "adapter-plain")
    models.write_adapter(base, root / "adapter-rslora")
    models.edit_json(root / "adapter-rslora" / "adapter_config.json", use_rslora=True)
    models.write_adapter(base, root / "adapter-new", seed=8)
    half = _truncated(good, root / "adapter-half", base)
    named = {"good": good, "twice": twice, "plain": plain, "half": half}
    return [
        *EXACT,
        *PROCESSED,
        "--enable-lora",
        "--max-loras",
        "2",
        "--max-cpu-loras",
        "8",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        *(f"{name}={folder}" for name, folder in named.items()),
    ]


def _truncated(source: Path, target: Path, base: Path) -> Path:
    """Half of the ranks, with the same scale for each."""
    from safetensors.torch import load_file, save_file

    target.mkdir(exist_ok=True)
    tensors = load_file(source / "adapter_model.safetensors")
    cut = {k: (t[:4] if "lora_A" in k else t[:, :4]).contiguous() for k, t in tensors.items()}
    save_file(cut, target / "adapter_model.safetensors")
    targets = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    models.write_adapter_config(target, base, 4, 8.0, targets)
    return target


def _adapter(name: str, folder: str) -> Callable[[Path], dict[str, Any]]:
    return lambda root: {"adapter": root / folder, "model": name}


def _forced(**sampling: Any) -> Callable[[str], AbstractContextManager[str]]:
    """A gateway that puts sampling parameters of its own into each request."""

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, **sampling} if path == "/v1/completions" else body

    return lambda url: proxy(url, ask=ask)


def _base_for_adapter(url: str) -> AbstractContextManager[str]:
    """A session server that forgets to name the adapter."""

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "model": "m"} if path == "/v1/completions" else body

    return proxy(url, ask=ask)


def _second_start_token(url: str) -> AbstractContextManager[str]:
    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != "/v1/completions":
            return body
        return {**body, "prompt": [[1, *prompt] for prompt in body["prompt"]]}

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        # The caller sees logprobs for the prompt that it sent.
        for choice in body.get("choices", []) if path == "/v1/completions" else []:
            if choice.get("prompt_logprobs"):
                choice["prompt_logprobs"] = [None, *choice["prompt_logprobs"][2:]]
        return body

    return proxy(url, ask=ask, answer=answer)


def _rolled(url: str) -> AbstractContextManager[str]:
    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices", []) if path == "/v1/completions" else []:
            values = choice["logprobs"]["token_logprobs"]
            choice["logprobs"]["token_logprobs"] = [*values[1:], values[-1]]
        return body

    return proxy(url, answer=answer)


def _reload_adapter(url: str, root: Path) -> None:
    """An audit fills the cache; then the trainer writes the next adapter over the same files."""
    live = root / "adapter-live"
    shutil.copytree(root / "adapter", live, dirs_exist_ok=True)

    def load() -> None:
        body = {"lora_name": "live", "lora_path": str(live), "load_inplace": True}
        found = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60, trust_env=False)
        found.raise_for_status()

    load()
    first = audit(Settings(root / "llama", engine=url, adapter=live, model="live", device="cpu"))
    assert first.verdict == "serves", first
    shutil.copytree(root / "adapter-new", live, dirs_exist_ok=True)
    load()


def _other_config(name: str, **config: Any) -> Callable[[Path], dict[str, Any]]:
    """The folder's config says something else than the engine's."""
    return lambda root: {"weights": models.copied(root / name, root / f"{name}-config", **config)}


def _other_tokenizer(root: Path) -> dict[str, Any]:
    folder = models.copied(root / "llama", root / "llama-tokenizer")
    models.tokenizer(shift=1).save_pretrained(folder)
    return {"weights": folder}


def _qwen2_defaults(root: Path) -> Path:
    folder = models.save(models.build("qwen2"), root / "qwen2")
    models.edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
    )
    return folder


def _tied_twice(root: Path) -> Path:
    """Embedding and head of a tied model as two tensors, the head stepped twice."""
    old = models.save(models.build("qwen2", seed=1), root / "tied-old")
    right = models.build("qwen2", seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        weight = right.model.embed_tokens.weight
        step = 0.05 * torch.randn(weight.shape, generator=draw)
        before = weight.clone()
        weight.add_(step)
    models.save(right, root / "tied")

    def untie(model: Any) -> None:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(before + 2 * step)

    assert old
    return models.changed(root / "tied", root / "tied-twice", untie, tie_word_embeddings=False)


def _empty_layers(root: Path) -> Path:
    models.save(models.build("qwen3"), root / "qwen3")

    def empty(model: Any) -> None:
        for layer in model.model.layers[2:]:
            for weight in layer.parameters():
                weight.zero_()

    return models.changed(root / "qwen3", root / "qwen3-empty", empty)


def _quantised(root: Path) -> Path:
    llama(root)

    def round_all(model: Any) -> None:
        for layer in model.model.layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    rounded = SCHEMES["int8 with a scale for each row"](module.weight)
                    module.weight.copy_(rounded)

    return models.changed(root / "llama", root / "llama-int8", round_all)


def _padded(root: Path) -> Path:
    llama(root)
    rows = 512

    def pad(model: Any) -> None:
        for module in (model.model.embed_tokens, model.lm_head):
            weight = torch.zeros(rows, module.weight.shape[1])
            weight[: models.VOCABULARY] = module.weight
            module.weight = torch.nn.Parameter(weight)
        model.config.vocab_size = rows

    return models.changed(root / "llama", root / "llama-padded", pad, vocab_size=rows)


def _tied_routers(root: Path) -> Path:
    """In the last layer two pairs of experts are nearly equal for the router."""
    model = models.build("moe")
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        router = model.model.layers[-1].mlp.gate.weight
        for first in (0, 2):
            near = 3e-4 * torch.randn(router[first].shape, generator=draw)
            router[first + 1] = router[first] + near
        # The experts themselves differ much.
        for name, weight in model.model.layers[-1].mlp.experts.named_parameters():
            if "down" in name:
                weight.mul_(8.0)
    model.config.num_experts_per_tok = 1
    return models.save(model, root / "moe-ties", dtype="bfloat16")


def gemma(root: Path) -> Path:
    return models.save(models.build("gemma"), root / "gemma")


ENGINES: dict[str, Engine] = {
    "llama": Engine(llama, _adapters),
    "gemma": Engine(gemma),
    "qwen2 with defaults": Engine(_qwen2_defaults, lambda root: [*EXACT, *PROCESSED]),
    "tied head": Engine(_tied_twice),
    "empty layers": Engine(_empty_layers),
    "int8": Engine(_quantised),
    "half precision": Engine(llama, lambda root: []),
    "padded": Engine(_padded),
    "dummy": Engine(llama, lambda root: [*EXACT, "--load-format", "dummy"]),
    "router": Engine(_tied_routers, lambda root: ["--dtype", "bfloat16"]),
}

WEIGHTS = (records.OTHER_WEIGHTS,)
ADAPTER = (causes.ADAPTER,)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "old weights",
        "updates never reach the engine, which goes on with the checkpoint before",
        "llama",
        (records.STALE_WEIGHTS,),
        GITHUB + "huggingface/trl/issues/5312",
        settings=lambda root: {"weights": newer(root), "older": root / "llama"},
    ),
    Fault(
        "lost weights",
        "the engine has slept and woken without its weights",
        "dummy",
        (*WEIGHTS, causes.HALF_LOADED),
        GITHUB + "huggingface/trl/pull/5313",
    ),
    Fault(
        "half of an update",
        "layers 2 and 3 are still those of the checkpoint before",
        "llama",
        (causes.HALF_LOADED,),
        settings=_half_published,
    ),
    Fault(
        "layers that were never loaded",
        "names of the last layers do not match, and their weights stay empty",
        "empty layers",
        (causes.HALF_LOADED,),
        GITHUB + "vllm-project/vllm/issues/14828",
        settings=lambda root: {"weights": root / "qwen3"},
    ),
    Fault(
        "adapter never arrives",
        "rollouts name no adapter, so the base model answers",
        "llama",
        ADAPTER,
        GITHUB + "modelscope/ms-swift/issues/9855",
        between=_base_for_adapter,
        settings=_adapter("good", "adapter"),
    ),
    Fault(
        "adapter of another rank",
        "only half of the ranks are loaded",
        "llama",
        ADAPTER,
        settings=_adapter("half", "adapter"),
    ),
    Fault(
        "rank-stabilised adapter with the plain scale",
        "the engine divides alpha by the rank, not by its root",
        "llama",
        ADAPTER,
        GITHUB + "vllm-project/vllm/issues/10798",
        settings=_adapter("plain", "adapter-rslora"),
    ),
    Fault(
        "adapter with too large a scale",
        "the engine multiplies the adapter by twice what its config says",
        "llama",
        ADAPTER,
        GITHUB + "Blaizzy/mlx-vlm/issues/841",
        settings=_adapter("twice", "adapter"),
    ),
    Fault(
        "tied head as a tensor of its own",
        "embedding and head are two tensors there, and the head moved twice as far",
        "tied head",
        (causes.TIED_HEAD,),
        GITHUB + "PrimeIntellect-ai/prime-rl/pull/2823",
        settings=lambda root: {"weights": root / "tied", "older": root / "tied-old"},
    ),
    Fault(
        "stale prefix cache",
        "the next adapter comes under the same name and path, and the cache is not reset",
        "llama",
        (records.STALE_PREFIX,),
        GITHUB + "InternLM/lmdeploy/issues/4917",
        before=_reload_adapter,
        settings=_adapter("live", "adapter-new"),
    ),
    Fault(
        "top-p in the logprobs",
        "logprobs are renormalised over the kept tokens",
        "llama",
        (records.SAMPLING,),
        GITHUB + "vllm-project/vllm/issues/42259",
        between=_forced(top_p=0.9),
    ),
    Fault(
        "top-k in the logprobs",
        "logprobs are renormalised over the kept tokens",
        "llama",
        (records.SAMPLING,),
        GITHUB + "NVIDIA-NeMo/RL/issues/69",
        between=_forced(top_k=20),
    ),
    Fault(
        "temperature missing in the logprobs",
        "rollouts at 0.6 bring raw logprobs",
        "gemma",
        (records.TEMPERATURE,),
        GITHUB + "huggingface/trl/issues/4159",
        settings=lambda root: {"temperature": 0.6},
    ),
    Fault(
        "temperature forced by a gateway",
        "every request is sampled at 0.7, whatever it says",
        "llama",
        (records.TEMPERATURE,),
        between=_forced(temperature=0.7),
    ),
    Fault(
        "repetition penalty in the logprobs",
        "a gateway adds a repetition penalty of 1.1",
        "llama",
        (records.SAMPLING,),
        between=_forced(repetition_penalty=1.1),
    ),
    Fault(
        "sampling defaults of the model",
        "generation_config.json sets temperature, top-p and top-k for requests without them",
        "qwen2 with defaults",
        (records.SAMPLING,),
        GITHUB + "vllm-project/vllm/pull/15281",
    ),
    Fault(
        "wrong rotary base",
        "the engine uses another base than the folder's",
        "llama",
        (causes.ROTARY,),
        GITHUB + "vllm-project/vllm/pull/56066",
        settings=_other_config(
            "llama", rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"}
        ),
    ),
    Fault(
        "wrong dtype",
        "vLLM's --dtype auto serves a float32 folder in half precision",
        "half precision",
        (causes.DTYPE,),
    ),
    Fault(
        "padded vocabulary",
        "the softmax runs over the padding of the head",
        "padded",
        (causes.PADDING,),
        settings=lambda root: {"weights": root / "llama"},
    ),
    Fault(
        "tokenizer of another model",
        "the server's tokenizer gives other ids for the same text",
        "llama",
        (causes.TOKENIZER,),
        settings=_other_tokenizer,
    ),
    Fault(
        "quantised engine",
        "the matrices are rounded to int8",
        "int8",
        (causes.QUANTISED,),
        settings=lambda root: {"weights": root / "llama"},
    ),
    Fault(
        "router replay missing",
        "near ties of the router fall otherwise in the two programs",
        "router",
        (causes.ROUTING,),
        GITHUB + "NVIDIA-NeMo/RL/pull/2590",
    ),
    Fault(
        "sliding window off by one",
        "the engine attends to one token less than the folder says",
        "gemma",
        (causes.WINDOW,),
        GITHUB + "huggingface/transformers/issues/39408",
        settings=_other_config("gemma", sliding_window=65),
    ),
    Fault(
        "logprobs of the next token",
        "logprobs stand one place to the left of their tokens",
        "llama",
        (records.SHIFTED,),
        GITHUB + "modelscope/ms-swift/pull/8196",
        between=_rolled,
    ),
    Fault(
        "a second start token",
        "the server puts a start token before a prompt that has one",
        "llama",
        (causes.PROMPT,),
        between=_second_start_token,
    ),
)
