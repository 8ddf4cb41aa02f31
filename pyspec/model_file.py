"""The header of a GGUF file, read in milliseconds without loading the model.

It answers what must be known before loading: is this a model, of which architecture, and does it
bring its own MTP block. Long arrays (the vocabulary) are skipped, not built.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from pyspec.errors import ModelError

DEMO = "demo"
"""The word that stands for the model shipped in the package."""

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
class ModelFile:
    """What the header of a GGUF file says.

    Attributes:
        path: The file.
        arch: ``general.architecture``.
        metadata: Every scalar and string key; arrays are left out.
        matrix_types: The ggml types of the tensors of two and more dimensions, as ``Q4_K``.
    """

    path: Path
    arch: str
    metadata: dict[str, Any]
    matrix_types: frozenset[str] = frozenset()

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
                    metadata, end = _read_metadata(data)
                    types = _read_matrix_types(data, end)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from None
        except (struct.error, UnicodeDecodeError, KeyError):
            raise ModelError(f"{path} has a damaged or truncated GGUF header") from None
        return cls(path, str(metadata.get("general.architecture", "unknown")), metadata, types)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{arch}.{key}``."""
        return self.metadata.get(f"{self.arch}.{key}", default)

    @property
    def mtp_layers(self) -> int:
        """Number of MTP blocks in the file."""
        return int(self.get("nextn_predict_layers", 0) or 0)


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


def _read_metadata(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    _version, _tensors, count = struct.unpack_from("<IQQ", data, 4)
    at, metadata = 24, {}
    for _ in range(count):
        key, at = _read_string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        value, at = _read_value(data, at + 4, kind)
        if kind != _ARRAY:
            metadata[key.decode()] = value
    return metadata, at


def _read_matrix_types(data: mmap.mmap, at: int) -> frozenset[str]:
    (tensors,) = struct.unpack_from("<Q", data, 8)
    types = set()
    for _ in range(tensors):
        _, at = _read_string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        (kind,) = struct.unpack_from("<I", data, at + 4 + 8 * dimensions)
        at += 4 + 8 * dimensions + 4 + 8
        if dimensions > 1:
            types.add(kind)
    return frozenset(map(_type_name, types))


def _type_name(kind: int) -> str:
    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


def _read_value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        value, at = _read_string(data, at)
        return value.decode("utf-8", "replace"), at
    if kind == _ARRAY:
        return None, _skip_array(data, at)
    layout = "<" + _SCALARS[kind]
    return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)


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
