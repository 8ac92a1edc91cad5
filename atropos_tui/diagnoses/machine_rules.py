"""Rules for log lines about the machine and its programs: ports, memory, GPUs, disks.

They are the first entries of `LOG_RULES`.
"""

from __future__ import annotations

import re

from atropos_common.protocol.control import Role
from atropos_tui.diagnoses.model import Diagnosis, Ends, Layer, LogMatch, LogPattern, LogRule
from atropos_tui.profile import ports

FEWER_BYTES: dict[Role | None, str] = {
    Role.ENGINE: (
        "lower [vllm] gpu_memory_utilization (0.4); lower [vllm] max_model_len; end other "
        "programs on the GPU "
        "(nvidia-smi); give {engine} and {trainer} a GPU each ([vllm] gpus, [trainer] gpus); "
        "or split the model: "
        "[vllm] tensor_parallel = 2"
    ),
    Role.TRAINER: (
        "five ways out, cheapest first: lower [vllm] gpu_memory_utilization (0.4); lower "
        "[trainer] batch_size and "
        "raise gradient_accumulation_steps by the same factor (the gradient stays the same); "
        "lower [trainer] seq_len; "
        'set [trainer] optimizer = "adafactor"; give {trainer} a GPU of its own ([trainer] gpus)'
    ),
    None: "free GPU memory: nvidia-smi shows who holds it; atropos-tui clean ends processes of "
    "earlier runs",
}


def port_taken(name: str, port: int | None, evidence: str) -> Diagnosis:
    holder = ports.holder(port) if port else None
    held = f"; held by {holder}" if holder else ""
    return Diagnosis(
        f"port {port or '?'} is in use",
        evidence + held,
        f"{holder.way_out if holder else 'stop the process that holds it'}; or give {name} "
        f"another port in the profile",
        "port_in_use",
    )


def _port_in_use(match: LogMatch) -> Diagnosis:
    number = re.search(r"(?:[Pp]ort |:|', )(\d{2,5})\b", match.line)
    port = match.spec.port or (int(number.group(1)) if number else None)
    return port_taken(match.spec.name, port, match.line)


MACHINE_RULES: tuple[LogRule, ...] = (
    LogRule(
        "port_in_use",
        "a port is in use",
        "",
        (
            LogPattern("ddress already in use"),
            LogPattern("rrno 98", r"\[[Ee]rrno 98\]"),
            LogPattern("EADDRINUSE"),
            LogPattern("cannot be bound", r":\d+ cannot be bound"),
            LogPattern("is already in use!", r"Port (\d+) is already in use!"),
        ),
        tell=_port_in_use,
        passing=True,
        layer=Layer.MACHINE,
    ),
    # Before out_of_memory: the fix is the opposite one.
    LogRule(
        "kv_cache_too_small",
        "{engine}'s KV cache does not fit: GPU memory is exhausted",
        "raise [vllm] gpu_memory_utilization, or lower [vllm] max_model_len (on a CPU: raise "
        "kv-cache-memory-bytes "
        "under [vllm.args])",
        (
            LogPattern("No available memory for the cache blocks"),
            LogPattern("cache is needed, which is larger than the available"),
        ),
        roles=(Role.ENGINE,),
        layer=Layer.MACHINE,
    ),
    LogRule(
        "out_of_memory",
        "GPU memory is exhausted",
        FEWER_BYTES,
        (
            LogPattern("CUDA out of memory"),
            LogPattern("CUDA error: out of memory"),
            LogPattern("OutOfMemoryError"),
            LogPattern("Free memory on device", r"Free memory on device.*is less than"),
        ),
        passing=True,
        layer=Layer.MACHINE,
    ),
    LogRule(
        "forked_cuda",
        "a forked process cannot use the GPU that its parent has opened",
        'set VLLM_WORKER_MULTIPROC_METHOD = "spawn" under [vllm.env], or keep CUDA out of '
        "the parent (VLLM_USE_V1=0, "
        "the older advice, no longer exists)",
        (LogPattern("Cannot re-initialize CUDA in forked subprocess"),),
        layer=Layer.PROCESS,
    ),
    LogRule(
        "daemonic_processes",
        "a daemonic process tried to start children",
        "leave out `command` under [vllm] (python -m vllm_server starts none); in a program "
        "of your own, start workers "
        "with daemon=False, or as threads",
        (LogPattern("daemonic processes are not allowed to have children"),),
        layer=Layer.PROCESS,
    ),
    LogRule(
        "flexible_argument_parser",
        "this program was written for another version of vLLM",
        "leave out `command` under [vllm] (python -m vllm_server supports several versions), "
        "or install the vLLM that "
        "the program was written for",
        (
            LogPattern("FlexibleArgumentParser", r"cannot import name 'FlexibleArgumentParser'"),
            LogPattern("No module named 'vllm.", r"No module named '(vllm\.[\w.]+)'"),
        ),
        layer=Layer.PROCESS,
    ),
    LogRule(
        "triton_blackwell",
        "Triton cannot compile for this GPU",
        "with adapters set VLLM_LORA_DISABLE_PDL=1 under [vllm.env]; if its ptxas is older "
        "than the GPU, set "
        "TRITON_PTXAS_PATH (from Triton 3.6 on TRITON_PTXAS_BLACKWELL_PATH) there to the "
        "ptxas of a CUDA 12.8+ "
        "toolkit; or disable compiled kernels: enforce-eager = true under [vllm.args]",
        (
            LogPattern("is not defined for option 'gpu-name'", r"Value '(sm_\w+)' is not defined"),
            LogPattern("PTXASError"),
            LogPattern("--gpu-name=sm_1", r"ptxas.*--gpu-name=(sm_1\d\d\w?).*returned non-zero"),
            LogPattern(
                "is not compatible with the current PyTorch installation",
                r"with CUDA capability (sm_1\d\d)",
            ),
            LogPattern("Triton compilation", r"Triton compilation (?:error|failed)"),
        ),
        layer=Layer.PROCESS,
    ),
    LogRule(
        "eager_fallback",
        "{0} runs without CUDA graphs, which would use a stale copy of the weights",
        "training is correct, but decoding is slower than with graphs. Use a mode in which "
        "the engine has its own "
        "weights (broadcast, lora_only) to keep graphs; or set enforce-eager = true under "
        "[vllm.args] to avoid the "
        "second start",
        (
            LogPattern(
                "starting again with --enforce-eager",
                r"vllm_server: (\S+?):? .*starting again with --enforce-eager",
            ),
        ),
        roles=(Role.ENGINE,),
        at_exit=False,
        severity="advice",
        ends=Ends.ATTEMPT,
    ),
    LogRule(
        "gpu_unusable",
        "torch cannot use the GPU",
        "run atropos-tui doctor: driver, CUDA and torch must fit each other; on a machine "
        "without a GPU set [trainer] "
        'device = "cpu"',
        (
            LogPattern("NVIDIA driver on your system is too old"),
            LogPattern("no kernel image is available for execution on the device"),
            LogPattern("CUDA driver version is insufficient for CUDA runtime version"),
            LogPattern("Found no NVIDIA driver on your system"),
            LogPattern("torch sees no GPU here"),
            LogPattern("Torch not compiled with CUDA enabled"),
        ),
        layer=Layer.MACHINE,
    ),
    LogRule(
        "shm_full",
        "/dev/shm is full",
        "see what is there: ls -l /dev/shm; atropos-tui clean removes files of earlier runs; "
        "enlarge it: mount -o "
        "remount,size=16G /dev/shm, or --shm-size=16g (--ipc=host) for a container",
        (
            LogPattern("insufficient shared memory (shm)"),
            LogPattern("unable to write to file </torch_"),
            LogPattern("unable to allocate shared memory"),
            LogPattern("out of shared memory. Please try to raise", r"out of shared memory"),
            LogPattern(
                "/dev/shm",
                r"/dev/shm.*(?:cannot reserve|No space left|creating shared memory segment)",
            ),
            LogPattern(
                "creating shared memory segment",
                r"Error while creating shared memory segment /dev/shm",
            ),
        ),
        passing=True,
        layer=Layer.MACHINE,
    ),
    LogRule(
        "disk_full",
        "a disk is full",
        "free space (df -h; du -sh RUN/checkpoints), or put the run elsewhere: --run-dir "
        "DIR. The run goes on as long "
        "as its components do; training pauses at a checkpoint until it can be written",
        (
            # A full /dev/shm is the rule shm_full.
            LogPattern(
                "No space left on device", r"^(?!.*(?:/dev/shm|</torch_)).*No space left on device"
            ),
            LogPattern("Disk quota exceeded"),
        ),
        unless=("shm_full",),
        passing=True,
        severity="alarm",
        layer=Layer.MACHINE,
    ),
    LogRule(
        "checkpoint_damaged",
        "a checkpoint is damaged",
        "remove the damaged folder, and check the disk (dmesg, smartctl); the run continues "
        "from the checkpoint before",
        (LogPattern("[WARNING] passed over: --resume"),),
        roles=(Role.TRAINER,),
        passing=True,
    ),
    LogRule(
        "too_many_files",
        "too many open files",
        "raise the limit before atropos-tui up: ulimit -n 65536; or lower the number of "
        "parallel rollouts: "
        "env.max_num_workers_per_node under [env.args]",
        # At every start vLLM warns that a low limit "can cause" this error, and quotes it.
        (LogPattern("Too many open files", r"^(?!.*can cause).*Too many open files"),),
        passing=True,
        layer=Layer.MACHINE,
    ),
)
