"""Mode `broadcast` on gloo: the tensors, their receivers, and the errors when one is missing."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig

from atropos_common.broadcast.transfer import ALIGNMENT, SentTensor, chunks
from atropos_tui.profile.checks.consistency import check_notes, check_profile
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.site import make_site
from tests.atropos_tui.profile.test_plan import profile
from tests.support.nursery import TRAINER, forked
from tests.support.small_models import CONFIGS, SMALL, build
from tests.trainer_core.weight_sync.transfer_stand_in import (
    Fault,
    Receiver,
    assert_same_weights,
    step,
)
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.ranks.world import World
from trainer_core.rollouts.source import LagMeter
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.base import Start, SyncReport
from trainer_core.weight_sync.broadcast import Broadcast, require_nodes
from trainer_core.weight_sync.orders import Follower, Order, Orders
from trainer_core.weight_sync.sending import into_one_piece, meeting_point
from vllm_server.weights.copy_recorder import named_views

Make = Callable[..., Broadcast]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    build(CONFIGS["qwen3 tied"]).save_pretrained(folder)
    return folder


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    """Two servers: one with two workers, one with one."""
    made = [Receiver(2), Receiver(1, instance="b")]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def make(base: Path, receivers: list[Receiver]) -> Iterator[Make]:
    made: list[Broadcast] = []

    def broadcast(**fields: Any) -> Broadcast:
        config = TrainingConfig.model_validate(
            {
                "model_name": str(base),
                "weight_bridge_mode": "shared_vllm",
                "use_shared_memory": True,
                "dtype": "float32",
                "vllm_urls": [each.url for each in receivers],
                "engine_timeout": 30,
                "broadcast_timeout": 20,
                **fields,
            }
        )
        made.append(Broadcast(config, torch.device("cpu"), threading.Event()))
        return made[-1]

    yield broadcast
    for each in made:
        each.close()


def test_every_worker_of_every_server_gets_every_version(
    make: Make, receivers: list[Receiver]
) -> None:
    sync = make()
    model = sync.attach(Start(version=7))
    assert [each.version for each in receivers] == [7, 7]
    for version in (8, 9):
        report = sync.publish(version, lambda: step(model))
        assert report.weight_version == version and report.mode == "broadcast"
        assert {"write", "pause", "receive", "resume", "request"} == report.phases.keys()
        assert report.seconds == pytest.approx(sum(report.phases.values()))
        for each in receivers:
            assert each.version == version
            assert_same_weights(each, model)
    assert [each.joins for each in receivers] == [1, 1], "one group for all versions"


def test_an_overlapped_publish_returns_at_once_and_ends_before_weights_change(
    make: Make, receivers: list[Receiver]
) -> None:
    sync = make(overlap_publish=True)
    model = sync.attach(Start(version=7))
    arrived: list[SyncReport] = []
    seen: list[list[int | None]] = []
    sync.arrived = arrived.append
    for each in receivers:
        each.lets_end_s = 0.5

    def write() -> None:
        seen.append([each.version for each in receivers])
        step(model)

    for version in (8, 9):
        report = sync.publish(version, write)
        assert not report.moved and report.phases.keys() == {"settle", "write"}
        assert [each.version for each in receivers] == [version - 1] * 2, "under way"
        assert len(arrived) == version - 8
    assert seen == [[7, 7], [8, 8]], "nothing is written while a version is on its way"
    sync.settle()
    assert [each.weight_version for each in arrived] == [8, 9] and all(
        each.moved for each in arrived
    )
    assert all(each.seconds > 0.4 and "receive" in each.phases for each in arrived)
    for each in receivers:
        assert each.version == 9
        assert_same_weights(each, model)
    sync.settle()
    assert len(arrived) == 2, "told once"


def test_a_server_lost_during_an_overlapped_publish_is_left_out(
    make: Make, receivers: list[Receiver]
) -> None:
    sync = make(overlap_publish=True, engine_timeout=2)
    model = sync.attach(Start())
    arrived: list[SyncReport] = []
    sync.arrived = arrived.append
    receivers[1].fault = "dies at update"
    sync.publish(1, lambda: step(model))
    until = time.monotonic() + 30
    while not arrived and time.monotonic() < until:
        sync.check()
        time.sleep(0.05)
    assert receivers[0].version == 1 and list(arrived[0].left_out) == [receivers[1].url]
    assert_same_weights(receivers[0], model)
    receivers[0].fault = "dies at update"
    sync.publish(2, lambda: step(model))
    with pytest.raises(EngineGone):
        sync.settle()
    sync.publish(3, lambda: step(model))  # nothing of the failed one is left; its error comes again
    with pytest.raises(EngineGone):
        sync.publish(4, lambda: pytest.fail("written"))


def test_parameters_lie_in_one_piece_and_compute_the_same(base: Path) -> None:
    for name in ("qwen3 tied", "llama", "qwen2"):
        model = build(CONFIGS[name]).eval()
        tokens = torch.tensor([[1, 2, 3]])
        before = model(tokens).logits
        stream, tensors, copied = into_one_piece(model)
        assert not copied
        assert torch.equal(model(tokens).logits, before)
        assert ("lm_head.weight" in {tensor.name for tensor in tensors}) == (name != "qwen3 tied")
        model(tokens).logits.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        (whole,) = chunks(tensors, 1 << 40)
        for sent, view in named_views(whole, stream):
            assert torch.equal(view, dict(model.named_parameters())[sent]), (
                f"{sent}: a step is seen in what is sent"
            )


@pytest.mark.parametrize("width", [64, 5])
def test_experts_are_sent_singly_under_the_checkpoint_s_names(width: int, tmp_path: Path) -> None:
    """In place where each lies at a round address in its stack, by a copy before every broadcast
    where it does not."""
    config = Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width, head_dim=16
    )
    model = build(config).eval()
    stream, tensors, copied = into_one_piece(model)
    assert len(copied) == (0 if width == 64 else 3 * 4 * 3)
    step(model)
    for sent, tensor in copied:
        sent.copy_(tensor)
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    (whole,) = chunks(tensors, 1 << 40)
    sent = dict(named_views(whole, stream))
    assert (
        "model.layers.1.mlp.experts.3.up_proj.weight" in sent and sent.keys() == checkpoint.keys()
    )
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in sent.items())


SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=20)


@given(shapes=SIZES, limit=st.integers(1, 20_000), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_chunks_cover_the_stream_once_in_order(
    shapes: list[list[int]], limit: int, dtype: Any
) -> None:
    tensors = [SentTensor(name=str(i), dtype=dtype, shape=shape) for i, shape in enumerate(shapes)]
    parts = chunks(tensors, limit)
    assert [placed.tensor for part in parts for placed in part.tensors] == tensors
    assert parts[0].start == 0 and all(a.end == b.start for a, b in itertools.pairwise(parts))
    for part in parts:
        for placed in part.tensors:
            assert placed.start % ALIGNMENT == 0
            assert part.start <= placed.start and placed.start + placed.tensor.nbytes <= part.end
        last = part.tensors[-1]
        assert len(part.tensors) == 1 or last.start + last.tensor.nbytes - part.start <= limit


def test_a_restarted_server_gets_the_present_weights(make: Make, receivers: list[Receiver]) -> None:
    sync = make()
    model = sync.attach(Start())
    sync.publish(1, lambda: step(model))
    receivers[1].die()
    receivers[1].restart()
    sync._checked = 0.0
    sync.check()
    assert [each.version for each in receivers] == [1, 1]
    assert_same_weights(receivers[1], model)
    sync.publish(2, lambda: step(model))
    assert_same_weights(receivers[0], model)
    assert_same_weights(receivers[1], model)


@pytest.mark.parametrize("fault", ["dies at update", "never receives", "breaks"])
def test_a_server_lost_in_the_middle_is_named_and_waited_for(
    fault: Fault, make: Make, receivers: list[Receiver], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by the others, who have the update at once; when it is back it has the weights of
    then."""
    sync = make()
    model = sync.attach(Start())
    receivers[1].fault = fault
    if fault == "never receives":
        sync.config = sync.config.model_copy(update={"broadcast_timeout": 1.0})
    began = time.monotonic()
    report = sync.publish(1, lambda: step(model))
    assert time.monotonic() - began < 8
    assert "begun_anew" in report.phases and report.moved
    assert (
        report.left_out.keys() == {receivers[1].url}
        and "phase transfer" in report.left_out[receivers[1].url]
    )
    said = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if "did not reach every server" in line
    )
    assert "phase transfer" in said and receivers[1].url in said, said
    if fault == "dies at update":
        assert receivers[0].url not in said, "the one that died is named, not the one that noticed"
    assert receivers[0].version == 1
    assert_same_weights(receivers[0], model)
    assert "left_out" not in sync.publish(2, lambda: step(model)).phases
    assert (receivers[0].version == 2 and receivers[1].version == 0) or receivers[1].version is None

    receivers[1].restart()
    sync._checked = 0.0
    sync.check()
    assert not sync.left_out
    for each in receivers:
        assert each.version == 2
        assert_same_weights(each, model)


@pytest.mark.parametrize("fault", ["a worker dies at update", "a worker hangs at update"])
def test_one_worker_of_several_costs_its_server_and_no_other(
    fault: Fault, make: Make, receivers: list[Receiver], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its neighbour waits in the same broadcast, and so would the servers beside it."""
    sync = make(broadcast_timeout=4.0)
    model = sync.attach(Start())
    receivers[0].fault = fault
    began = time.monotonic()
    report = sync.publish(1, lambda: step(model))
    assert time.monotonic() - began < 15, "of 4 seconds that a broadcast may take, and a group anew"
    assert report.left_out.keys() == {receivers[0].url} and receivers[1].version == 1
    out = capsys.readouterr().out
    said = next(line for line in out.splitlines() if "did not reach every server" in line)
    assert (
        "phase transfer" in said
        and f"[WARNING] {receivers[0].url} is left out of the broadcast: " in out
    ), out
    assert_same_weights(receivers[1], model)
    receivers[0].restart()
    sync._checked = 0.0
    sync.check()
    assert not sync.left_out and receivers[0].version == 1
    assert_same_weights(receivers[0], model)


def test_when_none_is_left_one_is_waited_for(make: Make, receivers: list[Receiver]) -> None:
    sync = make()
    model = sync.attach(Start())
    for each in receivers:
        each.die()
    threading.Timer(1.5, receivers[1].restart).start()
    began = time.monotonic()
    report = sync.publish(1, lambda: step(model))
    assert 1.0 < time.monotonic() - began < 10
    assert receivers[1].version == 1 and report.left_out.keys() == {receivers[0].url}
    assert_same_weights(receivers[1], model)


@pytest.mark.parametrize("comes", [True, False], ids=["comes late", "never comes"])
def test_at_the_beginning_only_who_never_comes_is_left_out(
    make: Make, receivers: list[Receiver], capsys: pytest.CaptureFixture[str], comes: bool
) -> None:
    """A server that still loads its own weights is not one that a run goes on without."""
    receivers[1].die()
    if comes:
        threading.Timer(0.7, receivers[1].restart).start()
    make(engine_timeout=30 if comes else 2).attach(Start())
    assert (
        f"{receivers[1].url} is left out of the broadcast" in capsys.readouterr().out
    ) is not comes


def test_another_rank_does_not_look_for_servers(make: Make) -> None:
    """It knows none; one that met with an error would wait for them while rank 0 waits for it."""
    sync = make(engine_timeout=5)
    sync.world = World()
    sync.world.rank, sync.world.size = 1, 2
    began = time.monotonic()
    sync.check()
    assert time.monotonic() - began < 1


def test_one_that_was_left_out_is_not_waited_for(make: Make, receivers: list[Receiver]) -> None:
    """A read of versions or idle seconds between two publishes takes a second and not a minute."""
    sync = make()
    model = sync.attach(Start())
    lost, there = sync.engines
    receivers[0].die()
    sync.publish(1, lambda: step(model))
    assert lost.away and not there.away
    receivers[0].restart()
    deadline = time.monotonic() + 10
    while lost.away and time.monotonic() < deadline:
        sync.check()
        time.sleep(0.1)
    assert not lost.away and receivers[0].version == 1


def test_a_worker_that_hangs_is_named_before_it_is_given_up(
    make: Make,
    receivers: list[Receiver],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_core.weight_sync.broadcast.WARN_AFTER_S", 0.3)
    sync = make()
    model = sync.attach(Start())
    sync.config = sync.config.model_copy(update={"broadcast_timeout": 1.5})
    receivers[1].fault = "never receives"
    sync.publish(1, lambda: step(model))
    lines = capsys.readouterr().out.splitlines()
    waits = next(
        i for i, line in enumerate(lines) if "the broadcast waits (phase transfer)" in line
    )
    assert receivers[1].url in lines[waits] and "left out" in "".join(lines[waits + 1 :])


def test_every_server_that_answers_is_named(
    make: Make, receivers: list[Receiver], capsys: pytest.CaptureFixture[str]
) -> None:
    """A message about one server alone reads as if the others had not answered."""
    make().attach(Start())
    said = capsys.readouterr().out
    assert all(
        f"The server at {each.url} answers with weight version 0" in said for each in receivers
    ), said


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("never comes", "rendezvous"),
        ("dies at join", "rendezvous"),
        ("never connects", "connect"),
        ("a worker dies at join", "rendezvous"),
    ],
)
def test_a_group_that_does_not_form_says_who_is_missing(
    fault: Fault, phase: str, make: Make, receivers: list[Receiver]
) -> None:
    """A run begins without a server that does not come within `engine_timeout`."""
    receivers[0].fault = fault
    sync = make(broadcast_timeout=0.5, engine_timeout=0.1)
    sync.attach(Start(version=3))
    assert sync.left_out.keys() == {receivers[0].url}
    assert receivers[0].version is None and receivers[1].version == 3
    (text,) = sync.left_out.values()
    if "dies at join" not in fault:  # whose later silence is newer
        assert f"phase {phase}" in text and receivers[0].url in text, text
        assert f"no answer from {receivers[0].url}" in text, text
    assert receivers[1].url not in text, "the one that died is named, not the one that noticed"


def test_two_ranks_on_one_gpu_are_named(
    make: Make, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_server.weights.collectives.gpu_of", lambda device: "GPU-1")
    with pytest.raises(
        UsageError, match=r"on one GPU, and NCCL .* invalid usage.*vllm\.gpus"
    ) as raised:
        make().attach(Start())
    assert all(each.url in str(raised.value) for each in receivers)


def test_completions_that_may_end_first_are_waited_for_besides(
    make: Make, receivers: list[Receiver]
) -> None:
    """The server lets them end before it receives: longer than the broadcast itself may take."""
    sync = make(broadcast_timeout=1, in_flight="wait", in_flight_timeout=5)
    model = sync.attach(Start())
    receivers[1].lets_end_s = 2.0
    report = sync.publish(1, lambda: step(model))
    assert "begun_anew" not in report.phases and receivers[1].joins == 1
    for each in receivers:
        assert_same_weights(each, model)


def test_the_other_server_is_released_at_once(make: Make, receivers: list[Receiver]) -> None:
    """A peer that dies must not keep the living ones until their timeout."""
    sync = make(broadcast_timeout=30, engine_timeout=20)
    model = sync.attach(Start())
    receivers[1].fault = "dies at update"
    began = time.monotonic()
    sync.publish(1, lambda: step(model))
    assert time.monotonic() - began < 8
    assert_same_weights(receivers[0], model)


def test_a_trainer_that_dies_is_an_error_on_the_server(
    make: Make, receivers: list[Receiver]
) -> None:
    """The servers wait for data that nobody sends, with minutes to go until the timeout."""
    sync = make(broadcast_timeout=300)
    sync.attach(Start())
    clients = [ServerClient(each.url) for each in receivers]
    errors: list[str] = []

    def receive(client: ServerClient) -> None:
        from atropos_common.broadcast.transfer import TransferUpdate

        try:
            client.receive(TransferUpdate(weight_version=1, timeout_s=300))
        except EngineGone as error:
            errors.append(str(error))

    waiting = [threading.Thread(target=receive, args=(client,)) for client in clients]
    for thread in waiting:
        thread.start()
    time.sleep(0.3)
    assert sync._meeting is not None
    sync._meeting._server = None  # the process is gone: its store no longer answers
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()
    assert len(errors) == 2 and all(
        "phase receive" in text and "trainer" in text for text in errors
    ), errors


def test_a_group_that_keeps_failing_is_tried_ever_more_rarely(
    make: Make, receivers: list[Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_core.weight_sync.broadcast.OTHER_ERRORS_S", 0.0)
    receivers[1].fault = "breaks"
    sync = make(engine_timeout=4.0)
    sync.attach(Start())
    assert "a worker broke" in sync.left_out[receivers[1].url]
    assert 2 <= receivers[1].joins <= 10, (
        "twice each, about 0, 0.2, 0.6, 1.4 and 3.0 s after the start, or later"
    )


def leave(arguments: list[str]) -> int:
    """A trainer that ends with the last of its groups."""
    model, *urls = arguments
    config = TrainingConfig(
        model_name=model,
        weight_bridge_mode="shared_vllm",
        use_shared_memory=True,
        dtype="float32",
        vllm_urls=urls,
    )
    made = [Broadcast(config, torch.device("cpu"), threading.Event()) for _ in range(4)]
    for each in made:
        each.attach(Start())
    for each in made:
        each.close()
    return 0


def test_a_trainer_ends_cleanly_right_after_it_left_its_group(
    base: Path, tmp_path: Path, receivers: list[Receiver]
) -> None:
    """A thread inside the group's end when the interpreter ends aborts the process: a failure after
    the last step."""
    log = tmp_path / "said"
    words = [str(base), *(each.url for each in receivers)]
    child = forked(TRAINER, "tests.trainer_core.weight_sync.test_broadcast:leave", words, log)
    assert child.wait(110) == 0, log.read_text()[-2000:]
    assert log.read_text().count("Broadcast group: the trainer and 3 workers") == 4


def test_a_refusal_is_final(make: Make, receivers: list[Receiver]) -> None:
    receivers[1].fault = "refuses"
    began = time.monotonic()
    with pytest.raises(EngineError, match="another model"):
        make(engine_timeout=60).attach(Start())
    assert time.monotonic() - began < 10


def test_servers_that_cannot_receive_are_refused(make: Make, receivers: list[Receiver]) -> None:
    receivers[1].receives = None
    with pytest.raises(UsageError, match="ATROPOS_WEIGHT_UPDATES=1"):
        make().attach(Start())
    receivers[1].receives = "nccl"
    with pytest.raises(UsageError, match="both the CPU"):
        make().attach(Start())


def test_the_number_of_inference_nodes_is_checked() -> None:
    def config(**fields: Any) -> TrainingConfig:
        return TrainingConfig(
            model_name="m",
            weight_bridge_mode="shared_vllm",
            use_shared_memory=True,
            vllm_urls=["http://a", "http://b"],
            **fields,
        )

    require_nodes(config(), {})
    require_nodes(config(), {"NUM_INFERENCE_NODES": "0"})
    require_nodes(config(num_inference_nodes=2), {"NUM_INFERENCE_NODES": "5"})
    with pytest.raises(
        UsageError, match=r"NUM_INFERENCE_NODES is 3, but --vllm-urls names 2: http://a http://b"
    ):
        require_nodes(config(), {"NUM_INFERENCE_NODES": "3"})
    with pytest.raises(UsageError, match="--num-inference-nodes is 1"):
        require_nodes(config(num_inference_nodes=1), {})
    with pytest.raises(UsageError, match="NUM_INFERENCE_NODES=two"):
        require_nodes(config(), {"NUM_INFERENCE_NODES": "two"})


@pytest.mark.parametrize(
    ("method", "env", "expected"),
    [
        ("env://", {}, ("127.0.0.1", 0)),
        ("env://", {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, ("localhost", 29500)),
        ("tcp://10.0.0.1:1234", {"MASTER_ADDR": "localhost"}, ("10.0.0.1", 1234)),
        ("tcp://[::1]:1234", {}, ("::1", 1234)),
    ],
)
def test_meeting_point(method: str, env: dict[str, str], expected: tuple[str, int]) -> None:
    assert (
        meeting_point(TrainingConfig(model_name="m", init_method=method).init_method, env)
        == expected
    )


def test_a_meeting_point_that_cannot_be_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="MASTER_PORT=70000"):
        meeting_point("env://", {"MASTER_PORT": "70000"})
    for everywhere in ("0.0.0.0", "[::]", "0"):
        with pytest.raises(UsageError, match=r"every interface.* by default it is 127\.0\.0\.1"):
            meeting_point(f"tcp://{everywhere}:5000", {})
    with pytest.raises(
        UsageError, match=r"MASTER_ADDR=0\.0\.0\.0 MASTER_PORT=0: that is every interface"
    ):
        meeting_point("env://", {"MASTER_ADDR": "0.0.0.0"})
    with pytest.raises(ValueError, match="init_method"):
        TrainingConfig(model_name="m", init_method="file:///tmp/x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot meet at 127\.0\.0\.1:{port}"):
            make(init_method=f"tcp://127.0.0.1:{port}").attach(Start())


def test_the_store_listens_on_the_loopback_only_and_the_port_is_kept(
    make: Make, receivers: list[Receiver]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sync = make(init_method=f"tcp://127.0.0.1:{port}")
    model = sync.attach(Start())
    mine = [
        c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ]
    assert {c.ip for c in mine} <= {"127.0.0.1", "::ffff:127.0.0.1"}, mine
    assert port in {c.port for c in mine}
    receivers[0].restart()
    sync.publish(1, lambda: step(model))
    assert_same_weights(receivers[0], model)


def test_lag_asks_every_server(receivers: list[Receiver]) -> None:
    receivers[0].versions, receivers[1].versions = {"a": (3, 3)}, {"b": (1, 2)}
    meter = LagMeter([ServerClient(each.url).versions for each in receivers])

    class Rolled:
        def __init__(self, *digests: str) -> None:
            self.digests, self.oldest_version = list(digests), None

    rollouts: Any = [Rolled("a"), Rolled("b"), Rolled("a", "b"), Rolled("c")]
    lags = meter.measure(rollouts, 4)
    assert [lag and lag.oldest for lag in lags] == [1, 3, 3, None]
    receivers[0].die()
    lags = meter.measure(rollouts, 4)
    assert [lag and lag.oldest for lag in lags] == [None, 3, 3, None], "the other one still answers"


def two_engines(**changes: Any) -> Any:
    """A profile of two engines and an environment for each."""
    engines = [{"name": "a", "port": 9001}, {"name": "b", "port": 9002}]
    envs = [
        {"name": name, "module": "json", "engine": engine}
        for name, engine in (("x", "a"), ("y", "b"))
    ]
    return make_site(
        profile(mode="broadcast", vllm=engines, env=envs, **changes), Path("/runs/r"), run_id="r"
    )


def test_the_plan_feeds_every_engine_and_a_restart_takes_nobody_along() -> None:
    site = two_engines()
    assert check_profile(site) == []
    stack = {
        part.name: part
        for part in stack_of(make_site(site.profile, Path("/runs/r"), run_id="r")).components
    }
    command = " ".join(stack["trainer"].command)
    assert (
        "--use-shared-memory" in command
        and "--vllm-urls http://127.0.0.1:9001,http://127.0.0.1:9002" in command
    )
    for name, port in (("a", 9001), ("b", 9002)):
        assert (
            stack[name].env["ATROPOS_WEIGHT_UPDATES"]
            == stack[name].env["ATROPOS_HOLD_GENERATION"]
            == "1"
        )
        assert stack[name].restart_with == []
        assert f"http://127.0.0.1:{port}/v1" in stack["x" if name == "a" else "y"].command


def test_the_servers_of_a_plan_meet_the_trainer_where_the_profile_says() -> None:
    def hosts(**trainer: Any) -> list[str | None]:
        site = two_engines(trainer=trainer)
        stack = stack_of(make_site(site.profile, Path("/runs/r"), run_id="r"))
        return [
            part.env.get("ATROPOS_TRAINER_HOSTS")
            for part in stack.components
            if part.role == "engine"
        ]

    assert (
        hosts()
        == hosts(init_method="tcp://127.0.0.1:5000")
        == hosts(env={"MASTER_ADDR": "localhost"})
        == [None] * 2
    )
    assert (
        hosts(init_method="tcp://10.0.0.7:5000")
        == hosts(env={"MASTER_ADDR": "10.0.0.7"})
        == ["10.0.0.7"] * 2
    )
    assert hosts(env={"MASTER_ADDR": "${HERE}"}) == ["${HERE}"] * 2, (
        "looked up when the process starts"
    )


def test_a_public_meeting_point_is_warned_of_and_every_interface_is_refused() -> None:
    assert check_notes(two_engines(trainer={"init_method": "tcp://[::1]:5000"})) == []
    (note,) = check_notes(two_engines(trainer={"init_method": "tcp://10.0.0.7:5000"}))
    assert note.startswith(
        "WARNING trainer.init_method: the broadcast's group meets at 10.0.0.7, beyond the loopback"
    )
    (note,) = check_notes(two_engines(trainer={"env": {"MASTER_ADDR": "node-3"}}))
    assert note.startswith("WARNING trainer.env.MASTER_ADDR: the broadcast's group meets at node-3")
    for trainer in ({"init_method": "tcp://0.0.0.0:5000"}, {"init_method": "tcp://[::]:0"}):
        (problem,) = check_profile(two_engines(trainer=trainer))
        assert (
            problem.key == "trainer.init_method"
            and "every interface" in problem.reason
            and problem.fix
        )
    (problem,) = check_profile(two_engines(trainer={"env": {"MASTER_ADDR": "0.0.0.0"}}))
    assert problem.key == "trainer.env.MASTER_ADDR"


def test_the_plan_counts_inference_nodes() -> None:
    found = check_profile(two_engines(trainer={"num_inference_nodes": 3}))
    assert [(problem.key, problem.reason) for problem in found] == [
        (
            "trainer.num_inference_nodes",
            "3 inference servers, but the trainer feeds 2 of this profile's",
        )
    ]
    assert check_profile(two_engines(trainer={"num_inference_nodes": 2})) == []


def test_what_ranks_met_in_is_gone_once_they_have() -> None:
    """Or it would stay for ever where rank 0 is killed."""
    orders = Orders(2)
    assert orders.meeting is not None
    follower = Follower(orders.meeting, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    orders.meet()
    assert not Path(orders.meeting.at).exists()
    orders.give(Order(do="leave"))
    until = time.monotonic() + 10
    while not orders.done() and time.monotonic() < until:
        time.sleep(0.01)
    assert orders.done(), "its line goes on without"
    follower.close()
    orders.close()
