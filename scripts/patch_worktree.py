#!/usr/bin/env python3
"""Make DIR a git tree to work on the patches in: the pristine source, then one commit a patch.

Edit and commit there with plain git (git commit --amend, git rebase -i upstream), then write the
series back with scripts/export_patches.py DIR. The commit of the pristine source is tagged
'upstream'. A commit's subject is 'stem: what it does' and becomes stem.patch; its body ends with
'Reason: ...', 'Upstream: ...' and 'Drop-when: ...'.

Where a patch does not apply, the tree stops before it: make the change by hand, then --continue.
After a change of the pin in UPSTREAM, --rebase moves the commits of an existing DIR onto the new
source; conflicts are resolved as in any git rebase.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from fetch_upstream import fetch, unpack
from patchlib import SERIES_DIR, PatchToolError, Pin, Series, read_file, run_tool, write_file

#: Nothing of the user's configuration may change what is committed or exported.
ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "pyspec",
    "GIT_AUTHOR_EMAIL": "pyspec@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "pyspec",
    "GIT_COMMITTER_EMAIL": "pyspec@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}


def git(root: Path, *arguments: str, message: str | None = None) -> bytes:
    """Run git in `root`, free of the user's configuration; its output."""
    if shutil.which("git") is None:
        raise PatchToolError(
            "git is needed to work on the patches: install it (building does not need it)"
        )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    result = subprocess.run(
        ["git", "-C", str(root), *arguments],
        input=None if message is None else message.encode(),
        capture_output=True,
        env=inherited | ENVIRONMENT,
        check=False,
    )
    if result.returncode != 0:
        output = (result.stderr or result.stdout).decode(errors="replace").strip()
        raise PatchToolError(f"git {' '.join(arguments[:2])} failed in {root}:\n{output}")
    return result.stdout


def upstream_message(pin: Pin) -> str:
    return f"{pin.requirement}: {pin.source}\n\nsha256: {pin.sha256}\n"


def commit_all(root: Path, message: str) -> None:
    git(root, "add", "--all", "--force", ".")
    git(
        root,
        "commit",
        "--quiet",
        "--no-verify",
        "--allow-empty",
        "--cleanup=verbatim",
        "--file=-",
        message=message,
    )


def make(root: Path, series_dir: Path, sdist: Path | None) -> None:
    """Pristine source and one commit a patch in the new folder `root`."""
    if root.exists() and any(root.iterdir()):
        raise PatchToolError(f"{root} is not empty: choose a new folder (or --rebase it)")
    pin, series = Pin.load(series_dir), Series.load(series_dir)
    unpack(fetch(pin, sdist), pin, root)
    git(root, "init", "--quiet", "--initial-branch=series")
    for key, value in {
        "user.name": "pyspec",
        "user.email": "pyspec@localhost",
        "core.autocrlf": "false",
        "commit.gpgsign": "false",
        "advice.detachedHead": "false",
    }.items():
        git(root, "config", key, value)
    commit_all(root, upstream_message(pin))
    git(root, "tag", "upstream")
    commit_patches(root, series, 0)


def commit_patches(root: Path, series: Series, done: int) -> None:
    """One commit for each patch from number `done` on; stops where one does not apply."""
    for number, patch in enumerate(series.patches[done:], done):
        try:
            files = Series(series.directory, (patch,)).apply(lambda path: read_file(root / path))
        except PatchToolError as error:
            with contextlib.suppress(PatchToolError):
                git(root, "apply", "--reject", str(series.directory / patch.name))
            raise PatchToolError(
                f"{error}.\n{root} has the patches before it as commits ({number}) and the hunks "
                "of this one that fit as changes; the rest is in *.rej files. Make the change, delete "
                f"the *.rej files, then scripts/patch_worktree.py --continue {root}"
            ) from None
        for path, content in files.items():
            write_file(root / path, content)
        commit_all(root, patch.message())
    total = len(series.patches)
    print(f"{root}: the source (tag 'upstream') and {total} patches as commits")


def resume(root: Path, series_dir: Path) -> None:
    """After a patch did not apply: commit the changes in `root` as that patch, then the others."""
    require_tree(root)
    series = Series.load(series_dir)
    if rejects := [str(path) for path in root.rglob("*.rej")]:
        raise PatchToolError(f"delete these first, when their change is made: {', '.join(rejects)}")
    done = int(git(root, "rev-list", "--count", "upstream..HEAD"))
    if done >= len(series.patches):
        raise PatchToolError(f"{root} has all {done} patches: nothing to continue")
    commit_all(root, series.patches[done].message())
    commit_patches(root, series, done + 1)


def rebase(root: Path, series_dir: Path, sdist: Path | None) -> None:
    """Move the commits of `root` onto the source that UPSTREAM pins now."""
    pin = Pin.load(series_dir)
    require_clean(root)
    source = root / ".git" / "new-upstream"
    unpack(fetch(pin, sdist), pin, source)
    old = git(root, "rev-parse", "upstream").decode().strip()
    git(root, "checkout", "--quiet", "--detach", "upstream")
    for path in root.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in source.iterdir():
        path.rename(root / path.name)
    source.rmdir()
    commit_all(root, upstream_message(pin))
    git(root, "tag", "--force", "upstream")
    git(root, "checkout", "--quiet", "series")
    try:
        git(root, "rebase", "--onto", "upstream", old, "series")
    except PatchToolError as error:
        raise PatchToolError(
            f"{error}\nResolve the conflict in {root}, 'git rebase --continue', then "
            f"scripts/export_patches.py {root}"
        ) from None
    print(
        f"{root}: the series is rebased onto {pin.requirement}; now scripts/export_patches.py {root}"
    )


def require_tree(root: Path) -> None:
    if not (root / ".git").is_dir():
        raise PatchToolError(f"{root} is not a patch tree: make one with scripts/patch_worktree.py")


def require_clean(root: Path) -> None:
    require_tree(root)
    if any((root / ".git" / name).exists() for name in ("rebase-merge", "rebase-apply")):
        raise PatchToolError(f"a rebase is under way in {root}: finish it (git rebase --continue)")
    changes = git(root, "status", "--porcelain").decode().rstrip()
    if changes:
        raise PatchToolError(
            f"{root} has changes that are not committed; commit or amend them:\n{changes}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="DIR", help="a new folder")
    step = parser.add_mutually_exclusive_group()
    step.add_argument(
        "--continue",
        dest="resume",
        action="store_true",
        help="DIR stopped at a patch: commit the changes in it as that patch, then the others",
    )
    step.add_argument(
        "--rebase",
        action="store_true",
        help="DIR exists: move its commits onto the source that UPSTREAM pins now",
    )
    parser.add_argument(
        "--series",
        type=Path,
        default=SERIES_DIR,
        metavar="DIR",
        help="folder with UPSTREAM, series and the patches (ggml_patches)",
    )
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help="the source distribution, instead of a download"
    )
    args = parser.parse_args()
    root, series_dir = args.tree.resolve(), args.series.resolve()
    if args.resume:
        resume(root, series_dir)
    elif args.rebase:
        rebase(root, series_dir, args.sdist)
    else:
        make(root, series_dir, args.sdist)


if __name__ == "__main__":
    run_tool(main)
