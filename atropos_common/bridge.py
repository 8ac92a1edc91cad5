"""Messages between trainer and inference server, and the digest that ties a completion to its weight version.

    GET  /bridge/info                            -> BridgeInfo
    POST /bridge/pause      PauseRequest         -> BridgeInfo   (in-flight requests freeze, end or begin anew)
    POST /bridge/resume     ResumeRequest        -> BridgeInfo   (prefix cache reset, version set, hold released)
    POST /bridge/load       LoadWeightsRequest   -> WeightsLoaded (pause, load, prefix cache reset, resume in one)
    POST /bridge/versions   VersionsRequest      -> VersionsResponse
    POST /bridge/logprobs   LogprobsRequest      -> LogprobsResponse
    POST /bridge/routing    RoutingRequest       -> RoutingResponse (where the engine records which experts it took)
    POST /lora/load         LoadAdapterRequest   -> AdapterInfo  (fresh name and id; version set, hold released)

All carry the run's token in the header `TOKEN_HEADER`. A request may name the server that it means in
`INSTANCE_HEADER`: another one in its place, and one that ends or whose engine has died, answers 503 to all of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TOKEN_HEADER = "X-Atropos-Token"
INSTANCE_HEADER = "X-Atropos-Instance"
"""Of a request: the `instance_id` of the one server that may answer it."""
SPLIT_HEADER = "X-Atropos-Split"
"""Of a request for completions: `train` for rollouts, `eval` for evaluations, which sample as they ask."""
SAMPLING_HEADER = "X-Atropos-Sampling"
"""Of an answer: names of the sampling options that were left out of the request."""
ENV_SAMPLING = "ATROPOS_SAMPLING"
ENV_OPEN_GENERATION = "ATROPOS_OPEN_GENERATION"
"""1: other users of this machine may ask a server for completions without a key."""
SamplingPolicy = Literal["plain", "as_asked", "refuse"]
"""What a server does with sampling options of rollouts that would leak into the importance ratio. plain: it leaves them
out. as_asked: it takes them, and returns the logprobs of the whole distribution. refuse: 400."""
METRIC_IDLE_S, METRIC_REQUESTS, METRIC_SLOTS = (
    "atropos:idle_seconds_total",
    "atropos:generation_requests_total",
    "atropos:max_num_seqs",
)
"""Of `/metrics`: seconds without a request for completions, such requests, sequences computed at a time at most."""
METRIC_CAPACITY = "atropos:capacity_tokens_per_second"
"""Of `/metrics`: the most tokens a second that the engine can make; missing while that is not known."""
METRIC_VERSION = "atropos:weight_version"
"""Of `/metrics`: the version that answers; missing while none is named."""
GONE_STATUS = 503
"""How a server answers that cannot do what it is asked now, and perhaps never: wait for it, or for the next one."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What peft calls the two files of a saved adapter."""
ADAPTER_PREFIX = "base_model.model."
"""What it puts there before every name."""
FEW_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)

MOST_DIGESTS = 65536
"""Of one `VersionsRequest`."""
MOST_COMPLETIONS = 256
"""Of one `LogprobsRequest` or `RoutingRequest`."""
ROUTING_FLAG = "enable-return-routed-experts"
"""vLLM's flag, with which a server keeps the experts of every completion."""

InFlight = Literal["keep", "wait", "recompute"]
"""What a pause does to requests in flight. keep: frozen, they go on with the new weights and carry both versions. wait:
they end with the old weights first. recompute: they begin anew with the new weights; streams of vLLM's own routes end
with the finish reason "abort"."""


MAX_VERSION = 1 << 53
"""Beyond it not every JSON reader keeps an integer."""
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]


class BridgeMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class BridgeInfo(BridgeMessage):
    """State of one inference server."""

    instance_id: str
    model: str
    vllm_version: str
    weight_version: int | None = None
    """Null until the trainer has named one."""
    held: bool = False
    """Generation is held for everyone without the token."""
    paused: bool = False
    dirty: bool = False
    """A write to the weights began and has not been declared complete."""
    shared_weights: bool = False
    manifest: str | None = None
    exported: int = 0
    """Number of tensors in the manifest."""
    workers: int = 1
    """Processes that hold the model or a part of it: tensor, pipeline and data parallel ranks."""
    receives: Literal["nccl", "gloo"] | None = None
    """Over what a trainer can broadcast weights to it; null when it was not started for that."""
    load_obstacle: str | None = "it was started without ATROPOS_WEIGHT_UPDATES=1"
    """Why `/bridge/load` cannot change the weights of this server while it runs; null when it can."""
    started_from: str | None = None
    """The folder whose weights this server started with; null for the model's own."""
    block_size: int | None = None
    """Tokens in one block of the KV cache: a shorter prompt leaves nothing in the prefix cache."""
    idle_s: float | None = None
    """Seconds since its start in which no request for completions was under way; null where nobody counts."""
    generated_tokens: int | None = None
    """Tokens generated since its start; null where nobody counts."""
    capacity_tokens_per_s: float | None = None
    """The most tokens a second that it can make; null while that is not known."""
    records_routing: bool = False
    """Whether it keeps which experts each token of a completion took, and answers `/bridge/routing`."""
    eager_because: str | None = None
    """Why this server gave up CUDA graphs and compiled code by itself; null when it did not."""


class PauseRequest(BridgeMessage):
    lease_s: float = 60.0
    """Without a resume in this time a clean server resumes by itself; a dirty one turns unhealthy."""
    dirty: bool = False
    """Set when weights are about to be written in place."""
    holder: str = Field("", max_length=64)
    """Who pauses. From then on only a resume of the same holder counts; a pause by another takes the lease over."""
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, gt=0)
    """After this time `wait` freezes what is left."""


class ResumeRequest(BridgeMessage):
    weight_version: int = Field(le=MAX_VERSION)
    """Optimizer steps behind the weights that are now in place; 0 is the base model."""
    holder: str = Field("", max_length=64)
    """As in the `PauseRequest` before."""


class LoadWeightsRequest(BridgeMessage):
    path: str
    """A folder of safetensors under the names of the model's own, below the run's directory."""
    weight_version: Version
    lease_s: float = Field(600.0, gt=0, le=24 * 3600)
    """A load that takes longer leaves the server unhealthy."""
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, gt=0)
    """Both as in `PauseRequest`."""
    at_restart: bool = False
    """Change nothing now: the next start of this server begins with these weights."""


class WeightsLoaded(BridgeMessage):
    instance_id: str
    weight_version: int | None
    """What answers now."""
    tensors: int
    bytes: int
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds of pause, load, device_sync and resume."""


class LoadAdapterRequest(BridgeMessage):
    path: str
    """A folder that peft's `save_pretrained` wrote, below the run's directory."""
    weight_version: Version


class AdapterInfo(BridgeMessage):
    """Which LoRA adapter answers now; nulls: the base model does."""

    enabled: bool
    name: str | None = None
    weight_version: int | None = None
    path: str | None = None
    max_lora_rank: int | None = None
    retiring: int = 0
    """Older adapters that still finish completions which they began."""
    retiring_paths: list[str] = Field(default_factory=list)
    """Their folders, which the server may read again until then."""


class VersionsRequest(BridgeMessage):
    digests: list[str] = Field(max_length=MOST_DIGESTS)


class VersionsResponse(BridgeMessage):
    versions: list[tuple[int, int] | None]
    """Oldest and newest weight version of each completion, in the order asked; null for one not known."""


GREEDY_BELOW = 1e-5
"""vLLM takes a lower temperature for greedy decoding, whose logprobs are those at temperature 1."""


class LogprobsRequest(BridgeMessage):
    """Completions that came to the trainer without logprobs: `prompts[i]` is the `prompt_digest` of all tokens before
    `completions[i]`, which are generated token ids."""

    prompts: list[str] = Field(max_length=MOST_COMPLETIONS)
    completions: list[list[int]] = Field(max_length=MOST_COMPLETIONS)


class KnownLogprobs(BridgeMessage):
    """What the engine computed when it made a completion."""

    logprobs: list[float]
    """In nats, at `temperature`, one for each token asked for. Fewer where the last tokens are not the engine's."""
    temperature: float
    oldest_version: int
    """Of the weights that made it."""


class LogprobsResponse(BridgeMessage):
    found: list[KnownLogprobs | None]
    """In the order asked; null for a completion that is not known, or not any more."""


class RoutingRequest(BridgeMessage):
    """Completions whose experts are asked for, named as in `LogprobsRequest`; of the tokens of prompt and completion
    those from `starts[i]` on."""

    prompts: list[str] = Field(max_length=MOST_COMPLETIONS)
    completions: list[list[int]] = Field(max_length=MOST_COMPLETIONS)
    starts: list[Annotated[int, Field(ge=0)]] = Field(max_length=MOST_COMPLETIONS)


class KnownRouting(BridgeMessage):
    """Which experts the engine took, [tokens, layers, experts a token]: of all tokens from the one asked for on but the
    last, which it never read."""

    shape: tuple[int, int, int]
    wide: bool = False
    """Two bytes an expert, little-endian, instead of one."""
    data: str
    """In base64."""


class RoutingResponse(BridgeMessage):
    found: list[KnownRouting | None]
    """In the order asked; null for a completion that is not known, or not any more."""
    dropped: int = 0
    """Completions that this server has forgotten so far, since newer ones needed their room."""


def server_rank(rank: int) -> int | None:
    """--max-lora-rank for adapters of `rank`; null when no server takes them."""
    return next((known for known in LORA_RANKS if known >= rank), None)


def few_graph_sizes(max_num_seqs: int = 1024) -> list[int]:
    """--cudagraph-capture-sizes for an engine that is restarted often: a third of vLLM's own, up to the same limit.

    vLLM captures every size up to 512 in steps of 8 and 16, which is a third of a warm start. A batch between two sizes
    is padded to the next, which costs decoding little: it waits for the weights, not for the rows.
    """
    limit = min(2 * max_num_seqs, 512)
    return [*(size for size in FEW_GRAPH_SIZES if size < limit), limit]


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Name the tokens before a completion."""
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=16).hexdigest()


def completion_digest(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Name one completion by what the client surely gets back: its token ids and their logprobs.

    Both pass through JSON unchanged (doubles round-trip), so server and trainer compute the same digest.

    Args:
        token_ids: generated tokens, prompt excluded, length T.
        logprobs: their logprobs as returned by the server, length T.
    """
    count = len(token_ids)
    if count != len(logprobs):
        raise ValueError(f"{count} tokens but {len(logprobs)} logprobs")
    payload = struct.pack(f"<{count}q{count}d", *token_ids, *logprobs)
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
