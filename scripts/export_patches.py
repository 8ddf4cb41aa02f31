#!/usr/bin/env python3
"""Write the commits of TREE (made with scripts/patch_worktree.py) back as the patch series.

Patches are written in one normal form, so that only what changed in a commit changes in its file.
Files of commits that are gone are deleted, 'series' gets the order of the commits, and the table in
README.md what they say.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from patch_worktree import git, require_clean, upstream_message
from patchlib import SERIES_DIR, Patch, PatchToolError, Pin, Series, make_patch, run_tool

DIFF = (
    "-c",
    "core.quotePath=false",
    "diff-tree",
    "-p",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--unified=3",
    "--diff-algorithm=myers",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


def commits(root: Path, pin: Pin) -> list[str]:
    found = git(root, "log", "-1", "--format=%B", "upstream").decode().strip()
    if found != upstream_message(pin).strip():
        raise PatchToolError(
            f"{root} starts from {found.splitlines()[0]!r}, but UPSTREAM pins {pin.requirement}: "
            f"run scripts/patch_worktree.py --rebase {root}"
        )
    if git(root, "rev-list", "--merges", "upstream..HEAD"):
        raise PatchToolError(f"{root} has a merge after 'upstream': make it a line with git rebase")
    return git(root, "rev-list", "--reverse", "upstream..HEAD").decode().split()


def to_patch(root: Path, commit: str) -> Patch:
    subject, _, body = git(root, "log", "-1", "--format=%s%n%b", commit).decode().partition("\n")
    diff = git(root, *DIFF, f"{commit}^", commit)
    try:
        return make_patch(subject, body, diff)
    except PatchToolError as error:
        raise PatchToolError(f"commit {commit[:10]} in {root}: {error}") from None


def export(root: Path, series_dir: Path = SERIES_DIR) -> list[str]:
    """Write the series of the tree `root`; the names of the files that changed."""
    require_clean(root)
    patches = [to_patch(root, commit) for commit in commits(root, Pin.load(series_dir))]
    names = [patch.name for patch in patches]
    for name in names:
        if names.count(name) > 1:
            raise PatchToolError(
                f"{names.count(name)} commits in {root} would be {name}: squash them"
            )
    return Series(series_dir, tuple(patches)).write()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument(
        "--series",
        type=Path,
        default=SERIES_DIR,
        metavar="DIR",
        help="folder to write to, with UPSTREAM and series (ggml_patches)",
    )
    args = parser.parse_args()
    changed = export(args.tree.resolve(), args.series)
    print(f"{args.series}: " + (", ".join(sorted(changed)) if changed else "nothing changed"))


if __name__ == "__main__":
    run_tool(main)
