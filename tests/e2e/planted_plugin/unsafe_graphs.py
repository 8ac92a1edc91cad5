"""A vLLM plug-in whose Qwen3 computes its last norm from a copy, unless it runs eager."""

from __future__ import annotations


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("Qwen3ForCausalLM", "unsafe_qwen3:UnsafeQwen3")
