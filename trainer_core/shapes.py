"""Print a model's config and parameter shapes as one JSON object, for programs that must not import
torch. The model is built without allocating memory.

    python -m trainer_core.shapes FOLDER     # FOLDER has a config.json

It uses no network and runs no code from the model's folder. The JSON object has `config`, complete
with the class's defaults, and `shapes`, with a tied head once; or `error`, a text.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

LEAST_BYTES = 4 << 30
"""Lower bound of the memory limit in bytes, for small machines: torch and transformers alone take
about 1 GB."""


def describe(folder: Path) -> dict[str, Any]:
    """Build the object that `main` prints."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # Tensors on the meta device have a shape and no storage.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # A broken config can raise anything: each model class has checks of its own.
    except Exception as error:
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return {"config": json.loads(config.to_json_string(use_diff=False)), "shapes": shapes}


def limit_memory() -> None:
    """Limit this process to half of the machine's memory: a hostile configuration could request all
    of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(total // 2, LEAST_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main(arguments: list[str]) -> int:
    limit_memory()
    with contextlib.redirect_stdout(sys.stderr):  # transformers may print
        found = describe(Path(arguments[0]))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
