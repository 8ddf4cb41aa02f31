"""Emits the C source of the extension module `pyspec.native._pyspec_cffi` (cffi, API mode).

    python build_cffi.py --emit-c FILE      run by the build
    python build_cffi.py --update-abi       after a change of include/pyspec.h

The declarations are those of `include/pyspec.h` between `cffi:begin` and `cffi:end`, so header and
binding cannot differ.
"""

from __future__ import annotations

import argparse
import re
import zlib
from pathlib import Path

HEADER = Path(__file__).parent / "include" / "pyspec.h"
MODULE = "pyspec.native._pyspec_cffi"
ABI = re.compile(r"^#define PYSPEC_ABI +(\w+)$", re.MULTILINE)

# Called by libpyspec while a model loads; user data is a handle of a Python callable.
CALLBACKS = 'extern "Python" bool pyspec_on_progress(float fraction, void * user);'
# The header that the extension was compiled with, to compare with the library that it finds.
CONSTANTS = "static const int32_t PYSPEC_ABI;"


def declarations(header: str) -> str:
    """The part of the header that cffi reads."""
    _, begin, rest = header.partition("// cffi:begin")
    body, end, _ = rest.partition("// cffi:end")
    if not begin or not end:
        raise SystemExit(f"{HEADER}: the markers cffi:begin and cffi:end are missing")
    return re.sub(r"//.*", "", body.partition("\n")[2])


def abi(header: str) -> int:
    """Checksum of the declarations, white space aside, as a positive int32."""
    return zlib.crc32(" ".join(declarations(header).split()).encode()) & 0x7FFFFFFF


def check_abi(header: str) -> None:
    """Stops when the header's PYSPEC_ABI does not belong to its declarations."""
    found = ABI.search(header)
    if not found or int(found[1], 0) != abi(header):
        raise SystemExit(
            f"{HEADER}: declarations have changed, PYSPEC_ABI must be {abi(header):#x}; "
            f"run {Path(__file__).name} --update-abi"
        )


def emit_c(target: str) -> None:
    """Writes the extension's C source to `target`."""
    import cffi

    header = HEADER.read_text(encoding="utf-8")
    check_abi(header)
    builder = cffi.FFI()
    builder.cdef(declarations(header))
    builder.cdef(CONSTANTS)
    builder.cdef(CALLBACKS)
    builder.set_source(MODULE, '#include "pyspec.h"')
    builder.emit_c_code(target)


def update_abi() -> None:
    """Sets PYSPEC_ABI in the header to what its declarations ask for."""
    header = HEADER.read_text(encoding="utf-8")
    HEADER.write_text(ABI.sub(f"#define PYSPEC_ABI {abi(header):#x}", header), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--emit-c", metavar="FILE", help="write the extension's C source")
    action.add_argument("--update-abi", action="store_true", help="renew PYSPEC_ABI in pyspec.h")
    options = parser.parse_args()
    if options.update_abi:
        update_abi()
    else:
        emit_c(options.emit_c)


if __name__ == "__main__":
    main()
