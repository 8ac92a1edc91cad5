"""Foreign environments: how they are found and hosted, and the messages about bad ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.server_handling.server_baseline import ServerBaseline
from tenacity import RetryError, retry, stop_after_attempt

from atropos_common.protocol.control import Role
from atropos_common.protocol.records import (
    EnvCountsRecord,
    EnvMetricsRecord,
    EvalRecord,
    parse_line,
)
from atropos_envs import EnvFault, needs_no_torch
from atropos_envs.hosting import runner
from atropos_envs.hosting.base import StackEnv
from atropos_envs.hosting.engine_client import EngineClient
from atropos_envs.hosting.evaluation import EvalLog, Tally, reason_of
from atropos_envs.hosting.hosted import Hosted
from atropos_envs.hosting.runner import Foreign, hosted, missing_package
from atropos_envs.tiny_model import make_tokenizer
from atropos_tui.diagnoses import Evidence, diagnose
from atropos_tui.profile.spec import ComponentSpec

ENV = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
class {name}(BaseEnv):
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), []
    async def get_next_item(self): ...
    async def evaluate(self, *args, **kwargs): ...
"""


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        (None, "no.py", "there is no file no.py"),
        (
            "import no_such_package_x.part",
            "e.py",
            "needs the Python package 'no_such_package_x'.*PYTHONPATH",
        ),
        ("def f(:", "e.py", "e.py, line 1: invalid syntax"),
        ("x = 1", "e.py", "no environment class"),
        (
            ENV.format(name="A") + ENV.format(name="B"),
            "e.py",
            "defines A, B; name one: e.py:ClassName",
        ),
        (ENV.format(name="A"), "e.py:C", "defines no environment 'C'; it has A"),
        (None, "no_such_module_x", "cannot be imported: No module named no_such_module_x"),
    ],
)
def test_what_cannot_run_is_said_in_words(
    text: str | None, target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["x"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    if text is not None:
        (tmp_path / "e.py").write_text(text)
    with pytest.raises(EnvFault, match=words) as caught:
        runner.run([target, "serve"])
    assert caught.value.exit_code == 2
    assert "atropos_envs.hosting.runner" not in BaseEnv.cli.__func__.__module__, (
        "nothing stays replaced"
    )


def test_the_class_whose_command_line_the_file_calls_is_hosted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(BaseEnv, "cli", classmethod(ran.append))
    monkeypatch.setattr("sys.argv", ["x"])
    (tmp_path / "e.py").write_text(
        ENV.format(name="A") + ENV.format(name="B") + 'if __name__ == "__main__": B.cli()'
    )
    runner.run([str(tmp_path / "e.py"), "serve"])
    runner.run([f"{tmp_path / 'e.py'}:A", "serve"])
    assert [each.__name__ for each in ran] == ["B", "A"] and all(
        issubclass(each, Foreign) for each in ran
    )
    assert hosted(StackEnv) is StackEnv and issubclass(StackEnv, Hosted), "ours are hosted already"


@pytest.mark.parametrize(
    ("code", "light"),
    [
        ("import random, math\nfrom atroposlib.envs.base import BaseEnv", True),
        ("from atroposlib.envs.base import BaseEnv\ndef f():\n    import torch", False),
        ("from atroposlib.utils import x", False),
        ("from . import rewards", False),
        ("import importlib", False),
        ("import rewards", False),
        ("def", False),
    ],
)
def test_torch_is_left_out_where_nothing_can_want_it(
    tmp_path: Path, code: str, light: bool
) -> None:
    (tmp_path / "e.py").write_text(code)
    assert needs_no_torch(tmp_path / "e.py") is light and not needs_no_torch(tmp_path / "none.py")


@pytest.mark.slow
def test_a_program_without_torch_begins_without_it(tmp_path: Path) -> None:
    """And ends as every file that defines no environment."""
    (tmp_path / "e.py").write_text(
        "import sys\nfrom atroposlib.envs.base import BaseEnv\nprint('torch' in sys.modules)"
    )
    command = [sys.executable, "-m", "atropos_envs.hosting.runner", str(tmp_path / "e.py"), "serve"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        2,
        "False\n",
    ) and "defines no environment class" in done.stderr


def _env(servers: Any, **members: Any) -> type[BaseEnv]:
    config = classmethod(lambda cls: (BaseEnvConfig(), servers))
    return hosted(type("Theirs", (BaseEnv,), {"config_init": config, **members}))


@pytest.mark.parametrize(
    ("servers", "asked"),
    [
        (APIServerConfig(base_url="http://x:1/v1", timeout=7), 1),
        ([APIServerConfig(timeout=7)], 1),
        (ServerBaseline(timeout=7), 1),
        ([APIServerConfig(timeout=7), APIServerConfig()], 2),
        ([], 1),
    ],
)
def test_servers_are_the_plan_s_whatever_is_asked_for(servers: Any, asked: int) -> None:
    """One in a list, which is the only form in which atroposlib takes `--openai.*`; settings of the
    first stay."""
    env = _env(servers)
    _, given = env.config_init()
    assert env.servers_wanted == asked and env.server_cls is EngineClient
    assert [type(each) for each in given] == [APIServerConfig]
    assert given[0].timeout == (7 if servers != [] else APIServerConfig().timeout)


def test_an_evaluation_stops_no_rollouts_unless_the_author_says_so() -> None:
    stops = EvalHandlingEnum.STOP_TRAIN
    chosen = classmethod(lambda cls: (BaseEnvConfig(eval_handling=stops), []))
    assert _env([]).config_init()[0].eval_handling is EvalHandlingEnum.NONE
    assert (
        hosted(type("Theirs", (BaseEnv,), {"config_init": chosen})).config_init()[0].eval_handling
        is stops
    )


@pytest.mark.parametrize(
    ("sequences", "config", "workers"),
    [
        ("256", {}, 32),
        ("256", {"group_size": 16}, 16),
        ("24", {}, -1),  # not less than the author's library would begin
        ("256", {"max_num_workers": 3}, 3),
        ("256", {"max_num_workers_per_node": 2}, -1),
        ("", {}, -1),
    ],
)
def test_groups_in_flight_are_the_plan_s_where_nobody_chose(
    sequences: str, config: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(self: Any) -> None:
        self.env_id, self.curr_step = 0, 0

    monkeypatch.setattr(Hosted, "get_server_info", told)
    monkeypatch.setenv("ATROPOS_SEQUENCES_IN_FLIGHT", sequences) if sequences else None
    members = {"evaluate": None, "get_next_item": None}
    env = object.__new__(_env([], **members))
    env.config = BaseEnvConfig(**{"group_size": 8} | config)
    asyncio.run(env.get_server_info())
    assert env.config.max_num_workers == workers


def test_a_server_class_of_their_own_stays() -> None:
    own = type("Own", (EngineClient,), {})
    assert _env([], server_cls=own).server_cls is own


def _group(
    scores: list[float], tokens: list[list[int]] | None = None, **more: Any
) -> dict[str, Any]:
    return {"tokens": tokens or [[1, 2]] * len(scores), "scores": scores, **more}


def test_groups_and_failures_are_counted_by_reason(tmp_path: Path) -> None:
    tally = Tally()
    for group in (
        _group([1.0, 0.0]),
        _group([1.0, 1.0]),
        _group([1.0]),
        None,
        _group([1.0, 0.0], [[1] * 9, [1]]),
        _group([0.0, 1.0, 0.5], group_overrides={"group_size": 3}),
        _group([float("nan"), 1.0]),
        _group([1.0, 1.0], advantages=[[0.0, 1.0], [0.0, -1.0]]),
        _group([1.0, 1.0], distill_token_ids=[[[], [3]], [[], [4]]]),
    ):
        tally.group(group, 2, 8, drops_flat=True)
    assert dict(tally.left_out) == {
        "flat": 1,
        "group_size": 1,
        "none": 1,
        "too_long": 1,
        "not_finite": 1,
    }
    for error in (KeyError("answer"), KeyError("answer"), ValueError("x" * 500)):
        tally.failed(error)
    assert tally.failures["KeyError: 'answer'"] == 2 and max(map(len, tally.failures)) < 200
    assert tally.news() and "2 failed (KeyError: 'answer')" in tally.line() and not tally.news()
    path = tmp_path / "eval.theirs.jsonl"
    log = EvalLog(path, "theirs")
    log.counted(tally, {"top_p": 3}, 7, 5)
    log.measured(
        {"eval/percent_correct": 0.5, "train/len": 7, "table": object(), "eval/length": 0.2}, 6
    )
    counts, accuracy, metrics = [parse_line(line) for line in path.read_text().splitlines()]
    assert (
        isinstance(counts, EnvCountsRecord)
        and counts.failures == dict(tally.failures)
        and counts.policy_step == 5
    )
    assert counts.adjusted == {"top_p": 3}
    assert isinstance(accuracy, EvalRecord) and (accuracy.split, accuracy.accuracy) == (
        "percent_correct",
        0.5,
    )
    assert isinstance(metrics, EnvMetricsRecord) and set(metrics.metrics) == {
        "eval/percent_correct",
        "train/len",
        "eval/length",
    }


@pytest.mark.parametrize("name", ["eval/percent_correct", "percent_correct"])
def test_an_evaluation_has_one_name_whichever_way_it_is_told(name: str, tmp_path: Path) -> None:
    """Most environments hand the same `eval/NAME` to `evaluate_log` and to W&B: it became two
    curves."""
    path = tmp_path / "eval.theirs.jsonl"
    env: Any = SimpleNamespace(
        eval_log=EvalLog(path, "theirs"),
        curr_step=6,
        config=SimpleNamespace(data_dir_to_save_evals=None),
    )
    asyncio.run(Hosted.evaluate_log(env, {name: 0.5}))
    accuracy, metrics = [parse_line(line) for line in path.read_text().splitlines()]
    assert isinstance(accuracy, EvalRecord) and accuracy.split == "percent_correct"
    assert isinstance(metrics, EnvMetricsRecord) and set(metrics.metrics) == {
        "eval/percent_correct"
    }


def test_the_root_of_retries_is_named() -> None:
    @retry(stop=stop_after_attempt(1))
    def fails() -> None:
        raise ConnectionError("gone\nfor good")

    with pytest.raises(RetryError) as caught:
        fails()
    assert reason_of(caught.value) == "ConnectionError: gone for good"


@pytest.mark.parametrize("declared", [False, True])
def test_a_file_with_relative_imports_runs_as_part_of_its_package(
    declared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(BaseEnv, "cli", classmethod(ran.append))
    monkeypatch.setattr("sys.argv", ["x"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    top = f"games{declared}"
    folder = tmp_path / top / "env"  # named like the file, as environments often are
    folder.mkdir(parents=True)
    if declared:
        (folder.parent / "__init__.py").write_text("from .deck import NAME")
        (folder / "__init__.py").write_text("")
    (folder / "rules.py").write_text("RULE = 3")
    (folder.parent / "deck.py").write_text("NAME = 'deck'")
    imports = "from .rules import RULE\nfrom ..deck import NAME\nimport rules\n"
    (folder / "env.py").write_text(
        imports + ENV.format(name="A") + 'if __name__ == "__main__": A.cli()'
    )
    runner.run([str(folder / "env.py"), "serve"])
    runner.run([f"{folder / 'env.py'}:A", "serve"])
    assert [each.__name__ for each in ran] == ["A", "A"]


def test_a_name_of_older_releases_is_still_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(BaseEnv, "cli", classmethod(ran.append))
    monkeypatch.setattr("sys.argv", ["x"])
    (tmp_path / "e.py").write_text(
        "from atroposlib.envs.base import OpenaiConfig\n" + ENV.format(name="A")
    )
    runner.run([str(tmp_path / "e.py"), "serve"])
    assert len(ran) == 1


def test_a_module_that_the_installed_atroposlib_lacks_is_no_missing_package() -> None:
    error = ModuleNotFoundError("No module named 'atroposlib.envs.x'", name="atroposlib.envs.x")
    assert "no module 'atroposlib.envs.x': install another version" in missing_package(error)


def test_a_folder_named_like_its_file_is_a_package_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(BaseEnv, "cli", classmethod(ran.append))
    monkeypatch.setattr("sys.argv", ["x"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    folder = tmp_path / "solitaire_x"
    folder.mkdir()
    (folder / "rules.py").write_text("RULE = 3")
    (folder / "solitaire_x.py").write_text("from .rules import RULE\n" + ENV.format(name="A"))
    runner.run([str(folder / "solitaire_x.py"), "serve"])
    assert len(ran) == 1


def test_the_chat_template_of_every_tokenizer_gives_token_ids_as_with_older_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that a file loads by itself, at any time: its groups held a dictionary, and none
    could be sent."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(BaseEnv, "cli", classmethod(lambda cls: None))
    monkeypatch.setattr("sys.argv", ["x"])
    lines = [
        "from transformers import AutoTokenizer",
        f"own = AutoTokenizer.from_pretrained({str(tmp_path)!r})",
        "assert own.apply_chat_template([{'role': 'user', 'content': '12'}]) == [3, 4]",
    ]
    (tmp_path / "e.py").write_text("\n".join([*lines, ENV.format(name="A")]))
    runner.run([str(tmp_path / "e.py"), "serve"])


SETUPS = [
    (
        "import reasoning_gym_x",
        "env_package_missing",
        "rg needs the Python package reasoning_gym_x",
    ),
    (
        "open('data/questions.jsonl')",
        "env_setup_failed",
        "the setup of rg failed: FileNotFoundError",
    ),
    (
        "raise ConnectionError(\"Couldn't reach 'openai/gsm8k' on the Hub "
        '(LocalEntryNotFoundError)")',
        "dataset_unreachable",
        "a data set or model hub cannot be reached",
    ),
]


@pytest.mark.parametrize(("line", "rule", "title"), SETUPS, ids=[case[1] for case in SETUPS])
def test_an_environment_that_ends_in_its_setup_is_explained(
    line: str, rule: str, title: str
) -> None:
    """In the words that the hosting of foreign environments really has for it."""

    async def setup(self: Any) -> None:
        exec(line)

    members = {"setup": setup, "evaluate": None, "get_next_item": None}
    env = hosted(type("Env", (BaseEnv,), members))
    with pytest.raises(EnvFault) as caught:
        asyncio.run(env.setup(object.__new__(env)))
    spec = ComponentSpec(name="rg", role=Role.ENV, command=["x"])
    lines = [f"2026-11-22 20:00:00,000 ERROR atropos_envs.hosting.runner: {caught.value}"]
    found = diagnose(Evidence(spec, caught.value.exit_code, lines))
    assert (found.rule, found.title) == (rule, title) and found.fix
