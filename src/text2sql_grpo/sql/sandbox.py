"""Kernel's wall around a worker process: what it may never do, whatever an engine lets through.

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

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

PARTS = ("no_new_privs", "landlock", "seccomp", "parent_death_signal", "limits")
MAX_OPEN_FILES = 1024
MAX_FILE_BYTES = 1 << 30  # a sort that spills to disk

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

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
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Numbers of system calls on x86_64 and aarch64; -1 where there is none.
_REFUSED_NUMBERS = """
    59/221 322/281  # execve, execveat
    57/-1 58/-1  # fork, vfork
    101/117 310/270 311/271 312/272 440/440  # ptrace, process_vm_*, kcmp, process_madvise
    200/130 129/138 297/240 424/424  # tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
    434/434 438/438  # pidfd_open, pidfd_getfd
    50/201 43/202 288/242  # listen, accept, accept4
    272/97 308/268 161/51 155/41 165/40 166/39  # unshare, setns, chroot, .., umount2
    428/428 429/429 430/430 431/431 432/432 433/433 442/442  # open_tree .. fspick
    90/-1 91/52 268/53 452/452  # chmod, fchmod, fchmodat, fchmodat2
    92/-1 93/55 94/-1 260/54  # chown, fchown, lchown, fchownat
    132/-1 235/-1 261/-1 280/88  # utime, utimes, futimesat, utimensat
    188/5 189/6 190/7 197/14 198/15 199/16 463/463 466/466  # *setxattr, *removexattr
    303/264 304/265  # name_to_handle_at, open_by_handle_at
    425/425 426/426 427/427  # io_uring_*, which could do all of these
    321/280 298/241 323/282  # bpf, perf_event_open, userfaultfd
    248/217 249/218 250/219  # add_key, request_key, keyctl
    175/105 313/273 176/106 246/104 320/294 169/142  # modules, kexec, reboot
"""
_REFUSED = [
    tuple(int(number) for number in pair.split("/"))
    for line in _REFUSED_NUMBERS.splitlines()
    for pair in line.partition("#")[0].split()
]
_SOCKETS = ((41, 198), (53, 199), (49, 200), (42, 203))  # socket, socketpair, bind, connect
_TO_ITSELF = ((62, 129), (234, 131))  # kill, tgkill: their first argument is a process
_LIMITS_OF_ITSELF = (302, 261)  # prlimit64, whose first argument is a process, or 0 for this one
_CLONE, _CLONE3 = (56, 220), (435, 435)

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
        "no_new_privs": lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0),
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
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _python_folders() -> list[str]:
    """Folders of the standard library and of installed packages; not those of a user's own modules."""
    standard = os.path.dirname(os.__file__)
    installed = ("site-packages", "dist-packages")
    return [path for path in sys.path if path.startswith(standard) or path.endswith(installed)] + [
        standard,
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    ]


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


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _set_limits() -> None:
    import resource

    bounds = {
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for bound, value in bounds.items():
        lower_limit(bound, value)


def lower_limit(bound: int, value: int) -> None:
    """Set a resource limit, or keep a lower one."""
    import resource

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
    """Seccomp: refuse system calls with EPERM."""
    if os.uname().machine not in _MACHINES:
        raise OSError(_ENOSYS, "no list of system calls for this machine")
    machine, index = _MACHINES[os.uname().machine]
    refuse = _ERRNO | _EPERM
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),  # the 32-bit calls of another machine have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, refuse),
    ]
    for numbers in (*_REFUSED, *(() if has_network else _SOCKETS)):
        if numbers[index] >= 0:
            program += [(_EQUAL, 0, 1, numbers[index]), (_RETURN, 0, 0, refuse)]
    # glibc falls back to `clone`, whose flags a filter can read.
    program += [(_EQUAL, 0, 1, _CLONE3[index]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    checks = [(_CLONE[index], _ANY_BIT, _CLONE_THREAD), (_LIMITS_OF_ITSELF[index], _EQUAL, 0)]
    checks += [(numbers[index], _EQUAL, os.getpid()) for numbers in _TO_ITSELF]
    for number, test, value in checks:
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (test, 1, 0, value),
            (_RETURN, 0, 0, refuse),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, header)
