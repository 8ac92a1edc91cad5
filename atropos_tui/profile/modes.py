"""What each weight mode asks of the stack: flags, files, who restarts with whom. Data: planning never branches.

The trainer's own side of a mode is a strategy in `trainer_core/weight_sync/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from atropos_tui.profile.sections import Mode


@dataclass(frozen=True)
class ModeTraits:
    """Derived once per profile; every component builder reads it."""

    shares_memory: bool = False
    """The engine exports its weights, and the trainer attaches to them."""
    other_gpus: bool = False
    """Trainer and engine need GPUs of their own."""
    feeds_all: bool = False
    """The trainer's weights reach every engine that serves the stack's model, else only the first."""
    updates_weights: bool = False
    """The engine takes whole models while it runs: from a folder, or over the network."""
    lora: bool = False
    """Adapters are trained, and the engine must serve them."""
    holds_generation: bool = False
    """The engine serves nobody until the trainer has named its weights."""
    restarts_engine: bool = False
    """The trainer has the engine restarted every few steps, so its start must be quick."""
    trainer_follows_engine: bool = False
    """A restarted engine takes the trainer with it."""
    trainer_settings: tuple[tuple[str, object], ...] = ()
    """Fields of TrainingConfig that select the mode."""


TRAITS: dict[Mode, ModeTraits] = {
    "shared_vllm": ModeTraits(
        shares_memory=True,
        holds_generation=True,
        trainer_follows_engine=True,
        trainer_settings=(("weight_bridge_mode", "shared_vllm"),),
    ),
    "broadcast": ModeTraits(
        other_gpus=True,
        feeds_all=True,
        holds_generation=True,
        updates_weights=True,
        trainer_settings=(("weight_bridge_mode", "shared_vllm"), ("use_shared_memory", True)),
    ),
    "lora_only": ModeTraits(
        lora=True,
        holds_generation=True,
        trainer_settings=(("weight_bridge_mode", "lora_only"),),
    ),
    "lora_restart": ModeTraits(
        lora=True,
        holds_generation=True,
        restarts_engine=True,
        trainer_settings=(("weight_bridge_mode", "lora_restart"),),
    ),
    "none": ModeTraits(
        holds_generation=True,
        updates_weights=True,
        trainer_settings=(("weight_bridge_mode", "none"),),
    ),
}
