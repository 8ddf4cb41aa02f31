"""The patch series: read it, check it, apply it to files in memory, write it out.

Used by fetch_upstream.py, apply_patches.py, patch_worktree.py and export_patches.py.
Standard library only: the build runs it before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SERIES_DIR = REPO / "ggml_patches"

TRAILERS = ("Reason", "Upstream", "Drop-when")
STEM = re.compile(r"[a-z0-9][a-z0-9_]*")


class PatchToolError(Exception):
    """One message for the user: what is wrong, where, and what to do."""


def run_tool(main: Callable[[], None]) -> None:
    """Run a script's main(); errors become one message on stderr and exit status 1."""
    try:
        main()
    except PatchToolError as error:
        sys.exit(f"error: {error}")


# --- the pin ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """The source distribution that the series applies to (ggml_patches/UPSTREAM)."""

    package: str
    version: str
    sha256: str
    source: str  # folder of llama.cpp inside the distribution

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}.tar.gz"

    @classmethod
    def load(cls, series_dir: Path = SERIES_DIR) -> Pin:
        path = series_dir / "UPSTREAM"
        try:
            return cls(**tomllib.loads(path.read_text()))
        except OSError as error:
            raise PatchToolError(f"cannot read the pin: {error}") from None
        except (tomllib.TOMLDecodeError, TypeError) as error:
            raise PatchToolError(
                f"{path}: {error}; it needs exactly package, version, sha256 and source"
            ) from None


# --- patches ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Hunk:
    old_start: int
    old_lines: tuple[bytes, ...]  # with their line ends
    new_lines: tuple[bytes, ...]
    header: str


@dataclass(frozen=True)
class FileChange:
    path: str
    hunks: tuple[Hunk, ...]
    mode: int | None = None  # new mode, where the patch sets one
    creates: bool = False
    deletes: bool = False


@dataclass(frozen=True)
class Patch:
    name: str  # file name, "<stem>.patch"
    subject: str  # "<stem>: what it does"
    body: str
    diff: bytes
    changes: tuple[FileChange, ...] = field(repr=False)

    def message(self) -> str:
        return f"{self.subject}\n\n{self.body}\n"

    def trailer(self, key: str) -> str:
        """The text of a trailer, its continuation lines (which start with a blank) included."""
        match = re.search(rf"^{key}: (.*(?:\n[ \t].*)*)", self.body, re.MULTILINE)
        return " ".join(match[1].split()) if match else ""


HEADER = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: pyspec <pyspec@localhost>
Subject: [PATCH] {subject}

{body}
---
"""


def format_patch(patch: Patch) -> bytes:
    """The one byte form of a patch: as git format-patch writes it, without date, statistics,
    object ids and signature, so that a refresh changes only what changed."""
    head = HEADER.format(subject=patch.subject, body=patch.body.strip("\n"))
    return head.encode() + b"\n" + patch.diff


def make_patch(subject: str, body: str, diff: bytes) -> Patch:
    """A patch from a commit's message and diff; checks the rules of the series."""
    stem, colon, _ = subject.partition(": ")
    if not colon or not STEM.fullmatch(stem):
        raise PatchToolError(
            f"the subject {subject!r} does not name its patch: write 'stem: what it does', "
            "with a stem of a-z, 0-9 and _ (the file will be stem.patch)"
        )
    name = f"{stem}.patch"
    check_trailers(name, body)
    if marker := re.search(r"^(---|diff --git .*)$", body, re.MULTILINE):
        raise PatchToolError(
            f"{name}: the message has a line {marker[0]!r}, which ends it; reword it"
        )
    diff = normalise_diff(diff)
    return Patch(name, subject, body.strip("\n"), diff, parse_diff(name, diff))


def check_trailers(name: str, body: str) -> None:
    missing = [t for t in TRAILERS if not re.search(rf"^{t}: \S", body, re.MULTILINE)]
    if missing:
        lines = ", ".join(f"'{t}: ...'" for t in missing)
        raise PatchToolError(
            f"{name}: the message lacks {lines}; every patch says why it "
            "exists, its state upstream and when it can go"
        )


def read_patch(path: Path) -> Patch:
    """Parse a patch file in the form that format_patch() writes (or git format-patch)."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PatchToolError(
            f"cannot read patch: {error}; is it listed wrongly in 'series'?"
        ) from None
    match = re.search(rb"^---\n", text, re.MULTILINE)
    start = re.search(rb"^diff --git ", text, re.MULTILINE)
    if not match or not start or match.start() > start.start():
        raise PatchToolError(f"{path.name}: not a git patch (no '---' line before 'diff --git')")
    head = text[: match.start()].decode()
    header, _, body = head.partition("\n\n")
    subject = re.search(r"^Subject: (?:\[PATCH[^\]]*\] )?(.+(?:\n .+)*)", header, re.MULTILINE)
    if not subject:
        raise PatchToolError(f"{path.name}: no 'Subject:' line")
    diff = re.sub(rb"\n-- \n[^\n]*\n*\Z", b"\n", text[start.start() :])
    patch = make_patch(re.sub(r"\n ", " ", subject[1]), body, diff)
    if patch.name != path.name:
        raise PatchToolError(
            f"{path.name}: its subject {patch.subject!r} belongs in {patch.name}; rename one of them"
        )
    return patch


def normalise_diff(diff: bytes) -> bytes:
    """Drop what differs between equal changes: object ids."""
    out, in_hunk = [], False
    for line in diff.split(b"\n"):
        if line.startswith(b"diff --git "):
            in_hunk = False
        elif line.startswith(b"@@ "):
            in_hunk = True
        if in_hunk or not line.startswith(b"index "):
            out.append(line)
    return b"\n".join(out)


HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def parse_diff(name: str, diff: bytes) -> tuple[FileChange, ...]:
    changes = []
    for section in re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE):
        if section:
            changes.append(_parse_file(name, section))
    if not changes:
        raise PatchToolError(f"{name}: changes no file")
    return tuple(changes)


def _parse_file(name: str, section: bytes) -> FileChange:
    lines = section.split(b"\n")
    title = re.fullmatch(rb"diff --git a/(.+) b/(.+)", lines[0])
    if not title or title[1] != title[2]:
        raise PatchToolError(
            f"{name}: renames are not supported: {lines[0].decode()!r}; "
            "export with scripts/export_patches.py"
        )
    path = title[1].decode()
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise PatchToolError(f"{name}: {path} lies outside the source tree")
    mode, creates, deletes, hunks = None, False, False, []
    i = 1
    while i < len(lines):
        line = lines[i]
        if line.startswith((b"GIT binary patch", b"Binary files ")):
            raise PatchToolError(f"{name}: {path} is binary; patches are text")
        if line.startswith(b"new file mode "):
            creates, mode = True, int(line.split()[-1], 8)
        elif line.startswith(b"new mode "):
            mode = int(line.split()[-1], 8)
        elif line.startswith(b"deleted file mode "):
            deletes = True
        elif line.startswith(b"@@ "):
            hunk, i = _parse_hunk(name, path, lines, i)
            hunks.append(hunk)
            continue
        i += 1
    return FileChange(path, tuple(hunks), mode, creates, deletes)


def _parse_hunk(name: str, path: str, lines: list[bytes], i: int) -> tuple[Hunk, int]:
    match = HUNK.match(lines[i])
    header = lines[i].decode(errors="replace")
    broken = PatchToolError(
        f"{name}: {path}: hunk '{header}' is damaged (its line counts are wrong)"
    )
    if not match:
        raise broken
    old_left = int(match[2] or 1)
    new_left = int(match[4] or 1)
    old: list[bytes] = []
    new: list[bytes] = []
    i += 1
    while old_left or new_left or (i < len(lines) and lines[i].startswith(b"\\")):
        if i >= len(lines):
            raise broken
        tag, text = lines[i][:1], lines[i][1:] + b"\n"
        i += 1
        if tag == b"\\":  # "\ No newline at end of file" speaks of the line before it
            before = lines[i - 2][:1]
            if before in b" -" and old:
                old[-1] = old[-1].removesuffix(b"\n")
            if before in b" +" and new:
                new[-1] = new[-1].removesuffix(b"\n")
            continue
        if tag in (b" ", b"-"):
            old.append(text)
            old_left -= 1
        if tag in (b" ", b"+"):
            new.append(text)
            new_left -= 1
        if tag not in (b" ", b"-", b"+") or old_left < 0 or new_left < 0:
            raise broken
    return Hunk(int(match[1]), tuple(old), tuple(new), header), i


# --- applying --------------------------------------------------------------------------

#: A file of the tree: content and whether it is executable; None where it does not exist.
Content = tuple[bytes, bool] | None


def apply_change(patch: Patch, change: FileChange, content: Content) -> Content:
    """`content` with one patch's change to this file. Exact: no offset, no fuzz."""
    where = f"{patch.name} does not apply: {change.path}"
    advice = "repair it in a tree of scripts/patch_worktree.py"
    if change.creates and content is not None:
        raise PatchToolError(f"{where} exists already; {advice}")
    if not change.creates and content is None:
        raise PatchToolError(f"{where} does not exist in the source; {advice}")
    data, executable = content or (b"", False)
    lines = data.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[bytes] = []
    at = 0
    for number, hunk in enumerate(change.hunks, 1):
        start = hunk.old_start - 1 if hunk.old_lines else hunk.old_start
        found = tuple(lines[start : start + len(hunk.old_lines)])
        if start < at or found != hunk.old_lines:
            wrong = next(
                (k for k, (a, b) in enumerate(zip(found, hunk.old_lines, strict=False)) if a != b),
                len(found),
            )
            expected, got = (
                repr(seq[wrong].decode(errors="replace").rstrip("\n"))
                if wrong < len(seq)
                else "nothing"
                for seq in (hunk.old_lines, found)
            )
            raise PatchToolError(
                f"{where}, hunk {number} of {len(change.hunks)} ({hunk.header}): "
                f"line {start + wrong + 1} is {got}, the patch expects {expected}; {advice}"
            )
        out += lines[at:start]
        out += hunk.new_lines
        at = start + len(hunk.old_lines)
    out += lines[at:]
    if change.deletes:
        if out:
            raise PatchToolError(f"{where} is to be deleted but has other lines left; {advice}")
        return None
    if change.mode is not None:
        executable = bool(change.mode & 0o111)
    return b"".join(out), executable


@dataclass(frozen=True)
class Series:
    """The ordered patches of a directory that holds a file 'series'."""

    directory: Path
    patches: tuple[Patch, ...]

    @classmethod
    def load(cls, directory: Path = SERIES_DIR) -> Series:
        path = directory / "series"
        try:
            text = path.read_text()
        except OSError as error:
            raise PatchToolError(f"cannot read the series: {error}") from None
        names = [line.split("#")[0].strip() for line in text.splitlines()]
        names = [name for name in names if name]
        for name in names:
            if names.count(name) > 1:
                raise PatchToolError(f"{path}: {name} is listed more than once")
        unlisted = {p.name for p in directory.glob("*.patch")} - set(names)
        if unlisted:
            raise PatchToolError(
                f"{path} does not list {', '.join(sorted(unlisted))}: add or delete the file"
            )
        return cls(directory, tuple(read_patch(directory / name) for name in names))

    def files(self) -> set[str]:
        return {change.path for patch in self.patches for change in patch.changes}

    def apply(self, read: Callable[[str], Content]) -> dict[str, Content]:
        """Every file that the series touches, patched; `read` gives the pristine file."""
        result: dict[str, Content] = {}
        for patch in self.patches:
            for change in patch.changes:
                if change.path not in result:
                    result[change.path] = read(change.path)
                result[change.path] = apply_change(patch, change, result[change.path])
        return result

    def describe(self, readme: str) -> str:
        """`readme` with the table between its 'series' marks brought up to date."""
        rows = ["| patch | what it does | reason | drop when |", "|---|---|---|---|"]
        for patch in self.patches:
            stem, _, subject = patch.subject.partition(": ")
            cells = (f"`{stem}`", subject, patch.trailer("Reason"), patch.trailer("Drop-when"))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        marks = r"(<!-- series:begin -->\n).*?(<!-- series:end -->)"
        table = "\n".join([*rows, ""])
        return re.sub(marks, lambda mark: mark[1] + table + mark[2], readme, flags=re.DOTALL)

    def write(self) -> list[str]:
        """Write the patches and the order; returns the names of the files that changed."""
        changed = []
        order = self.directory / "series"
        old = order.read_text().splitlines() if order.exists() else []
        comments = [line for line in old if line.startswith("#")]
        wanted = {patch.name: format_patch(patch) for patch in self.patches}
        wanted["series"] = "\n".join([*comments, *(p.name for p in self.patches), ""]).encode()
        if (readme := self.directory / "README.md").exists():
            wanted[readme.name] = self.describe(readme.read_text()).encode()
        for name, data in wanted.items():
            path = self.directory / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
                changed.append(name)
        for path in self.directory.glob("*.patch"):
            if path.name not in wanted:
                path.unlink()
                changed.append(path.name)
        return changed


# --- files -----------------------------------------------------------------------------


def read_file(path: Path) -> Content:
    if not path.is_file():
        return None
    return path.read_bytes(), bool(path.stat().st_mode & 0o100)


def write_file(path: Path, content: Content) -> bool:
    """Bring a file to `content`, touching it only when it differs; True when it did."""
    if read_file(path) == content:
        return False
    if content is None:
        path.unlink()
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    data, executable = content
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)
    return True
