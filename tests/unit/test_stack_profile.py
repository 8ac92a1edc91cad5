"""Profiles: strict, every problem at once, overridable, and never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_tui.errors import Exit, UserError
from atropos_tui.stack.profile import apply_sets, load_profile, parse_profile, shipped_profiles

MINIMAL = 'name = "p"\nmodel = "m"\n[env]\nmodule = "json"\n'


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "p.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def problems(tmp_path: Path, text: str | bytes, sets: list[str] | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        load_profile(write(tmp_path, text), sets or [])
    assert caught.value.exit_code == Exit.USAGE
    return caught.value


def test_minimal_profile_gets_defaults(tmp_path: Path) -> None:
    profile, _ = load_profile(write(tmp_path, MINIMAL))
    assert (profile.mode, profile.api.port, profile.vllm[0].port, profile.env[0].name) == (
        "shared_vllm",
        8000,
        9001,
        "env",
    )


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_every_shipped_profile_loads(name: str) -> None:
    profile, path = load_profile(name)
    assert path.stem == name and profile.env


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    error = problems(
        tmp_path,
        'name = "a/b"\nmode = "magic"\nmodell = "x"\n[env]\n[trainer]\nlr = "fast"\nclip_epz = 1\nmodel_name = "y"\n',
    )
    text = str(error)
    for expected in (
        "name",
        "mode",
        "modell",
        "did you mean model?",
        "env",
        "trainer.lr",
        "trainer.clip_epz",
        "clip_eps",
        "set model instead",
    ):
        assert expected in text, f"{expected!r} missing in:\n{text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        b"\xff\xfe\x00",
        "name = ",
        "[[[",
        "a=" + "[" * 2000,
        "name = 3\nmodel = []\nenv = 7\nvllm = 'x'\ntrainer = 1\n",
    ],
)
def test_broken_files_are_problems_not_tracebacks(tmp_path: Path, text: str | bytes) -> None:
    assert problems(tmp_path, text).problems


def test_huge_file_is_refused(tmp_path: Path) -> None:
    assert "1 MiB" in str(problems(tmp_path, b"#" * (10 * 1024 * 1024)))


def test_unknown_profile_names_the_shipped_ones() -> None:
    with pytest.raises(UserError, match="demo") as caught:
        load_profile("demoo")
    assert "did you mean demo?" in str(caught.value)


def test_environment_tables_are_flags(tmp_path: Path) -> None:
    profile, _ = load_profile(write(tmp_path, MINIMAL + "[env.args]\nenv.group_size = 8\n'openai.timeout' = 5\n"))
    assert profile.env[0].args == {"env.group_size": 8, "openai.timeout": 5}


def test_set_reaches_tables_lists_and_new_keys() -> None:
    single: dict[str, object] = {"env": {"name": "a"}}
    apply_sets(single, ["env.0.weight=2"])
    assert single == {"env": {"name": "a", "weight": 2}}
    data: dict[str, object] = {"env": [{"name": "a"}, {"name": "b"}], "trainer": {}}
    apply_sets(data, ["trainer.lr=1e-4", "env.1.name=c", "env.weight=2", "mode=lora_only", "model=/a b"])
    assert data == {
        "env": [{"name": "a", "weight": 2}, {"name": "c"}],
        "trainer": {"lr": 1e-4},
        "mode": "lora_only",
        "model": "/a b",
    }


@pytest.mark.parametrize("item", ["novalue", "=1", "name.x=1", "env.9.name=x"])
def test_bad_set_is_a_problem(item: str) -> None:
    with pytest.raises(UserError):
        apply_sets({"name": "p", "env": [{}]}, [item])


def test_one_program_per_environment() -> None:
    with pytest.raises(UserError, match="exactly one of module"):
        parse_profile({"name": "p", "model": "m", "env": {"module": "a", "script": "b"}}, "p.toml")
