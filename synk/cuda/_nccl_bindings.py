"""Two ways to call NCCL behind one interface: the pynccl package, hardened, and CuPy's own binding.

Owns calls and their types, nothing else: no deadline, no splitting, no op's meaning. Both packages are imported when a
binding is loaded, which only workers do. Methods return NCCL's status and never raise for it, because what a status
means depends on the moment: "in progress" is no failure, and an error during an abort is none either. In one file
because the two must offer the same, call by call.
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

from synk.cuda._nccl_library import SUCCESS, NcclError, find_library, mapped_library, status_name
from synk.errors import UnsupportedError

BINDING_VARIABLE = "SYNK_NCCL_BINDING"
BINDINGS = ("pynccl", "cupy")
UNIQUE_ID_NBYTES = 128

# The scalar of a weighted sum lies in host memory and is read during the call.
_SCALAR_IN_HOST_MEMORY = 1


class Binding(Protocol):
    """NCCL's functions. ``comm`` is what ``init`` returned; pointers and streams are plain integers.

    ``dtype`` and ``op`` are NCCL's numbers, ``count`` is in elements of ``dtype``.
    """

    name: ClassVar[str]
    has_weighted_sum: bool
    version: int
    library_path: str

    def new_unique_id(self) -> bytes:
        """Return 128 bytes that name a new group. Opens a listening socket in this process; needs no GPU."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, Any]:
        """Join the group: return the status, perhaps "in progress", and the communicator."""

    def async_error(self, comm: Any) -> int:
        """Return the state of the communicator: success, in progress, or an error."""

    def last_error(self) -> str:
        """Return NCCL's last message, or an empty string."""

    def abort(self, comm: Any) -> int: ...
    def destroy(self, comm: Any) -> int: ...
    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
    def all_reduce(self, comm: Any, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> int: ...
    def reduce(
        self, comm: Any, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> int: ...
    def broadcast(self, comm: Any, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> int: ...
    def all_gather(self, comm: Any, send: int, recv: int, count: int, dtype: int, stream: int) -> int: ...
    def reduce_scatter(self, comm: Any, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> int: ...
    def send(self, comm: Any, pointer: int, count: int, dtype: int, peer: int, stream: int) -> int: ...
    def recv(self, comm: Any, pointer: int, count: int, dtype: int, peer: int, stream: int) -> int: ...

    def create_weighted_sum(self, comm: Any, weight: bytes, dtype: int) -> tuple[int, int]:
        """Return the status and an op that multiplies by ``weight`` (one ``dtype``) before it sums."""

    def destroy_op(self, comm: Any, op: int) -> int: ...


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: bytes, not characters, or reading it stops at the first zero."""

    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_NBYTES),)


# NCCL has the non-blocking start since 2.17. Before 2.27.3 its own thread goes on reading thread-locals of the caller
# (src/group.cc), which here is a thread that has ended by then.
_NON_BLOCKING_VERSION = 22703


class InitConfig(ctypes.Structure):
    """The first fields of ``ncclConfig_t``, as of NCCL 2.17; later ones take NCCL's defaults.

    NCCL copies ``size`` bytes over its defaults (``parseCommConfig`` in ``src/init.cc``), so one prefix serves all
    releases since.
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
        """Return a configuration that asks for calls that return before they are done."""
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
    that return text as if they returned a status. The function objects are shared with pynccl, so its own methods
    are mended with them.
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
        function = getattr(dll, name, None)  # ncclGetLastError came with 2.13
        if function is not None:
            function.restype = c_char_p
            function.argtypes = argtypes


class _Library:
    """What both bindings call in the library itself, because pynccl and CuPy do not have it.

    Parameters
    ----------
    dll : ctypes.CDLL
        Its functions are re-typed.
    path : str
        The file behind it.
    """

    def __init__(self, dll: ctypes.CDLL, path: str) -> None:
        retype(dll)
        self.dll = dll
        self.path = path
        version = c_int()
        _raise_for(dll.ncclGetVersion(byref(version)), "ask for NCCL's version")
        self.version = version.value
        self.has_weighted_sum = hasattr(dll, "ncclRedOpCreatePreMulSum")  # NCCL 2.11

    def last_error(self) -> str:
        if not hasattr(self.dll, "ncclGetLastError"):  # NCCL 2.13
            return ""
        return (self.dll.ncclGetLastError(None) or b"").decode(errors="replace").strip()

    def create_weighted_sum(self, pointer: int, weight: bytes, dtype: int) -> tuple[int, int]:
        op = c_int()
        scalar = ctypes.create_string_buffer(weight, len(weight))
        status = self.dll.ncclRedOpCreatePreMulSum(byref(op), scalar, dtype, _SCALAR_IN_HOST_MEMORY, pointer)
        return status, op.value

    def destroy_op(self, pointer: int, op: int) -> int:
        return self.dll.ncclRedOpDestroy(op, pointer)


class PyncclBinding:
    """NCCL through the library object of pynccl, called by ctypes, which releases the GIL during each call.

    pynccl's own ``Nccl`` and ``NcclWrp`` are left alone: they need numba's CUDA context and its device.

    Parameters
    ----------
    dll : ctypes.CDLL
        ``pynccl.binding.libnccl().dll``; its functions are re-typed.
    library_path : str
        The file behind it.
    """

    name: ClassVar[str] = "pynccl"

    def __init__(self, dll: ctypes.CDLL, library_path: str) -> None:
        self._dll = dll
        self._library = _Library(dll, library_path)
        self.library_path = library_path
        self.version = self._library.version
        self.has_weighted_sum = self._library.has_weighted_sum
        self._has_config = self.version >= _NON_BLOCKING_VERSION and hasattr(dll, "ncclCommInitRankConfig")
        self.abort: Callable[[int], int] = dll.ncclCommAbort
        self.destroy: Callable[[int], int] = dll.ncclCommDestroy
        self.group_start: Callable[[], int] = dll.ncclGroupStart
        self.group_end: Callable[[], int] = dll.ncclGroupEnd
        self.last_error = self._library.last_error
        self.create_weighted_sum = self._library.create_weighted_sum
        self.destroy_op = self._library.destroy_op

    def new_unique_id(self) -> bytes:
        unique_id = UniqueId()
        _raise_for(self._dll.ncclGetUniqueId(byref(unique_id)), "make a group id", self.last_error())
        return bytes(unique_id)

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, int]:
        comm = c_void_p()
        identifier = UniqueId.from_buffer_copy(unique_id)
        if self._has_config:
            config = InitConfig.non_blocking()
            status = self._dll.ncclCommInitRankConfig(byref(comm), world_size, identifier, rank, byref(config))
        else:
            status = self._dll.ncclCommInitRank(byref(comm), world_size, identifier, rank)
        return status, comm.value or 0

    def async_error(self, comm: int) -> int:
        state = c_int()
        return self._dll.ncclCommGetAsyncError(comm, byref(state)) or state.value

    def all_reduce(self, comm: int, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> int:
        return self._dll.ncclAllReduce(send, recv, count, dtype, op, comm, stream)

    def reduce(self, comm: int, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> int:
        return self._dll.ncclReduce(send, recv, count, dtype, op, root, comm, stream)

    def broadcast(self, comm: int, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> int:
        return self._dll.ncclBroadcast(send, recv, count, dtype, root, comm, stream)

    def all_gather(self, comm: int, send: int, recv: int, count: int, dtype: int, stream: int) -> int:
        return self._dll.ncclAllGather(send, recv, count, dtype, comm, stream)

    def reduce_scatter(self, comm: int, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> int:
        return self._dll.ncclReduceScatter(send, recv, count, dtype, op, comm, stream)

    def send(self, comm: int, pointer: int, count: int, dtype: int, peer: int, stream: int) -> int:
        return self._dll.ncclSend(pointer, count, dtype, peer, comm, stream)

    def recv(self, comm: int, pointer: int, count: int, dtype: int, peer: int, stream: int) -> int:
        return self._dll.ncclRecv(pointer, count, dtype, peer, comm, stream)


class CupyBinding:
    """NCCL through ``cupy.cuda.nccl``, whose start always blocks."""

    name: ClassVar[str] = "cupy"

    def __init__(self, nccl: Any, library_path: str) -> None:
        self._nccl = nccl
        self._library = _Library(ctypes.CDLL(library_path), library_path)
        self.library_path = library_path
        self.version = int(nccl.get_version())
        self.has_weighted_sum = self._library.has_weighted_sum
        self.last_error = self._library.last_error

    def _status(self, function: Callable[..., None], *args: int) -> int:
        try:
            function(*args)
        except self._nccl.NcclError as error:
            return int(error.status)
        except KeyError as error:  # CuPy's table of names ends at 6: its error class fails on 7 and 8
            return int(error.args[0])
        return SUCCESS

    def new_unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, Any]:
        made: list[Any] = []
        status = self._status(lambda: made.append(self._nccl.NcclCommunicator(world_size, unique_id, rank)))
        return status, made[0] if made else None

    def async_error(self, comm: Any) -> int:
        return self._status(comm.check_async_error)

    def abort(self, comm: Any) -> int:
        return self._status(comm.abort)

    def destroy(self, comm: Any) -> int:
        return self._status(comm.destroy)

    def group_start(self) -> int:
        return self._status(self._nccl.groupStart)

    def group_end(self) -> int:
        return self._status(self._nccl.groupEnd)

    def all_reduce(self, comm: Any, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> int:
        return self._status(comm.allReduce, send, recv, count, dtype, op, stream)

    def reduce(self, comm: Any, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> int:
        return self._status(comm.reduce, send, recv, count, dtype, op, root, stream)

    def broadcast(self, comm: Any, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> int:
        return self._status(comm.broadcast, send, recv, count, dtype, root, stream)

    def all_gather(self, comm: Any, send: int, recv: int, count: int, dtype: int, stream: int) -> int:
        return self._status(comm.allGather, send, recv, count, dtype, stream)

    def reduce_scatter(self, comm: Any, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> int:
        return self._status(comm.reduceScatter, send, recv, count, dtype, op, stream)

    def send(self, comm: Any, pointer: int, count: int, dtype: int, peer: int, stream: int) -> int:
        return self._status(comm.send, pointer, count, dtype, peer, stream)

    def recv(self, comm: Any, pointer: int, count: int, dtype: int, peer: int, stream: int) -> int:
        return self._status(comm.recv, pointer, count, dtype, peer, stream)

    def create_weighted_sum(self, comm: Any, weight: bytes, dtype: int) -> tuple[int, int]:
        return self._library.create_weighted_sum(comm.comm, weight, dtype)

    def destroy_op(self, comm: Any, op: int) -> int:
        return self._library.destroy_op(comm.comm, op)


def _raise_for(status: int, action: str, last_error: str = "") -> None:
    """Raise ``NcclError`` unless ``status`` is success."""
    if status != SUCCESS:
        raise NcclError(status, status_name(status), last_error, action)


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


def _load_pynccl(path: str) -> PyncclBinding:
    """Load ``path`` through pynccl. Raises ImportError if the package cannot be imported."""
    with warnings.catch_warnings():
        # With numba-cuda installed, numba's old driver module, which pynccl uses, warns that it will go.
        warnings.simplefilter("ignore", DeprecationWarning)
        binding = importlib.import_module("pynccl.binding")
    # pynccl looks into this one folder and into sys.prefix/lib, nowhere else.
    with _variable("NUMBA_NCCLLIB", os.path.dirname(path)):
        try:
            dll = binding.libnccl().dll
        except Exception as error:  # pynccl raises Exception itself
            raise UnsupportedError(
                f"cannot load {path} through pynccl: got {error}. pynccl only takes files named libnccl.so.<version>; "
                f"set {BINDING_VARIABLE}=cupy to use CuPy's binding."
            ) from error
    loaded = dll._name
    if not os.path.samefile(loaded, path):
        raise UnsupportedError(
            f"cannot load {path} through pynccl: it chose {loaded}. Leave one libnccl.so.<version> in that folder, or "
            f"set {BINDING_VARIABLE}=cupy."
        )
    return PyncclBinding(dll, loaded)


def _load_cupy(path: str) -> CupyBinding:
    """Use CuPy's binding with the library at ``path``. Raises ImportError if CuPy or its NCCL part is missing."""
    # CuPy's module is linked against the library's name; what is mapped under that name first is what it gets.
    ctypes.CDLL(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it finds no NCCL; the error below says more
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError(f"cannot use cupy.cuda.nccl: it could not load NCCL from {path}.")
    return CupyBinding(nccl, mapped_library() or path)


def load_binding(environ: Mapping[str, str] = os.environ) -> Binding:
    """Load NCCL through the binding that ``SYNK_NCCL_BINDING`` names; by default pynccl, or CuPy's where it is missing.

    For workers only: pynccl brings numba, and neither package belongs into the master.

    Raises
    ------
    ValueError
        If the variable has another value than ``pynccl`` or ``cupy``.
    UnsupportedError
        If the binding asked for, or both, cannot be loaded, or there is no NCCL library.
    """
    choice = environ.get(BINDING_VARIABLE, "")
    if choice and choice not in BINDINGS:
        raise ValueError(
            f"cannot choose an NCCL binding: got {BINDING_VARIABLE}={choice!r}, expected one of "
            f"{', '.join(BINDINGS)}. Unset it to take pynccl where it is installed."
        )
    path = find_library(environ)
    loaders: dict[str, Callable[[str], Binding]] = {"pynccl": _load_pynccl, "cupy": _load_cupy}
    reasons = []
    for name in (choice,) if choice else BINDINGS:
        try:
            return loaders[name](path)
        except Exception as error:  # a package of another version than its parts may fail in any way
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    other = f" or set {BINDING_VARIABLE}={next(name for name in BINDINGS if name != choice)}" if choice else ""
    raise UnsupportedError(
        f"cannot load an NCCL binding: {'; '.join(reasons)}. Install one "
        f'(pip install "synkhronos[cuda12]" or "synkhronos[cuda13]"){other}.'
    )
