#!/usr/bin/env python3
"""Check the address spaces of .metal files with clang's C++ for OpenCL mode, where they are part of the types.

check.py CLANG INCLUDE_DIR... -- FILE.metal...

Then checks itself: a copy in which one 'device' pointer has become 'threadgroup' has to be refused.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MSL = HERE.parent / "msl"

FLAGS = [
    "-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc",
    "-Xclang", "-cl-ext=-__opencl_c_generic_address_space,-__opencl_c_pipes,-__opencl_c_device_enqueue,"
    "-__opencl_c_program_scope_global_variables",
    "-fsyntax-only", f"-I{HERE}", "-Wno-unknown-attributes", "-Wno-unused-value",
]  # fmt: skip


def errors(clang, includes, path, directory):
    """clang's errors about the file, as text."""
    preprocessed, source = directory / "kernel.i", directory / "kernel.clcpp"
    subprocess.run(
        [clang, "-E", "-x", "c++", "-D__METAL_VERSION__=310", "-nostdinc", f"-I{MSL / 'empty'}",
         *(f"-I{i}" for i in includes), str(path), "-o", str(preprocessed)],
        check=True,
    )  # fmt: skip
    subprocess.run(
        [
            sys.executable,
            str(MSL / "generate.py"),
            str(preprocessed),
            str(source),
            path.name,
            "--lint",
        ],
        check=True,
    )
    result = subprocess.run(
        [clang, *FLAGS, str(source)], capture_output=True, text=True, check=False
    )
    return result.stderr if result.returncode else ""


def main():
    clang, *rest = sys.argv[1:]
    includes, files = rest[: rest.index("--")], [Path(f) for f in rest[rest.index("--") + 1 :]]
    failed = False
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for path in files:
            found = errors(clang, includes, path, directory)
            print(f"{path.name}: {'FAIL' if found else 'ok'}\n{found}".rstrip())
            failed |= bool(found)

        text = files[0].read_text()
        wrong, n = re.subn(
            r"device(\s+)float(\s+)\* (win|s_row) =", r"threadgroup\1float\2* \3 =", text, count=1
        )
        mistake = directory / files[0].name
        mistake.write_text(wrong)
        if n != 1 or "address space" not in errors(clang, includes, mistake, directory):
            print(f"{files[0].name}: a pointer with the wrong address space was not refused")
            failed = True
    return failed


if __name__ == "__main__":
    sys.exit(main())
