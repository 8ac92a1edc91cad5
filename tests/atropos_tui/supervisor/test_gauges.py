"""Records of machine and components while a stack runs."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import GaugesRecord
from atropos_tui.supervisor import gauges, supervisor
from atropos_tui.supervisor.launchers import launcher
from atropos_tui.supervisor.processes import procfs
from tests.support.harness import part, python, wait_until

BUSY = "while True: sum(range(1000))"


async def test_a_live_stack_leaves_gauges_of_its_components(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "GAUGES_EVERY_S", 0.3)
    async with launch(part("sleeps"), part("works", python(BUSY))) as running:
        tail, found = RecordTail(running.run.gauges_jsonl), list[Record]()

        def worked() -> bool:
            found.extend(tail.read())
            used = [
                one.components["works"].cpu_percent for one in found if "works" in one.components
            ]
            return any((percent or 0) > 10 for percent in used)

        await wait_until(worked, 30)
        await running.client.command(CommandRequest(action="down"))
        await running.end()
    last = next(one for one in reversed(found) if "sleeps" in one.components)
    assert isinstance(last, GaugesRecord)
    assert last.run_id == running.stack.run_id
    assert (last.components["sleeps"].memory_bytes or 0) > 100_000
    assert last.host.memory_total
    assert last.disk_free_bytes


async def test_no_descriptor_to_measure_with_is_no_fault(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`psutil` and the look at /proc both fail for a while, as when another program has used up
    what there is."""
    monkeypatch.setattr(gauges, "GAUGES_EVERY_S", 0.1)
    monkeypatch.setattr(supervisor, "SURVEY_EVERY_S", 0.1)
    left = {"read": 3, "survey": 3}

    def at_first(name: str, real: Any) -> Any:
        def call(*values: Any) -> Any:
            if left[name]:
                left[name] -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*values)

        return call

    monkeypatch.setattr(gauges.GaugeReader, "read", at_first("read", gauges.GaugeReader.read))
    monkeypatch.setattr(launcher.Host, "survey", at_first("survey", launcher.Host.survey))
    async with launch(part("sleeps")) as running:
        await wait_until(lambda: not any(left.values()) and running.run.gauges_jsonl.exists())
        assert not running.run.fault_txt.exists()


def test_memory_is_that_of_the_container_where_it_has_a_limit(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's cache of files is not in use; a group other than the container's own root has no
    such files."""
    monkeypatch.setattr(procfs, "CONTAINER", str(tmp_path))
    whole = procfs.MachineMeter().read()["memory_total"]
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 200000\n")
    assert procfs.MachineMeter().read()["memory_total"] == whole
    (tmp_path / "memory.max").write_text("1000000\n")
    found = procfs.MachineMeter().read()
    assert (found["memory_used"], found["memory_total"]) == (500_000, 1_000_000)
