#!/usr/bin/env python3
"""Make TREE the pinned llama.cpp with the patch series applied.

The first run unpacks the source into TREE. Later runs bring it up to date and write only the
files whose content changes, so that a build recompiles only those. To work on the patches
themselves use scripts/patch_worktree.py: edits made in TREE are found and refused here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from fetch_upstream import fetch, unpack
from patchlib import (
    SERIES_DIR,
    Content,
    PatchToolError,
    Pin,
    Series,
    read_file,
    run_tool,
    write_file,
)

STATE = ".pyspec"  # in TREE: state.json and the pristine form of the files that are patched


def digest(content: Content) -> str | None:
    return None if content is None else hashlib.sha256(content[0] + bytes([content[1]])).hexdigest()


class Tree:
    """An unpacked source tree and the record of what the series did to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state_path = root / STATE / "state.json"
        state = json.loads(self.state_path.read_text()) if self.state_path.exists() else {}
        self.pin: dict | None = state.get("pin")
        self.patched: dict[str, str | None] = state.get("patched", {})  # path -> digest
        self.interrupted: bool = state.get("interrupted", False)

    def pristine(self, path: str) -> Content:
        if path in self.patched:
            return read_file(self.root / STATE / "pristine" / path)
        return read_file(self.root / path)

    def check_edits(self) -> None:
        if self.interrupted:
            return
        for path, wanted in self.patched.items():
            if digest(read_file(self.root / path)) != wanted:
                raise PatchToolError(
                    f"{self.root / path} was edited by hand and would be overwritten. Move the edit "
                    "to a tree made with scripts/patch_worktree.py, or run with --force to lose it"
                )

    def update(self, pin: Pin, patched: dict[str, Content]) -> list[str]:
        """Write the patched files, restore those no longer patched; the paths that changed."""
        restored = {path: self.pristine(path) for path in self.patched if path not in patched}
        for path in patched:
            if path not in self.patched:
                write_file(self.root / STATE / "pristine" / path, self.pristine(path))
        # The record comes first: an interrupted run is then repaired by the next one.
        self.save(pin, {**{path: None for path in patched}, **self.patched}, interrupted=True)
        changed = [p for p, c in {**restored, **patched}.items() if write_file(self.root / p, c)]
        for path in restored:
            write_file(self.root / STATE / "pristine" / path, None)
        self.save(pin, {path: digest(content) for path, content in patched.items()})
        return changed

    def save(self, pin: Pin, patched: dict[str, str | None], interrupted: bool = False) -> None:
        self.pin, self.patched, self.interrupted = asdict(pin), patched, interrupted
        self.state_path.parent.mkdir(exist_ok=True)
        temporary = self.state_path.with_suffix(".tmp")
        state = {"pin": self.pin, "patched": patched, "interrupted": interrupted}
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(self.state_path)


def apply(
    root: Path, series_dir: Path = SERIES_DIR, sdist: Path | None = None, force: bool = False
) -> list[str]:
    """Bring `root` up to date with the pin and the series; the paths of the files that changed."""
    pin = Pin.load(series_dir)
    series = Series.load(series_dir)
    tree = Tree(root)
    if tree.pin != asdict(pin):
        if tree.pin is None and root.exists() and any(root.iterdir()):
            raise PatchToolError(f"{root} is not empty and was not made by this script")
        unpack(fetch(pin, sdist), pin, root)
        tree = Tree(root)
    elif not force:
        tree.check_edits()
    return tree.update(pin, series.apply(tree.pristine))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="folder to make or update")
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
    parser.add_argument(
        "--force", action="store_true", help="overwrite files edited by hand in TREE"
    )
    args = parser.parse_args()
    changed = apply(args.tree, args.series, args.sdist, args.force)
    print(f"{args.tree}: {len(changed)} files changed")
    for path in sorted(changed):
        print(f"  {path}")


if __name__ == "__main__":
    run_tool(main)
