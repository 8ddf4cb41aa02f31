"""Point `llama_cpp` at the patched libraries, and make sure that it uses them.

`llama_cpp` loads libllama once, when it is first imported, from `LLAMA_CPP_LIB_PATH`. Importing
`pyspec` sets that variable; `use_patched_libraries()` imports `llama_cpp` and checks the outcome.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType

from pyspec.errors import LibraryError

VARIABLE = "LLAMA_CPP_LIB_PATH"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"

#: A function of each library that must be ours; the dynamic linker tells which file it came from.
PROBES = {
    "libllama": "llama_backend_init",
    "libggml": "ggml_backend_load_all",
    "libggml-base": "ggml_backend_name",
    "libggml-cpu": "ggml_backend_cpu_init",
}


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


def library_dir() -> Path:
    """The folder of the patched libraries: `lib` in the installed package."""
    # Two places in an editable install: the source tree and site-packages.
    candidates = [Path(root) / "lib" for root in sys.modules["pyspec"].__path__]
    for candidate in candidates:
        if (candidate / f"libllama{SUFFIX}").is_file():
            return candidate.resolve()
    looked = ", ".join(map(str, candidates))
    raise LibraryError(f"libllama{SUFFIX} is missing (looked in {looked}): run scripts/setup")


def set_library_path() -> None:
    """Make a later `import llama_cpp` load the patched libraries; raise when it is too late."""
    ours = library_dir()
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        _check(loaded, ours)
    elif (theirs := os.environ.get(VARIABLE)) and Path(theirs).resolve() != ours:
        raise LibraryError(
            f"{VARIABLE} is {theirs}, but pyspec needs its own {ours}: unset {VARIABLE}"
        )
    os.environ[VARIABLE] = str(ours)


def use_patched_libraries() -> ModuleType:
    """Import `llama_cpp` on the patched libraries and return it; raise `LibraryError` otherwise."""
    set_library_path()
    import llama_cpp

    _check(sys.modules["llama_cpp.llama_cpp"], library_dir())
    return llama_cpp


def _check(bindings: ModuleType, ours: Path) -> None:
    for name, symbol in PROBES.items():
        found = _origin(bindings._lib, symbol)
        if found is None or found.parent != ours:
            advice = (
                "llama_cpp was imported before pyspec: import pyspec first"
                if name == "libllama"
                else "another copy of ggml is loaded: import pyspec before the package that brings it"
            )
            raise LibraryError(
                f"{name} was loaded from {found or 'an unknown place'}, not from {ours}; {advice}"
            )


def _origin(library: ctypes.CDLL, symbol: str) -> Path | None:
    """The file that `symbol`, looked up through `library`, was loaded from."""
    try:
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    if not dladdr(address, ctypes.byref(info)) or not info.dli_fname:
        return None
    return Path(os.fsdecode(info.dli_fname)).resolve()
