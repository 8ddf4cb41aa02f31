"""The installed libraries: all there, each exactly once, and the ones that `llama_cpp` runs on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyspec import _libs
from pyspec.errors import LibraryError

LIBRARIES = ("libllama", "libggml", "libggml-base", "libggml-cpu", "libpyspec")
ROOT = Path(__file__).resolve().parent.parent
PRELUDE = "import sys, pathlib\n"


def run(code: str, **environment: str) -> str:
    """The output of `code` in a new interpreter; what it raises comes back as its last line."""
    env = {k: v for k, v in os.environ.items() if k != _libs.VARIABLE} | environment
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=env, capture_output=True, text=True, check=False
    )
    return (result.stdout if result.returncode == 0 else result.stderr).strip()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second set of the libraries, as another package would bring it."""
    copy = tmp_path_factory.mktemp("foreign") / "lib"
    shutil.copytree(_libs.library_dir(), copy)
    return copy


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_one_file_without_version_links(name: str) -> None:
    found = sorted(p.name for p in _libs.library_dir().glob(f"{name}.*"))
    assert found == [f"{name}{_libs.SUFFIX}"]
    assert not (_libs.library_dir() / found[0]).is_symlink()


def test_no_tools_of_llama_cpp_are_installed() -> None:
    names = {p.name.split(".")[0] for p in _libs.library_dir().glob(f"*{_libs.SUFFIX}")}
    assert names - set(LIBRARIES) <= {"libggml-metal", "libggml-blas"}


def test_the_licence_of_llama_cpp_is_shipped() -> None:
    assert "MIT License" in (_libs.library_dir() / "LICENSE-llama.cpp.txt").read_text()


def test_llama_cpp_and_the_binding_use_one_set_of_libraries() -> None:
    code = """
import pyspec
from pyspec._libs import library_dir, use_patched_libraries
from pyspec.native import _pyspec_cffi
use_patched_libraries().llama_backend_init()
maps = pathlib.Path("/proc/self/maps")
if maps.exists():
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    loaded = {p for p in loaded if pathlib.Path(p).name.startswith(("libllama", "libggml", "libpyspec"))}
    assert {str(pathlib.Path(p).parent) for p in loaded} == {str(library_dir())}, loaded
    assert len(loaded) >= 5, loaded
print("ok")
"""
    assert run(code) == "ok"


def test_import_pyspec_then_llama_cpp_is_enough() -> None:
    code = """
import pyspec, llama_cpp
print(pathlib.Path(llama_cpp.llama_cpp._lib._name).parent)
"""
    assert run(code) == str(_libs.library_dir())


def test_a_child_process_inherits_the_libraries() -> None:
    code = "import pyspec, subprocess; sys.exit(subprocess.call([sys.executable, '-c', 'import pyspec']))"
    assert run(code) == ""


def test_llama_cpp_imported_first_with_other_libraries(foreign: Path) -> None:
    message = run("import llama_cpp, pyspec", LLAMA_CPP_LIB_PATH=str(foreign))
    assert message.splitlines()[-1] == (
        f"pyspec.errors.LibraryError: libllama was loaded from {foreign}/libllama{_libs.SUFFIX}, not "
        f"from {_libs.library_dir()}; llama_cpp was imported before pyspec: import pyspec first"
    )


def test_llama_cpp_imported_first_with_our_libraries() -> None:
    code = "import llama_cpp, pyspec; print('ok')"
    assert run(code, LLAMA_CPP_LIB_PATH=str(_libs.library_dir())) == "ok"


def test_library_path_set_to_other_libraries(foreign: Path) -> None:
    message = run("import pyspec", LLAMA_CPP_LIB_PATH=str(foreign))
    assert message.splitlines()[-1] == (
        f"pyspec.errors.LibraryError: LLAMA_CPP_LIB_PATH is {foreign}, but pyspec needs its own "
        f"{_libs.library_dir()}: unset LLAMA_CPP_LIB_PATH"
    )


def test_missing_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pyspec"], "__path__", [str(tmp_path)])
    with pytest.raises(
        LibraryError, match=r"libllama\.\w+ is missing \(looked in .*\): run scripts/setup"
    ):
        _libs.library_dir()


def test_another_ggml_is_named(monkeypatch: pytest.MonkeyPatch, foreign: Path) -> None:
    def origin(library: object, symbol: str) -> Path:
        folder = foreign if symbol == _libs.PROBES["libggml-cpu"] else _libs.library_dir()
        return folder / "lib"

    monkeypatch.setattr(_libs, "_origin", origin)
    with pytest.raises(
        LibraryError, match=r"libggml-cpu was loaded from .*/lib, not from .*; another copy of ggml"
    ):
        _libs.use_patched_libraries()


@pytest.mark.parametrize(
    ("files", "before", "told"),
    [
        pytest.param(7, 3, "    2 of 4 files compiled\n", id="goes-on"),
        pytest.param(3, 3, "    2 files compiled\n", id="what-changed"),
        pytest.param(None, 0, "    2 files compiled\n", id="nobody-knows"),
    ],
)
def test_set_up_counts_the_files_that_it_compiles(
    tmp_path: Path, files: int | None, before: int, told: str
) -> None:
    log = tmp_path / "build" / "default" / ".ninja_log"
    log.parent.mkdir(parents=True)
    line = "1\t2\t3\tsrc/{}\tabc\n"
    log.write_text("# ninja log v5\n" + line.format("lib.so") + line.format("x.cpp.o") * before)
    if files is not None:
        (log.parent / "build.ninja").write_text(
            "rule cxx\n command = c++ -o $out -c $in\nrule link\n command = c++ -o $out $in\n"
            + "".join(f"build {n}.o: cxx {n}.cpp\n" for n in range(files))
            + f"build lib.so: link {' '.join(f'{n}.o' for n in range(files))}\n"
            + "build other.o: cxx other.cpp\nbuild pyspec-libs: phony lib.so\n"
        )
    script = (
        'set -euo pipefail; source "$0" && cd "$1" && before=$(made)'
        ' && (compiled "$before" 0.1 & echo $!) && sleep 0.5 && printf "$2" >>build/default/.ninja_log'
    )
    command = [
        "bash",
        "-c",
        script,
        str(ROOT / "scripts" / "env.sh"),
        str(tmp_path),
        line.format("y.c.o") * 2 + line.format("generated.h"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == told
        finally:
            os.kill(pid, signal.SIGTERM)
