"""Log rules against the lines of the real programs: live in the scanner, and at an exit.

`logs/*.log` is captured output of atroposlib 0.4.0 and its example_trainer, vLLM 0.32, torch 2.13
(on a GPU: 2.11), transformers, datasets, wandb and our own programs, with paths shortened.
`logs/clean/` is a run that went well. Lines below are the words of the program's source, or of a
public issue.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from atropos_common.protocol.control import Role
from atropos_tui.diagnoses import Diagnosis, Evidence, Names, diagnose
from atropos_tui.diagnoses.log_rules import LOG_RULES
from atropos_tui.diagnoses.log_scanner import HEAD, REST, LogScanner, Work
from atropos_tui.diagnoses.model import WORK_S
from tests.support.harness import part

LOGS = Path(__file__).parent / "logs"
API, ENGINE, ENV, TRAINER = Role.API, Role.ENGINE, Role.ENV, Role.TRAINER
LONG = 10_000.0

CAPTURED = [
    ("port_in_use", API, "port_in_use", "address already in use"),
    ("cuda_oom", TRAINER, "out_of_memory", "GPU 0 has a total capacity of 139.80 GiB"),
    ("forked_cuda", ENGINE, "forked_cuda", "you must use the 'spawn' start method"),
    ("daemonic", ENGINE, "daemonic_processes", "AssertionError"),
    ("flexible_argument_parser", ENGINE, "flexible_argument_parser", "cannot import name"),
    (
        "peer_vllm_server",
        ENGINE,
        "flexible_argument_parser",
        "No module named 'vllm.entrypoints.launcher'",
    ),
    ("gpu_unusable", TRAINER, "gpu_unusable", "Torch not compiled with CUDA enabled"),
    ("shm_full", ENGINE, "shm_full", "cannot reserve"),
    ("disk_full", TRAINER, "disk_full", "[Errno 28] No space left on device"),
    ("too_many_files", ENV, "too_many_files", "[Errno 24] Too many open files"),
    ("out_of_host_memory", TRAINER, "out_of_host_memory", "DefaultCPUAllocator"),
    ("gloo", TRAINER, "gloo_stuck", "1/2 clients joined"),
    ("nccl", TRAINER, "nccl_failed", "NCCL error in"),
    ("peer_loss", TRAINER, "no_logprobs", "GRPO requires inference_logprobs"),
    ("our_env_server_type", ENV, "no_logprobs", "server_type=openai returns no logprobs"),
    ("generate_404_server", ENGINE, "generate_404", '"POST /generate HTTP/1.1" 404 Not Found'),
    ("atroposlib_404", ENV, "generate_404", "404, message='Not Found'"),
    ("generate_404_server", API, "registration_refused", '"POST /register HTTP/1.1" 422'),
    (
        "peer_manifest_missing",
        TRAINER,
        "manifest_missing",
        "Could not find vllm_bridge_config.json",
    ),
    ("our_manifest_missing", TRAINER, "manifest_missing", "no manifest. Start the server with"),
    ("peer_manifest_empty", TRAINER, "manifest_empty", "No IPC handles found"),
    ("our_env_tokenizer", ENV, "tokenizer_missing", "no tokenizer at '/models/none'"),
    ("dataset_unreachable", ENV, "dataset_unreachable", "'openai/gsm8k' on the Hub"),
    ("wandb_key", TRAINER, "wandb_failed", "No API key configured"),
    ("lost_gradients", TRAINER, "lost_gradients", "None of the inputs have requires_grad=True"),
    ("trainer_not_registered", TRAINER, "trainer_not_registered", "Call /register first"),
    ("peer_api_unreachable", TRAINER, "api_unreachable", "not reachable at http://127.0.0.1:18741"),
    ("peer_api_gone", TRAINER, "api_unreachable", "Max retries exceeded with url: /batch"),
    (
        "our_api_unreachable",
        TRAINER,
        "api_unreachable",
        "not reachable at http://127.0.0.1:18741 for 3 s",
    ),
    ("peer_vllm_not_running", TRAINER, "engine_unreachable", "on port 18742"),
    ("health_timeout", TRAINER, "health_timeout", "failed to start within 2s"),
    ("api_reload", API, "api_reloaded", "detected changes in"),
    ("engine_start", ENGINE, "engine_dead", "AssertionError: num_heads (7)"),
    ("engine_killed", ENGINE, "engine_dead", "engine core exited unexpectedly"),
    ("engine_kv_cache", ENGINE, "kv_cache_too_small", "No available memory for the cache blocks"),
]
"""Log, role, the rule that explains the exit, and words of its evidence."""

LIVE_ONLY = [
    ("peer_loss", TRAINER, "logprobs_positive", "ref_logprobs avg 1.000 (should be negative!)"),
    ("use_cache", TRAINER, "use_cache_with_checkpointing", "`use_cache=True` is incompatible"),
    ("our_env_waits_for_trainer", ENV, "env_not_registered", "says: wait for trainer to start"),
    ("our_env_waits_for_trainer", ENV, "engine_unreachable", "waiting for the inference server at"),
]

PTXAS = (
    "(VllmWorker rank=1 pid=336) subprocess.CalledProcessError: Command "
    "'['/opt/vllm_env/lib/python3.12/site-packages/"
    "triton/backends/nvidia/bin/ptxas', '-lineinfo', '-v', '--gpu-name=sm_100', "
    "'/tmp/tmpat8x27d5.ptx', '-o', "
    "'/tmp/tmpat8x27d5.ptx.o']' returned non-zero exit status 255."
)
FREE = (
    "ValueError: Free memory on device cuda:0 (39.29/139.8 GiB) on startup is less than "
    "desired GPU memory utilization "
    "(0.9, 125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes."
)
BACKEND = (
    "torch.distributed.DistBackendError: NCCL error in: "
    "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, "
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6"
)
BROKE = (
    "Waiting for the inference server: the broadcast broke (phase receive): no answer from "
    "http://127.0.0.1:9001; no "
    "data for 60 s"
)
CUT_OFF = (
    "2026-11-21 13:23:44 WARNING atroposlib.envs.base: Worker 6f1c-77 has timed out after "
    "600.0731 seconds"
)
SHM = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
    "shared memory (shm)."
)
EAGER = (
    "vllm_server: model.norm.weight: this model computes from a copy of these weights with "
    "CUDA graphs or compiled "
    "code: starting again with --enforce-eager"
)
TORCH_SHM = (
    "RuntimeError: unable to write to file </torch_739_144252761_4>: No space left on device (28)"
)
WORDS = [
    (
        Role.ENV,
        "node_silent",
        "atropos: node infer-2 (n2) has said nothing for 7 s: srun: error: n2: no route",
    ),
    (ENGINE, "ssh_host_key", "Host key verification failed."),
    (ENGINE, "ssh_denied", "me@10.0.0.2: Permission denied (publickey)."),
    (ENGINE, "ssh_unreachable", "ssh: connect to host 10.0.0.2 port 22: Connection refused"),
    (
        ENGINE,
        "srun_refused",
        "srun: error: Unable to create step for job 5: Requested node configuration is not "
        "available",
    ),
    (ENGINE, "kubectl_refused", 'Error from server (NotFound): pods "infer-0" not found'),
    (
        ENGINE,
        "sampling_adjusted",
        "WARNING 11-22 18:59:39 [vllm_server] adjusted 64 requests to /v1/completions: "
        "top_p=0.95, top_k=20 left out: "
        "changes the distribution, and the trainer knows only the temperature. `sampling = "
        '"as_asked"` under [vllm] takes',
    ),
    (
        TRAINER,
        "logprobs_recomputed",
        "[WARNING] 32 sequences came without inference_logprobs: the trainer uses its own "
        "(missing_logprobs = ...)",
    ),
    (ENGINE, "triton_blackwell", PTXAS),  # vllm-project/vllm#16336
    (
        ENGINE,
        "triton_blackwell",
        "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
    ),  # vllm#29469
    (
        ENGINE,
        "triton_blackwell",
        "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
    ),
    (ENGINE, "eager_fallback", EAGER),
    (ENGINE, "out_of_memory", FREE),
    (
        ENGINE,
        "kv_cache_too_small",
        "ValueError: No available memory for the cache blocks. Try increasing",
    ),
    (
        ENGINE,
        "kv_cache_too_small",
        "(0.03 GiB KV cache is needed, which is larger than the available KV cache memory (0",
    ),
    (TRAINER, "broadcast_broke", BROKE),
    (TRAINER, "nccl_failed", BACKEND),  # hkproj/pytorch-transformer-distributed#1
    (
        TRAINER,
        "checkpoint_damaged",
        "[WARNING] passed over: --resume /r/step_6: model.safetensors has 7 bytes, and 9",
    ),
    (TRAINER, "shm_full", SHM),  # nianticlabs/simplerecon#3
    (TRAINER, "shm_full", TORCH_SHM),  # logicalclocks/hopsworks#1557
    (
        ENGINE,
        "lora_not_enabled",
        "RuntimeError: LoRA is not enabled. Use --enable-lora to enable LoRA.",
    ),
    (
        ENGINE,
        "lora_not_enabled",
        'INFO:     127.0.0.1:4 - "POST /v1/load_lora_adapter HTTP/1.1" 404 Not Found',
    ),
    (
        TRAINER,
        "served_in_part",
        "error: http://[::1]/bridge/load: HTTP 409 vLLM's Qwen3ForCausalLM has no place for "
        "3 of the tensors, such as "
        "model.layers.0.self_attn.o_proj.bias, and would answer without them.",
    ),
    (
        TRAINER,
        "manifest_stale",
        "error: /r/vllm_bridge_config.json: its server (pid 42) is gone; start vLLM again",
    ),
    (
        TRAINER,
        "manifest_empty",
        "[Setup] Single-copy mode not available (single_copy_enabled=False)",
    ),
    (
        ENGINE,
        "engine_dead",
        "(EngineCore pid=7) ERROR 11-21 12:48 [core.py:1512] EngineCore encountered a fatal error.",
    ),
    (
        ENV,
        "registration_refused",
        "ERROR atropos_envs.hosting.base: run-api refused the registration (422: {'a': 1})",
    ),
    (
        ENV,
        "no_logprobs",
        "NotImplementedError: OpenAI endpoints do not support token IDs or logprobs required for ",
    ),
    (ENV, "engine_unreachable", "ERROR:root:Error in collect_trajectories: Connection error."),
    (
        ENV,
        "tokenizer_missing",
        "OSError: Can't load tokenizer for 'x'. If you were trying to load it from 'https",
    ),
    (ENV, "worker_timeout", CUT_OFF),
    (
        TRAINER,
        "alignment_mismatch",
        "LogProb Alignment: MISMATCH (stale weights: the server does not see the updates)",
    ),
    (ENGINE, "non_finite", "RuntimeError: the model answers with NaN: its weights are broken"),
    (
        TRAINER,
        "rollouts_left_out",
        "[WARNING] nothing to train on in the last 10 batches (3 s): 40 sequences left out: "
        "longer than --seq-len 64.",
    ),
    (
        TRAINER,
        "other_trainer_registered",
        "[WARNING] run-api at http://[::1]:8000 holds another trainer's registration and "
        "allows only one: x",
    ),
    (
        TRAINER,
        "trainer_not_registered",
        "[WARNING] run-api at http://[::1]:8000 ignores the registration, because x: Trainer "
        "not registered",
    ),
    (TRAINER, "health_timeout", "  ERROR: vLLM failed to start after 300s"),
    (TRAINER, "gpu_unusable", "error: --device cuda: torch sees no GPU here"),
    (API, "port_in_use", "OSError: [Errno 98] Address already in use"),
    (
        TRAINER,
        "wandb_failed",
        "Warning: Weights & Biases failed (UsageError: x); training goes on without it",
    ),
]


def scanner(role: Role, **fields: object) -> LogScanner:
    return LogScanner(part("x", role=role, **fields), Names("api", "arithmetic", "vllm", "trainer"))


def scan(role: Role, text: bytes) -> list[Diagnosis]:
    """Return all live diagnoses of `text`, with those that need patience."""
    looks = scanner(role)
    looks.feed(text)
    said = looks.scan(looks.take(), 0.0)
    said += looks.close(0.0) if not text.endswith(b"\n") else []
    return said + looks.scan([], 200.0)


@pytest.mark.parametrize(
    ("log", "role", "rule", "words"), CAPTURED, ids=lambda value: str(value)[:30]
)
def test_a_captured_log_is_explained_live_and_at_the_exit(
    log: str, role: Role, rule: str, words: str
) -> None:
    text = (LOGS / f"{log}.log").read_bytes()
    live = next(found for found in scan(role, text) if found.rule == rule)
    lines = text.decode().splitlines()[-200:]
    ended = diagnose(Evidence(part("x", role=role), 1, lines))
    assert ended.rule == rule
    assert words in live.evidence or words in ended.evidence
    for found in (live, ended):
        assert found.title and "{" not in found.title + found.fix
        assert re.search(
            r"\[\w+(?:\.\w+)?\]|atropos-tui|env\.|\w+ = |`|ulimit|stop |df -h", found.fix
        ), found.fix


@pytest.mark.parametrize(
    ("log", "role", "rule", "words"), LIVE_ONLY, ids=lambda value: str(value)[:30]
)
def test_what_a_running_program_says(log: str, role: Role, rule: str, words: str) -> None:
    found = next(
        found for found in scan(role, (LOGS / f"{log}.log").read_bytes()) if found.rule == rule
    )
    assert words in found.evidence


@pytest.mark.parametrize(("role", "rule", "line"), WORDS, ids=lambda value: str(value)[:30])
def test_lines_of_the_sources(role: Role, rule: str, line: str) -> None:
    assert [found.rule for found in scan(role, b"noise\n" + line.encode() + b"\n")] == [rule]


def test_every_log_rule_has_a_line_here() -> None:
    shown = {row[2] for row in CAPTURED + LIVE_ONLY} | {row[1] for row in WORDS}
    assert {rule.name for rule in LOG_RULES} == shown


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("api", API),
        ("arithmetic", ENV),
        ("vllm", ENGINE),
        ("trainer", TRAINER),
        ("trainer-two-engines", TRAINER),
        ("warm-start", Role.PREPARE),
    ],
)
def test_a_clean_run_says_nothing(name: str, role: Role) -> None:
    """Its vLLM warns of too few files, its environment and trainer wait for the engine that is
    starting."""
    looks = scanner(role)
    text = (LOGS / "clean" / f"{name}.log").read_bytes()
    said = []
    for second, line in enumerate(text.splitlines(keepends=True)):
        looks.feed(line)
        said += looks.scan(looks.take(), second * 5.0, {ENGINE} if second < 60 else ())
    assert said + looks.scan([], LONG) == []
    assert len(text) > 300


INNOCENT = [
    (ENGINE, "INFO 11-21 [utils.py:1] Port 8000 is already in use, trying port 8001"),
    (
        ENGINE,
        "INFO [gpu_worker.py:1013] Free memory on device (138.1/139.8 GiB) on startup. "
        "Desired GPU memory utilizati",
    ),
    (ENGINE, 'INFO:     127.0.0.1:43674 - "POST /generate HTTP/1.1" 200 OK'),
    (
        ENGINE,
        "W1121 12:48:56 torch/_library/triton.py:53] Triton not available, "
        "find_triton_kernels = []",
    ),
    (
        TRAINER,
        "run-api says: Trainer not registered. Call /register first. Registering again at step 7.",
    ),
    (
        TRAINER,
        "run-api was restarted and has no registration of this trainer. "
        "Registering again at step 7.",
    ),
    (TRAINER, "[WARNING] 4 sequences left out: older than --max-policy-lag 2"),
    (
        TRAINER,
        "LogProb Alignment: DRIFT (rollouts are far from the policy (policy lag of up to 6))",
    ),
    (
        ENV,
        "INFO atropos_envs.hosting.base: inference server at http://127.0.0.1:9001 answers after "
        "36.8 s",
    ),
    (API, 'INFO:     127.0.0.1:34712 - "POST /register HTTP/1.1" 200 OK'),
    (Role.OTHER, "WARNING:  WatchFiles detected changes in 'made.py'. Reloading..."),
]


@pytest.mark.parametrize(("role", "line"), INNOCENT, ids=lambda value: str(value)[:40])
def test_innocent_lines(role: Role, line: str) -> None:
    assert scan(role, f"{line}\n".encode()) == []


def test_the_five_ways_out_of_memory_by_role() -> None:
    line = b"torch.OutOfMemoryError: CUDA out of memory.\n"
    trainer, engine = (scan(role, line)[0].fix for role in (TRAINER, ENGINE))
    assert trainer.count(";") == 4
    for way in ("gpu_memory_utilization", "batch_size", "seq_len", "adafactor", "GPU of its own"):
        assert way in trainer
    for way in ("gpu_memory_utilization", "max_model_len", "tensor_parallel", "[vllm] gpus"):
        assert way in engine
    assert "nvidia-smi" in scan(Role.OTHER, line)[0].fix


def test_a_line_in_many_pieces_in_colours_and_without_a_newline() -> None:
    text = (
        b"\x1b[31mERROR\x1b[0m \x1b[1mCannot re-initialize CUDA in forked subprocess.\x1b[0m To use"
    )
    looks = scanner(ENGINE)
    said = []
    for second, byte in enumerate(text):
        looks.feed(bytes([byte]))
        said += looks.scan(looks.take(), float(second))
    assert said == []
    said = looks.close(99.0)
    assert [found.rule for found in said] == ["forked_cuda"]
    assert said[0].evidence == "ERROR Cannot re-initialize CUDA in forked subprocess. To use"


def test_one_endless_line_is_seen_and_forgotten() -> None:
    looks = scanner(TRAINER)
    said = []
    for second in range(100):
        looks.feed(b"." * 10_000 + (b" CUDA out of memory " if second == 50 else b""))
        said += looks.scan(looks.take(), float(second))
    assert [found.rule for found in said] == ["out_of_memory"]
    assert len(said[0].evidence) < 1000
    assert len(looks._carry) <= 10_000


def test_it_speaks_once_while_it_lasts_and_comes_to_its_end_later_each_time() -> None:
    looks, said = scanner(ENV), []

    def at(now: float, text: str = "") -> list[bool]:
        looks.feed(text.encode())
        found = looks.scan(looks.take(), now, (), Work(True, (now - 2, now - 1, now - 0.5)))
        said.extend(found)
        return [each.over for each in found]

    at(0.0)
    assert [over for now in range(1, 600, 10) for over in at(now, CUT_OFF + "\n")] == [False]
    assert at(600.0) == []
    assert at(591 + WORK_S + 3) == [True], "it works, and has not printed it since"
    assert at(1000.0, CUT_OFF + "\n") == [False], "it holds now"
    assert at(1000 + WORK_S + 3) == []
    assert at(1000 + 2 * WORK_S + 3) == [True]
    assert [found.title for found in said] == [said[0].title] * 4, "an end names what it ends"


@pytest.mark.parametrize(
    "work", [Work(False, (95.0, 96.0, 97.0)), Work(True, (95.0, 96.0)), Work(True, ())]
)
def test_what_does_not_work_again_keeps_its_diagnosis(work: Work) -> None:
    looks = scanner(ENV)
    looks.feed(CUT_OFF.encode() + b"\n")
    assert len(looks.scan(looks.take(), 1.0, (), Work(True, ()))) == 1
    assert looks.scan([], 100.0, (), work) == []


WAITS = b"WARNING waiting for the inference server at http://127.0.0.1:9001 (Cannot connect)\n"
CAME = b"INFO inference server at http://127.0.0.1:9001 answers after 36.8 s\n"


def fed(looks: LogScanner, text: bytes, now: float, *starting: Role) -> list[str]:
    looks.feed(text)
    return [found.rule for found in looks.scan(looks.take(), now, starting) if not found.over]


def test_waiting_is_trouble_only_when_it_lasts_and_nobody_is_starting() -> None:
    looks = scanner(ENV)
    assert fed(looks, WAITS, 0, ENGINE) == []
    assert fed(looks, b"", 500, ENGINE) == [], "the engine is starting"
    assert fed(looks, b"", 540) == []
    assert fed(looks, b"", 561) == ["engine_unreachable"]
    assert fed(looks, b"", 2000) == []


def test_waiting_that_ended_is_no_trouble() -> None:
    looks = scanner(ENV)
    assert fed(looks, WAITS, 0) == []
    assert fed(looks, CAME, 30) == []
    assert fed(looks, b"", 200) == []
    assert fed(looks, WAITS + CAME, 201) == []
    assert fed(looks, b"", 400) == []
    assert fed(looks, CAME + WAITS, 401) == []
    assert fed(looks, b"", 462) == ["engine_unreachable"]


def test_who_is_gone_waits_no_more() -> None:
    looks = scanner(ENV)
    assert fed(looks, WAITS, 0) == []
    assert looks.close(1.0) == []
    assert fed(looks, b"", 500) == []


def test_the_better_explanation_of_a_line_speaks_alone() -> None:
    """A full /dev/shm raises `No space left on device`, too."""
    text = (LOGS / "shm_full.log").read_bytes()
    assert b"OSError: [Errno 28] No space left on device" in text
    assert [found.rule for found in scan(ENGINE, text)] == ["shm_full"]


def test_a_flood_is_kept_at_both_ends_and_costs_little() -> None:
    looks = scanner(TRAINER)
    chunk = b"".join(b"%012d a line of a log\n" % number for number in range(8000))
    began = time.perf_counter()
    looks.feed(b"CUDA out of memory at the beginning\n")
    for _ in range(400):
        looks.feed(chunk)
    looks.feed(b"GRPO requires inference_logprobs at the end\n")
    fed_s = time.perf_counter() - began
    pieces = looks.take()
    assert sum(map(len, pieces)) <= HEAD + REST
    assert {found.rule for found in looks.scan(pieces, 0.0)} == {"out_of_memory", "no_logprobs"}
    assert looks.take() == []
    assert fed_s < 0.5, "106 MB are only kept or dropped"


def test_nothing_but_telling_lines_is_looked_at_in_part() -> None:
    looks = scanner(API)
    looks.feed(b'INFO: 127.0.0.1 - "GET /x" 422 nothing to do with registration\n' * 3000)
    began = time.perf_counter()
    assert looks.scan(looks.take(), 0.0) == []
    assert time.perf_counter() - began < 0.5


def test_lines_are_counted_for_those_who_wait() -> None:
    looks = scanner(ENV)
    looks.feed(
        b"WARNING Scores are the same in a group, skipping...\n" * 3 + CUT_OFF.encode() + b"\n"
    )
    looks.scan(looks.take(), 0.0)
    assert dict(looks.counts) | {} == {
        "dropped groups": 3,
        "timed-out rollouts": 1,
        "stock registrations": 0,
        "refusals": 0,
        "stock refusals": 0,
        "openai refusals": 0,
    }


def test_waiting_explains_an_exit_only_when_nothing_better_does() -> None:
    lines = ["WARNING waiting for the inference server at http://127.0.0.1:9001 (x)", "bye"]
    assert diagnose(Evidence(part("x", role=ENV), 1, lines)).rule == "engine_unreachable"
    assert diagnose(Evidence(part("x", role=ENV), -15, lines)).rule == "killed"
    assert diagnose(Evidence(part("x", role=ENV), 1, [*lines, CAME.decode()])).rule == "exited"


@pytest.mark.parametrize("role", [API, ENGINE])
def test_the_path_of_a_request_raises_no_diagnosis(role: Role) -> None:
    """A web page of this user, or another user, chooses it."""
    words = (
        "torch.OutOfMemoryError",
        "/x?huggingface_hub.errors.LocalEntryNotFoundError:",
        "EngineDeadError",
    )
    lines = [f'INFO:     127.0.0.1:4880 - "GET {word} HTTP/1.1" 403 Forbidden' for word in words]
    spec = part("a", role=role)
    scanner = LogScanner(spec, Names())
    scanner.feed("".join(f"{line}\n" for line in lines).encode())
    assert scanner.scan(scanner.take(), 0.0) + scanner.close(LONG) == []
    assert diagnose(Evidence(spec, 1, lines, Names())).rule not in ("out_of_memory", "engine_dead")
