"""Profiles: strict, every problem at once, overridable, and never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atropos_tui.errors import Exit, UserError
from atropos_tui.profile.load import apply_sets, shipped_profiles
from atropos_tui.profile.profile import READ_WORDS, load_profile, parse_profile

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
        'name = "a/b"\nmode = "magic"\nmodell = "x"\n[env]\n[trainer]\nlr = "fast"\nclip_epz '
        '= 1\nmodel_name = "y"\n',
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
    assert "did you mean demo or demo-" in str(caught.value)


def test_environment_tables_are_flags(tmp_path: Path) -> None:
    profile, _ = load_profile(
        write(tmp_path, MINIMAL + "[env.args]\nenv.group_size = 8\n'openai.timeout' = 5\n")
    )
    assert profile.env[0].args == {"env.group_size": 8, "openai.timeout": 5}


def test_set_reaches_tables_lists_and_new_keys() -> None:
    single: dict[str, object] = {"env": {"name": "a"}}
    apply_sets(single, ["env.0.weight=2"])
    assert single == {"env": {"name": "a", "weight": 2}}
    data: dict[str, object] = {"env": [{"name": "a"}, {"name": "b"}], "trainer": {}}
    apply_sets(
        data, ["trainer.lr=1e-4", "env.1.name=c", "env.weight=2", "mode=lora_only", "model=/a b"]
    )
    assert data == {
        "env": [{"name": "a", "weight": 2}, {"name": "c"}],
        "trainer": {"lr": 1e-4},
        "mode": "lora_only",
        "model": "/a b",
    }


@pytest.mark.parametrize("item", ["novalue", "=1", "name.x=1", "env.9.name=x"])
def test_bad_set_is_a_problem(item: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_sets({"name": "p", "env": [{}]}, [item])
    assert caught.value.problems[0].file == "--set" and caught.value.problems[0].fix


def test_a_program_set_takes_the_place_of_another() -> None:
    data: dict[str, Any] = {"env": {"module": "a", "args": {"command": 1}}}
    apply_sets(data, ["env.script=b.py", "env.args.module=x"])
    assert data == {"env": {"script": "b.py", "args": {"command": 1, "module": "x"}}}


def test_one_program_per_environment() -> None:
    with pytest.raises(UserError, match="exactly one of module"):
        parse_profile({"name": "p", "model": "m", "env": {"module": "a", "script": "b"}}, "p.toml")


def extended(tmp_path: Path, base: str, child: str) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/base.toml").write_text(base)
    path = tmp_path / "child.toml"
    path.write_text('extends = "shared/base.toml"\n' + child)
    return path


def test_tables_merge_lists_are_replaced_and_the_child_wins(tmp_path: Path) -> None:
    base = MINIMAL + (
        "args.env.group_size = 8\nargs.'env.seed' = 1\n[trainer]\nlr = 1e-3\nbatch_size = "
        "16\nbetas = [0.5, 0.6]\n"
        "[[vllm]]\nname = 'one'\n[[vllm]]\nname = 'two'\n"
    )
    child = (
        "name = 'c'\n[env]\nargs.'env.group_size' = 4\nargs.env.seed = 2\n[trainer]\nlr = "
        "2e-3\nbetas = [0.1, 0.2]\n"
        "[[vllm]]\nport = 9100\n"
    )
    profile, _ = load_profile(str(extended(tmp_path, base, child)), ["trainer.batch_size=32"])
    assert (profile.name, profile.model, profile.env[0].module) == ("c", "m", "json")
    assert profile.env[0].args == {"env.group_size": 4, "env.seed": 2}
    assert profile.trainer.settings == {"lr": 2e-3, "batch_size": 32, "betas": [0.1, 0.2]}
    assert [(engine.name, engine.port) for engine in profile.vllm] == [("vllm", 9100)]


def test_an_inherited_program_makes_room(tmp_path: Path) -> None:
    profile, _ = load_profile(str(extended(tmp_path, MINIMAL, "[env]\nscript = 'mine.py'\n")))
    assert (profile.env[0].module, profile.env[0].script) == (None, "mine.py")


def test_what_was_said_of_an_inherited_program_is_not_said_of_another(tmp_path: Path) -> None:
    base = MINIMAL.replace(
        "[env]",
        "[env]\nname = 'theirs'\nconfig = 'their.yaml'\nweight = 2\nargs = {env = "
        "{group_size = 4}}",
    )
    other, _ = load_profile(
        str(extended(tmp_path, base, "[env]\nscript = 'mine.py'\n[env.args]\nenv.seed = 1\n"))
    )
    env = other.env[0]
    assert (env.name, env.config, env.weight, env.args) == ("env", None, None, {"env.seed": 1})
    (tmp_path / "again").mkdir()
    same, _ = load_profile(
        str(
            extended(tmp_path / "again", base, "[env]\nmodule = 'json'\n[env.args]\nenv.seed = 1\n")
        )
    )
    assert (same.env[0].name, same.env[0].args) == ("theirs", {"env.group_size": 4, "env.seed": 1})


def test_a_shipped_profile_can_be_extended_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "demo"\nname = "mine"\n')
    profile, _ = load_profile(str(tmp_path / "mine.toml"))
    demo, _ = load_profile("demo")
    assert profile.model_dump() == demo.model_dump() | {"name": "mine"}


def test_problems_name_the_file_in_which_the_key_stands(tmp_path: Path) -> None:
    base = MINIMAL + "[trainer]\nlr = 'fast'\nseq_len = 1\n[[vllm]]\nprot = 1\n[api]\nport = 0\n"
    path = extended(
        tmp_path,
        base,
        "seed = -1\n[trainer]\nseq_len = 0\n[[component.x.startup.checks]]\nkind = 'tcp'\n",
    )
    with pytest.raises(UserError) as caught:
        load_profile(str(path), ["trainer.clip_eps=0", "env.weight=0"])
    where = {
        problem.key: problem.file.removeprefix(f"{tmp_path}/") for problem in caught.value.problems
    }
    assert where == {
        "trainer.lr": "shared/base.toml",
        "vllm.prot": "shared/base.toml",
        "api.port": "shared/base.toml",
        "seed": "child.toml",
        "trainer.seq_len": "child.toml",
        "component.x.command": "child.toml",
        "component.x.startup.checks[0].port": "child.toml",
        "trainer.clip_eps": "--set",
        "env.weight": "--set",
    }


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"mode": "shared"},
            'mode: unknown value (got "shared") did you mean shared_vllm? choose one of: none,',
        ),
        (
            {"api": {"port": "8000"}},
            'api.port: wrong type (got "8000") write it without quotes: 8000',
        ),
        (
            {"api": {"port": True}},
            "api.port: wrong type (got true) give a whole number from 1 to 65535",
        ),
        (
            {"api": {"port": 70000}},
            "api.port: out of range (got 70000) give a whole number from 1 to 65535",
        ),
        (
            {"trainer": {"env": {"OMP_NUM_THREADS": 2}}},
            'trainer.env.OMP_NUM_THREADS: wrong type (got 2) write it in quotes: "2" (in a shell: '
            "--set 'trainer.env.OMP_NUM_THREADS=\"2\"')",
        ),
        ({"seed": 1.5}, "seed: wrong type (got 1.5) give a whole number from 0 to 4294967295"),
        (
            {"survive": True},
            "survive: no such key any more: components end with their supervisor remove it; after "
            "a supervisor has died, continue its run with atropos-tui up --resume RUN",
        ),
        (
            {"vllm": {"gpus": [0, -1]}},
            "vllm.gpus[1]: out of range (got -1) give a whole number of at least 0",
        ),
        (
            {"vllm": {"gpus": 0}},
            "vllm.gpus: wrong type (got 0) give a list, each a whole number of at least 0",
        ),
        (
            {"vllm": {"gpu_memory_utilization": 0}},
            "out of range (got 0) give a number above 0 and of at most 1",
        ),
        ({"api": 3}, "api: wrong type (got 3) give a table"),
        (
            {"vllm": [{}, {"port": 0, "name": "b"}]},
            'vllm.1.port ([[vllm]] "b"): out of range (got 0) give a whole',
        ),
        (
            {"trainer": {"optimizer": "adam"}},
            "did you mean adamw? choose one of: adamw, adamw_8bit, adafactor",
        ),
        (
            {"trainer": {"lr": "1e-4"}},
            'trainer.lr: wrong type (got "1e-4") write it without quotes: 1e-4',
        ),
        (
            {"trainer": {"train_layer_indices": "9-1"}},
            "trainer.train_layer_indices: the range 9-1 ends before it begins",
        ),
        (
            {"trainer": {"device": "tpu"}},
            "give text in quotes: auto (cuda if there is one), cpu, cuda or cuda:N",
        ),
        (
            {"trainer": {"alignment_ok": 2.0, "alignment_mismatch": 1.0}},
            "alignment_ok must not be above alignment_mis",
        ),
        ({"component": {"x": {}}}, "component.x.command: is missing add it: Program and arguments"),
        (
            {"env": {"module": "m", "args": {"a": {"b": [1, {}]}}}},
            "env.args.a.b[1]: wrong type (got an empty table) give",
        ),
        (
            {"env": {"module": "m", "env": {"API_KEY": 5}}},
            'env.env.API_KEY: wrong type (got 5) write it in quotes: "5"',
        ),
        (
            {"vllm": {"args": {"api-key": ["s3cret"]}}},
            "vllm.args.api-key: wrong type (got a list of 1 entry)",
        ),
    ],
)
def test_plain_words(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_profile({"name": "p", "model": "m", "env": {"module": "json"}} | data, "p.toml")
    (problem,) = caught.value.problems
    assert expected in f"{problem.key}: {problem.reason} {problem.fix}"


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    text = str(
        problems(
            tmp_path,
            MINIMAL + "[vllm]\nport = 'x'\n[notify]\nwebhook = 'hunter2'\non = 'hunter2'\n",
        )
    )
    assert "notify.webhook" in text and text.count("hunter2") == 1


@pytest.mark.parametrize("webhook", ["https://example.org/x", "http://127.0.0.1:9/x", "${HOOK}"])
def test_webhooks(tmp_path: Path, webhook: str) -> None:
    profile, _ = load_profile(
        write(tmp_path, MINIMAL + f"[notify]\nwebhook = '{webhook}'\non = ['failed']\n")
    )
    assert (profile.notify.webhook, profile.notify.on) == (webhook, ("failed",))


def test_trainer_fields_that_read_words_do_so_in_profiles(tmp_path: Path) -> None:
    words = {"betas": "0.9 0.95", "lora_target_modules": "q_proj v_proj"}
    lines = [f"{key} = '{words.get(key, '0-3')}'" for key in READ_WORDS]
    profile, _ = load_profile(write(tmp_path, MINIMAL + "[trainer]\n" + "\n".join(lines)))
    assert set(profile.trainer.settings) == READ_WORDS
