"""Servers that get the weights of a model whose memory is another server's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.small_models import CONFIGS, build
from tests.trainer_core.weight_sync.transfer_stand_in import Receiver, assert_same_weights, step
from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.ranks.world import World
from trainer_core.weight_sync.base import Start, make_sync
from trainer_core.weight_sync.broadcast import Broadcast
from trainer_core.weight_sync.further_servers import SingleCopyAndOthers

CPU = torch.device("cpu")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(1)
    yield made
    made.close()


def config(*urls: str, overlap: bool = False) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "model_name": "m",
            "weight_bridge_mode": "shared_vllm",
            "dtype": "float32",
            "vllm_urls": list(urls),
            "engine_timeout": 2,
            "overlap_publish": overlap,
        }
    )


def model_with_gaps() -> torch.nn.Module:
    """A model whose parameters lie in a server's memory: rows and columns of larger tensors."""
    torch.manual_seed(1)
    model = build(CONFIGS["qwen3 tied"])
    for number, parameter in enumerate(model.parameters()):
        wide = torch.zeros((*parameter.shape[:-1], 2 * parameter.shape[-1]))
        half = wide[..., parameter.shape[-1] :] if number % 2 else wide[..., ::2]
        parameter.data = half.copy_(parameter.detach())
    return model


@pytest.mark.parametrize("overlap", [False, True])
def test_each_version_is_sent_from_memory_that_stays_where_it_is(
    receiver: Receiver, overlap: bool
) -> None:
    model = model_with_gaps()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    sync = Broadcast(config(receiver.url, overlap=overlap), CPU, threading.Event(), optional=True)
    sync.feed(model, 4)
    assert_same_weights(receiver, model)
    for version in (5, 6):
        step(model)
        sync.publish(version, lambda: None)
        sync.settle()
        assert receiver.version == version
        assert_same_weights(receiver, model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    sync.close()


def test_without_any_of_them_the_run_goes_on_until_one_is_back(receiver: Receiver) -> None:
    model = model_with_gaps()
    sync = Broadcast(config(receiver.url), CPU, threading.Event(), optional=True)
    sync.feed(model, 0)
    receiver.die()
    step(model)
    began = time.monotonic()
    assert not sync.publish(1, lambda: None).moved
    step(model)
    assert not sync.publish(2, lambda: None).moved
    assert time.monotonic() - began < 10, "nobody waits for it"
    assert sync.left_out.keys() == {receiver.url}
    receiver.restart()
    until = time.monotonic() + 20
    while receiver.version != 2 and time.monotonic() < until:
        sync.check()
        time.sleep(0.1)
    assert receiver.version == 2 and not sync.left_out
    assert_same_weights(receiver, model)
    step(model)
    assert sync.publish(3, lambda: None).moved and receiver.version == 3
    sync.close()


def test_at_the_beginning_one_that_never_comes_is_left_out(receiver: Receiver) -> None:
    receiver.die()
    sync = Broadcast(config(receiver.url), CPU, threading.Event(), optional=True)
    sync.feed(model_with_gaps(), 0)
    assert sync.left_out.keys() == {receiver.url}
    assert not sync.publish(1, lambda: None).moved
    sync.close()


def test_further_servers_choose_the_strategy_and_need_one_rank() -> None:
    sync = make_sync(config("http://127.0.0.1:9"), CPU, threading.Event())
    assert isinstance(sync, SingleCopyAndOthers) and sync.shares_memory
    sync.world = World()
    sync.world.size = 2
    with pytest.raises(UsageError, match="whole model on one GPU"):
        sync.attach(Start())
    alone = make_sync(config(), CPU, threading.Event())
    assert not isinstance(alone, SingleCopyAndOthers)
