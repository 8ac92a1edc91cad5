"""`init` on a terminal and without one: its profile is valid, and it overwrites nothing."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest

from atropos_tui.cli import main
from atropos_tui.cli.start import init
from atropos_tui.cli.start.init import SCHEMA_FILE, default_model
from atropos_tui.cli.start.profiles import planned_site, schema_text
from atropos_tui.errors import Exit
from atropos_tui.profile.budget import memory
from atropos_tui.profile.budget.fit import lack
from atropos_tui.profile.budget.inventory import Gpu, Hardware
from atropos_tui.profile.budget.memory import site_budget, take_inventory
from atropos_tui.profile.checks.consistency import check_notes
from atropos_tui.profile.ports import is_free
from atropos_tui.profile.profile import Profile, load_profile, profile_schema
from atropos_tui.profile.site import TRAITS, make_site


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def written(file: str) -> Profile:
    """The profile, which points at the schema beside it and agrees with it."""
    text = Path(file).read_text()
    assert text.splitlines()[0] == f"#:schema ./{SCHEMA_FILE}"
    assert (Path(file).parent / SCHEMA_FILE).read_text() == schema_text()
    jsonschema.validate(tomllib.loads(text), profile_schema(), jsonschema.Draft7Validator)
    return load_profile(file)[0]


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("mode", TRAITS)
@pytest.mark.parametrize("env", ["gsm8k", "arithmetic", "math-zero", "own.py"])
def test_what_it_writes_is_valid(
    env: str,
    mode: str,
    gpus: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(init, "gpu_count", lambda: gpus)
    monkeypatch.setattr(
        memory, "read_machine", lambda: Hardware((Gpu("NVIDIA H100", 80 << 30),) * gpus, 512 << 30)
    )
    Path("own.py").touch()
    if main.run(["init", "p.toml", "--yes", "--env", env, "--mode", mode]) == Exit.USAGE:
        assert "fix: " in capsys.readouterr().err and not Path("p.toml").exists(), (
            "refused in words, by the checks"
        )
        assert not TRAITS[mode].shares_memory, "single copy runs everywhere"  # type: ignore[index]
        return
    profile = written("p.toml")
    assert profile.mode == mode and profile.vllm[0].gpus == ([0] if gpus else [])
    assert profile.trainer.settings.get("device") == (None if gpus else "cpu")
    assert profile.trainer.settings.get("single_copy", False) == (mode == "lora_only" and gpus < 2)
    assert not any(
        "trainer.lr" in note for note in check_notes(make_site(profile, Path("r"), run_id="r"))
    )
    if env == "arithmetic":
        assert (
            ("rows128" in profile.model)
            == ("--vocab-rows" in profile.prepare[0].command)
            == bool(gpus)
        )
        assert profile.prepare[0].creates == profile.model
    assert "p.toml: written, valid" in capsys.readouterr().out
    assert main.run(["plan", "p.toml"]) == 0


def test_flags_reach_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "init",
        "--yes",
        "--name",
        "mine",
        "--env",
        "math-zero",
        "--model",
        'a "b"\\c/ü',
        "--api-port",
        "8111",
    ]
    assert main.run([*words, "--vllm-port", "8112", "--vllm-gpus", "3"]) == 0
    profile = written("mine.toml")
    assert "# beside the shipped profiles; a path works too" in Path("mine.toml").read_text(), (
        "its comments stay"
    )
    assert (profile.name, profile.model, profile.env[0].name) == ("mine", 'a "b"\\c/ü', "math-zero")
    assert (profile.api.port, profile.vllm[0].port, profile.vllm[0].gpus, profile.trainer.gpus) == (
        8111,
        8112,
        [3],
        [3],
    )
    assert "cannot start it yet" in capsys.readouterr().out, "GPU 3 and that model are not here"


@pytest.mark.parametrize(
    ("mode", "width", "rate"),
    [("shared_vllm", 64, 2e-4), ("shared_vllm", 512, 1e-5), ("lora_only", 64, 1e-4)],
)
def test_a_small_model_takes_a_higher_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, width: int, rate: float
) -> None:
    """0.2 and 38 million parameters."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    main.run(
        ["init", "m.toml", "--yes", "--env", "gsm8k", "--mode", mode, "--model", str(tmp_path)]
    )
    assert written("m.toml").trainer.settings["lr"] == rate
    said = "set because the model is small: trainer.lr"
    assert (said in capsys.readouterr().out) == (mode == "shared_vllm")


@pytest.mark.parametrize(("gpus", "kept"), [("", False), ("0", True)])
def test_a_profile_for_a_cpu_has_no_keys_of_gpus(gpus: str, kept: bool) -> None:
    main.run(["init", "--yes", "--env", "gsm8k", "--vllm-gpus", gpus, "mine.toml"])
    text = Path("mine.toml").read_text()
    assert [key in text for key in ("per_gpu", "gpu_memory_utilization")] == [kept] * 2


def test_defaults_avoid_taken_ports() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = next(port for port in range(8000, 65536) if is_free(port))
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert main.run(["init", "--yes", "--env", "gsm8k", "--vllm-port", str(port + 1)]) == 0
    profile = written("gsm8k.toml")
    assert profile.api.port not in (port, port + 1)


def test_the_port_after_the_engine_s_is_free_for_a_second_engine() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        second = next(port for port in range(9002, 65536) if is_free(port) and is_free(port - 1))
        taken.bind(("127.0.0.1", second))
        taken.listen()
        assert main.run(["init", "--yes", "--env", "gsm8k"]) == 0
    port = written("gsm8k.toml").vllm[0].port
    assert second not in (port, port + 1) and is_free(port) and is_free(port + 1)


def test_wrong_flags_are_listed_at_once_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--env",
        "gsm9k",
        "--mode",
        "shared",
        "--name",
        "a b",
        "--vllm-gpus",
        "-1",
        "--api-port",
        "0",
        "--model",
        "",
    ]
    assert main.run(["init", "--yes", *words]) == Exit.USAGE
    error = capsys.readouterr().err
    for expected in (
        "did you mean gsm8k?",
        "--mode: cannot be",
        "--name: ",
        "--vllm-gpus: ",
        "1 to 65535",
        "--model: ",
    ):
        assert expected in error
    assert error.count("fix: ") == 6 and list(Path().iterdir()) == []


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.toml").write_text("precious")
    assert main.run(["init", "p.toml", "--yes"]) == Exit.USAGE
    assert (
        "name another FILE" in capsys.readouterr().err and Path("p.toml").read_text() == "precious"
    )
    assert main.run(["init", "--yes", "--name", "p"]) == Exit.USAGE
    assert "name another FILE" in capsys.readouterr().err and not Path(SCHEMA_FILE).exists()
    Path("link.toml").symlink_to("nowhere")
    assert main.run(["init", "link.toml", "--yes"]) == Exit.USAGE
    assert main.run(["init", "no/such/p.toml", "--yes"]) == Exit.USAGE
    assert "no/such" in capsys.readouterr().err
    Path(SCHEMA_FILE).write_text('{"title": "another schema"}')
    assert main.run(["init", "q.toml", "--yes"]) == 0
    assert (
        "is kept" in capsys.readouterr().out and "another schema" in Path(SCHEMA_FILE).read_text()
    )
    Path(SCHEMA_FILE).write_text(schema_text().replace("boolean", "old"))
    assert main.run(["init", "r.toml", "--yes"]) == 0
    written("r.toml")


def test_no_terminal_to_ask_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["init"]) == Exit.USAGE
    assert "--yes" in capsys.readouterr().err and list(Path().iterdir()) == []


class Terminal:
    """A real terminal with `atropos-tui init` on it."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "atropos_tui", "init", *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def expect(self, words: str, *, seconds: float = 60) -> None:
        """Read until `words` appear; what came before is then forgotten."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} never came: {self.text!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 4096).decode()
                except OSError:
                    raise AssertionError(f"ended without {words!r}: {self.text!r}") from None
        self.text = self.text.partition(words)[2]

    def answer(self, question: str, words: str) -> None:
        self.expect(question)
        self.expect("]: ")
        os.write(self.master, f"{words}\n".encode())


def test_on_a_terminal_it_asks_again_and_takes_defaults() -> None:
    terminal = Terminal("--vllm-port", "9777", "--mode", "shared_vllm")
    terminal.answer("Environment", "arithmetik")
    terminal.expect("did you mean arithmetic?")
    terminal.answer("Environment", "arithmetic")
    terminal.answer("Model", "")
    terminal.answer("Name", "a b")
    terminal.expect("use letters")
    terminal.answer("Name", "sums")
    terminal.answer("GPUs of vLLM", "none")
    terminal.answer("Port of run-api", "9777")
    terminal.expect("run-api uses port 9777")
    terminal.answer("Port of vLLM", "9778")
    terminal.expect("sums.toml: written, valid")
    assert terminal.process.wait(30) == 0
    profile = written("sums.toml")
    assert (profile.model, profile.env[0].name, profile.api.port, profile.vllm[0].port) == (
        default_model("arithmetic"),
        "arithmetic",
        9777,
        9778,
    )


@pytest.mark.parametrize(("key", "code"), [(b"\x04", Exit.USAGE), (b"\x03", Exit.INTERRUPTED)])
def test_leaving_a_question_writes_nothing(key: bytes, code: Exit) -> None:
    terminal = Terminal()
    terminal.expect("]: ")
    os.write(terminal.master, key)
    for _ in range(15):
        # The terminal is not the controlling one, so the key alone sends no signal. One that comes
        # between the question and the reading of its answer waits for that answer.
        if code is Exit.INTERRUPTED:
            os.kill(terminal.process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(2)
            break
    assert terminal.process.poll() == code
    assert not list(Path().glob("*.toml"))


def on_one_gpu(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(init, "gpu_count", lambda: 1)
    monkeypatch.setattr(
        memory, "read_machine", lambda: Hardware((Gpu("GPU", int(gib * 2**30)),), 512 << 30)
    )


@pytest.mark.parametrize(
    ("gib", "said"), [(79.6, ""), (40, "set so that it fits: "), (6, "no known setting")]
)
def test_what_it_writes_fits_the_machine(
    gib: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_one_gpu(monkeypatch, gib)
    (tmp_path / "m").mkdir()
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "vocab_size": 151_936,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
    }
    (tmp_path / "m/config.json").write_text(json.dumps(shape))
    assert (
        main.run(["init", "p.toml", "--yes", "--env", "gsm8k", "--model", str(tmp_path / "m")])
        == Exit.DONE
    )
    shown = capsys.readouterr().out
    assert (
        (said in shown)
        if said
        else ("so that it fits" not in shown and "no known setting" not in shown)
    )
    site = planned_site(written("p.toml"))
    assert bool(lack(site_budget(site, take_inventory(site)))) is (gib == 6), (
        "as it is written, nothing chosen later"
    )


def test_it_says_when_it_cannot_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_one_gpu(monkeypatch, 80)
    assert (
        main.run(["init", "p.toml", "--yes", "--env", "gsm8k", "--model", "owner/name"])
        == Exit.DONE
    )
    assert "its memory use is not known: model not on this machine" in capsys.readouterr().out


OWN = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class Mine(BaseEnv):
    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(group_size=5, max_token_length=256, steps_per_eval=2)
        return config, [APIServerConfig()]

    async def collect_trajectories(self, item):
        await self.server.chat_completion(messages=item)

Mine.cli()
"""
SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("env", "name"), [("my_task.py", "my_task"), ("pack.my_task", "my_task"), ("vllm.py", "env")]
)
def test_an_environment_of_ones_own_keeps_what_its_file_sets(
    env: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(init, "gpu_count", lambda: 0)
    (tmp_path / "pack").mkdir()
    for file in ("my_task.py", "pack/my_task.py", "vllm.py"):
        (tmp_path / file).write_text(OWN)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(SMALL))
    (tmp_path / "m/tokenizer_config.json").write_text("{}")
    assert main.run(["init", "p.toml", "--yes", "--env", env, "--model", str(tmp_path / "m")]) == 0
    said = capsys.readouterr().out
    profile = written("p.toml")
    (section,) = profile.env
    assert section.name == name and (section.module or "") == (
        "pack.my_task" if "pack" in env else ""
    )
    assert section.args == {"env.max_batches_offpolicy": 1}, "the trainer limits a CPU"
    assert (
        "sets group_size = 5, max_token_length = 256, steps_per_eval = 2"
        in Path("p.toml").read_text()
    )
    settings = profile.trainer.settings
    assert settings["batch_size"] * settings["gradient_accumulation_steps"] % 5 == 0
    assert (profile.vllm[0].max_model_len, settings["seq_len"]) == (512, 512), (
        "the model was made for no more"
    )
    cache = profile.vllm[0].args["kv-cache-memory-bytes"]
    assert isinstance(cache, int) and 2**26 <= cache < 2**28, "of the model's size, not 4 GiB"
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert profile.vllm[0].env == {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    assert profile.trainer.env == {"OMP_NUM_THREADS": threads}
    assert "fix these first:" in said and "has no chat template" in said, (
        "the model, not this machine"
    )
    assert "not ready" not in said, said


def test_lengths_of_a_template_fit_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "gpu_count", lambda: 0)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(SMALL))
    assert (
        main.run(["init", "p.toml", "--yes", "--env", "gsm8k", "--model", str(tmp_path / "m")]) == 0
    )
    profile = written("p.toml")
    assert (
        profile.vllm[0].max_model_len == 512 and profile.env[0].args["env.max_token_length"] == 256
    )


def test_a_module_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["init", "--yes", "--env", "pack.nope"]) == Exit.USAGE
    assert "module pack.nope is neither installed nor in this folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "verifiers"),
    [("my-sums", "my-sums"), ("my_sums", "{here}/my_sums"), ("project", "{here}/project")],
)
def test_an_environment_of_verifiers_is_recognised(
    env: str, verifiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of its package is enough, or its folder, with or without a project around it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "gpu_count", lambda: 0)
    for folder in ("my_sums", "project/project"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("import verifiers.v1 as vf\n")
    assert main.run(["init", "p.toml", "--yes", "--env", env, "--model", "owner/name"]) == 0
    (section,) = written("p.toml").env
    assert section.verifiers == verifiers.format(here=tmp_path)
    assert section.module is None and section.name == Path(env).stem
    (tmp_path / "empty").mkdir()
    assert main.run(["init", "q.toml", "--yes", "--env", "empty", "--model", "owner/name"]) != 0


def test_openenv_and_agents_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a server, an installed package, an address; a command with tasks and scorer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "gpu_count", lambda: 0)
    for folder in ("guess/server", "env_of_mine/server"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "app.py").write_text("app = None\n")
    (tmp_path / "env_of_mine/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("agent.py", "score.py", "tasks.jsonl"):
        (tmp_path / name).write_text("1\n")
    common = ["--yes", "--model", "owner/name"]

    for number, (env, wanted) in enumerate(
        [("./guess", f"{tmp_path}/guess"), ("http://h:8000", "http://h:8000")]
    ):
        assert main.run(["init", f"{number}.toml", "--env", env, *common]) == 0
        assert written(f"{number}.toml").env[0].openenv == wanted

    agent = ["--env", "python agent.py --fast", "--scorer", "python score.py"]
    assert main.run(["init", "a.toml", *agent, *common]) == 0
    (section,) = written("a.toml").env
    assert section.agent == ["python", f"{tmp_path}/agent.py", "--fast"]
    assert section.tasks == f"{tmp_path}/tasks.jsonl", "the default"
    assert section.scorer == ["python", f"{tmp_path}/score.py"]
    assert section.name == "agent" and section.module is None

    assert main.run(["init", "b.toml", *agent, "--tasks", "none.jsonl", *common]) != 0
    Path("tasks.jsonl").rename("others.jsonl")
    for more in ([], ["--tasks", "none.jsonl"]):
        capsys.readouterr()
        assert main.run(["init", "b.toml", *agent, *more, *common]) == 2
        assert "an agent needs tasks" in capsys.readouterr().err
    Path("others.jsonl").rename("tasks.jsonl")
    Path("my env.py").write_text("")
    assert main.run(["init", "c.toml", "--env", "my env.py", *common]) == 0
    assert written("c.toml").name == "my-env"
    assert main.run(["init", "b.toml", "--env", "gsm8k", "--tasks", "tasks.jsonl", *common]) != 0
