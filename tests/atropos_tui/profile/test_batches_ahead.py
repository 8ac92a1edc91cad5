"""Batches that an environment may generate ahead of the trainer, by the plan."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site


@pytest.mark.parametrize(
    ("lag", "args", "ahead"),
    [(3, {}, "1"), (4, {}, None), (3, {"env.max_batches_offpolicy": 2}, "2")],
)
def test_a_small_lag_bounds_the_batches_of_any_environment(
    lag: int, args: dict[str, int], ahead: str | None
) -> None:
    """atroposlib's default is 3 batches, so a bound of 3 versions gave more than one of 4."""
    data = {
        "name": "p",
        "mode": "broadcast",
        "model": "/models/m",
        "env": {"name": "a", "module": "json", "args": args},
        "trainer": {"device": "cpu", "dtype": "float32", "max_policy_lag": lag},
    }
    site = make_site(parse_profile(data, "p.toml"), Path("/runs/p"), run_id="r")
    (part,) = (part for part in stack_of(site).components if part.name == "a")
    flags = dict(itertools.pairwise(part.command))
    assert flags.get("--env.max_batches_offpolicy") == ahead
