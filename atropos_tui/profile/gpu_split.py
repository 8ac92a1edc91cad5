"""`inference_gpus = 6`: the machine's GPUs, divided into the engines' and the trainer's. Data to data."""

from __future__ import annotations

from atropos_tui.errors import Problem
from atropos_tui.profile.hardware import Hardware
from atropos_tui.profile.sections import Profile
from atropos_tui.profile.site import traits_of

KEY = "inference_gpus"


def split_gpus(profile: Profile, machine: Hardware) -> Profile | Problem:
    """The profile with `gpus` of both sides in the place of `inference_gpus`, or why it cannot be divided."""
    wanted, there, engine = profile.inference_gpus or 0, len(machine.gpus), profile.vllm[0]
    if traits_of(profile).shares_memory or profile.mode == "lora_restart":
        fix = f'leave it out and name vllm.gpus, or use mode = "broadcast" (now "{profile.mode}")'
        return Problem("trainer and engine use the same GPUs in this mode", fix, key=KEY)
    named = [key for key, gpus in (("vllm.gpus", engine.gpus), ("trainer.gpus", profile.trainer.gpus)) if gpus]
    if named or len(profile.vllm) > 1:
        what = " and ".join(named) or "several [[vllm]]"
        return Problem(f"divides the GPUs, and so do {what}", "leave the one or the other out", key=KEY)
    if not there:
        fix = "leave it out; on the CPU vllm.replicas = 2 makes two engines"
        return Problem("this machine has no NVIDIA GPU to divide", fix, key=KEY)
    each = engine.gpus_needed
    possible = [count for count in range(each, there, each) if engine.replicas in (None, count // each)]
    if wanted not in possible:
        engines = f"{engine.replicas} engines" if engine.replicas else "engines"
        fix = f"use one of: {', '.join(map(str, possible))}" if possible else "use a machine with more GPUs"
        return Problem(
            f"{wanted} of {there} GPUs cannot be those of {engines} that take {each} each, and leave the trainer one",
            fix,
            key=KEY,
        )
    return profile.model_copy(
        update={
            KEY: None,
            "vllm": [engine.model_copy(update={"gpus": list(range(wanted))})],
            "trainer": profile.trainer.model_copy(update={"gpus": list(range(wanted, there))}),
        }
    )


def split_text(profile: Profile, divided: Profile) -> str:
    """What was divided how, in a line."""
    engines, trainer = divided.vllm[0].gpus, divided.trainer.gpus
    return f"{KEY} = {profile.inference_gpus}: {len(divided.engines)} x engine on {engines}, the trainer on {trainer}"
