"""Test which models train in which mode on real vLLM, and write docs/internals/models.md.

    python -m benchmarks.models [--only NAME ...] [--modes MODE ...] [--records models.jsonl]
        [--again] [--limit S]
    python -m benchmarks.models --device cuda [--part 1/12 ...]    # a twelfth, on one GPU
    python -m benchmarks.models --table [--device cuda] [--write docs/internals/models.md]

A cell is one architecture in one mode: a real `python -m vllm_server` starts, the trainer's own
strategy attaches, proves its path, makes two optimizer steps with a publish each, and then compares
logprobs of what the server decodes with its own at the same weights. `works` needs them within a
`Bound`, where the two steps have moved logprobs by much more: a server that kept old weights would
be seen. Anything else is refused, with the words. On a CPU all is float32, but for quantized
weights; on a GPU too where vLLM has kernels for it, else bfloat16. Each cell is a line of the
records; a later run goes on with those that are missing. A broadcast needs a card for either side,
so on one GPU it is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atropos_common.models.engine_release import installed, why_not_served
from atropos_common.models.model_math import Dimensions, carries_state, why_refused
from atropos_common.system.run_dir import ENV_TOKEN
from benchmarks.support.checks import Checks
from benchmarks.support.children import (
    MODE_SERVERS,
    TOKEN,
    Child,
    ChildError,
    Server,
    environment,
    free_ports,
)
from benchmarks.support.model_zoo import QUANTIZED, ZOO, save
from benchmarks.support.nursery import VLLM, Forked
from trainer_core.config import TrainingConfig
from trainer_core.errors import TrainerError
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper
from trainer_core.optimization.step import accumulate
from trainer_core.policy.logprobs import completions_logprobs
from trainer_core.policy.proof import prove
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import pack
from trainer_core.server.client import GeneratedTokens, ServerClient
from trainer_core.weight_sync.base import Start, WeightSync, make_sync

NAMES = [*ZOO, *QUANTIZED]
MODES = ("shared_vllm", "broadcast", "lora_only", "lora_restart", "none")
BRIDGE = {"broadcast": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True}}
MOVED = 10
"""Two steps must move logprobs by this many times the difference between server and trainer."""
PROMPTS, PROMPT_TOKENS, TOKENS, STEPS = 4, 40, 24, 2
ERROR = re.compile(
    r"(?:^|\]) *(?:[\w.]+Error|[\w.]+Exception): (?!EngineCore|Engine core)|vllm_server: "
)
"""A line that names a cause."""
TYPE = re.compile(r"bf16|bfloat16|half|float32|dtype|attention backend", re.IGNORECASE)
"""In the words of a refusal: that another type may do."""
ENGINE_FLAGS = [
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "16",
    "--generation-config",
    "vllm",
    "--logprobs-mode",
    "processed_logprobs",
    "--kv-cache-memory-bytes",
    str(64 << 20),
    "--block-size",
    "32",
    "--enforce-eager",
]

CUDA_FLAGS = ["--gpu-memory-utilization", "0.05"]
CUDA_ENV = {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""float32 in vLLM's kernels is float32, not what tensor cores make of it."""

Pairs = list[tuple[list[int], GeneratedTokens]]


@dataclass(frozen=True)
class Bound:
    """|server - trainer| in nats: `measure` over the tokens must stay below `nats`."""

    nats: float
    measure: Callable[[torch.Tensor], torch.Tensor]

    def of(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float(self.measure((ours - theirs).abs()))


BOUNDS = {"float32": Bound(5e-3, torch.max), "bfloat16": Bound(0.1, torch.mean)}
"""In half precision a rare token is rounded far: there the mean, the product's own bound
(`alignment_ok`)."""


def ask(engine: ServerClient, vocabulary: int) -> Pairs:
    """Prompts with two completions each, the second on the cached prefix."""
    dice = random.Random(7)
    prompts = [
        [dice.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
    ]
    return [(prompt, engine.generate(prompt, TOKENS)) for prompt in prompts for _ in range(2)]


def rollouts_of(pairs: Pairs) -> list[Rollout]:
    """Return rollouts as an environment sends them: the first completion of a prompt is good, the
    second is not."""
    found = []
    for index, (prompt, done) in enumerate(pairs):
        length = PROMPT_TOKENS + len(done.token_ids)
        logprobs = np.zeros(length, np.float32)
        logprobs[PROMPT_TOKENS:] = done.logprobs
        advantages = np.full(length, 1.0 - 2.0 * (index % 2), np.float32)
        tokens = np.array([*prompt, *done.token_ids])
        found.append(
            Rollout(
                tokens, np.arange(length) >= PROMPT_TOKENS, logprobs, advantages, 1.0, 0.0, "", ()
            )
        )
    return found


def own_logprobs(model: torch.nn.Module, pairs: Pairs) -> torch.Tensor:
    ours = completions_logprobs(model, [(prompt, done.token_ids) for prompt, done in pairs])
    return torch.tensor([value for one in ours for value in one])


class Cell:
    """One architecture in one mode, whose model lies in `place`."""

    def __init__(
        self, name: str, mode: str, place: Path, nursery: Child | None, dtype: str
    ) -> None:
        self.name, self.mode, self.nursery, self.dtype = name, mode, nursery, dtype
        self.model, self.folder = place / "model", place / dtype / mode
        self.device = "cpu" if nursery else "cuda:0"
        self.lora_targets = ZOO[QUANTIZED.get(name, (name,))[0]].lora_targets
        self.own_server = mode == "lora_restart"
        """The trainer starts it, and restarts it."""
        self.port = free_ports(1)[0]

    def config(self) -> TrainingConfig:
        settings = BRIDGE.get(self.mode, {"weight_bridge_mode": self.mode})
        if self.mode.startswith("lora") and self.lora_targets:
            settings = settings | {"lora_target_modules": list(self.lora_targets)}
        return TrainingConfig.model_validate(
            settings
            | {
                "model_name": str(self.model),
                "vllm_port": self.port,
                "dtype": self.dtype,
                "device": self.device,
                "batch_size": 8,
                "optimizer": "adamw",
                "lr": 1e-2,
                "lora_r": 8,
                "save_path": str(self.folder / "saved"),
                "log_dir": str(self.folder / "logs"),
                "vllm_restart_interval": STEPS,
                "engine_timeout": 240,
                "max_model_len": 256,
                "vllm_config_path": str(self.folder / "server/bridge/vllm_bridge_config.json"),
            }
        )

    def logs(self) -> str:
        """Output of its servers."""
        files = [*self.folder.glob("**/log"), *self.folder.glob("**/*.log")]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def run(self) -> dict[str, Any]:
        """The cell's result and what was measured.

        Raises:
            ChildError, TrainerError: somebody refused, or failed.
        """
        with ExitStack() as opened:
            if not self.own_server:
                self._serve(opened)
            sync = make_sync(self.config(), torch.device(self.device), threading.Event())
            opened.callback(sync.close)
            if (lifecycle := getattr(sync, "lifecycle", None)) is not None:
                lifecycle.flags += self._engine_flags()
            return self._train(sync)

    def _serve(self, opened: ExitStack) -> None:
        flags, extra = MODE_SERVERS[self.mode]
        folder = self.folder / "server"
        argv = [
            "--model",
            str(self.model),
            "--served-model-name",
            "m",
            *self._engine_flags(),
            *flags,
        ]
        server: Server
        if self.nursery:
            server = Forked(self.nursery, folder, self.port, argv, environment(folder, None, extra))
        else:
            server = Server(folder, self.port, argv, environment(folder, 0, extra | CUDA_ENV))
        opened.callback(server.close)
        server.wait_ready(time.perf_counter() + 300)

    def _engine_flags(self) -> list[str]:
        place = [] if self.nursery else CUDA_FLAGS
        return ["--dtype", self.dtype, *ENGINE_FLAGS, *place, *self._lora_flags()]

    def _lora_flags(self) -> list[str]:
        """vLLM's adapters over experts need Triton, which a CPU does not have: leave the experts
        alone."""
        wanted = self.nursery and self.mode.startswith("lora") and self._experts
        return ["--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj"] if wanted else []

    @property
    def _experts(self) -> bool:
        return Dimensions.of(json.loads((self.model / "config.json").read_text())).experts > 0

    def _train(self, sync: WeightSync) -> dict[str, Any]:
        model = sync.attach(Start())
        proved = prove(model)
        stepper = Stepper(model, sync.config)
        vocabulary = model.config.vocab_size
        first = pairs = ask(sync.engines[0], vocabulary)
        before = own_logprobs(model, first)
        bound = BOUNDS[self.dtype]
        at_start = bound.of(before, _theirs(first))
        for step in range(1, STEPS + 1):
            outcome = accumulate(
                model, stepper, pack(rollouts_of(pairs), 256), Objective(sync.config), step
            )
            if not outcome.finite:
                raise ChildError("the gradient is not finite")
            stepper.compute()
            report = sync.publish(step, stepper.write)
            pairs = ask(sync.engines[0], vocabulary)
        moved = bound.of(own_logprobs(model, first), before)
        probe = bound.of(own_logprobs(model, pairs), _theirs(pairs))
        apart = max(probe, at_start)
        right = apart <= bound.nats and moved >= MOVED * apart
        notes = list(self._notes(model))
        if self.mode == "none" and report and "restart" in report.phases:
            notes.append("the server is restarted for each load")
        return {
            "result": "works" if right else "WRONG",
            "words": "; ".join(notes),
            "probe": probe,
            "moved": moved,
            "at_start": at_start,
            "proved": proved,
        }

    def _notes(self, model: torch.nn.Module) -> Iterator[str]:
        if self.dtype != "float32":
            yield "in bfloat16, the mean over tokens"
        if carries_state(vars(model.config)):
            yield "its sequences are computed one by one"
        if self.mode.startswith("lora") and (targets := self.lora_targets):
            yield f"`lora_target_modules = {json.dumps(list(targets))}`"
        if self._lora_flags():
            yield "on a CPU with `--lora-target-modules q_proj k_proj v_proj o_proj` for vLLM"


def _theirs(pairs: Pairs) -> torch.Tensor:
    return torch.tensor([value for _, done in pairs for value in done.logprobs])


@contextmanager
def saved_model(name: str) -> Iterator[Path]:
    """A folder with the architecture's random model in it."""
    from atropos_envs.tiny_model import make_tokenizer

    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        save(name, Path(folder) / "model")
        make_tokenizer().save_pretrained(Path(folder) / "model")
        yield Path(folder)


def measure(
    name: str, modes: list[str], records: Path, until: float, nursery: Child | None, checks: Checks
) -> None:
    """Append a line for each mode of this architecture, until `until` (`time.monotonic()`
    seconds)."""
    with saved_model(name) as folder:
        config = json.loads((folder / "model/config.json").read_text())
        for mode in modes:
            began = time.perf_counter()
            if time.monotonic() > until:
                return
            adapters, shared = mode.startswith("lora"), mode == "shared_vllm"
            release = installed()
            if refused := why_refused(config, frozen=adapters, shared=shared) or (
                release and why_not_served(release, config)
            ):
                found = {
                    "result": "refused",
                    "when": "before anything starts",
                    "words": "; ".join(refused),
                }
            else:
                for dtype in types_of(mode, nursery, quantized=name in QUANTIZED):
                    found = attempt(Cell(name, mode, folder, nursery, dtype))
                    if "when" not in found or not TYPE.search(found["words"]):
                        break
            cell = {
                "architecture": name,
                "mode": mode,
                "seconds": round(time.perf_counter() - began, 1),
            } | found
            print(json.dumps(cell), flush=True)
            with records.open("a") as stream:
                stream.write(json.dumps(cell) + "\n")
            checks.that(
                cell["result"] in ("works", "refused"),
                f"{name}, {mode}: {cell['result']}: {cell['words']}",
            )


def types_of(mode: str, nursery: Child | None, *, quantized: bool) -> tuple[str, ...]:
    """Tried in turn. vLLM's kernels for adapters, some for attention and all for quantized weights
    know half precision alone."""
    if quantized:
        return ("bfloat16",)
    return ("bfloat16",) if mode.startswith("lora") and not nursery else ("float32", "bfloat16")


def attempt(cell: Cell) -> dict[str, Any]:
    """The cell's result; what is raised is a refusal, in words where somebody of ours raised it. In
    mode none a server that does not load in place is one that the trainer restarts."""
    try:
        return cell.run()
    except (ChildError, TrainerError) as error:
        if "by a restart only" in str(error) and not cell.own_server:
            cell.own_server, cell.port = True, free_ports(1)[0]
            return attempt(cell)
        words = said(str(error), cell)
        print(
            f"{cell.name}, {cell.mode}: {error}\n{cell.logs()[-6000:]}", file=sys.stderr, flush=True
        )
        return {"result": "refused", "when": "at the start", "words": words}
    except Exception as error:  # an unexpected error: fix it
        return {
            "result": "FAILED",
            "when": "at the start",
            "words": f"{type(error).__name__}: {error}"[:600],
        }


def said(error: str, cell: Cell) -> str:
    """The cause in one line, without paths and ports: the first error in the log of a server that
    ended, else our own words."""
    raised = [line for line in cell.logs().splitlines() if ERROR.search(line)]
    last = [line.strip() for line in error.splitlines() if line.strip()][-1]
    ours = not any(
        word in error for word in ("ended", "EngineDead", "not ready", "gone", "crashed")
    )
    words = last if ours or not raised else raised[0]
    words = re.sub(r"^.*?\.py:\d+\]\s*", "", words).replace(str(cell.model.parent), "")
    return re.sub(r"(?<=//127\.0\.0\.1):\d+", "", words.replace(sys.executable, "python"))[:400]


def read_records(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest line of every cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    cells = [json.loads(line) for line in lines]
    return {(cell["architecture"], cell["mode"]): cell for cell in cells}


def table(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Markdown: architectures and modes of which anything was measured, and the words as notes
    below."""
    notes: dict[str, int] = {}
    names = [name for name in NAMES if any((name, mode) in cells for mode in MODES)]
    modes = [mode for mode in MODES if any((name, mode) in cells for name in NAMES)]
    rows = [f"| | {' | '.join(f'`{mode}`' for mode in modes)} |", "|---|" + "---|" * len(modes)]
    rows += [
        f"| {name} | {' | '.join(_cell(cells.get((name, mode)), notes) for mode in modes)} |"
        for name in names
    ]
    return "\n".join([*rows, "", *(f"{number}. {words}" for words, number in notes.items())])


def _cell(cell: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if cell is None:
        return ""
    words = f"{cell['when']}: {cell['words']}" if "when" in cell else cell["words"]
    mark = f" ({notes.setdefault(words, len(notes) + 1)})" if words else ""
    return (f"{cell['probe']:.0e}" if cell["result"] == "works" else cell["result"]) + mark


def measure_all(options: argparse.Namespace, checks: Checks) -> None:
    """Measure the requested cells that are missing, while there is time."""
    os.environ[ENV_TOKEN] = TOKEN
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    until = time.monotonic() + options.limit
    part, parts = map(int, options.part.split("/"))
    with ExitStack() as opened:
        nursery = None
        if options.device == "cpu":
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
            command = ["-m", "benchmarks.support.nursery", VLLM]
            nursery = Child(folder / "nursery", command, environment(folder, None, {}))
            opened.callback(nursery.close)
            nursery.wait(300)
        else:
            os.environ.update(CUDA_ENV)  # for servers that the trainer starts
        for name in options.only[part - 1 :: parts]:
            known = {} if options.again else read_records(options.records)
            if missing := [mode for mode in options.modes if (name, mode) not in known]:
                measure(name, missing, options.records, until, nursery, checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every Nth architecture, from the Ith on"
    )
    parser.add_argument("--records", type=Path, default=Path("models.jsonl"))
    parser.add_argument(
        "--again", action="store_true", help="measure what is in the records already, too"
    )
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which no further cell begins"
    )
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    parser.add_argument(
        "--write", type=Path, help="put the table into this file, between its marks"
    )
    options = parser.parse_args()
    if not options.table:
        checks = Checks()
        measure_all(options, checks)
        return checks.status()
    text = table(read_records(options.records))
    print(text)
    if options.write:
        begin, end = (f"<!-- models on {options.device}: {word} -->" for word in ("begin", "end"))
        before, _, rest = options.write.read_text().partition(begin)
        after = rest.partition(end)[2]
        options.write.write_text(f"{before}{begin}\n{text}\n{end}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
