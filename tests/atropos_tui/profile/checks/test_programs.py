"""Environments and flags before a start: what is certain to fail is refused, all else is left
alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atropos_tui.cli import main
from atropos_tui.errors import Exit, Problem
from atropos_tui.profile.budget.memory import take_inventory
from atropos_tui.profile.checks import programs
from atropos_tui.profile.checks.preflight import mismatches
from atropos_tui.profile.checks.programs import (
    environment_faults,
    environment_files,
    flag_name,
    has_chat_template,
    known_flags,
    unknown_flags,
)
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import load_profile, parse_profile
from atropos_tui.profile.site import make_site
from atropos_tui.profile.source import EnvSource

ENV = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class Config(BaseEnvConfig):
    bonus: float = 0.5

class Mine(BaseEnv):
    env_config_cls = Config

    @classmethod
    def config_init(cls):
        return Config(group_size=4, max_token_length=256, steps_per_eval=2), [APIServerConfig()]

    async def collect_trajectories(self, item):
        answer = await self.server.chat_completion(messages=item, n=4)
"""
CLI = '\nif __name__ == "__main__":\n    Mine.cli()\n'


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def model(folder: Path, **tokenizer: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def found(text: str, script: str = "mine.py", *, chats: bool = True, **env: Any) -> list[Problem]:
    Path("mine.py").write_text(text)
    folder = model(Path("model"), **({"chat_template": "x"} if chats else {}))
    trainer = {"batch_size": 16, "gradient_accumulation_steps": 1}
    data = {"name": "p", "model": str(folder), "env": {"script": script} | env, "trainer": trainer}
    site = make_site(parse_profile(data, "p.toml"), Path("r"), run_id="r")
    (section,) = site.profile.env
    return [*environment_files(site, section, "env.0"), *environment_faults(site, section, "env.0")]


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        (ENV + "\ndef broken(:\n    pass\n", "mine.py, line 17: ", "correct the Python syntax"),
        (
            "import nopackage_a\nimport bs4x, os\nfrom nopackage_b.c import d\n" + ENV + CLI,
            "3 Python packages that this interpreter does not have: 'nopackage_a' (mine.py, "
            "line 1), 'bs4x'",
            "-m pip install nopackage_a bs4x nopackage_b",
        ),
        (
            ENV.replace("class Mine(BaseEnv)", "class Mine"),
            "defines no environment",
            "derive a class from BaseEnv",
        ),
        (
            ENV + ENV.replace("class Mine(", "class Other("),
            "2 environments (Mine, Other) and starts none with cli()",
            'script = "mine.py:Mine"',
        ),
        (
            ENV.replace("group_size=4", "group_size=5") + CLI,
            "sets group_size 5: batch_size",
            "trainer.batch_size = 15 or 20",
        ),
    ],
)
def test_a_file_that_cannot_work(text: str, reason: str, fix: str) -> None:
    (problem,) = found(text)
    assert reason in problem.reason and fix in problem.fix and problem.key == "env.0.script", (
        problem
    )


@pytest.mark.parametrize(
    "text",
    [
        ENV + CLI,
        ENV,  # one class, no cli(): the runner takes it
        ENV + ENV.replace("class Mine(", "class Other(") + CLI,
        "try:\n    import nopackage\nexcept ImportError:\n    nopackage = None\n" + ENV + CLI,
        "import sys\nsys.path.append('elsewhere')\nimport nopackage\n" + ENV + CLI,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nopackage\n" + ENV + CLI,
        ENV + "\ndef late():\n    import nopackage\n" + CLI,
        "from helper import *\n" + ENV.replace("class Mine(BaseEnv)", "class Mine(Unknown)"),
        ENV.replace("class Mine(BaseEnv)", "class Mine(make_base())"),
        ENV.replace("class Mine(BaseEnv)", "class Mine")
        + "\nif __name__ == '__main__':\n    serve(Mine)\n",
    ],
)
def test_what_may_work_is_left_alone(text: str) -> None:
    Path("helper.py").write_text("Unknown = make_class()\n")
    assert found(text) == []


def test_a_file_with_relative_imports_finds_what_lies_beside_its_package(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/rules.py").write_text("import beside\n")
    path = tmp_path / "pack/env.py"
    path.write_text("from .rules import beside\nimport beside\nimport gone_d\n" + ENV)
    source = EnvSource(path, [str(path.parent)])
    assert source.missing == {"gone_d": "env.py, line 3"}


def test_a_named_class_and_a_file_beside_it() -> None:
    Path("helper.py").write_text("import nopackage_c\n" + ENV)
    both = "from helper import Config, Mine as Base\n" + ENV.replace(
        "class Mine(BaseEnv)", "class Mine(Base)"
    )
    (problem,) = found(both, "mine.py:Mine")
    assert "'nopackage_c' (helper.py, line 1)" in problem.reason
    Path("helper.py").write_text("def broken(:\n")
    (problem,) = found(both, "mine.py:Mine")
    assert problem.reason.startswith("helper.py, line 1: ")
    (problem,) = found(ENV, "mine.py:Theirs")
    assert "defines no class 'Theirs'" in problem.reason


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("env.grupp", "did you mean env.group_size?"),
        ("group_size", "did you mean env.group_size?"),
        ("env.group-size", "did you mean env.group_size?"),
        ("env.bonuss", "did you mean env.bonus?"),
        ("openai.timeot", "did you mean openai.timeout?"),
        ("zzzzzz", "remove it"),
        ("env.bonus", None),
        ("env.max_num_workers", None),
        ("openai.timeout", None),
        ("max_n_completions", None),
        ("testing", None),
    ],
)
def test_flags_of_an_environment(flag: str, fix: str | None) -> None:
    problems = found(ENV + CLI, args={flag: 1})
    assert [(each.key, each.fix) for each in problems] == (
        [(f"env.0.args.{flag}", fix)] if fix else []
    )


@pytest.mark.parametrize(
    "text",
    [
        ENV.replace("class Config(BaseEnvConfig)", "class Config(make_config())"),
        ENV.replace(
            "class Mine(BaseEnv):", "class Mine(BaseEnv):\n    @classmethod\n    def cli(cls): ..."
        ),
        "from pydantic import create_model\n" + ENV,
        "from gone import Settings\n" + ENV,
    ],
)
def test_flags_are_not_judged_where_the_settings_cannot_be_read(text: str) -> None:
    assert not [each for each in found(text + CLI, args={"env.grupp": 1}) if "flag" in each.reason]


def test_settings_of_a_class_that_is_imported_are_known() -> None:
    Path("theirs.py").write_text(ENV)
    text = "from atroposlib.envs.base import BaseEnvConfig\nfrom theirs import Mine\nMine.cli()\n"
    assert found(text, args={"env.bonus": 1}) == []
    (problem,) = found(text, args={"env.bonuss": 1})
    assert problem.fix == "did you mean env.bonus?"
    source = EnvSource(Path("mine.py"), ["."])
    assert source.settings["group_size"] == 4 and source.settings["bonus"] == 0.5
    both = "from theirs import Mine, Config\n" + ENV.replace(
        "class Mine(BaseEnv)", "class Own(Mine)"
    ).replace("=4", "=5")
    Path("mine.py").write_text(both)
    assert EnvSource(Path("mine.py"), ["."]).settings["group_size"] is None, "two files differ"


@pytest.mark.parametrize(
    "bases",
    [
        ("class Config(Config)", "class Mine(Mine)"),  # of the import's own name
        ("class Config(Mine)", "class Mine(Config)"),  # a circle
    ],
)
def test_classes_that_name_themselves_end(bases: tuple[str, str]) -> None:
    head = (
        "from atroposlib.envs.base import BaseEnvConfig as Config, BaseEnv as Mine\n"
        if bases[1] == "class Mine(Mine)"
        else ""
    )
    text = ENV.replace("class Config(BaseEnvConfig)", bases[0]).replace(
        "class Mine(BaseEnv)", bases[1]
    )
    Path("mine.py").write_text(head + text)
    source = EnvSource(Path("mine.py"), ["."])
    assert source.flags is not None and ("bonus" in source.flags) is bool(head)
    assert [each.node.name for each in source.environments or []] == (["Mine"] if head else [])


def test_a_model_without_a_chat_template() -> None:
    (problem,) = found(ENV + CLI, chats=False)
    assert problem.key == "model"
    assert "model has no chat template, so vLLM would refuse the chat" in problem.reason
    assert "mine.py requests" in problem.reason
    assert "chat_template.jinja" in problem.fix
    Path("model/chat_template.jinja").touch()
    assert found(ENV + CLI, chats=False) == []
    Path("model/chat_template.jinja").unlink()
    text = ENV.replace(
        "self.server.chat_completion(messages=item", "self.server.completion(prompt=item"
    )
    assert found(text + CLI, chats=False) == [], "it asks for text"
    both = ENV + "\n    async def more(self):\n        await self.server.completion(prompt='x')\n"
    assert found(both + CLI, chats=False) == [], "one of the two ways is taken"
    own = (
        "TEMPLATE = 'x'\n"
        + ENV
        + "\n    def setup(self):\n        self.tokenizer.chat_template = TEMPLATE\n"
    )
    assert found(own + CLI, chats=False) == [], "it brings one"
    client = ENV.replace(
        "self.server.chat_completion(messages=item",
        "self.client.chat.completions.create(messages=item",
    )
    assert found(client + CLI, chats=False) == [], "a client of its own may ask another server"


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({}, False),
        ({"chat_template": None}, False),
        ({"chat_template": [{"name": "default"}]}, True),
        ({"auto_map": {}}, None),
    ],
)
def test_where_a_chat_template_lies(
    tmp_path: Path, tokenizer: dict[str, Any], expected: bool | None
) -> None:
    assert has_chat_template(model(tmp_path / "m", **tokenizer)) is expected
    (tmp_path / "m/tekken.json").touch()
    assert has_chat_template(tmp_path / "m") is None, "Mistral's own format"
    assert has_chat_template(tmp_path / "nowhere") is None


def test_doctor_and_validate_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import nopackage_a\n" + ENV + CLI)
    model(Path("model"))
    Path("p.toml").write_text(
        'name = "p"\nmodel = "model"\n[env]\nscript = "mine.py"\nargs.env.grupp = 8\n'
    )
    assert main.run(["validate", "p.toml"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert (
        "p.toml:5: env.args.env.grupp: mine.py has no flag" in said
        and "p.toml:2: model: model has no chat" in said
    )
    assert "p.toml:4: env.script: mine.py needs 1 Python package" in said, "all of them at once"
    assert main.run(["doctor", "p.toml"]) == Exit.USAGE
    assert "'nopackage_a' (mine.py, line 1)" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_have_no_fault(name: str) -> None:
    site = make_site(load_profile(name)[0], Path("r"), run_id="r")
    for section in site.profile.env:
        assert list(environment_faults(site, section, "env.0")) == []
    assert [
        each
        for index, part in enumerate(site.profile.vllm)
        for each in unknown_flags(part, f"vllm.{index}")
    ] == []


@pytest.mark.parametrize(
    "name", ["arithmetic_server", "gsm8k_server", "math_zero_server", "sums_server"]
)
def test_flags_of_our_own_environments_are_known(name: str) -> None:
    flags = EnvSource(Path(__file__).parents[4] / f"atropos_envs/{name}.py", []).flags
    assert flags is not None and {"group_size", "seed"} <= flags


# vLLM


def engine(**args: Any) -> list[Problem]:
    data = {"name": "p", "model": "m", "env": {"module": "json"}, "vllm": {"args": args}}
    site = make_site(parse_profile(data, "p.toml"), Path("r"), run_id="r")
    stack_of(site)
    return [each for each in mismatches(site, take_inventory(site)) if each.key.startswith("vllm")]


@pytest.mark.skipif(not known_flags(), reason="no vLLM")
@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("no-such-flag", "remove it"),
        ("enforce-eagr", "did you mean enforce-eager?"),
        ("max_num_sequences", "did you mean max-num-seqs?"),
        ("enforce_eager", None),
        ("no-enable-prefix-caching", None),
        ("compilation-config.mode", None),
        ("kv-cache-mem", None),  # argparse takes what only one flag begins with
        ("chat-template", None),
    ],
)
def test_flags_of_vllm(flag: str, fix: str | None) -> None:
    problems = engine(**{flag: True})
    assert [each.key for each in problems] == ([f"vllm.0.args.{flag}"] if fix else [])
    assert fix is None or fix in problems[0].fix


def test_flags_of_a_vllm_that_cannot_be_read_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "known_flags", frozenset)
    assert engine(**{"no-such-flag": True}) == []


def test_every_flag_of_vllm_s_own_parser_is_known() -> None:
    """They are read from vLLM's source, whose layout may change with any release."""
    pytest.importorskip("vllm")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_server import compat

    parser = compat.make_arg_parser(FlexibleArgumentParser())
    options = {
        word
        for action in parser._actions
        for word in action.option_strings
        if word.startswith("--")
    }
    assert (
        len(options) > 200
        and {flag_name(word.removeprefix("--")) for word in options} <= known_flags()
    )


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("[vllm.args]\nenforce-eager = true\nenforce_eager = false\n", "vllm.args.enforce_eager"),
        (
            "[vllm.args]\nno-async-scheduling = true\nasync_scheduling = true\n",
            "vllm.args.async_scheduling",
        ),
        ("[env.args]\n'env.group_size' = 8\nenv.group_size = 4\n", "env.args.env.group_size"),
    ],
)
def test_a_flag_in_two_spellings(lines: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.toml").write_text('name = "p"\nmodel = "m"\n[env]\nmodule = "json"\n' + lines)
    assert main.run(["plan", "p.toml"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert f": {key}: is " in said and "remove one of the two" in said, said


def verifiers_site(name: str, **args: Any) -> Any:
    folder = model(Path("model"), chat_template="x")
    env = {"name": "e", "verifiers": name, "args": args}
    data = {"name": "p", "model": str(folder), "env": env, "vllm": {"max_model_len": 512}}
    return make_site(parse_profile(data, "p.toml"), Path("r"), run_id="r")


@pytest.mark.parametrize(
    ("name", "installed", "reason", "fix"),
    [
        ("my-env", False, "the Python package verifiers is not installed", "-m pip install"),
        ("my-env", True, "no package 'my_env' for the environment 'my-env'", "install it, or"),
        ("./folder", True, None, ""),
        ("json", True, None, ""),
    ],
)
def test_an_environment_of_verifiers_is_looked_up(
    name: str, installed: bool, reason: str | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("folder").mkdir()
    real = programs.find_module

    def find(module: str, folders: list[str]) -> Any:
        found = object() if installed else None
        return found if module == "verifiers" else real(module, folders)

    monkeypatch.setattr(programs, "find_module", find)
    site = verifiers_site(name)
    problems = list(environment_files(site, site.profile.env[0], "env.0"))
    assert [each.reason for each in problems] == ([reason] if reason else [])
    assert all(each.key == "env.0.verifiers" and fix in each.fix for each in problems)


def test_settings_of_an_environment_of_verifiers_are_apart_from_flags() -> None:
    site = verifiers_site("my-env", **{"num_tasks": 3, "env.group_size": 4})
    command = stack_of(site).components
    (words,) = [each.command for each in command if each.name == "e"]
    assert "atropos_envs.verifiers_server" in words
    flags = dict(pairwise(words))
    assert flags["--env.verifiers"] == "my-env"
    assert json.loads(flags["--env.arguments"]) == {"num_tasks": 3}
    assert (flags["--env.group_size"], flags["--env.max_token_length"]) == ("4", "512")
    assert "--num_tasks" not in words
