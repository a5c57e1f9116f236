"""A process that may not read the memory of others, as in a container whose rules forbid it."""

from __future__ import annotations

import ctypes
import errno
import os

_READS = {"x86_64": 310, "aarch64": 270}
"""The number of ``process_vm_readv``, by machine."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def forbid_reading_memory() -> None:
    """Let ``process_vm_readv`` fail in this process from now on, for good."""
    instructions = (_Instruction * 4)(
        _Instruction(_LOAD_NUMBER, 0, 0, 0),
        _Instruction(_JUMP_IF_EQUAL, 0, 1, _READS[os.uname().machine]),
        _Instruction(_RETURN, 0, 0, _ERRNO | errno.EPERM),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions), instructions)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0)),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program)),
    ):
        if libc.prctl(*arguments, ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
