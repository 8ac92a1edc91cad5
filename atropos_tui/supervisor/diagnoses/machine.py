"""Log rules about the machine: memory, GPU, ports, disks, and libraries that do not fit each other."""

from __future__ import annotations

import re

from atropos_common.control import Role
from atropos_tui.profile import ports
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Sighting
from atropos_tui.supervisor.diagnoses.signs import LogRule, Sign

FEWER_BYTES: dict[Role | None, str] = {
    Role.ENGINE: (
        "lower [vllm] gpu_memory_utilization (0.4); lower [vllm] max_model_len; end what else is on the GPU "
        "(nvidia-smi); give {engine} and {trainer} a GPU each ([vllm] gpus, [trainer] gpus); or spread it: [vllm] "
        "tensor_parallel = 2"
    ),
    Role.TRAINER: (
        "five ways out, cheapest first: lower [vllm] gpu_memory_utilization (0.4); lower [trainer] batch_size and "
        "raise gradient_accumulation_steps as much (the gradient stays the same); lower [trainer] seq_len; "
        '[trainer] optimizer = "adafactor"; give {trainer} a GPU of its own ([trainer] gpus)'
    ),
    None: "free GPU memory: nvidia-smi shows who holds it; atropos-tui clean ends what an earlier run left",
}


def port_taken(name: str, port: int | None, evidence: str) -> Diagnosis:
    """The diagnosis for a port that someone else holds, naming them where the system tells."""
    holder = ports.holder(port) if port else None
    held = f"; held by {holder}" if holder else ""
    return Diagnosis(
        f"port {port or '?'} is in use",
        evidence + held,
        f"{holder.way_out if holder else 'stop the process that holds it'}; or give {name} another port in the profile",
        "port_in_use",
    )


def _port_in_use(found: Sighting) -> Diagnosis:
    number = re.search(r"(?:[Pp]ort |:|', )(\d{2,5})\b", found.line)
    port = found.spec.port or (int(number.group(1)) if number else None)
    return port_taken(found.spec.name, port, found.line)


PORT_IN_USE = LogRule(
    "port_in_use",
    "a port is in use",
    "",
    (
        Sign("ddress already in use"),
        Sign("rrno 98", r"\[[Ee]rrno 98\]"),
        Sign("EADDRINUSE"),
        Sign("cannot be bound", r":\d+ cannot be bound"),
        Sign("is already in use!", r"Port (\d+) is already in use!"),
    ),
    tell=_port_in_use,
)
KV_CACHE_TOO_SMALL = LogRule(
    "kv_cache_too_small",
    "no room for {engine}'s KV cache: GPU memory is exhausted",
    "raise [vllm] gpu_memory_utilization, or lower [vllm] max_model_len (on a CPU: kv-cache-memory-bytes under "
    "[vllm.args])",
    (Sign("No available memory for the cache blocks"), Sign("cache is needed, which is larger than the available")),
    roles=(Role.ENGINE,),
)
OUT_OF_MEMORY = LogRule(
    "out_of_memory",
    "GPU memory is exhausted",
    FEWER_BYTES,
    (
        Sign("CUDA out of memory"),
        Sign("CUDA error: out of memory"),
        Sign("OutOfMemoryError"),
        Sign("Free memory on device", r"Free memory on device.*is less than"),
    ),
)
OUT_OF_HOST_MEMORY = LogRule(
    "out_of_host_memory",
    "the machine's memory is exhausted",
    "run fewer things beside it (atropos-tui ps shows memory), use a smaller model or context, or add memory or swap",
    (
        Sign("DefaultCPUAllocator: can't allocate memory"),
        Sign("Cannot allocate memory", r"\[?[Ee]rr(?:no|or) 12\]?|Cannot allocate memory"),
        Sign("MemoryError", r"^(?:numpy\.\S*)?MemoryError\b"),
    ),
)
FORKED_CUDA = LogRule(
    "forked_cuda",
    "a forked process cannot use the GPU that its parent has opened",
    'start workers by spawn: VLLM_WORKER_MULTIPROC_METHOD = "spawn" under [vllm.env], or keep CUDA out of '
    "the parent (VLLM_USE_V1=0, the older advice, is gone from vLLM)",
    (Sign("Cannot re-initialize CUDA in forked subprocess"),),
)
DAEMONIC = LogRule(
    "daemonic_processes",
    "a daemonic process tried to start children",
    "python -m vllm_server does not do that: leave out `command` under [vllm]; in a program of your own, start "
    "workers with daemon=False, or as threads",
    (Sign("daemonic processes are not allowed to have children"),),
)
FLEXIBLE_ARGUMENT_PARSER = LogRule(
    "flexible_argument_parser",
    "this program was written for another version of vLLM",
    "python -m vllm_server knows each version's names: leave out `command` under [vllm]; or install the vLLM that the "
    "program was written for",
    (
        Sign("FlexibleArgumentParser", r"cannot import name 'FlexibleArgumentParser'"),
        Sign("No module named 'vllm.", r"No module named '(vllm\.[\w.]+)'"),
    ),
)
TRITON_BLACKWELL = LogRule(
    "triton_blackwell",
    "Triton cannot compile for this GPU",
    "with adapters set VLLM_LORA_DISABLE_PDL=1 under [vllm.env]; where its ptxas is older than the GPU, set "
    "TRITON_PTXAS_PATH (from Triton 3.6 on TRITON_PTXAS_BLACKWELL_PATH) to that of a CUDA 12.8+ toolkit there; or go "
    "without compiled kernels: enforce-eager = true under [vllm.args]",
    (
        Sign("is not defined for option 'gpu-name'", r"Value '(sm_\w+)' is not defined"),
        Sign("PTXASError"),
        Sign("--gpu-name=sm_1", r"ptxas.*--gpu-name=(sm_1\d\d\w?).*returned non-zero"),
        Sign("is not compatible with the current PyTorch installation", r"with CUDA capability (sm_1\d\d)"),
        Sign("Triton compilation", r"Triton compilation (?:error|failed)"),
    ),
)
EAGER_FALLBACK = LogRule(
    "eager_fallback",
    "{0}: no CUDA graphs, since they would compute from a copy of weights",
    "nothing is wrong, but decoding is slower than with graphs: a mode in which the engine has its own weights "
    "(broadcast, lora_only) keeps them; enforce-eager = true under [vllm.args] spares the first start",
    (Sign("starting again with --enforce-eager", r"vllm_server: (\S+?):? .*starting again with --enforce-eager"),),
    roles=(Role.ENGINE,),
    at_exit=False,
)
NO_GPU = LogRule(
    "gpu_unusable",
    "torch cannot use the GPU",
    "run atropos-tui doctor: driver, CUDA and torch must fit each other; on a machine without a GPU set [trainer] "
    'device = "cpu"',
    (
        Sign("NVIDIA driver on your system is too old"),
        Sign("no kernel image is available for execution on the device"),
        Sign("CUDA driver version is insufficient for CUDA runtime version"),
        Sign("Found no NVIDIA driver on your system"),
        Sign("torch sees no GPU here"),
        Sign("Torch not compiled with CUDA enabled"),
    ),
)
SHM_FULL = LogRule(
    "shm_full",
    "/dev/shm is full",
    "see what lies there: ls -l /dev/shm; atropos-tui clean removes what earlier runs left; enlarge it: mount -o "
    "remount,size=16G /dev/shm, or --shm-size=16g (--ipc=host) for a container",
    (
        Sign("insufficient shared memory (shm)"),
        Sign("unable to write to file </torch_"),
        Sign("unable to allocate shared memory"),
        Sign("out of shared memory. Please try to raise", r"out of shared memory"),
        Sign("/dev/shm", r"/dev/shm.*(?:cannot reserve|No space left|creating shared memory segment)"),
        Sign("creating shared memory segment", r"Error while creating shared memory segment /dev/shm"),
    ),
)
DISK_FULL = LogRule(
    "disk_full",
    "a disk is full",
    "free space (df -h; du -sh RUN/checkpoints), or put the run elsewhere: --run-dir DIR; the run itself goes on "
    "as far as its parts do",
    (
        Sign("No space left on device", r"^(?!.*(?:/dev/shm|</torch_)).*No space left on device"),
        Sign("Disk quota exceeded"),
    ),
    unless=("shm_full",),
)
TOO_MANY_FILES = LogRule(
    "too_many_files",
    "too many open files",
    "raise the limit before atropos-tui up: ulimit -n 65536; or fewer rollouts at once: env.max_num_workers_per_node "
    "under [env.args]",
    # vLLM warns at every start that a low limit "can cause" this error, and quotes it.
    (Sign("Too many open files", r"^(?!.*can cause).*Too many open files"),),
)
NCCL_FAILED = LogRule(
    "nccl_failed",
    "the NCCL connection between trainer and engine was not made",
    "GPUs must differ: [vllm] gpus and [trainer] gpus; NCCL_DEBUG=INFO under [trainer.env] and [vllm.env] says "
    "more; with several network cards set NCCL_SOCKET_IFNAME. A good start prints `NCCL group created`",
    (
        Sign("NCCL error", r"NCCL error"),
        Sign("NCCL Error"),
        Sign("ncclSystemError"),
        Sign("ncclUnhandledCudaError"),
        Sign("Duplicate GPU detected"),
        Sign("Watchdog caught collective operation timeout"),
        Sign("Gloo group created", patience_s=120, cleared_by=("NCCL group created",), waits_for=(Role.ENGINE,)),
    ),
    roles=(Role.ENGINE, Role.TRAINER),
)
BROADCAST_BROKE = LogRule(
    "broadcast_broke",
    "a broadcast of weights broke off",
    "the trainer forms the group again with every server and sends the weights anew; if that does not end, restart the "
    "server that is named: atropos-tui restart {engine}. On a slow link raise trainer.broadcast_timeout",
    (Sign("the broadcast broke", r"the broadcast broke \(phase (?!rendezvous)\w+\): (.*)"),),
    roles=(Role.TRAINER,),
)
GLOO_STUCK = LogRule(
    "gloo_stuck",
    "the process group of trainer and engine is not complete: stuck at Gloo",
    "{engine} must have been started with ATROPOS_WEIGHT_UPDATES=1 (a profile's mode sets it) and reach {trainer} at "
    "MASTER_ADDR and MASTER_PORT; atropos-tui logs {engine} --grep 'broadcast|ERROR' shows whether its side started",
    (
        Sign("the broadcast broke (phase rendezvous)", r"the broadcast broke \(phase rendezvous\): (.*)"),
        Sign("waiting for clients", r"Timed out after \d+ seconds waiting for clients"),
        Sign(
            "reating Gloo process group", patience_s=120, cleared_by=("Gloo group created",), waits_for=(Role.ENGINE,)
        ),
    ),
    roles=(Role.ENGINE, Role.TRAINER),
)
