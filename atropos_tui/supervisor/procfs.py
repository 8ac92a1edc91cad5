"""The process table, read from /proc, and control groups: who lives, started when, with which marker, in which group.

A process is named by (pid, start ticks): a pid alone may have been given to someone else since.

Where this user may make cgroup v2 groups, there is one per run and one below it per attempt of a component: no process
leaves its group by double-forking, starting a session or cleaning its environment, and `cgroup.kill` ends a group even
while it forks. Where the hierarchy is missing, read-only or someone else's, every function about groups says so by its
empty or false result, and the other means (session, marker, descent, parent-death signal) do alone. No controller is
enabled, so groups with processes may have groups below them.

Imports only `os`, `signal` and `time` (pathlib alone costs 2 MB), because the guard, one small process per run, uses
it.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False  # `typing` costs as much
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TICKS_PER_SECOND: int = os.sysconf("SC_CLK_TCK")
SPAWNED: set[int] = set()
"""Children that were started here and are not reaped yet; all others in foreign sessions are adopted."""
CONTAINER = "/sys/fs/cgroup"
"""The control group that a container takes for the root of all."""
PREFIX = "atropos-"
"""Every group of ours is called this and the run's id; nothing else is ever killed or removed."""
SCRATCH = "atropos-scratch-"
"""How the names of folders for temporary files begin; no other folder is ever removed."""
SHARED_MEMORY = "/dev/shm/"
"""Semaphores, tensors and CUDA's own segments lie there under names of their makers' choice: whose a file is, is told
by who has it mapped, and of a killed process by nothing."""
PATIENCE_S = 1.0
"""How long the kernel may take to let go of a group whose last process was killed."""


class Proc:
    """One row of the process table. `ticks` is the start time in clock ticks after boot, `cpu_ticks` user + system."""

    __slots__ = ("cpu_ticks", "pgrp", "pid", "ppid", "session", "state", "threads", "ticks")

    def __init__(self, pid: int, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.state = fields[0].decode()
        self.ppid, self.pgrp, self.session = int(fields[1]), int(fields[2]), int(fields[3])
        self.cpu_ticks = int(fields[11]) + int(fields[12])
        self.threads = int(fields[17])
        self.ticks = int(fields[19])

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.ticks

    @property
    def alive(self) -> bool:
        """False for a zombie, unless other threads of it still run."""
        return self.state not in ("Z", "X") or self.threads > 1

    def __repr__(self) -> str:
        return f"Proc({self.pid}, {self.state}, ppid={self.ppid}, pgrp={self.pgrp}, session={self.session})"


def read(pid: int) -> Proc | None:
    """The row of `pid`, or None when there is no such process."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        return Proc(pid, os.read(descriptor, 2048))
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(descriptor)


def lives(pid: int, ticks: int) -> bool:
    """Whether the process that was started as `pid` at `ticks` still runs."""
    row = read(pid)
    return row is not None and row.alive and row.ticks == ticks


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP keeps the process from running."""
    row = read(pid)
    return row is not None and row.state in ("T", "t")


def exit_of(pidfd: int) -> int | None:
    """How the child behind `pidfd` has ended, negative for a signal; it stays a zombie. None while it runs."""
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def scan() -> dict[int, Proc]:
    """Every process of the machine that can be read, by pid."""
    rows = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {row.pid: row for row in rows if row is not None}


def _block(pid: int) -> bytes:
    """The environment that the process was started with, a zero byte before and behind each entry; empty when it
    cannot be read (another user's, a zombie)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return b"\0" + file.read() + b"\0"
    except OSError:
        return b""


def environ(pid: int) -> dict[str, str]:
    """Environment that the process was started with; empty when it cannot be read."""
    pairs = (entry.partition(b"=") for entry in _block(pid).split(b"\0") if b"=" in entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def marked(pid: int, *markers: bytes) -> bool:
    """Whether the process was started with every one of `markers` (`NAME=value`) in its environment."""
    data = _block(pid)
    return all(b"\0" + marker + b"\0" in data for marker in markers)


def component_of(pid: int, run: bytes) -> str:
    """Of which component of a run (`ATROPOS_RUN_ID=...`) the process was started; empty if of none."""
    data = _block(pid)
    begin = data.find(b"\0ATROPOS_COMPONENT=") + 1
    if not begin or b"\0" + run + b"\0" not in data:
        return ""
    return os.fsdecode(data[begin + len(b"ATROPOS_COMPONENT=") : data.index(b"\0", begin)])


def resident(pid: int) -> int | None:
    """Proportional set size of `pid` in bytes, or its resident size where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def mapped_by(pid: int) -> set[str]:
    """Files in /dev/shm that process `pid` has mapped; those already unlinked are left out.

    A semaphore is mapped before it has its name, under another that is gone: it is told by its inode.
    """
    found, nameless = set(), set()
    try:
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:  # noqa: PTH123
            for line in file:
                if SHARED_MEMORY in line:
                    path = line[line.index(SHARED_MEMORY) :].rstrip("\n")
                    if path.endswith(" (deleted)"):
                        nameless.add(int(line.split(maxsplit=5)[4]))
                    else:
                        found.add(path)
        if nameless:
            with os.scandir(SHARED_MEMORY) as entries:
                found |= {entry.path for entry in entries if entry.inode() in nameless}
    except OSError:
        return found
    return found


def remove_unused(paths: Iterable[str]) -> list[str]:
    """Remove those of `paths` that are this user's and that no process maps any more; what was removed."""
    left = {path for path in paths if _is_ours(path)}
    if not left:
        return []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            left -= mapped_by(int(name))
    for path in left:
        try:
            os.unlink(path)  # noqa: PTH108
        except OSError:
            continue
    return sorted(left)


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False


def grouped(table: dict[int, Proc], group: str) -> set[int]:
    """Processes in control group `group`; those that came after `table` was read are added to it."""
    found = group_pids(group)
    for pid in found - table.keys():
        row = read(pid)
        if row is not None:
            table[pid] = row
    return found & table.keys()


def children_of(table: dict[int, Proc]) -> dict[int, list[int]]:
    """By pid the pids of its children."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.ppid, []).append(row.pid)
    return children


def with_descendants(table: dict[int, Proc], seeds: set[int], children: dict[int, list[int]] | None = None) -> set[int]:
    """`seeds` and everything below them in `table`, of which somebody may have `children_of` already."""
    children = children_of(table) if children is None else children
    found: set[int] = set()
    todo = list(seeds)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def run_members(
    run_id: str,
    sessions: dict[int, int],
    exclude: set[int],
    group: str = "",
    known_until: int | None = None,
    counts: Callable[[int], bool] | None = None,
) -> list[Proc]:
    """Live processes of the run.

    Args:
        run_id: value of `ATROPOS_RUN_ID` in their environment.
        sessions: session id -> start ticks of its leader; a leader with other ticks is a stranger with a re-used pid.
        exclude: pids never to name, such as the caller's.
        group: the run's control group, if it has one.
        known_until: when `sessions` was written down, in ticks; None: it is of now. The number of a session whose
            leader is gone may be a stranger's since then.
        counts: whether a process with the run's id in its environment counts, by its pid; `None`: each does.
    """
    table = scan()
    led = {sid for sid, ticks in sessions.items() if sid in table and table[sid].ticks == ticks}
    leaderless = {sid for sid in sessions if sid not in table}
    marker = b"ATROPOS_RUN_ID=" + os.fsencode(run_id)

    def in_session(row: Proc) -> bool:
        ids = {row.session, row.pgrp}
        return bool(ids & led or (ids & leaderless and (known_until is None or row.ticks <= known_until)))

    def is_marked(pid: int) -> bool:
        return marked(pid, marker) and (counts is None or counts(pid))

    seeds = grouped(table, group) | {row.pid for row in table.values() if in_session(row) or is_marked(row.pid)}
    found = with_descendants(table, seeds - exclude) - exclude
    return [table[pid] for pid in found if pid in table and table[pid].alive]


def send(proc: Proc, number: int) -> bool:
    """Signal exactly this process: through a pidfd, and only if its start time is still the same.

    Returns False when it is gone (or is not ours to signal).
    """
    try:
        descriptor = os.pidfd_open(proc.pid)
    except OSError:
        return False
    try:
        now = read(proc.pid)
        if now is None or now.ticks != proc.ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def reap_adopted(table: dict[int, Proc]) -> None:
    """Collect zombies that became our children when their parent died (we are their subreaper)."""
    mine, session = os.getpid(), os.getsid(0)
    for row in table.values():
        if row.ppid == mine and not row.alive and row.pid not in SPAWNED and row.session != session:
            try:
                os.waitpid(row.pid, os.WNOHANG)
            except ChildProcessError:
                continue


def ticks_at(moment: float) -> int:
    """A moment in Unix seconds as a start time."""
    return ticks_now() - int((time.time() - moment) * TICKS_PER_SECOND)


def ticks_now() -> int:
    """The present moment as a start time."""
    with open("/proc/uptime") as file:  # noqa: PTH123
        return int(float(file.read().split()[0]) * TICKS_PER_SECOND)


def boot_id() -> str:
    """The kernel's name for this boot: pids and start ticks mean nothing after another one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def run_group(run_id: str) -> str:
    """Make the group of a run below the group of this process; its path, or "" where that cannot be done."""
    path = f"{_own_group()}/{group_name(run_id)}"
    return path if not _make_fillable(path) else ""


def group_name(run_id: str) -> str:
    """The name of a run's group."""
    return PREFIX + _as_path_part(run_id)


def is_group_of(path: str, run_id: str) -> bool:
    """Whether `path`, as found in a file, can be the group of run `run_id`."""
    return bool(path) and os.path.basename(path) == group_name(run_id) and os.path.exists(f"{path}/cgroup.procs")  # noqa: PTH110, PTH119


def part_group(group: str, component: str, attempt: int) -> str:
    """Make the group of one attempt below the run's `group`; its path, or "" where that cannot be done."""
    if not group:
        return ""
    path = f"{group}/{_as_path_part(component)}.{attempt}"
    try:
        os.mkdir(path)  # noqa: PTH102
    except OSError:
        return path if os.path.isdir(path) else ""  # noqa: PTH112
    return path


def group_pids(group: str) -> set[int]:
    """Live processes of `group` and of the groups below it, whoever made those."""
    found: set[int] = set()
    for folder in _group_tree(group):
        try:
            with open(f"{folder}/cgroup.procs", "rb") as file:  # noqa: PTH123
                found.update(map(int, file.read().split()))
        except OSError:
            continue
    return found - {0}  # 0 stands for a process of another pid namespace


def kill_group(group: str) -> bool:
    """SIGKILL to all of `group`, also to what it is just forking; False where the kernel has no `cgroup.kill`."""
    try:
        with open(f"{group}/cgroup.kill", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(b"1")
    except OSError:
        return False
    return True


def remove_group(group: str, patience_s: float = PATIENCE_S) -> bool:
    """Remove the empty `group` with the groups below it; False when something still runs in it."""
    give_up = time.monotonic() + patience_s
    while group and os.path.isdir(group):  # noqa: PTH112
        for folder in reversed(_group_tree(group)):
            try:
                os.rmdir(folder)  # noqa: PTH106
            except OSError:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.002)
    return True


def describe_groups() -> str:
    """Whether components get groups of their own on this machine, in one sentence; for `doctor`."""
    own = _own_group()
    if not own:
        return "no cgroup v2 hierarchy: components are tracked by session, marker and descent"
    trial = f"{own}/{PREFIX}trial.{os.getpid()}"
    problem = _make_fillable(trial)
    if problem:
        return f"cgroup v2 is not delegated ({problem}): components are tracked by session, marker and descent"
    ends = "ended by cgroup.kill" if os.path.exists(f"{trial}/cgroup.kill") else "ended one by one (Linux before 5.14)"  # noqa: PTH110
    remove_group(trial)
    return f"cgroup v2 is delegated: each component gets a group below {own}, {ends}"


def _as_path_part(name: str) -> str:
    """`name` as one part of a path; different names stay different."""
    allowed = (letter.isascii() and (letter.isalnum() or letter in "._-") for letter in name)
    return "".join(letter if fine else f"~{ord(letter):x}~" for letter, fine in zip(name, allowed, strict=True))


def _own_group() -> str:
    """Where the group of this process lies in the file system, or ""."""
    try:
        with open("/proc/self/cgroup") as file:  # noqa: PTH123
            path = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), "")
        with open("/proc/self/mountinfo") as file:  # noqa: PTH123
            return _group_folder(path, file.read())
    except OSError:
        return ""


def _group_folder(path: str, mountinfo: str) -> str:
    """The folder of cgroup `path`: below the cgroup2 mount that shows it. A container may see a part of the tree."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if path and right.split()[:1] == ["cgroup2"]:
            root, mount = (_unescaped(field) for field in left.split()[3:5])
            root = root.rstrip("/")
            if path == root or path.startswith(f"{root}/"):
                return (mount + path[len(root) :]).rstrip("/")
    return ""


def _unescaped(field: str) -> str:
    """Mount points are written with `\\040` for a space."""
    return field.encode().decode("unicode_escape") if "\\" in field else field


def _make_fillable(path: str) -> str:
    """Make group `path`, which this user must be able to fill; "" or why it cannot be done."""
    try:
        os.mkdir(path)  # noqa: PTH102
    except FileExistsError:
        pass
    except OSError as error:
        return f"{path}: {error.strerror}"
    parent = os.path.dirname(path)  # noqa: PTH120
    for folder in (parent, path):  # moving a process takes the right to write to their common ancestor, too
        if not os.access(f"{folder}/cgroup.procs", os.W_OK):
            remove_group(path, 0.0)
            return f"{folder}/cgroup.procs cannot be written"
    return ""


def _group_tree(group: str) -> list[str]:
    """`group` and every group below it, parents first."""
    found = [group] if group else []
    for folder in found:
        try:
            with os.scandir(folder) as entries:
                found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
    return found


class MachineMeter:
    """CPU and memory of the machine, from one look to the next; memory of the container where that has a limit."""

    def __init__(self) -> None:
        self._before = _machine_ticks()

    def read(self) -> dict[str, float | int | None]:
        """`cpu_percent` of all cores since the last look, `memory_used` and `memory_total` in bytes."""
        before, self._before = self._before, _machine_ticks()
        busy, whole = (now - then for now, then in zip(self._before, before, strict=True))
        used, total = _memory()
        percent = min(100.0, max(0.0, 100 * busy / whole)) if whole > 0 else None
        return {"cpu_percent": percent, "memory_used": used, "memory_total": total}


def _machine_ticks() -> tuple[int, int]:
    """Ticks of all cores that were spent working, and all of them; guests are in those of their users."""
    with open("/proc/stat") as file:  # noqa: PTH123
        user, nice, system, idle, wait, irq, soft, stolen = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + soft + stolen
    return busy, busy + idle + wait


def _memory() -> tuple[int, int]:
    """Bytes used, and bytes there are."""
    with open("/proc/meminfo") as file:  # noqa: PTH123
        lines = [line.split() for line in file]
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("MemTotal:", "MemAvailable:")}
    total = sizes["MemTotal:"]
    try:
        with open(f"{CONTAINER}/memory.max") as limit, open(f"{CONTAINER}/memory.current") as held:  # noqa: PTH123
            most, used = int(limit.read()), int(held.read())
        with open(f"{CONTAINER}/memory.stat") as file:  # noqa: PTH123
            # Cached files: the kernel gives them back when memory is needed.
            used -= next((int(line.split()[1]) for line in file if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):  # no container, or one without a limit, whose file says `max`
        most = total
    return (max(0, used), most) if most < total else (total - sizes["MemAvailable:"], total)


def ancestors() -> set[int]:
    """This process and those it comes from: a shell inside a component carries the marker, too."""
    found, pid = set(), os.getpid()
    while pid and pid not in found:
        found.add(pid)
        row = read(pid)
        pid = row.ppid if row else 0
    return found
