"""Profiles of the cluster tests: stand-ins on three nodes, which start in a second, and the real
demo."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.processes import HOSTS, free_port

STAND_INS = Path(__file__).parent / "stand_ins"
NODES = """
[[node]]
name = "first"
[[node]]
name = "second"
[[node]]
name = "third"
"""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
"""Configuration that checks read before a start; stand-ins load no weights."""
LIGHT = """
extends = "demo"
name = "light"
model = "{model}"
{cluster}
[[prepare]]
name = "warm-start"
command = ["true"]
[api]
port = {api}
command = ["python", "-I", "-c", "import time; time.sleep(3600)"]
readiness = {{ checks = [{{ kind = "exec", command = ["true"] }}] }}
liveness = {{ checks = [{{ kind = "exec", command = ["true"] }}] }}
[env]
name = "arithmetic"
command = ["python", "-I", "-c", "import time; time.sleep(3600)"]
[vllm]
port = {engine}
node = "second"
env = {{ PYTHONPATH = "{stand_ins}" }}
startup = {{ checks = [{{ kind = "log", pattern = "up" }}] }}
readiness = {{ checks = [{{ kind = "exec", command = ["true"] }}] }}
liveness = {{ checks = [{{ kind = "exec", command = ["true"] }}] }}
[trainer]
node = "second"
training_steps = {steps}
startup = {{ checks = [{{ kind = "log", pattern = "step" }}] }}
env = {{ PYTHONPATH = "{stand_ins}" }}
"""


def light(folder: Path, cluster: str, steps: int = 100_000) -> Path:
    """A profile of stand-ins; `cluster` is the text of its [cluster] and [[node]] tables."""
    (model := folder / "model").mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    file = folder / "light.toml"
    ports = {"api": free_port(), "engine": free_port()}
    file.write_text(
        LIGHT.format(cluster=cluster, model=model, stand_ins=STAND_INS, steps=steps, **ports)
    )
    return file


def slurm_tables(*more: str, nodes: str = NODES) -> str:
    """The tables of a profile for SLURM; `more` are lines of [cluster]."""
    return "\n".join(["[cluster]", 'launcher = "slurm"', 'time = "00:10:00"', *more, nodes])


def ssh_tables(config: Path) -> str:
    """The tables of a profile for ssh to the test's hosts; this process is on the first."""
    return "\n".join(["[cluster]", 'launcher = "ssh"', f'ssh = ["-F", "{config}"]', *hosts()])


def ray_tables(address: str) -> str:
    """The tables of a profile for a Ray cluster with nodes of those names."""
    return "\n".join(["[cluster]", 'launcher = "ray"', f'address = "{address}"', *hosts()])


def hosts() -> list[str]:
    """Three [[node]]s that are named in the profile."""
    return [
        f'[[node]]\nname = "{name}"\nhosts = ["{host}"]\naddresses = ["{HOSTS[host]}"]\n'
        for name, host in zip(("first", "second", "third"), HOSTS, strict=True)
    ]


DEMO = """
extends = "demo"
name = "demo-nodes"
mode = "broadcast"
{cluster}
[api]
port = {api}
node = "first"
[env]
name = "arithmetic"
module = "atropos_envs.arithmetic_server"
node = "first"
[vllm]
port = {engine}
node = "first"
[trainer]
node = "train"
training_steps = {steps}
"""


def demo(folder: Path, cluster: str, steps: int) -> Path:
    """The shipped demo with an engine on one node and a trainer rank on each of two others."""
    file = folder / "demo.toml"
    file.write_text(DEMO.format(cluster=cluster, api=free_port(), engine=free_port(), steps=steps))
    return file


def demo_nodes(launcher: str, *more: str) -> str:
    """The tables for that: SLURM chooses the hosts itself."""
    first, train = '[[node]]\nname = "first"\n', '[[node]]\nname = "train"\ncount = 2\n'
    if launcher != "slurm":
        n1, *others = HOSTS
        first += f'hosts = ["{n1}"]\naddresses = ["{HOSTS[n1]}"]\n'
        train += (
            f"hosts = {json.dumps(others)}\naddresses = "
            f"{json.dumps([HOSTS[each] for each in others])}\n"
        )
    return "\n".join(["[cluster]", f'launcher = "{launcher}"', *more, first, train])
