"""Settings, start-up checks and the environment for vLLM, without an import of vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from vllm_server import __main__ as start
from vllm_server.config import (
    ConfigError,
    ServerConfig,
    prepare_environment,
    remove_temporary_folder,
    take_temporary_folder,
)


def _made(folder: Path) -> list[Path]:
    """All but torch's compile cache, which is taken before another user can make it."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def test_defaults_are_a_private_place_and_a_token(tmp_path: Path) -> None:
    config = ServerConfig.from_env({"TMPDIR": str(tmp_path)})
    assert config.private_dir
    assert config.bridge_dir.is_relative_to(tmp_path)
    assert not _made(tmp_path), "reading the settings makes nothing"
    assert config.token_generated
    assert len(config.token) >= 24
    assert not config.shared_weights
    assert not config.hold_generation
    assert config.shm_path.name.endswith(config.instance_id)


def test_its_temporary_folder_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket called by a UUID, as vLLM makes them, can be bound in it."""
    before = tempfile.gettempdir()
    monkeypatch.setenv("TMPDIR", before)
    monkeypatch.setattr(tempfile, "tempdir", before)
    config = ServerConfig.from_env()
    take_temporary_folder(config, os.environ)
    place = Path(tempfile.gettempdir())
    assert place == config.temporary and place.parent == Path(before)
    assert place.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place / str(uuid.uuid4())))
    remove_temporary_folder(config, os.environ)
    assert not place.exists()
    assert tempfile.gettempdir() == before


def test_a_temporary_folder_too_deep_for_sockets_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    config = ServerConfig.from_env()
    take_temporary_folder(config, os.environ)
    assert tempfile.gettempdir() == str(deep), "where vLLM's sockets were before"
    remove_temporary_folder(config, os.environ)
    assert not _made(deep)


def test_a_temporary_folder_that_cannot_be_made_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM names one that only the first node has."""
    from vllm_server.__main__ import main

    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert main(["--model", "owner/name", "--uds", str(tmp_path / "socket")]) == 2
    assert f"{tmp_path / 'none'} takes no temporary folder" in capsys.readouterr().err


def test_a_full_environment_is_taken_as_given(tmp_path: Path) -> None:
    env = {
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        "LOGDIR": str(tmp_path),
        "ATROPOS_TOKEN": "0123456789abcdef",
        "ATROPOS_HOLD_GENERATION": "1",
        "ATROPOS_SHM_NAME": "my-run.vllm",
        "ATROPOS_ALLOWED_HOSTS": "Node7, box.lan",
    }
    config = ServerConfig.from_env(env)
    assert config.manifest_path == tmp_path / "vllm_bridge_config.json"
    assert config.state_path == tmp_path / "state.json"
    assert config.shm_path == Path("/dev/shm/my-run.vllm")
    assert config.token == "0123456789abcdef"
    assert not config.token_generated
    assert config.shared_weights
    assert config.hold_generation
    assert config.allowed_hosts == {"node7", "box.lan"}


def test_the_manifest_path_wins_over_logdir(tmp_path: Path) -> None:
    config = ServerConfig.from_env(
        {"LOGDIR": "/elsewhere", "VLLM_BRIDGE_CONFIG_PATH": str(tmp_path / "m.json")}
    )
    assert config.manifest_path == tmp_path / "m.json"
    assert config.bridge_dir == tmp_path


def test_a_bridge_directory_where_others_may_write_is_refused(tmp_path: Path) -> None:
    """A user who makes it first would read the token, and choose the weights of the start."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o777)
    assert ServerConfig.from_env({"LOGDIR": str(own)}).bridge_dir == own
    with pytest.raises(ConfigError, match="others may write into"):
        ServerConfig.from_env({"LOGDIR": str(shared)})
    if os.getuid() == 0:
        os.chown(own, 65534, 65534)
        with pytest.raises(ConfigError, match="mktemp -d"):
            ServerConfig.from_env({"LOGDIR": str(own)})


def test_two_starts_are_two_instances(tmp_path: Path) -> None:
    env = {"LOGDIR": str(tmp_path)}
    first, second = ServerConfig.from_env(env), ServerConfig.from_env(env)
    assert first.instance_id != second.instance_id
    assert first.token != second.token


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, "LOGDIR=DIR"),
        ({"VLLM_ENABLE_SHARED_WEIGHTS": "maybe"}, "use 1 or 0"),
        ({"ATROPOS_HOLD_GENERATION": "2"}, "use 1 or 0"),
        ({"ATROPOS_TOKEN": "short"}, "at least 8"),
        ({"ATROPOS_TOKEN": "new\nline-in-a-header"}, "letters, digits"),
        ({"ATROPOS_SHM_NAME": "../../etc/passwd"}, "plain file name"),
        ({"VLLM_BRIDGE_CONFIG_PATH": "/tmp"}, "is a directory"),
        ({"LOGDIR": "/dev/null"}, "not a directory"),
    ],
)
def test_a_wrong_setting_is_named_with_the_way_out(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig.from_env(env)


def test_environment_for_vllm_on_the_cpu() -> None:
    env = {"VLLM_USE_V1": "1", "VLLM_PLUGINS": "mine"}
    notes = prepare_environment(env, cpu=True)
    assert "VLLM_USE_V1" not in env
    assert env["VLLM_PLUGINS"] == "mine,atropos_bridge"
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert env["VLLM_ENFORCE_STRICT_TOOL_CALLING"] == "0", "no grammar behind a rollout's back"
    assert any("VLLM_USE_V1 is ignored" in note for note in notes)


def test_helpers_of_vllm_keep_out_of_the_working_directory_where_the_server_does() -> None:
    code = (
        "from vllm_server.config import prepare_environment as p; env = {}; p(env, cpu=True); "
        "print('safe', env)"
    )
    for flags, safe in (["-P"], True), ([], False):
        said = subprocess.run(
            [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert ("'PYTHONSAFEPATH': '1'" in said) == safe


def test_environment_for_vllm_on_a_gpu_keeps_what_the_user_set() -> None:
    env = {"VLLM_PLUGINS": "atropos_bridge,other"}
    assert prepare_environment(env, cpu=False) == []
    assert env["VLLM_PLUGINS"] == "atropos_bridge,other"
    assert "TORCHDYNAMO_DISABLE" not in env
    env = {
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7",
        "ATROPOS_SAMPLING": "as_asked",
    }
    prepare_environment(env, cpu=True)
    assert "VLLM_ENFORCE_STRICT_TOOL_CALLING" not in env, "sampled as asked"
    assert env["TORCHDYNAMO_DISABLE"] == "0"
    assert env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "7"


@pytest.mark.parametrize(
    ("env", "where"),
    [
        ({"VLLM_CACHE_ROOT": "/c"}, "/c/triton"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/vllm/triton"),
        ({}, str(Path.home() / ".cache/vllm/triton")),
        ({"TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": "/c"}, "/mine"),
    ],
)
def test_kernels_are_kept_in_one_place_for_every_start(env: dict[str, str], where: str) -> None:
    prepare_environment(env, cpu=False)
    assert env["TRITON_CACHE_DIR"] == where


def test_an_empty_plugin_list_still_gets_ours() -> None:
    env = {"VLLM_PLUGINS": ""}
    prepare_environment(env, cpu=False)
    assert env["VLLM_PLUGINS"] == "atropos_bridge"


@pytest.mark.parametrize("model", ["/no/such/model", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_model_path_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        start.check_model(model)


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        start.check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    start.check_model(str(tmp_path))


def test_a_hub_id_is_left_to_the_hub() -> None:
    start.check_model("Qwen/Qwen3-0.6B")


def test_a_taken_port_is_refused_with_the_one_who_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert start.main(["--model", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert "pytest" in error or "python" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--model is missing"),
        (["--port", "9001"], "--model is missing"),
        (["--model", "/no/such/model"], "no such directory"),
        (["--model", "Qwen/Qwen3-0.6B", "--port", "many"], "--port many"),
    ],
)
def test_mistakes_cost_one_line_and_exit_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start.main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_vllm_missing_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = start.importlib.util.find_spec
    monkeypatch.setattr(
        start.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else real(name, *rest),
    )
    monkeypatch.setattr(start, "check_port", lambda host, port: None)
    assert start.main(["--model", "Qwen/Qwen3-0.6B"]) == 2
    assert "make install EXTRA=gpu" in capsys.readouterr().err


def test_help_and_config_import_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from vllm_server.__main__ import main; import vllm_server.config, "
        "vllm_server.plugin; "
        "assert main(['--help']) == 0; "
        "assert not {'vllm', 'torch', 'fastapi'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--model MODEL" in done.stdout
