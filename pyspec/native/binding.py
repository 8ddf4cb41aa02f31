"""The compiled module, checked against its library, and status codes as exceptions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pyspec.errors import (
    AbortedError,
    AllocationError,
    ArgumentError,
    ComputeError,
    ContextError,
    DraftError,
    LibraryError,
    ModelError,
    PyspecError,
    SamplerError,
    StateError,
    TreeError,
)

try:
    from pyspec.native._pyspec_cffi import ffi, lib
except ImportError as error:
    raise LibraryError(f"the native core cannot be loaded: {error}; run scripts/setup") from error

ERRORS: dict[int, type[PyspecError]] = {
    lib.PYSPEC_ERR_ARGUMENT: ArgumentError,
    lib.PYSPEC_ERR_MODEL: ModelError,
    lib.PYSPEC_ERR_TREE: TreeError,
    lib.PYSPEC_ERR_CONTEXT: ContextError,
    lib.PYSPEC_ERR_DRAFT: DraftError,
    lib.PYSPEC_ERR_STATE: StateError,
    lib.PYSPEC_ERR_SAMPLER: SamplerError,
    lib.PYSPEC_ERR_MEMORY: AllocationError,
    lib.PYSPEC_ERR_ABORTED: AbortedError,
    lib.PYSPEC_ERR_COMPUTE: ComputeError,
}


def check_library() -> None:
    """Refuses a libpyspec that was built from another header than the extension module."""
    found, expected = lib.pyspec_abi(), lib.PYSPEC_ABI
    if found != expected:
        raise LibraryError(
            f"libpyspec {library_version()} has interface {found:#x}, the extension module was "
            f"built for {expected:#x}: build both again with scripts/setup"
        )


def library_version() -> str:
    """Version of libpyspec."""
    return text(lib.pyspec_version())


def text(pointer: Any) -> str:
    """A C string as str."""
    return ffi.string(pointer).decode("utf-8", "replace")


def check(status: int) -> None:
    """Raises what a status below zero stands for, with the library's message."""
    if status < 0:
        raise ERRORS.get(status, PyspecError)(text(lib.pyspec_last_error()))


def last_failure() -> PyspecError:
    """The exception for this thread's last failure, of a function that returns no status."""
    return ERRORS.get(lib.pyspec_last_status(), PyspecError)(text(lib.pyspec_last_error()))


@ffi.def_extern(error=False)
def pyspec_on_progress(fraction: float, user: Any) -> bool:
    """Called by the library while a model loads; `user` is a handle of a `Progress`."""
    return ffi.from_handle(user)(fraction)


class Progress:
    """Passes loading progress on; an exception of the callback ends loading and is kept."""

    def __init__(self, callback: Callable[[float], object]) -> None:
        self.callback = callback
        self.error: BaseException | None = None

    def __call__(self, fraction: float) -> bool:
        try:
            return self.callback(fraction) is not False
        except BaseException as error:
            self.error = error
            return False


class Handle:
    """A pointer that the library owns: freed once, by `close`, by the collector or at exit.

    Calls hold `lock`, so that closing from another thread waits for the running one.
    """

    def __init__(self, pointer: Any, what: str) -> None:
        self._pointer = pointer
        self._what = what
        self.lock = threading.Lock()

    @property
    def pointer(self) -> Any:
        """The pointer; raises after `free`."""
        if self._pointer is None:
            raise StateError(f"the {self._what} is closed")
        return self._pointer

    @property
    def closed(self) -> bool:
        """True after `free`."""
        return self._pointer is None

    def free(
        self, release: Callable[[Any], None], abort: Callable[[Any], None] | None = None
    ) -> None:
        """Frees the pointer; with `abort`, a call that runs in another thread is ended first."""
        if self._pointer is None:
            return
        if abort is not None and self.lock.locked():
            abort(self._pointer)
        with self.lock:
            pointer, self._pointer = self._pointer, None
            if pointer is not None:
                release(pointer)


check_library()
