"""Messages between trainer and inference server, and digests of completions.

    GET  /bridge/info                          -> BridgeInfo
    POST /bridge/pause     PauseRequest        -> BridgeInfo      freezes or ends requests
    POST /bridge/resume    ResumeRequest       -> BridgeInfo      sets the version
    POST /bridge/load      LoadWeightsRequest  -> WeightsLoaded   pause, load and resume in one
    POST /bridge/versions  VersionsRequest     -> VersionsResponse
    POST /bridge/logprobs  LogprobsRequest     -> LogprobsResponse
    POST /bridge/routing   RoutingRequest      -> RoutingResponse
    POST /rollouts/take    TakeRequest         -> RecordedTurns   see `ROLLOUT_HEADER`
    POST /lora/load        LoadAdapterRequest  -> AdapterInfo     sets the version

    GET  /engine/load                          -> EngineLoad

Each `/bridge` and `/lora` request carries the run's token. One that names another server in
`INSTANCE_HEADER` gets 503.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

TOKEN_HEADER = "X-Atropos-Token"
INSTANCE_HEADER = "X-Atropos-Instance"
"""`instance_id` of the only server that may answer."""
SPLIT_HEADER = "X-Atropos-Split"
"""Purpose of a completion: `train`, or `eval`, whose sampling options are free."""
ROLLOUT_HEADER = "X-Atropos-Rollout"
"""Name of the rollout that a request on vLLM's own routes belongs to; the server records it."""
TAKE_PATH = "/rollouts/take"
SAMPLING_HEADER = "X-Atropos-Sampling"
"""Sampling options that were removed from the request."""
FORM_HEADER, ARRAYS = "X-Atropos-Form", "arrays"
"""Form of the answer of `/generate`; `arrays`: logprobs as plain arrays, and no text."""
ENV_SAMPLING = "ATROPOS_SAMPLING"
ENV_OPEN_GENERATION = "ATROPOS_OPEN_GENERATION"
"""1: other users of this machine may request completions without a key."""
SamplingPolicy = Literal["plain", "as_asked", "refuse"]
"""Treatment of sampling options that change the importance ratio. plain: remove them. as_asked:
apply them, with logprobs of the whole distribution. refuse: answer 400."""
# The names start with `atropos:`, so that they never collide with vLLM's own.
METRIC_IDLE_S, METRIC_REQUESTS, METRIC_SLOTS = (
    "atropos:idle_seconds_total",
    "atropos:generation_requests_total",
    "atropos:max_num_seqs",
)
"""Seconds without a request for completions; such requests; most sequences at a time."""
METRIC_CAPACITY = "atropos:capacity_tokens_per_second"
"""The engine's largest token rate; missing while it is unknown."""
METRIC_RECOMPUTED = "atropos:recomputed_tokens_total"
"""Tokens of preempted sequences whose keys and values were computed again: after a weight update,
or for want of cache. Missing without a prefix cache."""
METRIC_VERSION = "atropos:weight_version"
"""Answering weight version; missing before the first."""
LOAD_PATH = "/engine/load"
GONE_STATUS = 503
"""Status of a server that cannot act now: wait for it or its successor."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""peft's files of an adapter."""
ADAPTER_PREFIX = "base_model.model."
# Batch sizes for captured CUDA graphs, denser where small batches gain most.
FEW_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)

MOST_DIGESTS = 65536
MOST_COMPLETIONS = 256
ROUTING_FLAG = "enable-return-routed-experts"

InFlight = Literal["keep", "reuse", "wait", "recompute"]
"""Effect of a pause on requests in flight. keep: they freeze, then go on with the new weights,
which also compute their keys and values again. reuse: as keep, with the keys and values that they
have.
wait: they end first. recompute: they restart; streams of vLLM's own routes end with "abort"."""


# JavaScript and others keep numbers as doubles, which have 53 bits of mantissa.
MAX_VERSION = 1 << 53
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]


class BridgeMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class TakeRequest(BridgeMessage):
    rollout: str
    """The name in `ROLLOUT_HEADER`; the server forgets the rollout with its answer."""


class RecordedTurn(BridgeMessage):
    """One completion of a recorded rollout."""

    after: int | None = None
    """Number of the earlier turn that its prompt continues, token by token."""
    prompt_ids: list[int]
    """The prompt's tokens behind that turn."""
    token_ids: list[int]
    logprobs: list[float]
    """Nats, one for each of `token_ids`."""
    token_versions: list[tuple[int, int]]
    """(weight version, tokens), in the order of generation."""
    temperature: float
    finish_reason: str
    """vLLM's, or `unfinished` after the client left."""
    replaced: int = 0
    """Tokens of the prompt that stand for another encoding of an earlier turn's text."""
    rewritten: bool = False
    """The prompt contains an earlier prompt with another text than the one sampled."""


class RecordedTurns(BridgeMessage):
    turns: list[RecordedTurn] = []
    """In the order of their ends."""


class BridgeInfo(BridgeMessage):
    """State of a server."""

    instance_id: str
    model: str
    vllm_version: str
    weight_version: int | None = None
    """None before the trainer's first version."""
    held: bool = False
    """Without the token, generation waits for the first weights."""
    # A pause lasts for one publish; the hold ends with the first version.
    paused: bool = False
    dirty: bool = False
    """A write to the weights is incomplete."""
    shared_weights: bool = False
    manifest: str | None = None
    exported: int = 0
    """Tensors in the manifest."""
    workers: int = 1
    """Processes with a part of the model."""
    receives: Literal["nccl", "gloo"] | None = None
    """Broadcast backend; None: not started for broadcasts."""
    load_obstacle: str | None = "it was started without ATROPOS_WEIGHT_UPDATES=1"
    """Why `/bridge/load` cannot replace weights; None if it can."""
    started_from: str | None = None
    """Folder of its first weights; None: the model's."""
    block_size: int | None = None
    """Tokens of a KV cache block: shorter prompts are not cached."""
    idle_s: float | None = None
    """Seconds without a completion request since its start."""
    generated_tokens: int | None = None
    """Tokens generated since its start."""
    capacity_tokens_per_s: float | None = None
    """Largest token rate."""
    records_routing: bool = False
    """It answers `/bridge/routing`."""
    eager_because: str | None = None
    """Why the server gave up CUDA graphs; None if it did not."""


class EngineLoad(BridgeMessage):
    """Answer of `GET /engine/load`, over all engines of a server."""

    running: int
    """Sequences in computation after the newest step."""
    waiting: int
    kv_use: float
    """Share of the KV cache, 0 to 1."""
    generated_tokens: int
    """Tokens since its start."""
    steps_s: float = 0.0
    """Seconds of its steps since then, without pauses and times without work, summed over
    engines."""
    slots: int
    """Largest number of sequences at a time."""
    knee: float | None
    """Sequences from which on more of them hardly raise tokens a second; None while unknown."""


class PauseRequest(BridgeMessage):
    lease_s: float = 60.0
    """Seconds after which a clean server resumes by itself, and a dirty one becomes unhealthy."""
    dirty: bool = False
    """Weights will be written in place."""
    holder: str = Field("", max_length=64)
    """Client that holds the pause: only its resume counts, until another one pauses."""
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, gt=0)
    """Seconds until `wait` freezes the rest."""


class ResumeRequest(BridgeMessage):
    weight_version: int = Field(le=MAX_VERSION)
    """Optimizer steps in the weights; 0: the base model."""
    holder: str = Field("", max_length=64)


class LoadWeightsRequest(BridgeMessage):
    path: str
    """Folder of safetensors below the run directory, under the model's names."""
    weight_version: Version
    lease_s: float = Field(600.0, gt=0, le=24 * 3600)
    """Seconds until an unfinished load makes the server unhealthy."""
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, gt=0)
    """Both as in `PauseRequest`."""
    at_restart: bool = False
    """Load at the server's next start only."""


class WeightsLoaded(BridgeMessage):
    instance_id: str
    weight_version: int | None
    tensors: int
    bytes: int
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds of pause, load, device_sync, resume."""


class LoadAdapterRequest(BridgeMessage):
    path: str
    """peft's folder, below the run directory."""
    weight_version: Version


class AdapterInfo(BridgeMessage):
    """The answering LoRA adapter; None where the base model answers."""

    enabled: bool
    name: str | None = None
    weight_version: int | None = None
    path: str | None = None
    max_lora_rank: int | None = None
    retiring: int = 0
    """Older adapters with completions in flight."""
    retiring_paths: list[str] = Field(default_factory=list)
    """Their folders, still in use."""


class VersionSpan(NamedTuple):
    """Weight versions that made one completion."""

    oldest: int
    newest: int
    # Two values instead of a list of runs: a server keeps them for 200,000 completions.
    tokens: int = 0
    """Tokens in `mean`; 0: it is unknown."""
    mean: float = 0.0
    """Mean version of the tokens."""


class VersionsRequest(BridgeMessage):
    digests: list[str] = Field(max_length=MOST_DIGESTS)


class VersionsResponse(BridgeMessage):
    # Two versions differ if a publish came while the completion was generated.
    versions: list[tuple[int, int] | None]
    """Oldest and newest version of each completion; None if unknown."""
    token_means: list[tuple[int, float] | None] = Field(default_factory=list)
    """Tokens of each completion and their mean version; None if unknown."""

    @classmethod
    def of(cls, spans: Sequence[VersionSpan | None]) -> VersionsResponse:
        return cls(
            versions=[None if span is None else span[:2] for span in spans],
            token_means=[span[2:] if span and span.tokens else None for span in spans],
        )

    def spans(self) -> list[VersionSpan | None]:
        """Return versions and means together; servers of earlier releases send no means."""
        means = self.token_means or [None] * len(self.versions)
        return [
            None if pair is None else VersionSpan(*pair, *(mean or ()))
            for pair, mean in zip(self.versions, means, strict=True)
        ]


GREEDY_BELOW = 1e-5
"""Temperature below which vLLM decodes greedily, with logprobs at temperature 1."""


class LogprobsRequest(BridgeMessage):
    """Completions without logprobs: the `prompt_digest` before each, and its token ids."""

    prompts: list[str] = Field(max_length=MOST_COMPLETIONS)
    completions: list[list[int]] = Field(max_length=MOST_COMPLETIONS)


class KnownLogprobs(BridgeMessage):
    """Logprobs of one completion as the engine computed them."""

    logprobs: list[float]
    """Nats at `temperature`; shorter if the last tokens are not the engine's."""
    temperature: float
    oldest_version: int


class LogprobsResponse(BridgeMessage):
    found: list[KnownLogprobs | None]
    """In request order; None for an unknown or forgotten completion."""


class RoutingRequest(BridgeMessage):
    """As `LogprobsRequest`; `starts[i]`: first wanted token of prompt and completion."""

    prompts: list[str] = Field(max_length=MOST_COMPLETIONS)
    completions: list[list[int]] = Field(max_length=MOST_COMPLETIONS)
    starts: list[Annotated[int, Field(ge=0)]] = Field(max_length=MOST_COMPLETIONS)


class KnownRouting(BridgeMessage):
    """Experts [tokens, layers, experts per token]; the last token, never read, has none."""

    shape: tuple[int, int, int]
    wide: bool = False
    """Two little-endian bytes per expert; False: one."""
    data: str
    """Base64."""


class RoutingResponse(BridgeMessage):
    found: list[KnownRouting | None]
    """In request order; None for an unknown or forgotten completion."""
    dropped: int = 0
    """Completions that the server dropped for newer ones."""


def server_rank(rank: int) -> int | None:
    """--max-lora-rank for `rank`; None if vLLM has none."""
    # vLLM pads an adapter to the next rank of its list, so round up.
    return next((known for known in LORA_RANKS if known >= rank), None)


def few_graph_sizes(max_num_seqs: int = 1024) -> list[int]:
    # A third of vLLM's own sizes, whose capture is a third of a warm start. Padding to the next
    # size costs little, because decoding is bound by reading the weights.
    # The largest size that vLLM itself captures.
    limit = min(2 * max_num_seqs, 512)
    return [*(size for size in FEW_GRAPH_SIZES if size < limit), limit]


def prompt_digest(token_ids: Sequence[int]) -> str:
    # 64-bit little-endian ids, independent of Python's and numpy's types.
    return hashlib.blake2b(
        struct.pack(f"<{len(token_ids)}q", *token_ids), digest_size=16
    ).hexdigest()


def completion_digest(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Digest of token ids and their returned logprobs, both of length T.

    Doubles survive JSON, so server and trainer compute the same digest.
    """
    count = len(token_ids)
    if count != len(logprobs):
        raise ValueError(f"{count} tokens but {len(logprobs)} logprobs")
    # The logprobs tell equal texts of different weight versions apart.
    payload = struct.pack(f"<{count}q{count}d", *token_ids, *logprobs)
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
