"""Plans for other hardware, the settings with which a stack fits it, and `memory` for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atropos_common.models import model_math
from atropos_tui.cli.main import run
from atropos_tui.cli.start import up
from atropos_tui.profile.budget import inventory as inputs
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.fit import LAST, SLACK, advice, budget_with, fits, nearest, settle
from atropos_tui.profile.budget.inventory import (
    Gpu,
    Hardware,
    Model,
    model_shapes,
    named_machine,
    read_model,
)
from atropos_tui.profile.budget.memory import Inventory, site_budget
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.ports import free_port
from atropos_tui.profile.profile import load_profile, parse_profile
from atropos_tui.profile.site import Site, make_site, training_config
from tests.atropos_tui.profile.support import ask
from trainer_core.shapes import describe

GIB = 1024**3
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
QWEN3_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
"""As the makers publish it: heads, vocabulary and the like are the class's defaults."""
QWEN3_1_7B = QWEN3_32B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN25_14B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
}


def model(config: Mapping[str, Any]) -> Model:
    return Model(dict(config), model_shapes(config) or {}, "config.json")


def site_of(
    trainer: dict[str, Any] | None = None, vllm: dict[str, Any] | None = None, **top: Any
) -> Site:
    """One GPU in single copy unless told otherwise."""
    data: dict[str, Any] = {
        "name": "p",
        "model": "/m",
        "env": {"module": "json"},
        "vllm": {"gpus": [0], "max_model_len": 4096} | (vllm or {}),
        "trainer": {"gpus": [0], "seq_len": 4096, "pack_tokens": 16_384} | (trainer or {}),
    }
    return make_site(parse_profile(data | top, "p.toml"), Path("/runs/r"), run_id="r")


def inventory(gpus: str, config: Mapping[str, Any] = LLAMA_8B, **more: Any) -> Inventory:
    return Inventory(named_machine(gpus), {"vllm": model(config)}, **more)


def devices(site: Site, found: Inventory) -> dict[str, dict[str, int]]:
    return {
        device.name: {f"{item.component} {item.what}": item.bytes or 0 for item in device.items}
        for device in site_budget(site, found).devices
    }


# Hardware by name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100", [81_559] * 8),
        ("H100", [81_559]),
        ("1xH100-80GB", [81_559]),
        ("2xh200", [143_771] * 2),
        ("2 x NVIDIA H200", [143_771] * 2),
        ("H200-141GB", [143_771]),
        ("A100-40GB", [40_960]),
        ("a100", [81_920]),
        ("rtx 4090", [24_564]),
        ("4x80GB", [80 * 1024] * 4),
        ("1xMI300X-192GiB", [192 * 1024]),
        ("1xH100-64GB", [64 * 1024]),
        ("1xH200,2xL40S", [143_771, 46_068, 46_068]),
    ],
)
def test_gpus_are_named(text: str, expected: list[int]) -> None:
    machine = named_machine(text)
    assert [gpu.total // 1024**2 for gpu in machine.gpus] == expected
    assert machine.host is None and not machine.is_here


@pytest.mark.parametrize(
    "text", ["", "x", "8x", "0xH100", "9999xH100", "8xH1000", "-3xH100", "80", "4x0GB", "H100;ls"]
)
def test_gpus_that_are_not_known_are_words(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"not a list of GPUs such as 8xH100|use one of B200, H200.*as 4x80GB"
    ):
        named_machine(text)


# What a model is made of


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_8B, 8_030_261_248), (QWEN3_32B, 32_762_123_264), (QWEN3_1_7B, 1_720_574_976)],
)
def test_published_models_are_counted_exactly(config: dict[str, Any], parameters: int) -> None:
    assert model(config).parameters == parameters


@pytest.mark.slow
def test_any_architecture_is_counted_by_transformers_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    found = read_model(str(tmp_path))
    assert isinstance(found, Model) and (found.source, found.parameters) == (
        "transformers",
        30_532_122_624,
    )
    assert found.dimensions.head_norms and found.dimensions.experts == 128
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is kept"))
    assert read_model(str(tmp_path)) == found


@pytest.fixture
def _in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing transformers once more takes seconds."""
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inputs, "_build_in_child", describe)


@pytest.mark.usefixtures("_in_this_process")
def test_what_a_configuration_leaves_out_is_the_class_s_default(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    found = read_model(str(tmp_path))
    assert isinstance(found, Model) and found.parameters == 4_300_079_472
    assert (found.dimensions.heads, found.dimensions.kv_heads, found.dimensions.head_size) == (
        8,
        4,
        256,
    )
    assert found.dimensions.vocab == 262_208 and found.max_length == 131_072


@pytest.mark.usefixtures("_in_this_process")
def test_what_transformers_cannot_build_is_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Unheard"], "model_type": "unheard"})
    )
    assert "no formula for Unheard, and transformers" in str(read_model(str(tmp_path)))
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    assert "not installed here" in str(read_model(str(tmp_path))), "a laptop"


def test_a_process_that_does_not_answer_is_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inputs.sys, "executable", "/bin/false")
    assert "CalledProcessError" in str(inputs.build(tmp_path, {"model_type": "llama"}))
    assert not (tmp_path / "cache/shapes").exists(), "the next time it may answer"


def test_the_hub_is_asked_for_config_json_alone_unless_it_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, against a hub of our own: the real client reads its settings when it
    is imported."""
    code = """
import http.server, json, os, sys, threading
asked = []
class Hub(http.server.BaseHTTPRequestHandler):
    def answer(self):
        asked.append(self.path)
        body = json.dumps(CONFIG).encode()
        known = self.path.startswith("/owner/name/")
        self.send_response(200 if known or self.path == "/" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"a1"')
        self.send_header("X-Repo-Commit", "c" * 40)
        if not known: self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET": self.wfile.write(body)
    do_GET = do_HEAD = answer
    def log_message(self, *args): pass
CONFIG = json.loads(sys.argv[1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ["NO_PROXY"] = "127.0.0.1"
import huggingface_hub.constants
from atropos_tui.profile.budget.inventory import read_model
os.environ["HF_HUB_OFFLINE"] = "1"
print(read_model("owner/name"))
assert not asked
del os.environ["HF_HUB_OFFLINE"]
print(read_model("owner/name").parameters)
print(read_model("owner/none"))
assert all(path.endswith("/config.json") for path in asked if "owner" in path), asked
server.shutdown(); server.server_close(); asked.clear()
print(read_model("owner/name").parameters, len(asked))
print(read_model("owner/other"))
"""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    command = [sys.executable, "-c", code, json.dumps(LLAMA_8B)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    offline, counted, unknown, again, unreachable = done.stdout.splitlines()
    assert "HF_HUB_OFFLINE turns the hub off" in offline
    assert "has no owner/none, or needs a token for it (hf auth login)" in unknown
    assert counted == "8030261248" and again == "8030261248 0", "the second time from the cache"
    assert "cannot be reached: fill the cache" in unreachable


# The budget


def test_what_is_offloaded_counts_on_the_host() -> None:
    plain = devices(site_of({"optimizer": "adamw"}), inventory("H200"))
    away = devices(site_of({"optimizer": "adamw", "optimizer_offload": True}), inventory("H200"))
    parameters = model(LLAMA_8B).parameters
    assert plain["GPU 0"]["trainer master weights"] == 4 * parameters and "host" not in plain
    assert not {"trainer master weights", "trainer optimizer state"} & away["GPU 0"].keys()
    assert 12 * parameters <= away["host"]["trainer masters, states"] < 24 * parameters, (
        "pinned: powers of two"
    )


def test_gradients_in_bfloat16_are_half() -> None:
    wide = devices(site_of(), inventory("H200"))["GPU 0"]["trainer gradients"]
    assert (
        devices(site_of({"gradient_dtype": "bfloat16"}), inventory("H200"))["GPU 0"][
            "trainer gradients"
        ]
        == wide // 2
    )


def test_checkpointing_and_its_offload() -> None:
    sizes = {}
    for name, more in {
        "off": {"gradient_checkpointing": "off"},
        "on": {"gradient_checkpointing": "on"},
        "auto": {},
        "away": {"gradient_checkpointing": "on", "activation_offload": True},
    }.items():
        # A small optimizer: else its step takes more than a pass with checkpointing.
        found = devices(site_of({"optimizer": "adamw", **more}), inventory("H200"))
        sizes[name] = found["GPU 0"]["trainer activations"]
        assert ("trainer activations" in found.get("host", {})) == (name == "away")
    assert sizes["auto"] == sizes["on"] < sizes["off"] / 3, (
        "122 GiB are taken by the rest: no room without"
    )
    assert sizes["away"] <= sizes["on"] - 29 * 16_384 * 4096 * 2
    roomy = devices(
        site_of({"optimizer": "adamw"}, {"gpu_memory_utilization": 0.2}), inventory("1x500GB")
    )
    logits = 2 * 16_384 * 128_256
    assert roomy["GPU 0"]["trainer activations"] == sizes["off"] + logits, (
        "auto leaves it off where there is room"
    )


def test_lora_over_the_one_copy_has_one_base() -> None:
    two = devices(site_of(mode="lora_only"), inventory("H200"))["GPU 0"]
    one = devices(site_of({"single_copy": True}, mode="lora_only"), inventory("H200"))["GPU 0"]
    assert two["trainer weights"] == 2 * model(LLAMA_8B).parameters
    assert "trainer weights" not in one
    assert two["trainer gradients"] == two["trainer adapters"] < 0.1 * GIB


def test_all_linear_adapters_and_the_engine_s_slots_are_counted() -> None:
    site = site_of({"lora_target_modules": ["all-linear"], "lora_r": 16}, mode="lora_only")
    found = devices(site, inventory("H200"))["GPU 0"]
    layer = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14_336))
    assert found["trainer adapters"] == 4 * 32 * layer
    assert found["vllm adapters"] == 2 * 2 * 32 * layer, (
        "two slots, which the plan asks for, in half precision"
    )


def test_adapters_on_the_upper_layers_keep_nothing_of_those_below() -> None:
    def kept(**more: Any) -> int:
        settings = {"gradient_checkpointing": "off", "lora_target_modules": ["q_proj"]} | more
        return devices(site_of(settings, mode="lora_only"), inventory("H200"))["GPU 0"][
            "trainer activations"
        ]

    whole, half = kept(), kept(lora_layer_indices="16-31")
    assert whole / 2.2 < half < whole / 1.6
    assert kept(lora_target_modules=["all-linear"]) > 1.3 * whole, (
        "adapters keep their inputs in float32"
    )


def test_cuda_graphs_are_counted_by_their_sizes() -> None:
    def graphs(**args: Any) -> int:
        found = devices(site_of(vllm={"args": args} if args else {}), inventory("H200"))["GPU 0"]
        return found.get("vllm CUDA graphs", 0) // (32 * memory.GRAPH)

    assert (
        graphs() == 51
        and graphs(**{"max-num-seqs": 64}) == 19
        and graphs(**{"enforce-eager": True}) == 0
    )


@pytest.mark.parametrize(
    ("settings", "peak"),
    [
        ({"gradient_checkpointing": "off"}, 70.1e9),
        ({"gradient_checkpointing": "on"}, 37.8e9),
        ({"gradient_checkpointing": "off", "optimizer": "adamw_8bit"}, 59.8e9),
        ({"gradient_checkpointing": "off", "master_weights": "stochastic"}, 63.2e9),
    ],
)
def test_the_trainer_s_peak_is_what_was_measured(settings: dict[str, Any], peak: float) -> None:
    """One NVIDIA H200, docs/benchmarks.md, "One optimizer step": Qwen3-1.7B's shape, rows of 16,384
    tokens."""
    site = site_of({"optimizer": "adamw", "seq_len": 2048} | settings, mode="none")
    found = devices(site, inventory("H200", QWEN3_1_7B))["GPU 0"]
    planned = sum(
        size for key, size in found.items() if key.startswith("trainer") and "CUDA" not in key
    )
    assert planned == pytest.approx(peak, rel=0.02)


def test_a_mixture_computes_with_the_chosen_experts_and_holds_all() -> None:
    dimensions = model_math.Dimensions.of(QWEN3_30B_A3B, head_norms=True)
    dense = model_math.Dimensions.of(
        QWEN3_30B_A3B | {"num_experts": 0, "intermediate_size": 8 * 768}, head_norms=True
    )
    sparse, same = (
        model_math.activation_bytes(d, 4096, width=2, on_gpu=True).total
        for d in (dimensions, dense)
    )
    assert same < sparse < 1.7 * same


# The search


def test_what_fits_stays_as_it_is() -> None:
    (found,) = nearest(
        site_of(vllm={"gpu_memory_utilization": 0.3}), inventory("8xB200", QWEN3_1_7B)
    )
    assert found.settings == {} and found.cost == 1.0


def test_eight_billion_on_one_card_of_80_gb() -> None:
    """The guides' own example; in single copy, all of it trained."""
    site, there = site_of(vllm={"gpu_memory_utilization": 0.4}), inventory("1xH100")
    found = nearest(site, there)
    assert 1 < len(found) <= 3 and [fit.cost for fit in found] == sorted(fit.cost for fit in found)
    assert found[0].cost < LAST, "without a loss of precision in the gradients"
    for fit in found:
        assert fits(fit.budget, SLACK) and fit.settings
        again = parse_profile(
            {"name": "p", "model": "/m", "env": {"module": "json"}}
            | _merged(site, tomllib.loads("\n".join(fit.lines))),
            "p.toml",
        )
        pasted = make_site(again, Path("/runs/r"), run_id="r")
        assert site_budget(pasted, there).devices == fit.budget.devices, (
            "the lines say what was found"
        )
    for one in found:
        for other in found:
            assert one is other or not one.settings.keys() <= other.settings.keys()


def _merged(site: Site, lines: dict[str, Any]) -> dict[str, Any]:
    data = site.profile.model_dump(mode="json", exclude_unset=True)
    vllm, trainer = (
        data["vllm"][0] | lines.get("vllm", {}),
        data["trainer"] | lines.get("trainer", {}),
    )
    return {"vllm": vllm, "trainer": trainer, "mode": lines.get("mode", site.profile.mode)}


def test_the_cheapest_is_first_and_nothing_cheaper_fits() -> None:
    site, there = site_of({"optimizer": "adamw"}), inventory("1x64GB", QWEN3_1_7B)
    first = nearest(site, there, most=1)[0]
    settings = training_config(site)
    for key in first.settings:
        fewer = {other: value for other, value in first.settings.items() if other != key}
        assert not fits(budget_with(site, settings, there, fewer), SLACK), (
            f"{key} would not have been needed"
        )


def test_a_host_that_is_too_small_takes_no_optimizer() -> None:
    site, gpu = site_of(vllm={"gpu_memory_utilization": 0.4}), Gpu("H100", 81_559 * 1024**2)
    for host, offloads in ((16 * GIB, False), (512 * GIB, True)):
        found = nearest(site, Inventory(Hardware((gpu,), host), {"vllm": model(LLAMA_8B)}), most=9)
        assert any("trainer.optimizer_offload" in fit.settings for fit in found) is offloads


def test_adapters_are_the_last_way_and_bfloat16_gradients_the_one_before() -> None:
    site = site_of(vllm={"gpu_memory_utilization": 0.5})
    *others, last = nearest(site, inventory("1xH200", QWEN3_32B))
    assert last.settings["mode"] == "lora_only" and last.settings["trainer.single_copy"] is True
    assert all(fit.settings["trainer.gradient_dtype"] == "bfloat16" for fit in others)
    assert (
        nearest(site, inventory("1xL4", QWEN3_32B)) == []
        and "smaller model" in advice(site, inventory("1xL4"))[0]
    )


@pytest.mark.parametrize(("optimizer", "spreads"), [("adamw", True), ("adafactor", False)])
def test_what_several_ranks_cannot_do_is_not_proposed(optimizer: str, spreads: bool) -> None:
    site = site_of(
        {"gpus": [1], "optimizer": optimizer}, {"gpu_memory_utilization": 0.9}, mode="broadcast"
    )
    found = [fit.settings for fit in nearest(site, inventory("3xH100", QWEN25_14B), most=9)]
    spread = [settings for settings in found if "trainer.gpus" in settings]
    assert found and bool(spread) is spreads
    assert all(settings.get("trainer.optimizer", optimizer) != "adafactor" for settings in spread)


def test_an_engine_with_too_small_a_share_is_given_more() -> None:
    site = site_of({"optimizer": "adafactor"}, {"gpu_memory_utilization": 0.1})
    assert "will not start" in site_budget(site, inventory("2xH200")).warnings[0]
    assert (
        nearest(site, inventory("2xH200"), most=1)[0].settings["vllm.gpu_memory_utilization"] > 0.1
    )


def test_the_8_bit_optimizer_is_proposed_where_its_package_is() -> None:
    site, kept = (
        site_of({"optimizer": "adamw"}, {"gpu_memory_utilization": 0.3}),
        {"vllm.gpu_memory_utilization"},
    )
    for there in (True, False):
        found = nearest(
            site, inventory("1x40GB", QWEN3_1_7B, has_eight_bit=there), fixed=kept, most=9
        )
        assert any(fit.settings.get("trainer.optimizer") == "adamw_8bit" for fit in found) is there


# memory = auto | speed | fit


def settled(
    trainer: dict[str, Any], gpus: str = "1xH100", **vllm: Any
) -> tuple[dict[str, Any], str]:
    """Return the keys added to [trainer] and [vllm], and the line."""
    site = site_of(trainer, vllm)
    after, line = settle(site, inventory(gpus))
    added = {
        k: v
        for k, v in after.profile.trainer.settings.items()
        if k not in site.profile.trainer.settings
    }
    share = after.profile.vllm[0].gpu_memory_utilization
    return added | ({} if share == vllm.get("gpu_memory_utilization") else {"share": share}), line


def test_auto_changes_nothing_where_all_fits() -> None:
    added, line = settled({"optimizer": "adamw"}, "1x400GB", gpu_memory_utilization=0.2)
    assert added == {} and line == "memory = auto: no change, the stack fits as it is"


def test_auto_chooses_what_fits_and_says_why() -> None:
    added, line = settled({}, gpu_memory_utilization=0.4)
    assert (
        "trainer." in line and added and "GPU 0 lacks" in line and all(key in line for key in added)
    )
    site, _ = settle(site_of({}, {"gpu_memory_utilization": 0.4}), inventory("1xH100"))
    assert fits(site_budget(site, inventory("1xH100")))
    assert training_config(site).model_fields_set >= added.keys(), "the trainer gets plain flags"


def test_what_the_user_sets_stays() -> None:
    asked = {
        "optimizer": "adamw",
        "master_weights": "fp32",
        "optimizer_offload": False,
        "gradient_dtype": "float32",
    }
    added, line = settled(asked, gpu_memory_utilization=0.4)
    assert added == {} and "no free setting makes it fit; GPU 0 lacks" in line
    added, _ = settled({"optimizer": "adamw", "master_weights": "fp32"}, gpu_memory_utilization=0.4)
    assert added == {"optimizer_offload": True}


def test_auto_sets_vllm_s_share_where_nobody_has() -> None:
    added, _ = settled({"optimizer": "adamw"}, "1x400GB")
    assert 0.1 < added["share"] < 0.9, "vLLM's own 0.92 leaves nothing for a trainer beside it"


def test_speed_changes_nothing_and_fit_takes_little() -> None:
    assert settled({"memory": "speed"}, gpu_memory_utilization=0.4) == ({}, "")
    added, line = settled({"memory": "fit"}, "1x400GB", gpu_memory_utilization=0.2)
    assert added == {
        "gradient_checkpointing": "on",
        "activation_offload": True,
        "optimizer_offload": True,
    }
    assert "the smallest GPU memory" in line
    assert settled(
        {"memory": "fit", "gradient_checkpointing": "off"}, "1x400GB", gpu_memory_utilization=0.2
    )[0] == {"optimizer_offload": True}


def test_nothing_is_chosen_where_nothing_is_known() -> None:
    assert settle(site_of({"device": "cpu"}, {"gpus": []}), inventory("1xH100"))[1] == ""
    unknown = Inventory(named_machine("1xH100"), {"vllm": "model not on this machine"})
    assert settle(site_of(), unknown)[1] == ""
    assert settle(site_of(), Inventory(Hardware((), 64 * GIB), {"vllm": model(LLAMA_8B)}))[1] == ""


@pytest.mark.parametrize(
    "name", sorted(n for n in shipped_profiles() if "72b" not in n and "32b" not in n)
)
def test_shipped_profiles_fit_on_80_gb_cards(name: str) -> None:
    """As they are, but for a trainer with 14 billion parameters on one, which `memory = auto` makes
    fit."""
    profile, _ = load_profile(name)
    site = make_site(profile, Path("/runs/r"), run_id="r")
    engines = [gpu for engine in profile.engines for gpu in engine.gpus]
    cards = max([0, *engines, *profile.trainer.gpus]) + 1
    there = inventory(f"{cards}xH100", QWEN25_14B if "14B" in profile.model else QWEN3_1_7B)
    there = replace(there, models={each.name: there.models["vllm"] for each in profile.vllm})
    after, _ = settle(site, there)
    assert (
        fits(site_budget(after, there)) and (after.profile == profile) is not name.endswith("-tp2")
    ) or ("single-copy" in name and after.profile == profile)


# On the command line


def in_folder(tmp_path: Path, config: Mapping[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"model={tmp_path}"


def test_plan_for_gpus_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "read_machine", lambda: pytest.fail("this machine is not asked"))
    sets = ["--set", in_folder(tmp_path, LLAMA_8B)]
    assert run(["plan", "gsm8k", *sets, "--gpus", "1xH100"]) == 0
    shown = capsys.readouterr().out
    assert (
        "GPU 0 (H100): " in shown and "of 79.6 GiB" in shown and "memory = auto: trainer." in shown
    )
    assert "--optimizer-offload true" in shown, "the plan has what was chosen"
    assert run(["plan", "gsm8k", *sets, "--set", "trainer.memory=speed", "--gpus", "1xH100"]) == 2
    said = capsys.readouterr()
    assert (
        "The nearest settings that fit, cheapest first:" in said.out
        and "\n    [trainer]\n" in said.out
    )
    assert "1xH100 cannot run this profile" in said.err and "    fix: set trainer." in said.err
    assert run(["plan", "gsm8k", *sets, "--gpus", "1xH100", "--json"]) == 0
    budget = json.loads(capsys.readouterr().out)["budget"]
    (gpu,) = [device for device in budget["devices"] if device["name"] == "GPU 0"]
    parts = budget["by_component"]
    assert (
        parts["vllm"]["GPU 0"] + parts["trainer"]["GPU 0"] == gpu["wanted"]
        and parts["trainer"]["host"] > 0
    )
    assert run(["plan", "gsm8k-tp2", "--gpus", "2xH100"]) == 2
    assert "GPU 2 does not exist: that machine has GPUs 0-1" in capsys.readouterr().err
    assert run(["plan", "gsm8k", "--gpus", "8xFOO"]) == 2
    assert "unknown GPU 'FOO'" in capsys.readouterr().err


def test_validate_tells_the_machine_from_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "read_machine", lambda: Hardware((), 400 * GIB))
    sets = ("--set", in_folder(tmp_path, QWEN3_1_7B))
    code, said = ask(["validate"], "gsm8k", *sets)
    assert code == 2 and "the profile is valid, but cannot start on this machine" in said
    code, said = ask(["validate"], "gsm8k", *sets, "--set", "vllm.max_model_len=99999")
    assert code == 2 and "cannot start this profile" in said and "limit is 40960 tokens" in said
    assert run(["validate", "gsm8k", *sets, "--gpus", "1xH100"]) == 0
    assert "valid (shared_vllm" in capsys.readouterr().out
    code, said = ask(["validate"], "gsm8k", *sets, "--gpus", "1x8GB")
    assert code == 2 and "cannot start this profile on 1x8GB" in said


def test_a_resume_keeps_what_its_checkpoints_are_of() -> None:
    site, found = site_of({}, {"gpu_memory_utilization": 0.4}), inventory("1xH100")
    chosen = settle(site, found)[0].profile.trainer.settings
    kept = settle(site, found, resumed=True)[0].profile.trainer.settings
    state = {"optimizer", "master_weights", "gradient_dtype"}
    assert state & chosen.keys() and not state & kept.keys()


def test_up_writes_what_was_chosen_into_the_run_and_a_resume_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        memory, "read_machine", lambda: Hardware((Gpu("H100", 81_559 * 1024**2),), 512 * GIB)
    )
    monkeypatch.setattr(up, "spawn_supervisor", lambda run, stack, lock: os.close(lock))
    ports = [
        part for key in ("api.port", "vllm.port") for part in ("--set", f"{key}={free_port()}")
    ]
    sets = ["--set", in_folder(tmp_path, LLAMA_8B), *ports]
    where = tmp_path / "run"
    assert run(["up", "gsm8k", *sets, "--detach", "--run-dir", str(where)]) == 0
    assert (
        "memory = auto: trainer.optimizer_offload = true (GPU 0 lacks " in capsys.readouterr().out
    )
    assert (
        tomllib.loads((where / "profile.toml").read_text())["trainer"]["optimizer_offload"] is True
    )
    assert "--optimizer-offload" in (where / "plan.json").read_text()
    for profile in ([], ["gsm8k", *sets]):
        assert run(["up", *profile, "--detach", "--resume", str(where)]) == 0
        assert "changed profile" not in capsys.readouterr().out
