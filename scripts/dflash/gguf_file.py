"""DFlash drafters as GGUF files of llama.cpp's `dflash` architecture. Needs gguf and numpy alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from .config import DrafterConfig, tensor_shapes

ARCH = "dflash"
MASK_KEY = "tokenizer.ggml.mask_token_id"
#: Tokens that models set aside and no text contains, the likeliest first.
MASK_NAMES = ("<|mask|>", "[MASK]", "<mask>", "<|fim_pad|>")
#: A byte that UTF-8 never uses, as byte-level BPE and SentencePiece write it.
UNUSED_BYTE = ("\xff", "<0xFF>")

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Target:
    """What a drafter must know of its target's file."""

    path: Path
    arch: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    mask_token: int | None

    @classmethod
    def read(cls, path: Path) -> Target:
        """The facts of a target's GGUF file."""
        reader = GGUFReader(path)
        arch = str(reader.fields["general.architecture"].contents())
        if arch == ARCH:
            raise ValueError(f"{path} is a drafter ({ARCH}): the target is the model it drafts for")

        def key(name: str, default: Any = None) -> Any:
            field = reader.fields.get(f"{arch}.{name}")
            return default if field is None else field.contents()

        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        types_field = reader.fields.get("tokenizer.ggml.token_type")
        types = types_field.contents() if types_field else None
        mask = reader.fields.get(MASK_KEY)
        return cls(
            path=path,
            arch=arch,
            n_layer=int(key("block_count")) - int(key("nextn_predict_layers", 0)),
            n_embd=int(key("embedding_length")),
            n_vocab=len(tokens),
            n_ctx=int(key("context_length", 4096)),
            rope_base=float(key("rope.freq_base", 10_000.0)),
            mask_token=int(mask.contents()) if mask else find_mask_token(tokens, types),
        )


def find_mask_token(tokens: list[str], types: list[int] | None) -> int | None:
    """A token that no text contains: one made for it, an unused one, or a byte foreign to UTF-8."""
    for name in MASK_NAMES:
        if name in tokens:
            return tokens.index(name)
    if types and gguf.TokenType.UNUSED in types:
        return types.index(gguf.TokenType.UNUSED)
    return next((tokens.index(name) for name in UNUSED_BYTE if name in tokens), None)


def read_matrix(path: Path, *names: str) -> NDArray[np.float32]:
    """The first tensor of these names that a file has, dequantised to float32 [rows, columns].

    Raises:
        KeyError: The file has none of them.
    """
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name in names:
        if name in tensors:
            tensor = tensors[name]
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    raise KeyError(f"{path} has no tensor {' or '.join(names)}")


def write_drafter(
    path: Path,
    cfg: DrafterConfig,
    weights: Weights,
    target: Path,
    kind: str = "Q8_0",
    name: str = "DFlash drafter",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter; the file appears whole or not at all.

    Args:
        path: The file.
        cfg: Its metadata.
        weights: Tensors by GGUF name; those of `tensor_shapes` and, for other variants, more.
        target: The target's file, whose tokenizer is copied.
        kind: Type of matrices, `Q8_0`, `F16` or `F32`; vectors and convolutions stay F32, rows that
            the type's blocks do not divide become F16.
        name: `general.name`.
        extra: More metadata without the `dflash.` prefix: bool, int or float values.

    Raises:
        ValueError: A tensor is missing or has another shape.
    """
    for tensor, shape in tensor_shapes(cfg):
        if tensor not in weights:
            raise ValueError(f"tensor {tensor} is missing")
        if weights[tensor].shape != shape:
            raise ValueError(f"tensor {tensor} is {weights[tensor].shape}, must be {shape}")
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCH)
    try:
        _write_metadata(writer, cfg, name, extra or {})
        _copy_tokenizer(writer, target)
        writer.add_uint32(MASK_KEY, cfg.mask_token)
        for tensor, value in weights.items():
            type_ = _type_of(tensor, value.shape, Type[kind])
            value = np.ascontiguousarray(value, dtype=np.float32)
            writer.add_tensor(
                tensor,
                gguf.quantize(value, type_),
                raw_dtype=type_,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_drafter(path: Path) -> tuple[DrafterConfig, dict[str, NDArray[np.float32]]]:
    """Metadata and tensors (float32, by GGUF name) of a drafter's file.

    Raises:
        ValueError: It is no drafter.
    """
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    if arch != ARCH:
        raise ValueError(f"{path} is a {arch} model, must be a {ARCH} drafter")

    def key(name: str) -> Any:
        field = reader.fields.get(f"{ARCH}.{name}")
        if field is None:
            raise ValueError(f"{path} lacks the key {ARCH}.{name}")
        return field.contents()

    cfg = DrafterConfig(
        n_embd=int(key("embedding_length")),
        n_vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
        n_layer=int(key("block_count")),
        n_head=int(key("attention.head_count")),
        n_head_kv=int(key("attention.head_count_kv")),
        head_dim=int(key("attention.key_length")),
        n_ff=int(key("feed_forward_length")),
        block_size=int(key("block_size")),
        mask_token=int(reader.fields[MASK_KEY].contents()),
        target_layers=tuple(int(layer) for layer in key("target_layers")),
        rope_base=_decimal(key("rope.freq_base")),
        eps=_decimal(key("attention.layer_norm_rms_epsilon")),
        n_ctx=int(key("context_length")),
    )
    weights = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    return cfg, weights


def _decimal(value: float) -> float:
    """The decimal number that a float32 was written for."""
    return float(f"{value:.7g}")


def _type_of(name: str, shape: tuple[int, ...], kind: Type) -> Type:
    if len(shape) != 2:
        return Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % block == 0 else Type.F16


def _write_metadata(
    writer: gguf.GGUFWriter, cfg: DrafterConfig, name: str, extra: Mapping[str, Any]
) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(cfg.n_layer)
    writer.add_context_length(cfg.n_ctx)
    writer.add_embedding_length(cfg.n_embd)
    writer.add_feed_forward_length(cfg.n_ff)
    writer.add_head_count(cfg.n_head)
    writer.add_head_count_kv(cfg.n_head_kv)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.eps)
    writer.add_rope_freq_base(cfg.rope_base)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_causal_attention(False)
    writer.add_uint32(f"{ARCH}.block_size", cfg.block_size)
    writer.add_array(f"{ARCH}.target_layers", list(cfg.target_layers))
    for key, value in extra.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[
            type(value)
        ]
        add(f"{ARCH}.{key}", value)


def _copy_tokenizer(writer: gguf.GGUFWriter, target: Path) -> None:
    for field in GGUFReader(target).fields.values():
        if not field.name.startswith("tokenizer.") or field.name == MASK_KEY:
            continue
        kind, *rest = field.types
        sub_type = rest[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
