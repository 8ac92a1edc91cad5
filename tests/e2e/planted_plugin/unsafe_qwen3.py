"""The model of `unsafe_graphs`."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


class UnsafeQwen3(Qwen3ForCausalLM):
    """As a captured graph would that had bound a copy."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if vllm_config.model_config.enforce_eager:
            return
        norm = self.model.norm
        true, kept = norm.forward, []

        def forward(*args: Any) -> Any:
            live = norm.weight.data
            kept.append(kept[0] if kept else live.clone())
            norm.weight.data = kept[0]
            try:
                return true(*args)
            finally:
                norm.weight.data = live

        norm.forward = forward
