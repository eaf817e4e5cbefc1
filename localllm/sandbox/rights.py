"""Drop the rights of a process on Linux: capabilities, Landlock (files, TCP, signals) and seccomp (system calls).

The confined child does this after its imports and before it reads untrusted input. Each part is optional: if the kernel
or processor does not support a part, the other parts and the limits of `worker` still apply. The C library has no
functions for these calls, so they go through `syscall(2)`. Numbers and structures: linux/landlock.h, linux/seccomp.h,
linux/bpf_common.h, asm/unistd_64.h (x86-64), asm-generic/unistd.h (Arm).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import NamedTuple

_PR_SET_NO_NEW_PRIVS = 38

# Landlock: the system call numbers are the same on all processors.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_GET_VERSION = 1  # flag of _CREATE_RULESET
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # ABI -> number of file rights; 14: links between folders, 15: truncate
_TCP_SINCE, _TCP_RIGHTS = 4, 0b11  # bind, connect
_SCOPES_SINCE, _SCOPES = 6, 0b11  # abstract sockets, signals to processes outside

# seccomp
_SET_FILTER, _ALL_THREADS = 1, 1
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF codes
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_PROT_EXEC = 4
_RLIMIT_AS = 9

# System calls that computation needs: x86-64 number, Arm number (None: Arm lacks the call).
_CALLS: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "write": (1, 64), "writev": (20, 66), "lseek": (8, 62),
    "close": (3, 57), "fstat": (5, 80), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72),
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "setitimer": (38, 103), "getitimer": (36, 102), "restart_syscall": (219, 128),
    "futex": (202, 98), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283),
    "getpid": (39, 172), "gettid": (186, 178),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "sysinfo": (99, 179),
    "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_NO_CODE = {"mmap": (9, 222), "mprotect": (10, 226)}  # allowed without PROT_EXEC
_OWN_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}  # allowed for this process, since abort() needs them
_LIMITS = (302, 261)  # prlimit64, allowed for the address space of this process


class _Machine(NamedTuple):
    arch: int  # AUDIT_ARCH_...
    column: int  # column in the system call tables
    seccomp: int
    capset: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0, 317, 126), "aarch64": _Machine(0xC00000B7, 1, 277, 91)}


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))


def drop_rights() -> list[str]:
    """Irrevocably drop capabilities and access to files, TCP and other processes. Return the restrictions in force,
    such as ["landlock 7"].
    """
    if (call := _library()) is None:
        return []
    done = []
    machine = _MACHINES.get(os.uname().machine)
    if machine is not None and _drop_capabilities(call, machine.capset):
        done.append("no capabilities")
    if version := _landlock(call):
        done.append(f"landlock {version}")
    return done


def filter_calls() -> list[str]:
    """Irrevocably limit all threads to the system calls of the tables above. All other calls fail with EPERM.

    Return ["seccomp"] if this is in force.
    """
    if (call := _library()) is None or (machine := _MACHINES.get(os.uname().machine)) is None:
        return []
    code = _filter(machine, os.getpid())
    program = _Program(len(code) // 8, code)
    done = _syscall(call, machine.seccomp, _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0
    return ["seccomp"] if done else []


def _library() -> ctypes.CDLL | None:
    """Return the C library, after setting no_new_privs, which Landlock and seccomp require. Return None if that is
    impossible."""
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return None
    call = ctypes.CDLL(None, use_errno=True)
    return call if call.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 else None


def _drop_capabilities(call: ctypes.CDLL, capset: int) -> bool:
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # version 3, this process; three sets of 64 bits
    return bool(_syscall(call, capset, header, none) == 0)


def _landlock(call: ctypes.CDLL) -> int:
    """Forbid files, TCP and signals to other processes, as far as the kernel can. Return the ABI version, or 0 without
    Landlock."""
    version = _syscall(call, _CREATE_RULESET, None, 0, _GET_VERSION)
    if version <= 0:
        return 0
    rights = max(count for since, count in _FILE_RIGHTS.items() if since <= version)
    rules = _Ruleset(
        (1 << rights) - 1,
        _TCP_RIGHTS if version >= _TCP_SINCE else 0,
        _SCOPES if version >= _SCOPES_SINCE else 0,
    )
    size = 8 * (1 + (version >= _TCP_SINCE) + (version >= _SCOPES_SINCE))
    ruleset = _syscall(call, _CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return 0
    try:
        return version if _syscall(call, _RESTRICT_SELF, ruleset, 0) == 0 else 0
    finally:
        os.close(ruleset)


def _filter(machine: _Machine, process: int) -> bytes:
    """Return the BPF program. Jumps count the instructions to skip: (code, if true, if false, value)."""
    steps = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, machine.arch),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for pair in _CALLS.values():
        if (number := pair[machine.column]) is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    refuse = (_RETURN, 0, 0, _REFUSE)
    allow = (_RETURN, 0, 0, _ALLOW)
    for pair in _NO_CODE.values():
        steps += [(_EQUAL, 0, 4, pair[machine.column]), _argument(2), (_ANY_BIT, 0, 1, _PROT_EXEC), refuse, allow]
    for pair in _OWN_SIGNALS.values():
        steps += [(_EQUAL, 0, 4, pair[machine.column]), _argument(0), (_EQUAL, 0, 1, process), allow, refuse]
    steps += [
        (_EQUAL, 0, 5, _LIMITS[machine.column]),
        _argument(0),
        (_EQUAL, 0, 3, 0),
        _argument(1),
        (_EQUAL, 0, 1, _RLIMIT_AS),
    ]
    steps += [allow, refuse]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _argument(n: int) -> tuple[int, int, int, int]:
    """Load the low half of argument `n`. Both processors are little-endian, and these arguments are ints."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * n)


def _syscall(call: ctypes.CDLL, number: int, *arguments: object) -> int:
    sized = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(call.syscall(ctypes.c_long(number), *sized))
