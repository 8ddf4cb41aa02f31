"""The header of a GGUF file, read in milliseconds without loading the model.

It answers what must be known before loading: is this a model, of which architecture, does it bring
its own MTP block, does a drafter fit it. Long arrays (the vocabulary) are read when asked for.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspec.errors import ModelError

DEMO = "demo"
"""The word that stands for the model shipped in the package."""

_ALIGNMENT = "general.alignment"
_SHORT = 256
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
        kind: Number of its ggml type.
        shape: Sizes, the innermost last.
        offset: First byte in the file.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int

    @property
    def type(self) -> str:
        """Its ggml type, as ``Q4_K``."""
        from gguf import GGMLQuantizationType

        try:
            return GGMLQuantizationType(self.kind).name
        except ValueError:
            return f"type {self.kind}"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the header of a GGUF file says.

    Attributes:
        path: The file.
        arch: ``general.architecture``.
        metadata: Every scalar and string key, and arrays of at most 256 numbers.
        tensors: All tensors of the file.
        spans: Where each longer array lies: first byte, end.
    """

    path: Path
    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Reads the header of `path`.

        Raises:
            ModelError: The file is missing, unreadable, not GGUF or cut off.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelError(f"{path} is not a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    metadata, spans, end = _read_metadata(data)
                    tensors = _read_tensors(data, end, int(metadata.get(_ALIGNMENT, 32) or 32))
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from None
        except (struct.error, UnicodeDecodeError, KeyError):
            raise ModelError(f"{path} has a damaged or truncated GGUF header") from None
        arch = str(metadata.get("general.architecture", "unknown"))
        return cls(path, arch, metadata, tensors, spans)

    @property
    def matrix_types(self) -> frozenset[str]:
        """The ggml types of the tensors of two and more dimensions."""
        return frozenset(one.type for one in self.tensors.values() if len(one.shape) > 1)

    @property
    def file_type(self) -> str:
        """What ``general.file_type`` names, as ``Q4_K_M``; without it the type of most weights."""
        from gguf import LlamaFileType

        try:
            name = LlamaFileType(self.metadata["general.file_type"]).name
            return name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except (KeyError, ValueError):
            weights: Counter[str] = Counter()
            for one in self.tensors.values():
                weights[one.type] += math.prod(one.shape)
            return weights.most_common(1)[0][0] if weights else "unknown"

    def strings(self, key: str) -> list[bytes]:
        """A long array of strings, such as ``tokenizer.ggml.tokens``; empty when there is none."""
        if key not in self.spans:
            return []
        begin, end = self.spans[key]
        with self.path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        kind, count = struct.unpack_from("<IQ", data, 0)
        if kind != _STRING:
            return []
        at, out = 12, []
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", data, at)
            out.append(data[at + 8 : at + 8 + size])
            at += 8 + size
        return out

    def rows(self, name: str, wanted: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Rows of a matrix as they are in the file: uint8 [rows, bytes of a row].

        They are read, not mapped, so that the file takes no memory.

        Args:
            name: The matrix.
            wanted: [rows]; their numbers.

        Raises:
            ModelError: The file ends before one of them.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self.tensors[name]
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        found = np.empty((len(wanted), tensor.shape[-1] // block * size), np.uint8)
        cuts = np.flatnonzero(wanted[1:] - wanted[:-1] != 1) + 1  # between neighbours in the file
        with self.path.open("rb", buffering=0) as file:
            for begin, end in pairwise([0, *cuts.tolist(), len(wanted)]):
                file.seek(tensor.offset + int(wanted[begin]) * found.shape[1])
                if file.readinto(found[begin:end].data) != found[begin:end].nbytes:
                    raise ModelError(f"{self.path} is cut off: {name} reaches beyond its end")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{arch}.{key}``."""
        return self.metadata.get(f"{self.arch}.{key}", default)

    @property
    def mtp_layers(self) -> int:
        """Number of MTP blocks in the file."""
        return int(self.get("nextn_predict_layers", 0) or 0)


def vocabulary_difference(target: ModelFile, drafter: ModelFile) -> str | None:
    """How the vocabulary of a drafter's file differs from its target's, token by token; or None."""
    ours, theirs = (file.strings("tokenizer.ggml.tokens") for file in (target, drafter))
    if len(ours) != len(theirs):
        return f"{drafter.path} has a vocabulary of {len(theirs)} tokens, the target of {len(ours)}"
    for token, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own != other:
            return (
                f"{drafter.path} has another vocabulary: token {token} is {_shown(other)} there, "
                f"{_shown(own)} in the target"
            )
    return None


def _shown(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """The path of `model`; the word ``demo`` is the model shipped in the package.

    The environment variable ``PYSPEC_DEMO_MODEL`` puts another file in the demo's place.
    """
    if os.fspath(model) != DEMO:
        return Path(model)
    if override := os.environ.get("PYSPEC_DEMO_MODEL"):
        return Path(override)
    roots = sys.modules["pyspec"].__path__  # two in an editable install: source and site-packages
    files = [Path(root) / "models" / "demo.gguf" for root in roots]
    return next((file for file in files if file.is_file()), files[0])


def _read_metadata(
    data: mmap.mmap,
) -> tuple[dict[str, Any], dict[str, tuple[int, int]], int]:
    _version, _tensors, count = struct.unpack_from("<IQQ", data, 4)
    at, metadata, spans = 24, {}, {}
    for _ in range(count):
        key, at = _read_string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        begin = at + 4
        value, at = _read_value(data, begin, kind)
        if value is None:
            spans[key.decode()] = (begin, at)
        else:
            metadata[key.decode()] = value
    return metadata, spans, at


def _read_tensors(data: mmap.mmap, at: int, alignment: int) -> dict[str, Tensor]:
    (count,) = struct.unpack_from("<Q", data, 8)
    found = []
    for _ in range(count):
        name, at = _read_string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        sizes = struct.unpack_from(f"<{dimensions}Q", data, at + 4)
        kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * dimensions)
        at += 4 + 8 * dimensions + 4 + 8
        found.append((name.decode(), kind, sizes[::-1], offset))
    start = (at + alignment - 1) // alignment * alignment
    return {name: Tensor(kind, shape, start + offset) for name, kind, shape, offset in found}


def _read_value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        value, at = _read_string(data, at)
        return value.decode("utf-8", "replace"), at
    if kind == _ARRAY:
        return _read_array(data, at)
    layout = "<" + _SCALARS[kind]
    return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)


def _read_array(data: mmap.mmap, at: int) -> tuple[list[Any] | None, int]:
    """A short array of numbers, or None for any other; and where it ends."""
    end = _skip_array(data, at)
    kind, count = struct.unpack_from("<IQ", data, at)
    if kind not in _SCALARS or count > _SHORT:
        return None, end
    return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", data, at + 12)), end


def _read_string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    at += 8
    if at + size > len(data):
        raise struct.error("string runs past the end of the file")
    return data[at : at + size], at + size


def _skip_array(data: mmap.mmap, at: int) -> int:
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind == _STRING:
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        return at
    if kind == _ARRAY:
        for _ in range(count):
            at = _skip_array(data, at)
        return at
    return at + count * struct.calcsize("<" + _SCALARS[kind])
