"""What a model is made of, for programs that must not import torch: it is built without memory, and its tensors' names
and shapes are printed as one JSON object.

    python -m trainer_core.shapes FOLDER     # with a config.json; never asks the network, never runs a model's own code

The object has `config`, complete with the class's defaults, and `shapes`, a tied head once; or `error` in words.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


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
        return {"error": " ".join(str(error).split())[:300]}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return {"config": json.loads(config.to_json_string(use_diff=False)), "shapes": shapes}


def main(arguments: list[str]) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # transformers may talk
        found = describe(Path(arguments[0]))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
