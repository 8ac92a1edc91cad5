"""Order of a send and other work on one GPU, in a group of a single rank.

python -m pytest -m gpu tests/gpu/test_sending.py -s
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from atropos_common.broadcast.group import unique_id
from tests.support.small_models import CONFIGS, build
from trainer_core.weight_sync.sending import NcclGroup, OnePiece, Outgoing, Shards

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
CYCLES = 2_000_000_000
"""About a second of a card's clock."""


@pytest.fixture(scope="module")
def group() -> Iterator[NcclGroup]:
    made = NcclGroup(unique_id(), 0, 1, torch.device("cuda", 0))
    yield made
    made.close()


@pytest.fixture(params=["one piece", "shards"])
def what(request: pytest.FixtureRequest, group: NcclGroup) -> Outgoing:
    model = build(CONFIGS["qwen3 tied"], torch.bfloat16).to("cuda:0")
    made = OnePiece(model) if request.param == "one piece" else Shards(model, torch.bfloat16, 0, 1)
    made.refresh()
    until_sent(group, made)  # the first one loads kernels
    return made


def until_sent(group: NcclGroup, what: Outgoing) -> float:
    began = time.monotonic()
    group.send(what)
    while not group.sent():
        assert time.monotonic() < began + 20
        time.sleep(0.0002)
    return time.monotonic() - began


def test_a_send_waits_for_the_weights_and_not_for_the_step_after_them(
    group: NcclGroup, what: Outgoing
) -> None:
    what.refresh()
    torch.cuda._sleep(CYCLES)
    computed = torch.cuda.current_stream().record_event()
    seconds = until_sent(group, what)
    assert not computed.query(), "sent while the card still computed"
    print(f"\nsent in {seconds * 1e3:.1f} ms beside a step")
    torch.cuda.synchronize()

    torch.cuda._sleep(CYCLES)
    written = torch.cuda.current_stream().record_event()
    what.refresh()
    until_sent(group, what)
    assert written.query(), "nothing leaves before it is written"
