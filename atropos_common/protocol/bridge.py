"""Messages between trainer and inference server, and the digest that links a completion to its
weight version.

    GET  /bridge/info      -> BridgeInfo
    POST /bridge/pause     PauseRequest -> BridgeInfo: freezes or ends requests
    POST /bridge/resume    ResumeRequest -> BridgeInfo: prefix cache reset, version set
    POST /bridge/load      LoadWeightsRequest -> WeightsLoaded: pause, load, resume
    POST /bridge/versions  VersionsRequest -> VersionsResponse
    POST /bridge/logprobs  LogprobsRequest -> LogprobsResponse
    POST /bridge/routing   RoutingRequest -> RoutingResponse
    POST /lora/load        LoadAdapterRequest -> AdapterInfo: sets the version

A resume and a load of an adapter also release the hold on generation. Each request carries the
run's token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TOKEN_HEADER = "X-Atropos-Token"
INSTANCE_HEADER = "X-Atropos-Instance"
"""The `instance_id` of the only server that may answer."""
SPLIT_HEADER = "X-Atropos-Split"
"""Header of completions: `train` for rollouts, `eval` for evaluations, which sample freely."""
SAMPLING_HEADER = "X-Atropos-Sampling"
"""Sampling options that were removed from the request."""
ENV_SAMPLING = "ATROPOS_SAMPLING"
ENV_OPEN_GENERATION = "ATROPOS_OPEN_GENERATION"
"""If "1", other users may request completions without a key."""
SamplingPolicy = Literal["plain", "as_asked", "refuse"]
"""Policy for sampling options of rollouts that change the importance ratio: remove them, apply
them and return logprobs of the whole distribution, or answer 400."""
# The names start with `atropos:`, so that they never collide with vLLM's own.
METRIC_IDLE_S, METRIC_REQUESTS, METRIC_SLOTS = (
    "atropos:idle_seconds_total",
    "atropos:generation_requests_total",
    "atropos:max_num_seqs",
)
"""Seconds without a request; completion requests; most sequences at a time."""
METRIC_CAPACITY = "atropos:capacity_tokens_per_second"
"""The engine's largest token rate; missing while unknown."""
METRIC_VERSION = "atropos:weight_version"
"""Missing before the first version."""
GONE_STATUS = 503
"""The server cannot do this now: wait for it, or for its successor."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""peft's two files of a saved adapter."""
ADAPTER_PREFIX = "base_model.model."
"""peft's prefix of every tensor name."""
# Batch sizes for captured CUDA graphs, denser where small batches gain most.
FEW_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)

MOST_DIGESTS = 65536
"""Digests in one `VersionsRequest`."""
MOST_COMPLETIONS = 256
"""Completions in one `LogprobsRequest` or `RoutingRequest`."""
ROUTING_FLAG = "enable-return-routed-experts"
"""vLLM's flag to record experts."""

InFlight = Literal["keep", "wait", "recompute"]
"""Requests in flight during a pause. keep: they freeze and go on with the new weights. wait:
they end with the old weights. recompute: they restart; streams end with "abort"."""


# JavaScript and others keep numbers as doubles, which have 53 bits of mantissa.
MAX_VERSION = 1 << 53
"""Largest integer that every JSON reader keeps exact."""
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]


class BridgeMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class BridgeInfo(BridgeMessage):
    """State of one inference server."""

    instance_id: str
    model: str
    vllm_version: str
    weight_version: int | None = None
    """None before the trainer's first version."""
    held: bool = False
    """Generation waits for the first weights."""
    # A pause lasts for one publish; the hold ends with the first version.
    paused: bool = False
    dirty: bool = False
    """A write to the weights has begun and is not complete."""
    shared_weights: bool = False
    manifest: str | None = None
    exported: int = 0
    """Tensors in the manifest."""
    workers: int = 1
    """Processes that hold the model or a part of it."""
    receives: Literal["nccl", "gloo"] | None = None
    """Backend of broadcasts; None: it was not started for them."""
    load_obstacle: str | None = "it was started without ATROPOS_WEIGHT_UPDATES=1"
    """Why `/bridge/load` cannot replace the weights."""
    started_from: str | None = None
    """Folder of the start weights; None for the model's own."""
    block_size: int | None = None
    """Tokens in one block: a shorter prompt leaves nothing in the prefix cache."""
    idle_s: float | None = None
    """Seconds without a request since its start."""
    generated_tokens: int | None = None
    """Tokens since its start."""
    capacity_tokens_per_s: float | None = None
    """Largest token rate."""
    records_routing: bool = False
    """The server records expert choices and answers `/bridge/routing`."""
    eager_because: str | None = None
    """Why this server gave up CUDA graphs."""


class PauseRequest(BridgeMessage):
    lease_s: float = 60.0
    """Seconds without a resume after which a clean server resumes; a dirty one becomes
    unhealthy."""
    dirty: bool = False
    """Weights are about to be written in place."""
    holder: str = Field("", max_length=64)
    """Only its own resume counts; a pause by another client takes the lease over."""
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, gt=0)
    """Seconds after which `wait` freezes the rest."""


class ResumeRequest(BridgeMessage):
    weight_version: int = Field(le=MAX_VERSION)
    """Optimizer steps in the weights now in place; 0 is the base model."""
    holder: str = Field("", max_length=64)
    """Holder of the pause, as in its `PauseRequest`."""


class LoadWeightsRequest(BridgeMessage):
    path: str
    """Folder of safetensors below the run directory."""
    weight_version: Version
    lease_s: float = Field(600.0, gt=0, le=24 * 3600)
    """Seconds after which an unfinished load leaves the server unhealthy."""
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, gt=0)
    """Both as in `PauseRequest`."""
    at_restart: bool = False
    """Change nothing now; the next start loads these weights."""


class WeightsLoaded(BridgeMessage):
    instance_id: str
    weight_version: int | None
    """Weight version that answers now."""
    tensors: int
    bytes: int
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds of pause, load, device_sync and resume."""


class LoadAdapterRequest(BridgeMessage):
    path: str
    """Folder of peft's `save_pretrained`, below the run directory."""
    weight_version: Version


class AdapterInfo(BridgeMessage):
    """The answering LoRA adapter; None: the base model answers."""

    enabled: bool
    name: str | None = None
    weight_version: int | None = None
    path: str | None = None
    max_lora_rank: int | None = None
    retiring: int = 0
    """Older adapters with completions in flight."""
    retiring_paths: list[str] = Field(default_factory=list)
    """Their folders; the server may read them until then."""


class VersionsRequest(BridgeMessage):
    digests: list[str] = Field(max_length=MOST_DIGESTS)


class VersionsResponse(BridgeMessage):
    # Two versions differ if a publish came while the completion was generated.
    versions: list[tuple[int, int] | None]
    """Oldest and newest version of each completion; None if unknown."""


GREEDY_BELOW = 1e-5
"""Temperature below which vLLM decodes greedily, with logprobs at temperature 1."""


class LogprobsRequest(BridgeMessage):
    """Completions without logprobs: `prompts[i]` is the `prompt_digest` before `completions[i]`."""

    prompts: list[str] = Field(max_length=MOST_COMPLETIONS)
    completions: list[list[int]] = Field(max_length=MOST_COMPLETIONS)


class KnownLogprobs(BridgeMessage):
    """Logprobs of one completion, as the engine computed them."""

    logprobs: list[float]
    """Logprobs in nats at `temperature`; fewer if the last tokens are not the engine's."""
    temperature: float
    oldest_version: int
    """Oldest weight version that contributed."""


class LogprobsResponse(BridgeMessage):
    found: list[KnownLogprobs | None]
    """None for an unknown completion."""


class RoutingRequest(BridgeMessage):
    """Completions whose experts are requested; `starts[i]` is the first token wanted."""

    prompts: list[str] = Field(max_length=MOST_COMPLETIONS)
    completions: list[list[int]] = Field(max_length=MOST_COMPLETIONS)
    starts: list[Annotated[int, Field(ge=0)]] = Field(max_length=MOST_COMPLETIONS)


class KnownRouting(BridgeMessage):
    """Expert choices, [tokens, layers, experts per token]; the last token has none."""

    shape: tuple[int, int, int]
    wide: bool = False
    """Two bytes per expert, little-endian."""
    data: str
    """The array in base64."""


class RoutingResponse(BridgeMessage):
    found: list[KnownRouting | None]
    """None for an unknown completion."""
    dropped: int = 0
    """Completions dropped for newer ones."""


def server_rank(rank: int) -> int | None:
    """--max-lora-rank for adapters of `rank`; None if vLLM supports none."""
    # vLLM pads an adapter to the next rank of its list, so round up.
    return next((known for known in LORA_RANKS if known >= rank), None)


def few_graph_sizes(max_num_seqs: int = 1024) -> list[int]:
    """Graph sizes for an engine that restarts often: a third of vLLM's own. A batch between two
    sizes is padded; decoding is bound by reading the weights."""
    # The largest size that vLLM itself captures.
    limit = min(2 * max_num_seqs, 512)
    return [*(size for size in FEW_GRAPH_SIZES if size < limit), limit]


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Digest of the tokens before a completion."""
    # 64-bit little-endian ids, independent of Python's and numpy's types.
    return hashlib.blake2b(
        struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=16
    ).hexdigest()


def completion_digest(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Digest of one completion from its token ids and their logprobs, both of length T.

    Both pass through JSON unchanged (doubles round-trip), so server and trainer agree.
    """
    count = len(token_ids)
    if count != len(logprobs):
        raise ValueError(f"{count} tokens but {len(logprobs)} logprobs")
    # The logprobs tell equal texts of different weight versions apart.
    payload = struct.pack(f"<{count}q{count}d", *token_ids, *logprobs)
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
