"""A model that says what another says, and costs what a larger one costs.

Every feed-forward layer gets more hidden units: rows of zeros behind those of gate and up, columns
of zeros behind those of down. A new unit is silu(0) * 0 = 0 and adds 0 to what down sums; the units
that were there keep their places, so every sum keeps its order and its bits. Only the bytes that a
step reads, and its products, become more.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from numpy.typing import NDArray
from synthetic_model import ProgressFn

#: The axis of the hidden units.
_HIDDEN = {"ffn_gate.weight": 0, "ffn_up.weight": 0, "ffn_down.weight": 1}


def times_for(source: Path, megabytes: float) -> int:
    """How many times as wide `pad` must make the layers of a file for it to have that size.

    Raises:
        ValueError: It is larger already, or has no dense feed-forward layers.
    """
    wider = sum(int(t.n_bytes) for t in GGUFReader(source).tensors if _axis(t) is not None)
    if not wider:
        raise ValueError(f"{source} has no dense feed-forward layers")
    size = source.stat().st_size / 1e6
    if megabytes < size:
        raise ValueError(f"{megabytes:g} megabytes: {source.name} alone has {size:.1f}")
    return 1 + round((megabytes - size) * 1e6 / wider)


def pad(source: Path, path: Path, times: int, progress: ProgressFn | None = None) -> None:
    """Writes `source` with feed-forward layers `times` as wide; whole or not at all.

    Args:
        source: A GGUF file with dense feed-forward layers; those of an MTP block grow, too.
        path: The file to write.
        times: 1 or more.
        progress: Called with a tensor's name and the numbers of tensors done and in all.
    """
    reader = GGUFReader(source)
    partial = path.with_name(path.name + ".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    try:
        _copy_metadata(writer, reader, times)
        for tensor in reader.tensors:
            data = tensor.data
            shape = [
                n + more for n, (_, more) in zip(data.shape, _more(tensor, times), strict=True)
            ]
            size = int(np.prod(shape)) * data.itemsize
            writer.add_tensor_info(tensor.name, shape, data.dtype, size, tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, tensor in enumerate(reader.tensors, 1):
            writer.write_tensor_data(_padded(tensor, times))
            if progress:
                progress(tensor.name, done, len(reader.tensors))
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _copy_metadata(writer: GGUFWriter, reader: GGUFReader, times: int) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *rest = field.types
        value = field.contents()
        if field.name == f"{writer.arch}.feed_forward_length":
            value *= times
        elif field.name == "general.name":
            value += f", feed-forward padded {times}x with zeros"
        sub_type = rest[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=sub_type)


def _padded(tensor: ReaderTensor, times: int) -> NDArray[np.generic]:
    """Zero bytes are zeros in every type: a block's scale is among them."""
    return np.pad(tensor.data, _more(tensor, times))


def _more(tensor: ReaderTensor, times: int) -> list[tuple[int, int]]:
    """Before and behind every axis of the data (bytes, where it is quantised): what is added."""
    axis = _axis(tensor)
    return [(0, (times - 1) * n if at == axis else 0) for at, n in enumerate(tensor.data.shape)]


def _axis(tensor: ReaderTensor) -> int | None:
    """The axis of hidden units in a matrix of a feed-forward layer; None for all other tensors."""
    name = tensor.name.split(".", 2)
    return _HIDDEN.get(name[-1]) if name[0] == "blk" else None
