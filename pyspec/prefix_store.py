"""`PrefixStore`: checkpoints in a directory, so that they survive a restart.

Files lie in a subdirectory named after the model and all that a state depends on. Each is written
under another name first and renamed, and carries a digest: what is cut off, damaged or foreign is
ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pyspec.errors import ArgumentError
from pyspec.prefix import Checkpoint

_log = logging.getLogger("pyspec")

_MAGIC = b"pyspec prefix 1\n"
_SUFFIX = ".prefix"
_NAME = re.compile(r"[0-9a-f]{32}\.prefix")
_DELAY = 1.0  # seconds before a checkpoint is written, in which it may already be outdated
_SHARE = 4  # the directory may take a quarter of the free disk by default


class PrefixStore:
    """Checkpoints on disk, the least recently used removed first.

    Args:
        directory: Where to keep them; made when missing.
        identity: All that a state depends on. Other identities are other subdirectories.
        limit: Most bytes of all files; None for a quarter of the free disk space.

    Raises:
        ArgumentError: The directory cannot be made or written.
    """

    def __init__(
        self, directory: str | os.PathLike[str], identity: dict[str, Any], limit: int | None = None
    ) -> None:
        self.identity = hashlib.blake2b(_canonical(identity), digest_size=16).hexdigest()
        self.directory = Path(directory) / self.identity
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "identity.json").write_bytes(_canonical(identity))
        except OSError as error:
            raise ArgumentError(f"cache_dir {directory}: {error.strerror or error}") from None
        self.limit = shutil.disk_usage(self.directory).free // _SHARE if limit is None else limit
        self.bytes = 0
        self._pending: deque[Checkpoint] = deque()
        self._files: dict[Path, int] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_pending, daemon=True)
        self._thread.start()

    # ---- reading ----

    def scan(self) -> Iterator[Checkpoint]:
        """What the directory holds, the least recently used first; states are not read."""
        for file in self.directory.glob(".*.tmp"):  # of a process that was killed
            file.unlink(missing_ok=True)
        files = sorted(self.directory.glob("*" + _SUFFIX), key=lambda file: file.stat().st_mtime)
        for file in files:
            try:
                with file.open("rb") as opened:
                    checkpoint = self._read_head(opened)
                if not _NAME.fullmatch(file.name):
                    raise ValueError("its name is not its content's")
                checkpoint.file = file
                self._note(file)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("%s is ignored: %s", file, error)
            else:
                yield checkpoint
        self._shrink()

    def read(self, checkpoint: Checkpoint) -> bytes | None:
        """The state of a checkpoint; None, with a warning, when the file is not what it was."""
        file = checkpoint.file
        if file is None:
            return None
        try:
            with file.open("rb") as opened:
                found = self._read_head(opened)
                digest = opened.read(32)
                state = opened.read()
            if found.key != checkpoint.key or digest != _digest(checkpoint.tokens, state):
                raise ValueError("it is damaged")
            os.utime(file)
        except FileNotFoundError:  # removed to make room
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is ignored: %s", file, error)
            return None
        return state

    def _read_head(self, file: BinaryIO) -> Checkpoint:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no checkpoint")
        head = json.loads(file.readline(1 << 20))
        if head["identity"] != self.identity:
            raise ValueError("it belongs to another model or other settings")
        tokens = file.read(int(head["token_bytes"]))
        passes = tuple((int(start), int(end)) for start, end in head["passes"])
        rest = os.fstat(file.fileno()).st_size - file.tell() - 32
        if len(tokens) != head["token_bytes"] or rest != head["size"]:
            raise ValueError("it is cut off")
        return Checkpoint(tokens, passes, int(head["size"]))

    # ---- writing ----

    def put(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint soon, unless its state is gone by then."""
        with self._lock:
            self._pending.append(checkpoint)

    def write(self, checkpoint: Checkpoint) -> bool:
        """Writes a checkpoint now; False, with a warning, when that fails."""
        state = checkpoint.state
        if checkpoint.file is not None or state is None:
            return checkpoint.file is not None
        if checkpoint.size > self.limit:
            return False
        name = hashlib.blake2b(
            checkpoint.tokens + repr(checkpoint.passes).encode(), digest_size=16
        ).hexdigest()
        file = self.directory / (name + _SUFFIX)
        temporary = self.directory / f".{name}.{os.getpid()}.tmp"
        head = {
            "identity": self.identity,
            "token_bytes": len(checkpoint.tokens),
            "passes": checkpoint.passes,
            "size": checkpoint.size,
        }
        try:
            with temporary.open("wb") as opened:
                opened.write(_MAGIC + json.dumps(head).encode() + b"\n" + checkpoint.tokens)
                opened.write(_digest(checkpoint.tokens, state))
                opened.write(state)
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            _log.warning("%s cannot be written: %s", file, error.strerror or error)
            return False
        checkpoint.file = file
        self._note(file)
        self._shrink()
        return True

    def remove(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint's file, if it has one."""
        if checkpoint.file is not None:
            self._unlink(checkpoint.file)
            checkpoint.file = None

    def close(self) -> None:
        """Writes what is pending. Safe to call twice."""
        self._closing.set()
        self._thread.join()

    def _write_pending(self) -> None:
        while True:
            closing = self._closing.wait(_DELAY)
            with self._lock:
                pending, self._pending = self._pending, deque()
            for checkpoint in pending:
                self.write(checkpoint)
            if closing:
                return

    # ---- size ----

    def _note(self, file: Path) -> None:
        with self._lock:
            size = file.stat().st_size
            self.bytes += size - self._files.pop(file, 0)
            self._files[file] = size

    def _unlink(self, file: Path) -> None:
        with self._lock:
            self.bytes -= self._files.pop(file, 0)
            file.unlink(missing_ok=True)

    def _shrink(self) -> None:
        with self._lock:
            for file in list(self._files):  # the oldest first
                if self.bytes <= self.limit:
                    return
                self._unlink(file)


def model_digest(file: Path, directory: Path) -> str:
    """The hash of a model's file, all its parts included.

    Hashing gigabytes takes seconds, so `directory` remembers it with the file's size and time.
    """
    parts = _parts(file)
    marks = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in parts]
    note = directory / f"model-{hashlib.blake2b(_canonical(marks), digest_size=16).hexdigest()}"
    try:
        known = note.read_text()
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    except (OSError, UnicodeDecodeError):
        pass
    total = hashlib.blake2b(digest_size=32)
    for part in parts:
        with part.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "blake2b").digest())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        note.write_text(total.hexdigest())
    except OSError as error:
        raise ArgumentError(f"cache_dir {directory}: {error.strerror or error}") from None
    return total.hexdigest()


def _parts(file: Path) -> list[Path]:
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file.name)
    if not found:
        return [file]
    return sorted(file.parent.glob(f"{found[1]}-?????-of-{found[2]}.gguf")) or [file]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


def _digest(tokens: bytes, state: bytes) -> bytes:
    total = hashlib.blake2b(tokens, digest_size=32)
    total.update(state)
    return total.digest()
