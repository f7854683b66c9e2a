"""Finding libnrt, and calling its functions by the table in `functions.py`.

Nothing is loaded before `load_nrt`. The library is loaded for the whole process (RTLD_GLOBAL), as
libfabric and NIXL look for it there; who uses either loads it before they first look for devices.

So far this has run on a simulator of libnrt only.
"""

import ctypes
import operator
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from neuron_di_bindings.nrt.functions import Answer, NrtFunction, of_generation
from neuron_di_bindings.nrt.status import (
    NrtError,
    NrtMisuse,
    NrtStatus,
    NrtUnsupported,
    error_of,
)
from neuron_di_bindings.nrt.structs import NrtVersionStruct

PATH_VARIABLE = "NEURON_DI_LIBNRT"
DEFAULT_PATHS = ("libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1")

_loaded: dict[int, "NrtLibrary"] = {}  # by the loader's handles
_loading = threading.Lock()


class NrtMissing(Exception):
    """Raised when no libnrt can be loaded. Says what was tried, and why each was not it."""


@dataclass(frozen=True, slots=True)
class NrtVersion:
    """Of the library. `detail` and `git_hash` are texts of the library's own."""

    major: int
    minor: int
    patch: int
    maintenance: int
    detail: str
    git_hash: str

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}.{self.maintenance}"


def load_nrt(path: str | None = None) -> "NrtLibrary":
    """The library at this path; or else at $NEURON_DI_LIBNRT; or else the system's libnrt.so.1, or
    that of AWS's packages. One object per library, whatever the path. NrtMissing, which says why
    each was not it."""
    path = path or os.environ.get(PATH_VARIABLE)
    tried = []
    with _loading:
        for candidate in [path] if path else DEFAULT_PATHS:
            try:
                found = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
                if not hasattr(found, "nrt_init"):
                    raise OSError(f"{Path(candidate).name} has no nrt_init")
            except OSError as error:
                tried.append(f"{candidate}: {error}")
            else:
                return _loaded.setdefault(_handle_of(found), NrtLibrary(candidate, found))
    raise NrtMissing(
        f"no libnrt can be loaded ({'; '.join(tried)}). It comes with the package "
        f"aws-neuronx-runtime-lib; ${PATH_VARIABLE} names another path"
    )


class NrtLibrary:
    """One loaded libnrt. Made by `load_nrt` alone: what is known of the runtime is known once.

    Calls may come from any thread, and run without the interpreter lock; what else libnrt asks for
    is up to the classes above.
    """

    def __init__(self, path: str, loaded: ctypes.CDLL) -> None:
        self.path = path
        self._library = loaded
        self.async_api = _generation_of(loaded)
        self._rows = of_generation(self.async_api)
        self._bound: dict[str, tuple[Any, NrtFunction, tuple[Any, ...]]] = {}
        # The process in which the runtime was started by us, or was seen to be started.
        self.started_by: int | None = None

    def has(self, name: str) -> bool:
        """Whether it can be called: it is known, and the library has it."""
        return name in self._rows and hasattr(self._library, name)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the table. None where it answers with a status, else what it answers.

        NrtError by the status; NrtUnsupported where the library has no such function;
        OverflowError and ValueError for numbers and texts that C would cut off.
        """
        function, row, kinds = self._bound.get(name) or self._bind(name)
        if self.started_by not in (None, os.getpid()):
            raise NrtMisuse(f"{name}: the runtime was started before this process was forked")
        if len(arguments) != len(kinds):
            raise TypeError(f"{name} takes {len(kinds)} arguments, not {len(arguments)}")
        passed = [_passed(name, *pair) for pair in zip(kinds, arguments, strict=True)]
        answer = function(*passed)
        if row.answer is not Answer.STATUS:
            return answer
        if answer != NrtStatus.SUCCESS:
            error = error_of(name, answer, self.status_name(answer))
            if answer == NrtStatus.UNINITIALIZED:  # perhaps it is in another copy of the library
                error.add_note(f"not started in this process through {self.path}")
            raise error
        return None

    def status_name(self, status: int) -> str:
        """As the library has it, or by our table (nrt_status.h: nrt_get_status_as_str)."""
        if self.has("nrt_get_status_as_str"):
            name = self.call("nrt_get_status_as_str", status)
            if name:
                return str(name, errors="replace")
        known = {int(each) for each in NrtStatus}
        return f"NRT_{NrtStatus(status).name}" if status in known else "an unknown status"

    def version(self) -> NrtVersion:
        """Of the library (nrt_version.h: nrt_get_version)."""
        found = NrtVersionStruct()
        self.call("nrt_get_version", ctypes.byref(found), ctypes.sizeof(found))
        numbers = (found.rt_major, found.rt_minor, found.rt_patch, found.rt_maintenance)
        texts = (found.rt_detail, found.git_hash)
        return NrtVersion(*numbers, *(text.decode(errors="replace") for text in texts))

    def is_started(self) -> bool:
        """Whether somebody has started the runtime and has not closed it.

        Asks for a tensor set: instance and counts may be told before the start, too.
        """
        place = ctypes.c_void_p()
        try:
            self.call("nrt_allocate_tensor_set", ctypes.byref(place))
        except NrtUnsupported:  # then it is no runtime
            return False
        except NrtError as error:
            return error.status not in (NrtStatus.CLOSED, NrtStatus.UNINITIALIZED)
        self.call("nrt_destroy_tensor_set", ctypes.byref(place))
        return True

    def _bind(self, name: str) -> tuple[Any, NrtFunction, tuple[Any, ...]]:
        row = self._rows.get(name)
        if row is None or not hasattr(self._library, name):
            # Not getattr of the library: another thread may bind the same, to the same.
            raise NrtUnsupported(f"{Path(self.path).name} has no {name}")
        function = getattr(self._library, name)
        function.restype = row.answer.value
        function.argtypes = row.arguments
        self._bound[name] = function, row, row.arguments
        return self._bound[name]


def _note_starts() -> None:
    """Before this process is forked: what somebody else has started, the child may not use."""
    for library in [*_loaded.values()]:
        if library.started_by is None and library.is_started():
            library.started_by = os.getpid()


os.register_at_fork(before=_note_starts)


def _handle_of(loaded: ctypes.CDLL) -> int:
    """The loader's, the same for the same library."""
    return loaded._handle  # noqa: SLF001 - ctypes has no other name


def _generation_of(loaded: ctypes.CDLL) -> Literal[2, 3] | None:
    """Of nrt_async.h, by the versions of its symbols. Before 2.x there were functions of the same
    names with other arguments."""
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *[ctypes.c_char_p] * 2)
    handle = _handle_of(loaded)
    if find(handle, b"nrt_init", b"none"):
        return None  # in a library without versions the loader takes any for right
    if find(handle, b"nrta_execute_schedule", b"NRT_3.0.0"):
        return 3
    return 2 if find(handle, b"nrta_error_tracker_create", b"NRT_2.0.0") else None


_LIMITS = {
    ctypes.c_int: (-(2**31), 2**31 - 1),
    ctypes.c_int64: (-(2**63), 2**63 - 1),
    ctypes.c_uint32: (0, 2**32 - 1),
    # Sizes are of this type, too, and none is larger. Sequence numbers are: they come as c_uint64.
    ctypes.c_uint64: (0, 2**63 - 1),
    ctypes.c_void_p: (0, 2**64 - 1),
}


def _passed(function: str, kind: Any, value: Any) -> Any:
    """What ctypes gets. It would take numbers modulo 2**n and texts up to their first NUL."""
    if kind in _LIMITS and hasattr(value, "__index__"):  # NumPy's numbers, too
        number = operator.index(value)
        least, most = _LIMITS[kind]
        if not least <= number <= most:
            raise OverflowError(f"{function}: {number} is not in {least}…{most}")
        return number
    if kind is ctypes.c_char_p and isinstance(value, str):
        text = value.encode()
        if b"\0" in text:
            raise ValueError(f"{function}: a text with a NUL in it")
        return text
    return value
