"""Planted faults in single copy on a GPU, under 16 streams with CUDA graphs and prefix cache: the
gate names each.

python -m pytest -m gpu tests/gpu/test_faults.py -s        # three servers at once, about three
minutes
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from atropos_envs.tiny_model import build_tiny_model, save_model
from tests.e2e.gate import Live, alignments, shift, stopped_for, train_on, train_on_copies
from tests.e2e.streams import Streams
from tests.e2e.vllm_server_live import Server, end_of
from tests.gpu.test_weight_sync import begin, until_ready
from tests.trainer_core.stand_ins import TOKEN

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
HERE: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cuda:0",
    "lr": 1e-2,
    "alignment_ok": 0.05,
    "alignment_mismatch": 0.1,
}
"""Bounds below those of bfloat16: faults that grow with the weights' way reach them in tens of
steps."""
PLUGIN = Path(__file__).parents[1] / "e2e" / "planted_plugin"
WHOLE_GRAPHS = ("-cc.mode=none", "-cc.cudagraph_mode=full_decode_only")
"""Without torch.compile: the planted model is Python that a graph is captured from."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("faults")
    model = save_model(build_tiny_model(dtype="bfloat16", vocab_rows=128), folder / "model")
    python_path = os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])
    started = {
        "clean": begin("shared_vllm", model, folder / "clean"),
        "stale prefix": begin(
            "shared_vllm", model, folder / "prefix", "--middleware", "tests.e2e.planted.StalePrefix"
        ),
        "stale graph": begin(
            "shared_vllm", model, folder / "graph", *WHOLE_GRAPHS, PYTHONPATH=python_path
        ),
    }
    yield started
    for server in started.values():
        end_of(server.process)


@pytest.fixture
def clean(servers: dict[str, Server]) -> Server:
    until_ready(servers["clean"])
    return servers["clean"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", TOKEN)


def test_nothing_planted_stays_aligned(clean: Server, tmp_path: Path) -> None:
    """The same run as below, as long: what the gate says there is the fault's doing."""
    with Streams(clean.url, TOKEN, with_token=True) as load:
        found = alignments(
            train_on(clean, tmp_path, training_steps=40, stop_on_mismatch=True, **HERE)
        )
    load.assert_whole()
    probes = [
        record.probe_diff_abs_mean for record in found if record.probe_diff_abs_mean is not None
    ]
    print(f"\nprobe: mean {mean(probes):.4f}, largest {max(probes):.4f}")
    assert {record.verdict for record in found} == {"ok"}
    assert "Graph capturing finished" in clean.log.read_text(), "CUDA graphs were on"


@pytest.mark.parametrize(
    ("part", "words"), [("mlp.gate_up_proj.weight", "only in part"), ("", "has not moved")]
)
def test_tensors_that_the_server_does_not_see(
    clean: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, words: str
) -> None:
    """One tensor of each layer, as of graphs that compute with copies of them; then all tensors.
    One tensor alone is for the test on a CPU: here rounding hides what it does, in a run that comes
    to rest early."""
    train_on_copies(monkeypatch, lambda name: part in name, clean, tmp_path, **HERE)
    found = stopped_for("stale weights", clean, tmp_path, **HERE)
    print(f"\nstep {found.step}: {found.cause}")
    assert words in found.cause


def test_a_wrong_temperature_is_named(clean: Server, tmp_path: Path) -> None:
    assert (
        "fit 0.70"
        in stopped_for("temperature", clean, tmp_path, Live(clean, temperature=0.7), **HERE).cause
    )


def test_shifted_logprobs_are_named(clean: Server, tmp_path: Path) -> None:
    assert stopped_for("shifted logprobs", clean, tmp_path, Live(clean, shift), **HERE).step == 1


def test_a_stale_prefix_cache_is_named(servers: dict[str, Server], tmp_path: Path) -> None:
    server = servers["stale prefix"]
    until_ready(server)
    assert stopped_for("stale prefix cache", server, tmp_path, **HERE).probe_cached_tokens


def test_a_stale_graph_is_found_before_anybody_is_served(
    servers: dict[str, Server], tmp_path: Path
) -> None:
    """The server sees it by itself, starts again without graphs, says why, and is right then."""
    server = servers["stale graph"]
    until_ready(server)
    log = server.log.read_text()
    assert "Graph capturing finished" in log, "graphs were captured, and they were wrong"
    assert (
        "model.norm.weight: this model computes from a copy of these weights with CUDA graphs"
        in log
    )
    assert "model.norm.weight" in server.get("/bridge/info").json()["eager_because"]
    found = alignments(train_on(server, tmp_path, training_steps=20, **HERE))
    assert {record.verdict for record in found} == {"ok"}
