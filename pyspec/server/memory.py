"""`return_freed_memory()`: what a long-running server frees goes back to the system."""

from __future__ import annotations

import ctypes
import sys

_LARGE = 1 << 20  # bytes of a block that is returned as soon as it is freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def return_freed_memory() -> bool:
    """Tells glibc to give blocks of 1 MiB and more back when they are freed; elsewhere does nothing.

    By itself it keeps ever larger ones for later, such as the states of finished requests, which
    differ in size, so that a server would keep much more than it uses.

    Returns:
        Whether there is a glibc that was told.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE) and mallopt(_M_TRIM_THRESHOLD, _LARGE))
