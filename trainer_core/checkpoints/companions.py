"""Files of a checkpoint that no step changes: the tokenizer and the settings of generation."""

from __future__ import annotations

import tempfile
from functools import lru_cache, partial
from pathlib import Path

from atropos_common.system.files import why_full
from trainer_core.errors import UsageError


def read_companions(model_name: str) -> None:
    """Read the files before the run's first checkpoint.

    Later writes take them from memory: reading a large tokenizer blocks Python's threads, and so
    the training beside a write, for seconds.
    """
    _files.cache_clear()  # an earlier run of this process may have read others by the same name
    _files(model_name)


def write_companions(model_name: str, target: Path) -> None:
    """Write the files into folder `target`; a model without them is fine."""
    for name, content in _files(model_name).items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)


@lru_cache(maxsize=1)
def _files(model_name: str) -> dict[str, bytes]:
    from transformers import AutoTokenizer, GenerationConfig

    with tempfile.TemporaryDirectory(prefix="atropos-companions-") as temporary:
        folder = Path(temporary)
        # Without a tokenizer or generation config: rollouts hold token ids.
        for read in (
            partial(AutoTokenizer.from_pretrained, trust_remote_code=False),
            GenerationConfig.from_pretrained,
        ):
            try:
                read(model_name).save_pretrained(folder)
            except (OSError, ValueError, ImportError, KeyError) as error:
                # Half a tokenizer would be in every checkpoint.
                if words := why_full(error):
                    raise UsageError(
                        f"{folder.parent}: {words}, and the tokenizer has to pass through it. "
                        f"fix: free space there, or set TMPDIR to another folder"
                    ) from None
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
