"""A broadcast group between two machines: each rank listens at its own address."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.support import two_machines
from tests.support.two_machines import OWN


def trainer() -> None:
    """Rank 0, on the first machine; it sends what the worker, on the other, prints."""
    import torch

    from atropos_common.broadcast.transfer import TransferInit
    from trainer_core.weight_sync.sending import Rendezvous, connect

    meeting = Rendezvous("gloo", OWN, 0, 2, 60.0)
    init = TransferInit(
        backend="gloo",
        address=OWN,
        port=meeting.port,
        key=meeting.key,
        secret=meeting.secret,
        first_rank=1,
        world_size=2,
        timeout_s=60.0,
        chunk_bytes=1,
        tensors=[],
    )
    words = two_machines.elsewhere(
        sys.executable, "-m", "tests.atropos_common.broadcast.test_two_machines", "worker"
    )
    worker = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    worker.stdin.write(init.model_dump_json().encode())
    worker.stdin.close()
    while meeting.missing("here"):
        assert worker.poll() is None
        time.sleep(0.05)
    meeting.go()
    group = connect(init, meeting.store, 0, torch.device("cpu"))
    group._gloo.broadcast(torch.arange(100_000, dtype=torch.float32), 0).wait()  # type: ignore[union-attr]
    assert worker.wait(60) == 0
    group.close()
    meeting.close()


def worker() -> None:
    """Rank 1, which knows no more than what came to it."""
    import torch

    from atropos_common.broadcast.transfer import TransferInit
    from vllm_server.weights.collectives import GlooLink, join

    link = join(TransferInit.model_validate_json(sys.stdin.read()), 1, torch.device("cpu"))
    assert isinstance(link, GlooLink)
    got = torch.empty(100_000)
    link._gloo.broadcast(got, 0).wait()
    print(json.dumps([float(got[7]), float(got[-1])]), flush=True)
    link.close()


@pytest.mark.slow
@pytest.mark.skipif(not two_machines.possible(), reason="no network of one's own here")
def test_weights_go_from_one_machine_to_another() -> None:
    words = two_machines.command(
        sys.executable, "-m", "tests.atropos_common.broadcast.test_two_machines", "trainer"
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [7.0, 99_999.0]


if __name__ == "__main__":
    {"trainer": trainer, "worker": worker}[sys.argv[1]]()
