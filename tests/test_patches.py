"""The patch tooling in scripts/: on the real series, and on a small fake upstream."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SCRIPTS = REPO / "scripts"
sys.path.insert(0, str(SCRIPTS))

import apply_patches  # noqa: E402
import export_patches  # noqa: E402
import fetch_upstream  # noqa: E402
import patch_worktree  # noqa: E402
import patchlib  # noqa: E402
from patchlib import PatchToolError, Pin, Series  # noqa: E402

A = "".join(f"int a{i};\n" for i in range(1, 31))
B = "int b;\nint last;"  # no newline at the end
FILES = {
    "CMakeLists.txt": "project(fake)\n",
    "LICENSE": "free\n",
    ".gitignore": "*.log\n",
    "src/a.c": A,
    "src/b.c": B,
    "src/windows.c": "int w;\r\nint x;\r\n",
    "src/untouched.c": "int u;\n",
    "src/ignored.log": "tracked although ignored\n",
    "models/big.gguf": "not unpacked\n",
}
BODY = "What it does.\n\nReason: a test needs it.\nUpstream: not sent.\nDrop-when: never."


def make_sdist(path: Path, files: dict[str, str]) -> str:
    root = path.name.removesuffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{root}/vendor/llama.cpp/{name}")
            data = text.encode()
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_pin(series: Path, version: str, sha256: str) -> None:
    (series / "UPSTREAM").write_text(
        f'package = "fake-llama"\nversion = "{version}"\nsha256 = "{sha256}"\n'
        'source = "vendor/llama.cpp"\n'
    )


class Upstream:
    """A fake pin, its source distribution, an empty series and a place for a patch tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sdist = root / "fake_llama-1.0.tar.gz"
        self.series = root / "series"
        self.series.mkdir()
        write_pin(self.series, "1.0", make_sdist(self.sdist, FILES))
        (self.series / "series").write_text("# order\n")
        self.worktree = root / "worktree"

    def commit(self, subject: str, body: str = BODY, **files: str | None) -> None:
        """A commit in the patch tree; `src__a_c="..."` names src/a.c, None deletes."""
        for key, text in files.items():
            path = self.worktree / key.replace("__", "/").replace("_c", ".c")
            path.parent.mkdir(exist_ok=True)
            path.unlink() if text is None else path.write_bytes(text.encode())
        patch_worktree.commit_all(self.worktree, f"{subject}\n\n{body}\n")

    def make_worktree(self) -> None:
        patch_worktree.make(self.worktree, self.series, self.sdist)

    def export(self) -> list[str]:
        return export_patches.export(self.worktree, self.series)

    def apply(self, tree: Path, **options: bool) -> list[str]:
        return apply_patches.apply(tree, self.series, self.sdist, **options)

    def patches(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.series.iterdir()}


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path)


@pytest.fixture
def series(upstream: Upstream) -> Upstream:
    """Three patches: edits at both ends of a file; a new file, line ends kept; a deletion."""
    upstream.make_worktree()
    first = A.replace("int a1;", "int first;").replace("int a30;", "int thirty;")
    upstream.commit("edit: change both ends of a", src__a_c=first, src__b_c="int b;\nlong last;")
    upstream.commit(
        "new_file: add a file",
        src__new_c="int n;\n",
        src__windows_c="int w;\r\nint y;\r\n",
        src__a_c=first.replace("int a15;\n", "int a15;\nint fifteen;\n"),
    )
    upstream.commit("remove: drop the untouched file", src__untouched_c=None)
    upstream.export()
    return upstream


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def failure(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert "\nerror: " in "\n" + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


# --- the real series ---------------------------------------------------------------------


def test_real_patches_are_in_the_normal_form() -> None:
    for patch in Series.load().patches:
        assert patchlib.format_patch(patch) == (patchlib.SERIES_DIR / patch.name).read_bytes()


def test_readme_describes_the_series() -> None:
    text = (patchlib.SERIES_DIR / "README.md").read_text()
    assert Series.load().describe(text) == text, "run scripts/export_patches.py"


def test_bindings_are_pinned_to_the_release_that_is_built() -> None:
    pin = Pin.load()
    assert f'"{pin.requirement}"' in (REPO / "pyproject.toml").read_text()


def test_real_series_apply_then_export_changes_no_byte(tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in patchlib.SERIES_DIR.iterdir() if p.is_file()}
    copy = tmp_path / "series"
    copy.mkdir()
    for name, data in before.items():
        (copy / name).write_bytes(data)
    patch_worktree.make(tmp_path / "tree", copy, None)
    assert export_patches.export(tmp_path / "tree", copy) == []
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before


# --- apply and export ----------------------------------------------------------------------


def test_apply_then_export_changes_no_byte(series: Upstream) -> None:
    before = series.patches()
    assert set(before) == {"UPSTREAM", "series", "edit.patch", "new_file.patch", "remove.patch"}
    series.worktree = series.root / "again"
    series.make_worktree()
    assert series.export() == []
    assert series.patches() == before


def test_order_and_comments_are_kept(series: Upstream) -> None:
    text = (series.series / "series").read_text()
    assert text == "# order\nedit.patch\nnew_file.patch\nremove.patch\n"


def test_export_writes_the_table_of_the_readme(series: Upstream) -> None:
    readme = series.series / "README.md"
    readme.write_text("before\n<!-- series:begin -->\nold\n<!-- series:end -->\nafter\n")
    assert series.export() == ["README.md"]
    text = readme.read_text()
    assert text.startswith("before\n<!-- series:begin -->\n| patch |")
    assert "| `remove` | drop the untouched file | a test needs it. | never. |\n" in text
    assert text.endswith("\n<!-- series:end -->\nafter\n")


def test_the_build_tree_equals_the_patch_tree(series: Upstream) -> None:
    tree = series.root / "tree"
    series.apply(tree)
    files = {p.relative_to(tree) for p in tree.rglob("*") if p.is_file()}
    files = {f for f in files if f.parts[0] != apply_patches.STATE}
    tracked = patch_worktree.git(series.worktree, "ls-files").decode().split()
    assert files == set(map(Path, tracked))
    for file in files:
        assert (tree / file).read_bytes() == (series.worktree / file).read_bytes(), file
    assert not (tree / "models").exists()


def test_git_applies_the_patches_too(series: Upstream) -> None:
    plain = series.root / "plain"
    fetch_upstream.unpack(series.sdist, Pin.load(series.series), plain)
    for name in ("edit.patch", "new_file.patch", "remove.patch"):
        patch_worktree.git(plain, "apply", str(series.series / name))
    assert (plain / "src/a.c").read_bytes() == (series.worktree / "src/a.c").read_bytes()
    assert (plain / "src/b.c").read_bytes() == b"int b;\nlong last;"


def test_only_changed_files_are_written(series: Upstream) -> None:
    tree = series.root / "tree"
    assert sorted(series.apply(tree)) == [
        "src/a.c",
        "src/b.c",
        "src/new.c",
        "src/untouched.c",
        "src/windows.c",
    ]
    old = {p: p.stat().st_mtime_ns for p in tree.rglob("*.c")}
    assert series.apply(tree) == []

    patch = series.series / "new_file.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+int n;", b"+int m;"))
    assert series.apply(tree) == ["src/new.c"]
    assert {p for p in old if p.stat().st_mtime_ns != old[p]} == {tree / "src/new.c"}


def test_a_dropped_patch_restores_its_files(series: Upstream) -> None:
    tree = series.root / "tree"
    series.apply(tree)
    for name in ("remove.patch", "new_file.patch"):
        (series.series / name).unlink()
    (series.series / "series").write_text("edit.patch\n")
    assert sorted(series.apply(tree)) == [
        "src/a.c",
        "src/new.c",
        "src/untouched.c",
        "src/windows.c",
    ]
    assert (tree / "src/untouched.c").read_text() == "int u;\n"
    assert not (tree / "src/new.c").exists()


def test_an_interrupted_run_is_completed_by_the_next(
    series: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = series.root / "tree"
    write_file = apply_patches.write_file

    def stop_at_b(path: Path, content: patchlib.Content) -> bool:
        if path == tree / "src/b.c":
            raise KeyboardInterrupt
        return write_file(path, content)

    monkeypatch.setattr(apply_patches, "write_file", stop_at_b)
    with pytest.raises(KeyboardInterrupt):
        series.apply(tree)
    monkeypatch.undo()
    assert "src/b.c" in series.apply(tree)
    assert (tree / "src/b.c").read_bytes() == b"int b;\nlong last;"
    assert series.apply(tree) == []


def test_a_new_pin_replaces_the_tree(series: Upstream) -> None:
    tree = series.root / "tree"
    series.apply(tree)
    series.sdist = series.root / "fake_llama-2.0.tar.gz"
    write_pin(series.series, "2.0", make_sdist(series.sdist, FILES | {"src/u2.c": "int u2;\n"}))
    series.apply(tree)
    assert (tree / "src/u2.c").exists()


def test_rebase_moves_the_series_to_a_new_pin(series: Upstream) -> None:
    series.sdist = series.root / "fake_llama-2.0.tar.gz"
    moved = FILES | {"src/a.c": A.replace("int a7;\n", "int a7;\nint upstream;\n")}
    write_pin(series.series, "2.0", make_sdist(series.sdist, moved))
    with pytest.raises(
        PatchToolError, match=r"starts from 'fake-llama==1\.0.*pins fake-llama==2\.0.*--rebase"
    ):
        series.export()
    patch_worktree.rebase(series.worktree, series.series, series.sdist)
    assert series.export() == ["edit.patch", "new_file.patch"]
    tree = series.root / "tree"
    series.apply(tree)
    text = (tree / "src/a.c").read_text()
    assert text.startswith("int first;\n")
    assert "int a7;\nint upstream;\n" in text
    assert "int a15;\nint fifteen;\n" in text


def test_amending_one_commit_changes_one_patch(series: Upstream) -> None:
    (series.worktree / "src/new.c").write_text("int changed;\n")
    patch_worktree.git(series.worktree, "commit", "-aqm", "fixup! new_file: add a file")
    with pytest.raises(
        PatchToolError, match="subject 'fixup! new_file: add a file' does not name its patch"
    ):
        series.export()
    patch_worktree.git(
        series.worktree, "-c", "sequence.editor=true", "rebase", "-qi", "--autosquash", "upstream"
    )
    assert series.export() == ["new_file.patch"]


def test_executables_stay_executable(upstream: Upstream) -> None:
    upstream.make_worktree()
    (upstream.worktree / "tool.sh").write_text("#!/bin/sh\n")
    (upstream.worktree / "tool.sh").chmod(0o755)
    upstream.commit("tool: add a script")
    upstream.export()
    upstream.apply(upstream.root / "tree")
    assert (upstream.root / "tree/tool.sh").stat().st_mode & 0o111


# --- errors: what is wrong, where, what to do ------------------------------------------------


def test_wrong_sha256_of_a_given_file(series: Upstream) -> None:
    wrong = series.root / "wrong.tar.gz"
    wrong.write_bytes(b"not the pinned file")
    message = failure(
        run("apply_patches.py", series.root / "tree", "--series", series.series, "--sdist", wrong)
    )
    assert f"wrong sha256 for {wrong}" in message
    assert hashlib.sha256(b"not the pinned file").hexdigest() in message
    assert Pin.load(series.series).sha256 in message
    assert "Delete the file" in message
    assert not (series.root / "tree").exists()


def fake_pip(root: Path, text: str) -> str:
    path = root / "pip.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def test_wrong_sha256_from_the_registry(series: Upstream) -> None:
    pip = fake_pip(
        series.root, "import sys; sys.exit('ERROR: THESE PACKAGES DO NOT MATCH THE HASHES')"
    )
    message = failure(
        run(
            "apply_patches.py",
            series.root / "tree",
            "--series",
            series.series,
            PYSPEC_PIP=pip,
            PYSPEC_CACHE=str(series.root / "cache"),
        )
    )
    assert "wrong sha256: the registry's fake-llama==1.0 is not the pinned file" in message
    assert "Do not build it" in message


def test_no_network(series: Upstream) -> None:
    pip = fake_pip(
        series.root, "import sys; sys.exit('ERROR: Could not find a version (from versions: none)')"
    )
    cache = series.root / "cache"
    message = failure(
        run(
            "apply_patches.py",
            series.root / "tree",
            "--series",
            series.series,
            PYSPEC_PIP=pip,
            PYSPEC_CACHE=str(cache),
        )
    )
    assert "cannot download fake-llama==1.0: is there a network" in message
    assert "pip: ERROR: Could not find a version" in message
    assert "PYSPEC_UPSTREAM_SDIST=FILE" in message
    assert not list(cache.rglob("*.tar.gz"))


def test_download_is_done_once(series: Upstream) -> None:
    pip = fake_pip(
        series.root,
        "import shutil, sys\n"
        f"shutil.move({str(series.sdist)!r}, sys.argv[sys.argv.index('--dest') + 1])\n",
    )
    for _ in range(2):
        result = run(
            "apply_patches.py",
            series.root / "tree",
            "--series",
            series.series,
            PYSPEC_PIP=pip,
            PYSPEC_CACHE=str(series.root / "cache"),
        )
        assert result.returncode == 0, result.stderr


def test_offline_from_a_given_file(series: Upstream) -> None:
    result = run(
        "apply_patches.py",
        series.root / "tree",
        "--series",
        series.series,
        PYSPEC_PIP="false",
        PYSPEC_UPSTREAM_SDIST=str(series.sdist),
    )
    assert result.returncode == 0, result.stderr


def test_patch_that_does_not_apply(series: Upstream) -> None:
    patch = series.series / "new_file.patch"
    patch.write_bytes(patch.read_bytes().replace(b" int a14;", b" int a41;"))
    message = failure(
        run(
            "apply_patches.py",
            series.root / "tree",
            "--series",
            series.series,
            "--sdist",
            series.sdist,
        )
    )
    assert "new_file.patch does not apply: src/a.c, hunk 1 of 1 (@@ -13,6 +13,7 @@" in message
    assert "line 14 is 'int a14;', the patch expects 'int a41;'" in message
    assert "repair it in a tree of scripts/patch_worktree.py" in message


def test_patch_that_does_not_apply_is_repaired(series: Upstream) -> None:
    wanted = series.patches()
    patch = series.series / "new_file.patch"
    patch.write_bytes(patch.read_bytes().replace(b" int a14;", b" int a41;"))
    tree = series.root / "repair"
    arguments = (tree, "--series", series.series, "--sdist", series.sdist)
    message = failure(run("patch_worktree.py", *arguments))
    assert "new_file.patch does not apply: src/a.c, hunk 1 of 1" in message
    assert f"{tree} has the patches before it as commits (1)" in message
    assert (tree / "src/new.c").exists()

    assert "a.c.rej" in failure(run("patch_worktree.py", "--continue", *arguments))
    (tree / "src/a.c.rej").unlink()
    text = (tree / "src/a.c").read_text()
    (tree / "src/a.c").write_text(text.replace("int a15;\n", "int a15;\nint fifteen;\n"))
    assert run("patch_worktree.py", "--continue", *arguments).returncode == 0
    series.worktree = tree
    assert series.export() == ["new_file.patch"]
    assert series.patches() == wanted
    assert "nothing to continue" in failure(run("patch_worktree.py", "--continue", *arguments))


def test_patch_of_a_file_that_is_gone(series: Upstream) -> None:
    (series.series / "series").write_text("remove.patch\nedit.patch\nnew_file.patch\nagain.patch\n")
    text = (series.series / "remove.patch").read_text()
    (series.series / "again.patch").write_text(text.replace("] remove:", "] again:"))
    with pytest.raises(
        PatchToolError, match=r"again\.patch does not apply: src/untouched\.c does not exist"
    ):
        series.apply(series.root / "tree")


def test_damaged_hunk(series: Upstream) -> None:
    patch = series.series / "edit.patch"
    patch.write_bytes(patch.read_bytes().replace(b"@@ -1,4 +1,4 @@", b"@@ -1,4 +1,9 @@"))
    with pytest.raises(PatchToolError, match=r"edit\.patch: src/a\.c: hunk .* is damaged"):
        series.apply(series.root / "tree")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(
            lambda t: t.replace("Drop-when: never.", ""),
            r"edit\.patch: the message lacks 'Drop-when: \.\.\.'",
            id="no-trailer",
        ),
        pytest.param(
            lambda t: t.replace("] edit: change", "] change"),
            r"does not name its patch",
            id="no-stem",
        ),
        pytest.param(
            lambda t: t.replace("] edit: ", "] other: "),
            r"belongs in other\.patch",
            id="other-name",
        ),
        pytest.param(
            lambda t: t.replace("Subject:", "Topic:"),
            r"edit\.patch: no 'Subject:' line",
            id="no-subject",
        ),
        pytest.param(
            lambda t: t.replace("src/a.c", "../a.c"), r"\.\./a\.c lies outside", id="escapes"
        ),
        pytest.param(
            lambda t: t.replace("a/src/a.c b/", "a/src/z.c b/"),
            r"renames are not supported",
            id="rename",
        ),
        pytest.param(lambda t: t[: t.index("diff --git")], r"not a git patch", id="no-diff"),
    ],
)
def test_bad_patch_files(series: Upstream, edit, message: str) -> None:
    patch = series.series / "edit.patch"
    patch.write_text(edit(patch.read_text()))
    with pytest.raises(PatchToolError, match=message):
        Series.load(series.series)


def test_series_and_files_must_agree(series: Upstream) -> None:
    order = series.series / "series"
    order.write_text("edit.patch\nnew_file.patch\n")
    with pytest.raises(PatchToolError, match=r"does not list remove\.patch: add or delete"):
        Series.load(series.series)
    order.write_text("edit.patch\nnew_file.patch\nremove.patch\nabsent.patch\n")
    with pytest.raises(PatchToolError, match=r"absent\.patch.*listed wrongly"):
        Series.load(series.series)


def test_hand_edits_of_the_build_tree_are_refused(series: Upstream) -> None:
    tree = series.root / "tree"
    series.apply(tree)
    (tree / "src/a.c").write_text("int mine;\n")
    with pytest.raises(
        PatchToolError, match=r"src/a\.c was edited by hand.*patch_worktree.*--force"
    ):
        series.apply(tree)
    assert series.apply(tree, force=True) == ["src/a.c"]


def test_a_foreign_folder_is_left_alone(series: Upstream) -> None:
    (series.root / "home").mkdir()
    (series.root / "home" / "file").write_text("precious")
    with pytest.raises(PatchToolError, match="is not empty and was not made by this script"):
        series.apply(series.root / "home")
    with pytest.raises(PatchToolError, match="is not empty: choose a new folder"):
        patch_worktree.make(series.root / "home", series.series, series.sdist)


def test_export_refuses_uncommitted_changes(series: Upstream) -> None:
    (series.worktree / "src/a.c").write_text("int mine;\n")
    with pytest.raises(PatchToolError, match=r"not committed(.|\n)*src/a\.c"):
        series.export()


def test_missing_git(series: Upstream) -> None:
    message = failure(
        run(
            "patch_worktree.py",
            series.root / "other",
            "--series",
            series.series,
            "--sdist",
            series.sdist,
            PATH=str(series.root),
        )
    )
    assert "git is needed to work on the patches" in message
