"""The ranks of a trainer: values and errors of rank 0 on all, sums, and the end of the others after
one."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

import trainer_core.ranks.group
from tests.support.ranks import run_ranks
from trainer_core.errors import EngineGone, RankGone, TrainerError, UsageError
from trainer_core.ranks.group import join
from trainer_core.ranks.world import ALONE, GONE_CODE, World, meeting_place

LIMIT_S = 10.0
"""In this time all know that a rank has ended."""


def joined() -> World:
    return join(torch.device("cpu"), 30.0)


class Odd(TrainerError):
    """An error that does not survive pickling."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def all_of_it(_: Path) -> int:
    """On each rank: what a step asks of its world."""
    world = joined()
    rows = world.share(
        lambda: {"rows": [torch.arange(3), torch.ones(2, dtype=torch.bool)], "rank": world.rank}
    )
    assert (
        rows["rank"] == 0
        and rows["rows"][0].tolist() == [0, 1, 2]
        and rows["rows"][1].dtype == torch.bool
    )
    assert world.total(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
    assert world.largest(torch.tensor([world.rank, -world.rank])).tolist() == [1, 0]
    assert world.gather("x" * world.rank) == ["", "x"]
    assert (
        world.mesh is not None and world.mesh.mesh_dim_names == ("fsdp",) and world.mesh.size() == 2
    )

    def fail() -> None:
        raise EngineGone("no server", answered=True)

    with pytest.raises(EngineGone, match=r"^no server$") as caught:
        world.share(fail)
    assert caught.value.answered

    def oddly() -> None:
        raise Odd("two", "words")

    with pytest.raises(TrainerError, match="two words"):
        world.share(oddly)
    with pytest.raises(UsageError, match=r"^rank 1: not here$"):
        world.agree(UsageError("not here") if world.rank == 1 else None)
    world.agree(None)
    assert world.share(lambda: "still in step") == "still in step"
    world.check()
    world.close()
    return 0


def test_values_errors_and_sums_are_the_same_on_every_rank(tmp_path: Path) -> None:
    ended = run_ranks("tests.trainer_core.ranks.test_world:all_of_it", tmp_path)
    assert [each.code for each in ended] == [0, 0], ended


def dies_while_others_wait(folder: Path, how: str) -> int:
    """Rank 1 ends while rank 0 waits: for a batch, or in a collective that nobody else will come
    to."""
    world = joined()
    world.agree(None)
    if world.rank == 1:
        (folder / "died").write_text(repr(time.monotonic()))
        if how in ("raised", "wordless"):
            world.close(ValueError("bad row") if how == "raised" else AssertionError())
            return 1
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "waiting":
        time.sleep(60)  # for a batch: nothing here looks at the others
    try:
        world.total(torch.zeros(1))
    except RankGone as error:
        print(error)
        world.close(error)
        return 5
    return 0


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("waiting", GONE_CODE, "rank 1 has ended"),
        ("collective", 5, "rank 1 has ended"),
        ("raised", 5, "rank 1 has ended: bad row"),
        ("wordless", 5, "rank 1 has ended: AssertionError"),
    ],
)
def test_end_of_one_is_seen_by_the_other(tmp_path: Path, how: str, code: int, words: str) -> None:
    first, second = run_ranks(
        "tests.trainer_core.ranks.test_world:dies_while_others_wait", tmp_path, how
    )
    assert (first.code, words in first.output) == (code, True), first
    assert second.code == (1 if how in ("raised", "wordless") else -signal.SIGKILL)
    assert first.at - float((tmp_path / "died").read_text()) < LIMIT_S


def dies_while_a_group_forms(folder: Path, before: str) -> int:
    """Rank 1 has come, and ends on its way into a group for which rank 0 waits."""

    def die(*_: object, **__: object) -> None:
        (folder / "died").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        owner, name = {
            "the control group": (trainer_core.ranks.group, "Gloo"),
            "the model's group": (torch.distributed, "init_process_group"),
            "a group of some": (torch.distributed, "new_group"),
        }[before]
        setattr(owner, name, die)
    try:
        joined().split(2)
    except RankGone as error:
        print(error)
        return 5
    return 0


@pytest.mark.parametrize("before", ["the control group", "the model's group", "a group of some"])
def test_end_of_one_is_seen_while_they_meet(tmp_path: Path, before: str) -> None:
    first, second = run_ranks(
        "tests.trainer_core.ranks.test_world:dies_while_a_group_forms", tmp_path, before
    )
    assert first.code in (5, GONE_CODE) and "rank 1 has ended" in first.output, first
    assert second.code == -signal.SIGKILL
    assert first.at - float((tmp_path / "died").read_text()) < LIMIT_S


class Poison:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def says_without_the_secret(folder: Path) -> int:
    """Rank 0 is foreign: it does not know the secret that its words want."""
    world = joined()
    if world.rank == 0:
        words = pickle.dumps((True, Poison(folder / "poisoned")))
        world._sealed._secret = b"guessed"  # type: ignore[attr-defined]
        world._send(words)  # type: ignore[attr-defined]
        return 0
    with pytest.raises(RankGone, match="has a wrong MAC"):
        world.share(lambda: None)
    return 0


def test_words_without_the_secret_are_not_unpickled(tmp_path: Path) -> None:
    ended = run_ranks("tests.trainer_core.ranks.test_world:says_without_the_secret", tmp_path)
    assert [each.code for each in ended] == [0, 0], ended
    assert not (tmp_path / "poisoned").exists()


def test_meeting_place_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    meeting_place(os.getpid()).chmod(0o755)
    with pytest.raises(UsageError, match="other users have access to"):
        meeting_place(os.getpid())


def test_alone_costs_nothing() -> None:
    assert joined() is ALONE
    value = torch.ones(1)
    assert ALONE.total(value) is value and ALONE.share(lambda: value) is value
    with pytest.raises(ValueError, match="mine"):
        ALONE.agree(ValueError("mine"))
