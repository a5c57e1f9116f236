"""Two ways to call NCCL behind one interface: NVIDIA's nccl4py, and the pynccl package, hardened.

This file owns calls and their types and nothing else: no deadlines, no splitting, no meaning of ops. A package is
imported when its binding is loaded, which only workers do. Methods return NCCL's status and never raise for it, because
its meaning depends on the moment: "in progress" is not a failure, nor is an error during an abort. In one file because
the two bindings must offer the same calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, ClassVar, Protocol

from synk.cuda._nccl_library import SUCCESS, NcclError, find_library
from synk.errors import UnsupportedError

BINDING_VARIABLE = "SYNK_NCCL_BINDING"
BINDINGS = ("nccl4py", "pynccl")
UNIQUE_ID_NBYTES = 128

# The low layer of nccl4py follows NCCL's header, and has changed between releases.
_NCCL4PY_RELEASE = "0.6."

# NCCL can start without blocking since 2.17. Before 2.27.3 its own thread reads thread-local variables of the calling
# thread later (src/group.cc), and here that thread has ended by then.
_NON_BLOCKING_VERSION = 22703
_WEIGHTED_SUM_VERSION = 21100
_LAST_ERROR_VERSION = 21300

# The scalar of a weighted sum lies in host memory and is read during the call.
_SCALAR_IN_HOST_MEMORY = 1


class Binding(Protocol):
    """NCCL's functions, with arguments in NCCL's order: the communicator comes before the stream.

    ``comm`` is the communicator from ``init``. Pointers and streams are plain integers. ``dtype`` and ``op`` are NCCL's
    numbers, and ``count`` is in elements of ``dtype``. A call that returns success may still be in progress, because
    nccl4py does not distinguish the two; ``async_error`` does.
    """

    name: ClassVar[str]
    has_weighted_sum: bool
    version: int
    library_path: str

    def new_unique_id(self) -> bytes:
        """Return 128 bytes that name a new group. This opens a listening socket in this process, and needs no GPU."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, Any]:
        """Join the group, without blocking if NCCL can. Return the status and the communicator."""

    def async_error(self, comm: Any) -> int:
        """Return the state of the communicator: success, in progress, or an error."""

    def last_error(self) -> str:
        """Return NCCL's last message, or an empty string."""

    def abort(self, comm: Any) -> int: ...
    def destroy(self, comm: Any) -> int: ...
    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> int: ...
    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: Any, stream: int
    ) -> int: ...
    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> int: ...
    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: Any, stream: int) -> int: ...
    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> int: ...

    def create_weighted_sum(self, weight: bytes, dtype: int, comm: Any) -> tuple[int, int]:
        """Return the status and an op that multiplies by ``weight`` (one element of ``dtype``) before it sums."""

    def destroy_op(self, op: int, comm: Any) -> int: ...


class Nccl4pyBinding:
    """NCCL through the low layer of NVIDIA's nccl4py, which is generated from NCCL's header. It releases the GIL.

    The layer above it, ``nccl.core``, is not used: it needs ``cuda.bindings`` of one CUDA release.

    Parameters
    ----------
    nccl : module
        ``nccl.bindings.nccl``.
    """

    name: ClassVar[str] = "nccl4py"

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl
        self.library_path: str = nccl.get_library_path()
        self.version: int = nccl.get_version()
        self.has_weighted_sum = self.version >= _WEIGHTED_SUM_VERSION
        self._is_non_blocking = self.version >= _NON_BLOCKING_VERSION
        self.abort = self._returning_status(nccl.comm_abort)
        self.destroy = self._returning_status(nccl.comm_destroy)
        self.group_start = self._returning_status(nccl.group_start)
        self.group_end = self._returning_status(nccl.group_end)
        self.all_reduce = self._returning_status(nccl.all_reduce)
        self.reduce = self._returning_status(nccl.reduce)
        self.broadcast = self._returning_status(nccl.broadcast)
        self.all_gather = self._returning_status(nccl.all_gather)
        self.reduce_scatter = self._returning_status(nccl.reduce_scatter)
        self.destroy_op = self._returning_status(nccl.red_op_destroy)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
        """Return the status of ``function(*arguments)`` and its result; None if it failed."""
        try:
            return SUCCESS, function(*arguments)
        except self._nccl.NCCLError as error:
            return int(error.status), None

    def _returning_status(self, function: Callable[..., Any]) -> Callable[..., int]:
        return lambda *arguments: self._call(function, *arguments)[0]

    def new_unique_id(self) -> bytes:
        status, unique_id = self._call(self._nccl.get_unique_id)
        _raise_for(status, "make a group id", self.last_error)
        return bytes(unique_id)

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, Any]:
        identifier = bytearray(unique_id)  # nccl4py accepts only writable memory
        if not self._is_non_blocking:
            return self._call(self._nccl.comm_init_rank, world_size, identifier, rank)
        config = self._nccl.Config()
        config.blocking = 0
        return self._call(self._nccl.comm_init_rank_config, world_size, identifier, rank, config)

    def async_error(self, comm: Any) -> int:
        status, state = self._call(self._nccl.comm_get_async_error, comm)
        return status or int(state)

    def last_error(self) -> str:
        if self.version < _LAST_ERROR_VERSION:
            return ""
        return str(self._nccl.get_last_error(self._nccl.Comm())).strip()

    def create_weighted_sum(self, weight: bytes, dtype: int, comm: Any) -> tuple[int, int]:
        scalar = ctypes.create_string_buffer(weight, len(weight))  # NCCL reads it during this call only
        create = self._nccl.red_op_create_pre_mul_sum
        status, op = self._call(create, ctypes.addressof(scalar), dtype, _SCALAR_IN_HOST_MEMORY, comm)
        return status, op or 0


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``. The field holds bytes and not characters: reading characters stops at the first zero."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_NBYTES),)


class InitConfig(ctypes.Structure):
    """The first fields of ``ncclConfig_t``, as of NCCL 2.17. Later fields get NCCL's defaults.

    NCCL copies ``size`` bytes over its defaults (``parseCommConfig`` in ``src/init.cc``), so one prefix serves all
    later releases.
    """

    MAGIC: ClassVar[int] = 0xCAFEBEEF
    MIN_VERSION: ClassVar[int] = 21700
    UNDEFINED: ClassVar[int] = -(1 << 31)

    _fields_ = (
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
    )

    @classmethod
    def non_blocking(cls) -> InitConfig:
        """Return a configuration for calls that return before they are done."""
        unset = cls.UNDEFINED
        return cls(ctypes.sizeof(cls), cls.MAGIC, cls.MIN_VERSION, 0, unset, unset, unset, None)


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (c_void_p,),
    "ncclGetUniqueId": (c_void_p,),
    "ncclCommInitRank": (c_void_p, c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, c_void_p),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p),
    "ncclBcast": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_OPTIONAL_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclCommInitRankConfig": (c_void_p, c_int, UniqueId, c_int, c_void_p),
    "ncclRedOpCreatePreMulSum": (c_void_p, c_void_p, c_int, c_int, c_void_p),
    "ncclRedOpDestroy": (c_int, c_void_p),
}


def retype(dll: ctypes.CDLL) -> None:
    """Declare NCCL's true argument types on ``dll``'s functions.

    pynccl declares counts as C ``int`` (a count of 2**32 + 7 arrives as 7), an id of 512 bytes, and the two functions
    that return text as if they returned a status. The function objects are shared with pynccl, so its own methods are
    fixed as well.
    """
    for name, argtypes in (_PROTOTYPES | _OPTIONAL_PROTOTYPES).items():
        function = getattr(dll, name, None)
        if function is None and name in _OPTIONAL_PROTOTYPES:
            continue
        if function is None:
            raise UnsupportedError(f"cannot use NCCL: got a library without {name}, expected NCCL 2.7 or later.")
        function.restype = c_int
        function.argtypes = argtypes
    for name, argtypes in (("ncclGetErrorString", (c_int,)), ("ncclGetLastError", (c_void_p,))):
        function = getattr(dll, name, None)  # ncclGetLastError exists since 2.13
        if function is not None:
            function.restype = c_char_p
            function.argtypes = argtypes


class PyncclBinding:
    """NCCL through pynccl's library object, called by ctypes, which releases the GIL during each call.

    pynccl's own ``Nccl`` and ``NcclWrp`` are not used: they need numba's CUDA context and its device.

    Parameters
    ----------
    dll : ctypes.CDLL
        ``pynccl.binding.libnccl().dll``. Its functions get new types.
    """

    name: ClassVar[str] = "pynccl"

    def __init__(self, dll: ctypes.CDLL) -> None:
        retype(dll)
        self._dll = dll
        self.library_path: str = dll._name
        version = c_int()
        _raise_for(dll.ncclGetVersion(byref(version)), "ask for NCCL's version")
        self.version = version.value
        self.has_weighted_sum = self.version >= _WEIGHTED_SUM_VERSION
        self._is_non_blocking = self.version >= _NON_BLOCKING_VERSION
        self.abort: Callable[..., int] = dll.ncclCommAbort
        self.destroy: Callable[..., int] = dll.ncclCommDestroy
        self.group_start: Callable[..., int] = dll.ncclGroupStart
        self.group_end: Callable[..., int] = dll.ncclGroupEnd
        self.all_reduce: Callable[..., int] = dll.ncclAllReduce
        self.reduce: Callable[..., int] = dll.ncclReduce
        self.broadcast: Callable[..., int] = dll.ncclBroadcast
        self.all_gather: Callable[..., int] = dll.ncclAllGather
        self.reduce_scatter: Callable[..., int] = dll.ncclReduceScatter

    def new_unique_id(self) -> bytes:
        unique_id = UniqueId()
        _raise_for(self._dll.ncclGetUniqueId(byref(unique_id)), "make a group id", self.last_error)
        return bytes(unique_id)

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, int]:
        comm = c_void_p()
        identifier = UniqueId.from_buffer_copy(unique_id)
        if self._is_non_blocking:
            config = InitConfig.non_blocking()
            status = self._dll.ncclCommInitRankConfig(byref(comm), world_size, identifier, rank, byref(config))
        else:
            status = self._dll.ncclCommInitRank(byref(comm), world_size, identifier, rank)
        return status, comm.value or 0

    def async_error(self, comm: int) -> int:
        state = c_int()
        return self._dll.ncclCommGetAsyncError(comm, byref(state)) or state.value

    def last_error(self) -> str:
        if self.version < _LAST_ERROR_VERSION:
            return ""
        return (self._dll.ncclGetLastError(None) or b"").decode(errors="replace").strip()

    def create_weighted_sum(self, weight: bytes, dtype: int, comm: int) -> tuple[int, int]:
        op = c_int()
        scalar = ctypes.create_string_buffer(weight, len(weight))
        status = self._dll.ncclRedOpCreatePreMulSum(byref(op), scalar, dtype, _SCALAR_IN_HOST_MEMORY, comm)
        return status, op.value

    def destroy_op(self, op: int, comm: int) -> int:
        return self._dll.ncclRedOpDestroy(op, comm)


def _raise_for(status: int, action: str, last_error: Callable[[], str] = str) -> None:
    """Raise ``NcclError`` unless ``status`` is success."""
    if status != SUCCESS:
        raise NcclError(status, last_error(), action)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the ``with`` body."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _load_nccl4py(path: str) -> Nccl4pyBinding:
    """Load ``path`` through nccl4py. Raise ImportError if the package is missing or has another release."""
    from importlib import metadata  # slow to import

    release = metadata.version("nccl4py")
    if not release.startswith(_NCCL4PY_RELEASE):
        raise ImportError(f"got release {release}, expected {_NCCL4PY_RELEASE}*")
    # nccl4py asks cuda.pathfinder for the library, which prefers one that the process has already mapped.
    ctypes.CDLL(path)
    return Nccl4pyBinding(importlib.import_module("nccl.bindings.nccl"))


def _load_pynccl(path: str) -> PyncclBinding:
    """Load ``path`` through pynccl. Raise ImportError if the package cannot be imported."""
    with warnings.catch_warnings():
        # With numba-cuda installed, numba's old driver module, which pynccl uses, warns that it will be removed.
        warnings.simplefilter("ignore", DeprecationWarning)
        binding = importlib.import_module("pynccl.binding")
    # pynccl looks for libnccl.so.<version> only in this folder and in sys.prefix/lib.
    with _variable("NUMBA_NCCLLIB", os.path.dirname(path)):
        return PyncclBinding(binding.libnccl().dll)


_LOADERS: dict[str, Callable[[str], Binding]] = {"nccl4py": _load_nccl4py, "pynccl": _load_pynccl}


def _load(name: str, path: str) -> Binding:
    """Load ``path`` through the binding ``name``. Raise if it fails, or has loaded another file."""
    binding = _LOADERS[name](path)
    if not os.path.samefile(binding.library_path, path):
        raise UnsupportedError(f"it chose {binding.library_path}")
    return binding


def load_binding(environ: Mapping[str, str] = os.environ) -> Binding:
    """Load NCCL through the binding that ``SYNK_NCCL_BINDING`` names; by default nccl4py, or else pynccl.

    For workers only: pynccl imports numba, and the master needs neither package.

    Raises
    ------
    ValueError
        If the variable is neither ``nccl4py`` nor ``pynccl``.
    UnsupportedError
        If the chosen binding, or both, cannot be loaded, or there is no NCCL library.
    """
    choice = environ.get(BINDING_VARIABLE, "")
    if choice and choice not in BINDINGS:
        raise ValueError(
            f"cannot choose an NCCL binding: got {BINDING_VARIABLE}={choice!r}, expected one of "
            f"{', '.join(BINDINGS)}. Unset it to take nccl4py where it is installed."
        )
    path = find_library(environ)
    reasons = []
    for name in (choice,) if choice else BINDINGS:
        try:
            return _load(name, path)
        except Exception as error:  # a package whose version does not match its parts may fail in any way
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    other = f" or set {BINDING_VARIABLE}={next(name for name in BINDINGS if name != choice)}" if choice else ""
    raise UnsupportedError(
        f"cannot load {path} through an NCCL binding: {'; '.join(reasons)}. Install one "
        f'(pip install "synkhronos[cuda12]" or "synkhronos[cuda13]"){other}.'
    )
