"""Huge numbers and shapes in foreign files give an error at once, and leave no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_common.system.files import LARGEST
from atropos_tui.errors import UserError
from atropos_tui.monitor.run import run_files
from atropos_tui.profile import load
from atropos_tui.profile.budget import inventory
from atropos_tui.profile.budget.inventory import read_model
from atropos_tui.profile.checks.programs import has_chat_template
from atropos_tui.supervisor.processes import procfs

pytestmark = pytest.mark.timeout(30)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 100,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "vocab_size": 100,
    "n_positions": 64,
    "n_layer": 2,
}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA, "num_hidden_layers"),
        (LLAMA, "num_attention_heads"),
        (LLAMA, "num_key_value_heads"),
        (GPT2, "n_layer"),
        (MIXTRAL, "num_hidden_layers"),
        (MIXTRAL, "num_local_experts"),
        (MIXTRAL, "n_routed_experts"),
        (MIXTRAL, "depths"),
    ],
)
def test_a_hostile_count_is_words_at_once(
    tmp_path: Path, config: dict[str, object], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "build", lambda *_: pytest.fail("it is not built"))
    for hostile in (1_000_000, 10**9, 10**400):
        for place in (config | {key: hostile}, config | {"text_config": {key: [hostile]}}):
            (tmp_path / "config.json").write_text(json.dumps(place))
            began = time.monotonic()
            said = read_model(str(tmp_path))
            assert (
                isinstance(said, str)
                and f"{key} is 1" in said
                and "no model has more than 4,096" in said
            )
            assert time.monotonic() - began < 2


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_number_beyond_any_size_is_words(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: 10**30}))
    assert f"{key} is 1,000" in str(read_model(str(tmp_path)))


def test_a_configuration_of_any_length_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 20 << 30)
    assert LARGEST < 20 << 30 and "cannot be read" in str(read_model(str(tmp_path)))


def test_a_model_folder_of_pipes_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["UnknownForCausalLM"]}))
    os.mkfifo(tmp_path / "model.safetensors")
    assert "cannot be read" in str(read_model(str(tmp_path)))
    os.mkfifo(tmp_path / "tokenizer_config.json")
    assert has_chat_template(tmp_path) is None


def test_a_profile_with_a_key_of_thousands_of_parts_costs_no_time(tmp_path: Path) -> None:
    """tomllib's time grows with the square of the parts: these would take minutes."""
    path = tmp_path / "profile.toml"
    began = time.monotonic()
    for text in (
        f"{'a.' * 200_000}a = 1",
        f"[{'a.' * 200_000}a]",
        f"a = {{{'a.' * 200_000}a = 1}}",
    ):
        path.write_text(text)
        assert run_files.read_toml(path) == {}, "as a recording"
        with pytest.raises(UserError, match="dots"):
            load.read_toml(path)
    assert time.monotonic() - began < 5


ASKS = """
import os, sys
from pathlib import Path
from atropos_tui.profile.budget import inventory
os.environ["PYTHONPATH"] = sys.argv[1]
inventory.build(Path(sys.argv[1]), {"model_type": "strange"})
"""


def test_what_builds_a_model_dies_with_who_asked(tmp_path: Path) -> None:
    """A builder that never ends: it wrote its pid, and its parent is killed."""
    (tmp_path / "trainer_core").mkdir()
    (tmp_path / "trainer_core/__init__.py").touch()
    (tmp_path / "trainer_core/shapes.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'aside')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'aside')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(600)\n"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    asking = subprocess.Popen([sys.executable, "-c", ASKS, str(tmp_path)], env=environment)
    try:
        while not (tmp_path / "pid").exists():
            assert asking.poll() is None
            time.sleep(0.02)
        builder = int((tmp_path / "pid").read_text())
        asking.kill()
        asking.wait()
        deadline = time.monotonic() + 5
        while (row := procfs.read(builder)) is not None and row.alive:
            assert time.monotonic() < deadline, "it lives on"
            time.sleep(0.02)
    finally:
        asking.kill()
        asking.wait()
        if (
            (tmp_path / "pid").exists()
            and (row := procfs.read(int((tmp_path / "pid").read_text())))
            and row.alive
        ):
            os.kill(row.pid, signal.SIGKILL)


def test_the_builder_has_a_limit_of_memory() -> None:
    code = (
        "import resource, trainer_core.shapes as s; s.limit_memory();"
        "print(resource.getrlimit(resource.RLIMIT_DATA)[0])\n"
        "try: bytearray(1 << 50)\nexcept MemoryError: print('refused')"
    )
    limit, said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert (
        0
        < int(limit)
        <= max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, 4 << 30)
    )
    assert said == "refused"
