"""The frozen base of adapters in the server's own memory: with `single_copy` it lies on the device once.

Nothing here writes to it. When the server has ended, its memory is let go of; from the next one the same model takes
that one's memory, and its adapter stays as it is.
"""

from __future__ import annotations

import threading
import time

import torch

from atropos_common.manifest import Manifest, ManifestError
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone, UsageError
from trainer_core.policy.lora import base_parameters
from trainer_core.weight_sync.shared_vllm import SingleCopy


class SharedBase:
    """A model whose parameters are the tensors of the server of now."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        self._memory = SingleCopy(config, device, stop)
        self._port = config.vllm_port
        self._model: torch.nn.Module | None = None
        self._instance: str | None = None
        """Whose memory it lies in; null while it has none."""

    def load(self) -> torch.nn.Module:
        """The base model.

        Raises:
            EngineGone: there is no server with a manifest yet.
            UsageError: another model, type or port than the trainer's.
        """
        manifest = self._manifest()
        if not manifest.base_url.endswith(f":{self._port}"):
            raise UsageError(
                f"{self._memory.path} is of the server at {manifest.base_url}, not of --vllm-port {self._port}"
            )
        began = time.perf_counter()
        self._model = model = self._memory.map_model(manifest)
        self._instance = manifest.instance_id
        print(f"Attached to {manifest.base_url} in {time.perf_counter() - began:.2f} s; no memory for the base model")
        return model

    def follow(self, instance: str) -> None:
        """Let the base lie in the memory of the server `instance`; what adapters the model has by now stay.

        Raises:
            EngineGone: its manifest is not there yet.
        """
        if instance == self._instance:
            return
        manifest = self._manifest()
        if manifest.instance_id != instance:
            raise EngineGone(f"{self._memory.path} belongs to an earlier server than {manifest.base_url}")
        fresh = dict(self._memory.map_model(manifest).named_parameters())
        for name, parameter in self._base().items():
            parameter.data = fresh[name].detach()
        self._instance = instance
        print(f"✓ The base model lies in the memory of the new server at {manifest.base_url}")

    def let_go_of_the_dead(self) -> None:
        """Where the server has ended: hold no memory of it, or a GPU would have too little for the next one."""
        try:
            self._memory.check()
        except EngineGone:
            self._instance = None
            for parameter in self._base().values():
                parameter.data = parameter.data.new_empty(0)

    def _base(self) -> dict[str, torch.nn.Parameter]:
        return base_parameters(self._model) if self._model else {}

    def _manifest(self) -> Manifest:
        try:
            return self._memory.usable_manifest()
        except ManifestError as error:
            raise EngineGone(str(error)) from None
