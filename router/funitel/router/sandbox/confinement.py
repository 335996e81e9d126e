"""Confine this process for good: limits, Landlock and a seccomp filter. Where the kernel lacks a layer, it is left out.

Landlock allows to read below some paths; it refuses all else of files, TCP ports and signals to other processes. The
filter refuses system calls: sockets, programs, processes, tracing, changes of files, administration of the kernel.
Linux on x86-64 and arm64. Sources: landlock(7), seccomp(2), `linux/landlock.h`, `linux/filter.h`, `asm/unistd.h`.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import funitel

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_FIRST_FREE_DESCRIPTOR = 3

# What imports and libraries read beside the search path; missing ones are left out.
_SYSTEM_PATHS = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"),
)

# Landlock.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS = (13, 14, 15, 15, 16)  # by version, from 1; the last one for all later versions
_NET_VERSION, _SCOPE_VERSION = 4, 6
_ALL_PORTS = _ALL_SCOPES = 0b11  # bind and connect; abstract Unix sockets and signals

# Refused system calls: name, number on x86-64, number on arm64 where it has one.
_REFUSED = """
socket:41:198 socketpair:53:199 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 sendto:44:206
sendmsg:46:211 sendmmsg:307:269 recvfrom:45:207 recvmsg:47:212 recvmmsg:299:243
execve:59:221 execveat:322:281 fork:57: vfork:58: setsid:112:157 setpgid:109:154 setpriority:141:140
sched_setaffinity:203:122 sched_setscheduler:144:119 sched_setattr:314:274 sched_setparam:142:118 setrlimit:160:164
ioprio_set:251:30
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440 process_mrelease:448:448
pidfd_open:434:434 pidfd_getfd:438:438 pidfd_send_signal:424:424 tkill:200:130 rt_sigqueueinfo:129:138
rt_tgsigqueueinfo:297:240 kcmp:312:272 move_pages:279:239 migrate_pages:256:238
creat:85: truncate:76:45 ftruncate:77:46 fallocate:285:47 unlink:87: unlinkat:263:35 rename:82: renameat:264:38
renameat2:316:276 link:86: linkat:265:37 symlink:88: symlinkat:266:36 mkdir:83: mkdirat:258:34 rmdir:84: mknod:133:
mknodat:259:33 chmod:90: fchmod:91:52 fchmodat:268:53 chown:92: fchown:93:55 lchown:94: fchownat:260:54
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16 utime:132:
utimes:235: utimensat:280:88 futimesat:261: memfd_create:319:279 memfd_secret:447:447 name_to_handle_at:303:264
open_by_handle_at:304:265
shmget:29:194 shmat:30:196 shmctl:31:195 msgget:68:186 msgsnd:69:189 semget:64:190 semop:65:193 mq_open:240:180
mq_unlink:241:181
io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427 bpf:321:280 perf_event_open:298:241
userfaultfd:323:282 mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 unshare:272:97 setns:308:268
move_mount:429:429 open_tree:428:428 fsopen:430:430 fsmount:432:432 fsconfig:431:431 fspick:433:433
mount_setattr:442:442 add_key:248:217 request_key:249:218 keyctl:250:219 init_module:175:105 finit_module:313:273
delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 reboot:169:142 swapon:167:224 swapoff:168:225
acct:163:89 quotactl:179:60 quotactl_fd:443:443 syslog:103:116 settimeofday:164:170 clock_settime:227:112
clock_adjtime:305:266 adjtimex:159:171 sethostname:170:161 setdomainname:171:162 iopl:172: ioperm:173:
fanotify_init:300:262 vhangup:153:58
"""
_FIRST_UNKNOWN_CALL = 450  # of later kernels; libraries do without, as on an earlier kernel
_CLONE_THREAD = 0x10000
_CHANGES_A_FILE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000  # the last: O_TMPFILE


class _Machine(NamedTuple):
    """Numbers of one architecture; -1 for a call that it has not."""

    audit_arch: int
    seccomp: int
    clone: int
    clone3: int
    open: int
    openat: int
    openat2: int
    kill: int
    tgkill: int
    prlimit: int
    prctl: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 317, 56, 435, 2, 257, 437, 62, 234, 302, 157),
    "aarch64": _Machine(0xC00000B7, 277, 220, 435, -1, 56, 437, 129, 131, 261, 167),
}

# Instructions of the filter, as (code, jump if true, jump if false, operand).
_Instruction = tuple[int, int, int, int]
_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_SET_FILTER, _ALL_THREADS = 1, 1


def confine(memory_limit: int, readable: Iterable[str]) -> list[str]:
    """Confine this process, and return the names of the layers that the kernel lacks.

    Args:
        memory_limit: bytes of address space.
        readable: files and folders that it may read, beside those from which Python imports.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor >= _FIRST_FREE_DESCRIPTOR:
            with suppress(OSError):  # that of the listing
                os.close(descriptor)
    limits = {resource.RLIMIT_AS: memory_limit, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for limit, maximum in limits.items():
        resource.setrlimit(limit, (maximum, maximum))
    has_layer = {
        "Landlock": _restrict_files([*_SYSTEM_PATHS, *sys.path, *funitel.__path__, *readable]),
        "seccomp": _restrict_calls(),
    }
    return [name for name, is_there in has_layer.items() if not is_there]


def _restrict_files(readable: Iterable[str]) -> bool:
    """Apply Landlock; return whether the kernel has it."""
    libc, version = ctypes.CDLL(None), landlock_version()
    if version < 1:
        return False
    rights = (1 << _NUM_FILE_RIGHTS[min(version, len(_NUM_FILE_RIGHTS)) - 1]) - 1
    ports = _ALL_PORTS if version >= _NET_VERSION else 0
    scopes = _ALL_SCOPES if version >= _SCOPE_VERSION else 0
    known = struct.pack("=QQQ", rights, ports, scopes)[: 8 * (1 + (ports > 0) + (scopes > 0))]
    rules = libc.syscall(_CREATE_RULESET, known, ctypes.c_size_t(len(known)), 0)
    if rules < 0:
        return False
    try:
        for path in readable:
            _allow_reading(libc, rules, path)
        return bool(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def landlock_version() -> int:
    """The kernel's version of Landlock; less than 1 without it."""
    is_linux = sys.platform.startswith("linux")
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)) if is_linux else 0


def _allow_reading(libc: ctypes.CDLL, rules: int, path: str) -> None:
    """Add a path, and all below it, to the rules; one that does not exist is left out."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _restrict_calls() -> bool:
    """Apply the filter to every thread; return whether the kernel has filters, on a known architecture."""
    machine = _MACHINES.get(platform.machine())
    if machine is None or sys.byteorder != "little" or not sys.platform.startswith("linux"):
        return False
    code = b"".join(struct.pack("=HBBI", *each) for each in _instructions(machine))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.syscall(machine.seccomp, _SET_FILTER, _ALL_THREADS, program) == 0)


def _instructions(machine: _Machine) -> Iterator[_Instruction]:
    """The filter: refused calls fail with EPERM, unknown ones with ENOSYS, all others are allowed."""
    yield (_LOAD, 0, 0, _ARCH_OFFSET)
    yield (_EQUALS, 1, 0, machine.audit_arch)
    yield (_RETURN, 0, 0, _KILL)
    yield (_LOAD, 0, 0, _NUMBER_OFFSET)
    yield from _refuse_if(_AT_LEAST, _FIRST_UNKNOWN_CALL, _FAIL | errno.ENOSYS)
    for number in (machine.clone3, machine.openat2):  # their arguments cannot be read here; libraries have another way
        yield from _refuse_if(_EQUALS, number, _FAIL | errno.ENOSYS)
    for number in _refused_numbers(machine):
        yield from _refuse_if(_EQUALS, number, _FAIL | errno.EPERM)
    for call, argument, test, value, is_refused in (  # refused if, or unless, an argument passes a test
        (machine.clone, 0, _HAS_BITS, _CLONE_THREAD, False),
        (machine.kill, 0, _EQUALS, os.getpid(), False),
        (machine.tgkill, 0, _EQUALS, os.getpid(), False),
        (machine.open, 1, _HAS_BITS, _CHANGES_A_FILE, True),
        (machine.openat, 2, _HAS_BITS, _CHANGES_A_FILE, True),
        (machine.prlimit, 2, _HAS_BITS, 0xFFFFFFFF, True),  # the address of limits to set: low half,
        (machine.prlimit, 2.5, _HAS_BITS, 0xFFFFFFFF, True),  # and high half
        (machine.prctl, 0, _EQUALS, _PR_SET_PDEATHSIG, True),
    ):
        if call >= 0:
            yield (_LOAD, 0, 0, _NUMBER_OFFSET)
            yield (_EQUALS, 0, 3, call)
            yield (_LOAD, 0, 0, _ARGUMENTS_OFFSET + int(8 * argument))
            yield (test, 0, 1, value) if is_refused else (test, 1, 0, value)
            yield (_RETURN, 0, 0, _FAIL | errno.EPERM)
    yield (_RETURN, 0, 0, _ALLOW)


def _refuse_if(test: int, value: int, action: int) -> Iterator[_Instruction]:
    yield (test, 0, 1, value)
    yield (_RETURN, 0, 0, action)


def _refused_numbers(machine: _Machine) -> list[int]:
    column = 1 if machine is _MACHINES["x86_64"] else 2
    numbers = (row.split(":")[column] for row in _REFUSED.split())
    return [int(number) for number in numbers if number]
