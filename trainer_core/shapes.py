"""Print a model's config and parameter shapes as JSON, for programs that must not import torch.

    python -m trainer_core.shapes FOLDER     # FOLDER has a config.json

Uses no network and no code from the folder, and allocates no weights. Prints `config` with defaults
and `shapes`, or `error`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

# For small machines: torch and transformers alone take about 1 GB.
LEAST_BYTES = 4 << 30


def describe(folder: Path) -> dict[str, Any]:
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
    # Half of the machine's memory: a hostile configuration could request all of it.
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
