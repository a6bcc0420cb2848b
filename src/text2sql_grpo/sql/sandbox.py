"""Kernel's sandbox of a worker process: what it may never do, even where an engine allows it.

Linux only. Each part holds alone, so that a kernel without one of them still enforces the others. No query
takes longer for it. Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys

if sys.platform != "win32":
    import resource

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

PARTS = ("no_new_privs", "landlock", "seccomp", "parent_death_signal", "limits")
MAX_OPEN_FILES = 1024
MAX_FILE_BYTES = 1 << 30  # a sort that spills to disk

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

# linux/capability.h
_CAPABILITY_VERSION, _CAPGET, _CAPSET = 0x20080522, (125, 90), (126, 91)
_CAPABILITIES_OF_FILES = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: databases of other users

# linux/landlock.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every machine
_VERSION, _PATH_BENEATH = 1, 1
_N_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version of the interface
_MAX_FILE_RIGHTS = 16
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = (
    1 << bit for bit in (1, 2, 3, 5, 8, 14)
)
_TCP = 0b11  # bind and connect
_SCOPES = 0b11  # abstract sockets and signals
_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE

# linux/seccomp.h, linux/bpf_common.h
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; an argument has 8 bytes
_X32 = 0x40000000
_EPERM, _ENOSYS = 1, 38
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Calls from Linux 5.1 on have the same number on every machine. Libraries that find one missing, as on an
# older kernel, take an older call instead.
_FIRST_PROBED = 424

# System calls that workers may make: their numbers on x86_64 and aarch64; -1 where there is none.
_ALLOWED_NUMBERS = """
    0/63 1/64 17/67 18/68 19/65 20/66 295/69 296/70  # read, write, pread64, .., pwritev
    2/-1 257/56 3/57 8/62 32/23 33/-1 292/24  # open, openat, close, lseek, dup*
    4/-1 5/80 6/-1 262/79 332/291 137/43 138/44  # stat, fstat, lstat, newfstatat, statx, statfs, fstatfs
    21/-1 269/48 439/439 89/-1 267/78 79/17  # access, faccessat, faccessat2, readlink, readlinkat, getcwd
    78/-1 217/61  # getdents, getdents64
    74/82 75/83 77/46 285/47 221/223 87/-1 263/35  # fsync, .., ftruncate, .., fadvise64, unlink, unlinkat
    9/222 10/226 11/215 12/214 25/216 26/227 28/233 27/232  # mmap, .., brk, mremap, msync, madvise, mincore
    7/-1 271/73 23/-1 270/72  # poll, ppoll, select, pselect6
    213/-1 291/20 233/21 232/-1 281/22 441/441 284/-1 290/19  # epoll_*, eventfd, eventfd2
    22/-1 293/59  # pipe, pipe2
    202/98 449/449 218/96 273/99 274/100 334/293 324/283 24/124  # futex, .., rseq, membarrier, sched_yield
    204/123 309/168 158/-1  # sched_getaffinity, getcpu, arch_prctl
    13/134 14/135 15/139 131/132 127/136 128/137 219/128  # rt_sig*, sigaltstack, restart_syscall
    35/101 230/115 228/113 229/114 96/169 201/-1 100/153  # sleeps and clocks, which are read
    39/172 186/178 110/173 102/174 107/175 104/176 108/177 118/148 120/150  # getpid, .., getresgid
    63/160 99/179 97/163 98/165 318/278  # uname, sysinfo, getrlimit, getrusage, getrandom
    60/93 231/94  # exit, exit_group
    444/444 445/445 446/446  # landlock_*: the thread of DuckDB's queries gives up more
"""
_NETWORK_NUMBERS = """
    42/203 49/200  # connect, bind (of a netlink socket, which lists this machine's addresses)
    44/206 45/207 46/211 47/212 307/269 299/243  # send*, recv*
    51/204 52/205 54/208 55/209 48/210  # getsockname, getpeername, *sockopt, shutdown
"""
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_CLONE, _CLONE_THREAD, _CLONE_NEW = (56, 220), 0x10000, 0x7E020000
_TO_ITSELF = ((62, 129), (234, 131))  # kill, tgkill
_LIMITS_OF_ITSELF = (302, 261)  # prlimit64, whose first argument is a process, or 0 for this one
_PRCTL, _IOCTL, _FCNTL = (157, 167), (16, 29), (72, 25)
_PR_SET_VMA, _PR_SET_NAME, _PR_GET_NAME = 0x53564D41, 15, 16  # names of memory and of threads
_IOCTLS = (0x5401, 0x5421, 0x541B, 0x5450, 0x5451)  # TCGETS, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX
_FCNTLS = (*range(8), 36, 37, 38, 1030)  # duplicates, flags and locks; not the owner, whom the kernel signals

# Read after start-up: modules and libraries that load late.
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache")
# Memory and processors that DuckDB may use; the seed of random numbers.
DEVICES = ("/proc/self/cgroup", "/sys/fs/cgroup", "/dev/urandom")
# Read by PostgreSQL's client: names of hosts and of this user, certificates.
NETWORK = (
    *("/etc/hosts", "/etc/host.conf", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/services"),
    *("/etc/gai.conf", "/etc/passwd", "/etc/localtime", "/etc/ssl", "/etc/pki", "/etc/krb5.conf"),
    *("/usr/share/zoneinfo", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates"),
)


def enter(
    readable: Iterable[str], writable: Iterable[str], *, parent: int, has_network: bool
) -> tuple[str, ...]:
    """Give up the rights that a worker does not need, in this thread and all that it starts.

    Args:
        readable: Files and folders that may be read besides Python's own.
        writable: Folders in which files may be made, written and removed.
        parent: Process whose end ends this one. The thread of it that started this one must live as long.
        has_network: whether sockets are needed.

    Returns:
        Those of `PARTS` that the kernel enforces.
    """
    if sys.platform != "linux":
        return ()
    system = [*SYSTEM, *DEVICES, *(NETWORK if has_network else ()), *_python_folders(), *readable]
    steps: dict[str, Callable[[], None]] = {
        "parent_death_signal": lambda: _die_with(parent),
        "no_new_privs": _drop_privileges,
        "landlock": lambda: _restrict_files(system, writable, has_network=has_network),
        "limits": _set_limits,
        "seccomp": lambda: _restrict_calls(has_network=has_network),
    }
    active = set()
    for part, step in steps.items():
        with contextlib.suppress(OSError, ValueError):
            step()
            active.add(part)
    return tuple(part for part in PARTS if part in active)


def end_with(parent: int) -> None:
    """Let the kernel end this process with its parent from now on; `enter` reports whether it does."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            _die_with(parent)


def forbid_files() -> None:
    """Let this thread open no file of the user; no error where the kernel has no Landlock."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
            _restrict_files(DEVICES, (), has_network=True)


def forbid_processes() -> None:
    """Let this process start neither a thread nor a process any more; root is exempt from it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _python_folders() -> list[str]:
    """Folders of the standard library and of installed packages; not those of a user's own modules."""
    standard = os.path.dirname(os.__file__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = ("site-packages", "dist-packages")
    paths = [path for path in sys.path if path.startswith(standard) or path.endswith(installed)]
    return [*paths, standard, package]


_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _syscall(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _prctl(option: int, first: object, second: object) -> None:
    none = ctypes.c_ulong(0)
    first = ctypes.c_ulong(first) if isinstance(first, int) else first
    if _libc.prctl(option, first, second or none, none, none) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _drop_privileges() -> None:
    """Gain no right by a program, and of root's keep only those to read and write files as before."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    if os.uname().machine in _MACHINES:
        _, index = _MACHINES[os.uname().machine]
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        data = ctypes.create_string_buffer(24)
        _syscall(_CAPGET[index], header, data)
        permitted = struct.unpack_from("=I", data, 4)[0] & _CAPABILITIES_OF_FILES
        _syscall(_CAPSET[index], header, struct.pack("=6I", permitted, permitted, 0, 0, 0, 0))


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _set_limits() -> None:
    lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    lower_limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0)


def lower_limit(bound: int, value: int) -> None:
    """Set a resource limit, or keep a lower one."""
    hard = resource.getrlimit(bound)[1]  # only root may raise it
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(bound, (value, value))


def _restrict_files(readable: Iterable[str], writable: Iterable[str], *, has_network: bool) -> None:
    """Landlock: read and write nothing but these files and folders."""
    version = _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    rights = (1 << _N_FILE_RIGHTS.get(version, _MAX_FILE_RIGHTS)) - 1
    fields = [rights]
    if version >= 4:
        fields.append(0 if has_network else _TCP)
    if version >= 6:
        fields.append(_SCOPES)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, wanted in ((readable, _READ), (writable, _WRITE)):
            for path in paths:
                _add_rule(ruleset, path, wanted & rights)
        _syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no right
    try:
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & ~_READ_DIR, file)
        _syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(file)


def _restrict_calls(*, has_network: bool) -> None:
    """Seccomp: refuse all system calls but those of an allow list.

    The others fail with EPERM, and newer ones with ENOSYS, as on an older kernel.
    """
    if os.uname().machine not in _MACHINES:
        raise OSError(_ENOSYS, "no list of system calls for this machine")
    machine, index = _MACHINES[os.uname().machine]
    refuse = (_RETURN, 0, 0, _ERRNO | _EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),  # the 32-bit calls of another machine have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    for numbers in _pairs(_ALLOWED_NUMBERS + (_NETWORK_NUMBERS if has_network else "")):
        if numbers[index] >= 0:
            program += [(_EQUAL, 0, 1, numbers[index]), allow]
    # glibc falls back from clone3 to clone, whose flags a filter can read.
    no_namespace = [(_ANY_BIT, 0, 1, _CLONE_NEW), refuse]
    checks = [
        (_CLONE, 0, [*no_namespace, (_ANY_BIT, 0, 1, _CLONE_THREAD), allow]),
        (_LIMITS_OF_ITSELF, 0, _any_of((0,))),
        (_PRCTL, 0, _any_of((_PR_SET_NO_NEW_PRIVS, _PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA))),
        (_IOCTL, 1, _any_of(_IOCTLS)),
        (_FCNTL, 1, _any_of(_FCNTLS)),
        *((numbers, 0, _any_of((os.getpid(),))) for numbers in _TO_ITSELF),
        *([(_SOCKET, 0, _any_of(_FAMILIES))] if has_network else []),
    ]
    for numbers, argument, test in checks:
        body = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument), *test, refuse]
        program += [(_EQUAL, 0, len(body), numbers[index]), *body]
    program += [(_AT_LEAST, 0, 1, _FIRST_PROBED), (_RETURN, 0, 0, _ERRNO | _ENOSYS), refuse]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, header)


def _any_of(values: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """Steps of a filter that allow a call whose loaded argument is one of these values."""
    return [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]


def _pairs(table: str) -> list[tuple[int, ...]]:
    return [
        tuple(int(number) for number in pair.split("/"))
        for line in table.splitlines()
        for pair in line.partition("#")[0].split()
    ]
