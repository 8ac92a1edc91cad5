"""Process table from /proc, and cgroup v2 groups.

A process is (pid, start ticks), because the kernel reuses pids. If this user may create control
groups, each attempt gets one: no process can leave it, and `cgroup.kill` ends it even while it
forks. Otherwise the group functions return "" or False. Imports only `os`, `signal` and `time`: the
guard must stay small.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False  # importing `typing` costs as much memory as pathlib
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TICKS_PER_SECOND: int = os.sysconf("SC_CLK_TCK")
SPAWNED: set[int] = set()
"""Unreaped children that this process started; others are adopted orphans."""
CONTAINER = "/sys/fs/cgroup"
"""Root of the control groups inside a container."""
PREFIX = "atropos-"
"""Prefix of our control groups. No other group is ever killed or removed."""
SCRATCH = "atropos-scratch-"
"""Prefix of our folders for temporary files. No other folder is ever removed."""
SHARED_MEMORY = "/dev/shm/"
"""A file here belongs to the live process that has mapped it; names say nothing."""
GROUP_REMOVAL_S = 1.0
"""Seconds that the kernel may take to release a group."""


class Proc:
    """`ticks`: start time in clock ticks after boot; `cpu_ticks`: user and system time."""

    __slots__ = ("cpu_ticks", "pgrp", "pid", "ppid", "session", "state", "threads", "ticks")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The command name may hold spaces and parentheses, so parse after the last ")". See
        # proc(5).
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
        return (
            f"Proc({self.pid}, {self.state}, ppid={self.ppid}, pgrp={self.pgrp}, "
            f"session={self.session})"
        )


def read(pid: int) -> Proc | None:
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
    """True if the process that started as `pid` at `ticks` still runs."""
    row = read(pid)
    return row is not None and row.alive and row.ticks == ticks


def is_stopped(pid: int) -> bool:
    """SIGSTOP has stopped the process."""
    row = read(pid)
    return row is not None and row.state in ("T", "t")


def stopped(pid: int | None) -> int | None:
    """`pid` if SIGSTOP has stopped it, else None."""
    return pid if pid and is_stopped(pid) else None


def exit_of(pidfd: int) -> int | None:
    """Exit status of the child behind `pidfd`, negative for a signal; None while it runs. It
    stays a zombie."""
    # WNOWAIT leaves the zombie, so that the kernel does not reuse pid and process group.
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def scan() -> dict[int, Proc]:
    """Every readable process, by pid."""
    rows = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {row.pid: row for row in rows if row is not None}


def _block(pid: int) -> bytes:
    """Initial environment with a zero byte before and after each entry; empty if unreadable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return b"\0" + file.read() + b"\0"
    except OSError:
        return b""


def environ(pid: int) -> dict[str, str]:
    """Initial environment; empty if unreadable."""
    pairs = (entry.partition(b"=") for entry in _block(pid).split(b"\0") if b"=" in entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def marked(pid: int, *markers: bytes) -> bool:
    """True if the environment has every one of `markers` (`NAME=value`)."""
    data = _block(pid)
    return all(b"\0" + marker + b"\0" in data for marker in markers)


def component_of(pid: int, run: bytes) -> str:
    """Component name in the environment of a process of run `run`."""
    data = _block(pid)
    begin = data.find(b"\0ATROPOS_COMPONENT=") + 1
    if not begin or b"\0" + run + b"\0" not in data:
        return ""
    return os.fsdecode(data[begin + len(b"ATROPOS_COMPONENT=") : data.index(b"\0", begin)])


def resident(pid: int) -> int | None:
    """Proportional set size in bytes, else resident size; None if the process is gone."""
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
    """Files in /dev/shm that `pid` has mapped. A named semaphore is found by its inode."""
    found, nameless = set(), set()
    try:
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:  # noqa: PTH123
            for line in file:
                if SHARED_MEMORY in line:
                    path = line[line.index(SHARED_MEMORY) :].rstrip("\n")
                    # Field 5 of a line in /proc/PID/maps is the inode.
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
    """Remove those of this user that no process maps; return the unmapped ones."""
    left = {path for path in paths if _is_ours(path)}
    if not left:
        return []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            # Processes of other users are not readable; their mappings of this user's files stay
            # unknown.
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
    found = group_pids(group)
    for pid in found - table.keys():
        row = read(pid)
        if row is not None:
            table[pid] = row
    return found & table.keys()


def children_of(table: dict[int, Proc]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.ppid, []).append(row.pid)
    return children


def with_descendants(
    table: dict[int, Proc], seeds: set[int], children: dict[int, list[int]] | None = None
) -> set[int]:
    """`seeds` and their descendants."""
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
    """Return the live processes of the run.

    Args:
        sessions: session id -> start ticks of its leader; other ticks mean a reused pid.
        known_until: time of `sessions` in ticks; None: now.
        counts: decides by pid whether a process with the run's id counts.
    """
    table = scan()
    led = {sid for sid, ticks in sessions.items() if sid in table and table[sid].ticks == ticks}
    # A session outlives its leader as long as it has members.
    leaderless = {sid for sid in sessions if sid not in table}
    marker = b"ATROPOS_RUN_ID=" + os.fsencode(run_id)

    def in_session(row: Proc) -> bool:
        ids = {row.session, row.pgrp}
        return bool(
            ids & led or (ids & leaderless and (known_until is None or row.ticks <= known_until))
        )

    def is_marked(pid: int) -> bool:
        return marked(pid, marker) and (counts is None or counts(pid))

    seeds = grouped(table, group) | {
        row.pid for row in table.values() if in_session(row) or is_marked(row.pid)
    }
    found = with_descendants(table, seeds - exclude) - exclude
    return [table[pid] for pid in found if pid in table and table[pid].alive]


def send(proc: Proc, number: int) -> bool:
    """Signal exactly this process, through a pidfd. False if it is gone or of another user."""
    try:
        descriptor = os.pidfd_open(proc.pid)
    except OSError:
        return False
    try:
        # The pidfd is open, so the pid cannot be reused between this check and the signal.
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
    """Reap zombies that became our children (this process is a subreaper)."""
    mine, session = os.getpid(), os.getsid(0)
    for row in table.values():
        # Components' leaders are in SPAWNED: their zombies must stay until their set is gone.
        if row.ppid == mine and not row.alive and row.pid not in SPAWNED and row.session != session:
            try:
                os.waitpid(row.pid, os.WNOHANG)
            except ChildProcessError:
                continue


def ticks_at(moment: float) -> int:
    return ticks_now() - int((time.time() - moment) * TICKS_PER_SECOND)


def ticks_now() -> int:
    with open("/proc/uptime") as file:  # noqa: PTH123
        return int(float(file.read().split()[0]) * TICKS_PER_SECOND)


def boot_id() -> str:
    """Pids and start ticks are meaningless after another boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def run_group(run_id: str) -> str:
    """Create the group of a run below that of this process; "" if that fails."""
    path = f"{_own_group()}/{group_name(run_id)}"
    return path if not _make_fillable(path) else ""


def group_name(run_id: str) -> str:
    return PREFIX + _as_path_part(run_id)


def is_group_of(path: str, run_id: str) -> bool:
    """True if `path`, read from a file, can be the group of run `run_id`."""
    return (
        bool(path)
        and os.path.basename(path) == group_name(run_id)  # noqa: PTH119
        and os.path.exists(f"{path}/cgroup.procs")  # noqa: PTH110
    )


def part_group(group: str, component: str, attempt: int) -> str:
    """Create the group of one attempt; "" if that fails."""
    if not group:
        return ""
    path = f"{group}/{_as_path_part(component)}.{attempt}"
    try:
        os.mkdir(path)  # noqa: PTH102
    except OSError:
        return path if os.path.isdir(path) else ""  # noqa: PTH112
    return path


def group_pids(group: str) -> set[int]:
    """Pids in `group` and below."""
    found: set[int] = set()
    for folder in _group_tree(group):
        try:
            with open(f"{folder}/cgroup.procs", "rb") as file:  # noqa: PTH123
                found.update(map(int, file.read().split()))
        except OSError:
            continue
    return found - {0}  # 0 stands for a process of another pid namespace


def kill_group(group: str) -> bool:
    """SIGKILL to all of `group`, new forks included. False without `cgroup.kill`."""
    try:
        with open(f"{group}/cgroup.kill", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(b"1")
    except OSError:
        return False
    return True


def remove_group(group: str, patience_s: float = GROUP_REMOVAL_S) -> bool:
    """Remove the empty `group`; False if processes still run in it."""
    give_up = time.monotonic() + patience_s
    while group and os.path.isdir(group):  # noqa: PTH112
        # Child groups first: rmdir of a group with children fails.
        for folder in reversed(_group_tree(group)):
            try:
                os.rmdir(folder)  # noqa: PTH106
            except OSError:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.002)
    return True


def describe_groups() -> str:
    """One sentence for `doctor`: whether components get control groups here."""
    own = _own_group()
    if not own:
        return "no cgroup v2 hierarchy: components are tracked by session, marker and descent"
    trial = f"{own}/{PREFIX}trial.{os.getpid()}"
    problem = _make_fillable(trial)
    if problem:
        return (
            f"cgroup v2 is not delegated ({problem}): components are tracked by session, marker "
            f"and descent"
        )
    ends = (
        "ended by cgroup.kill"
        if os.path.exists(f"{trial}/cgroup.kill")  # noqa: PTH110
        else "ended one by one (Linux before 5.14)"
    )
    remove_group(trial)
    return f"cgroup v2 is delegated: each component gets a group below {own}, {ends}"


def _as_path_part(name: str) -> str:
    allowed = (letter.isascii() and (letter.isalnum() or letter in "._-") for letter in name)
    return "".join(
        letter if fine else f"~{ord(letter):x}~" for letter, fine in zip(name, allowed, strict=True)
    )


def _own_group() -> str:
    """Folder of this process's control group, or ""."""
    try:
        with open("/proc/self/cgroup") as file:  # noqa: PTH123
            path = next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), "")
        with open("/proc/self/mountinfo") as file:  # noqa: PTH123
            return _group_folder(path, file.read())
    except OSError:
        return ""


def _group_folder(path: str, mountinfo: str) -> str:
    """Folder of cgroup `path` in the mount that shows it; a container may see only a part."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        if path and right.split()[:1] == ["cgroup2"]:
            root, mount = (_unescaped(field) for field in left.split()[3:5])
            root = root.rstrip("/")
            if path == root or path.startswith(f"{root}/"):
                return (mount + path[len(root) :]).rstrip("/")
    return ""


def _unescaped(field: str) -> str:
    r"""In a mountinfo field a space is `\040`."""
    return field.encode().decode("unicode_escape") if "\\" in field else field


def _make_fillable(path: str) -> str:
    """Create group `path`; return "" or why processes cannot be moved into it."""
    try:
        os.mkdir(path)  # noqa: PTH102
    except FileExistsError:
        pass
    except OSError as error:
        return f"{path}: {error.strerror}"
    parent = os.path.dirname(path)  # noqa: PTH120
    for folder in (
        parent,
        path,
    ):  # moving a process needs write access to their common ancestor as well
        if not os.access(f"{folder}/cgroup.procs", os.W_OK):
            remove_group(path, 0.0)
            return f"{folder}/cgroup.procs cannot be written"
    return ""


def _group_tree(group: str) -> list[str]:
    found = [group] if group else []
    # The list grows while it is walked: breadth first.
    for folder in found:
        try:
            with os.scandir(folder) as entries:
                found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
    return found


class MachineMeter:
    """CPU and memory of the machine; the container's memory if it has a limit."""

    def __init__(self) -> None:
        self._before = _machine_ticks()

    def read(self) -> dict[str, float | int | None]:
        """`cpu_percent` of all cores since the last reading, `memory_used` and `memory_total` in
        bytes."""
        before, self._before = self._before, _machine_ticks()
        busy, whole = (now - then for now, then in zip(self._before, before, strict=True))
        used, total = _memory()
        percent = min(100.0, max(0.0, 100 * busy / whole)) if whole > 0 else None
        return {"cpu_percent": percent, "memory_used": used, "memory_total": total}


def _machine_ticks() -> tuple[int, int]:
    with open("/proc/stat") as file:  # noqa: PTH123
        user, nice, system, idle, wait, irq, soft, stolen = map(int, file.readline().split()[1:9])
    # Guest time is part of user and nice already.
    busy = user + nice + system + irq + soft + stolen
    return busy, busy + idle + wait


def _memory() -> tuple[int, int]:
    with open("/proc/meminfo") as file:  # noqa: PTH123
        lines = [line.split() for line in file]
    sizes = {
        words[0]: int(words[1]) * 1024
        for words in lines
        if words[0] in ("MemTotal:", "MemAvailable:")
    }
    total = sizes["MemTotal:"]
    try:
        with open(f"{CONTAINER}/memory.max") as limit, open(f"{CONTAINER}/memory.current") as held:  # noqa: PTH123
            most, used = int(limit.read()), int(held.read())
        with open(f"{CONTAINER}/memory.stat") as file:  # noqa: PTH123
            # Cached files do not count: the kernel frees them when memory is needed.
            used -= next(
                (int(line.split()[1]) for line in file if line.startswith("inactive_file ")), 0
            )
    except (OSError, ValueError):  # no container, or its limit is `max`
        most = total
    return (max(0, used), most) if most < total else (total - sizes["MemAvailable:"], total)


def ancestors() -> set[int]:
    """Pids of this process and its ancestors: a shell inside a component has the run's marker."""
    found, pid = set(), os.getpid()
    while pid and pid not in found:
        found.add(pid)
        row = read(pid)
        pid = row.ppid if row else 0
    return found
