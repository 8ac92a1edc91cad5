"""What a model is made of, for programs that must not import torch: it is built without memory, and its tensors' names
and shapes are printed as one JSON object.

    python -m trainer_core.shapes FOLDER     # with a config.json; never asks the network, never runs a model's own code

The object has `config`, complete with the class's defaults, and `shapes`, a tied head once; or `error` in words.
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
"""Memory limit on a small machine: torch and transformers themselves take about 1 GB."""


def describe(folder: Path) -> dict[str, Any]:
    """The object that is printed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # Which errors a configuration of any class raises, none of its authors says.
    except Exception as error:
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return {"config": json.loads(config.to_json_string(use_diff=False)), "shapes": shapes}


def limit_memory() -> None:
    """Give this process half of the machine's memory at most: a hostile configuration could ask for all of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(total // 2, LEAST_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main(arguments: list[str]) -> int:
    limit_memory()
    with contextlib.redirect_stdout(sys.stderr):  # transformers may talk
        found = describe(Path(arguments[0]))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
