"""GGUF files with random weights and the layer shapes of real GatedDeltaNet hybrids.

Needs gguf and numpy alone; only types that gguf cannot quantise are handed to the patched ggml.
The text of such a model means nothing. Its speed, memory and rounding are those of a real one.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import string
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

ProgressFn = Callable[[str, int, int], None]

#: Types that `write` takes.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
         "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; names as in the GGUF keys.

    Attributes:
        arch: ``qwen35``, ``qwen35moe`` or ``qwen3next``.
        layers: Without the MTP block; each fourth one is an attention layer.
        embd: Width of the residual stream.
        ff: Width of a dense feed-forward layer; of one expert in a mixture.
        heads: Query heads of an attention layer.
        heads_kv: Key and value heads of an attention layer.
        head_dim: Size of an attention head.
        rope_dim: Rotated part of a head.
        k_heads: Key heads of a GatedDeltaNet layer.
        v_heads: Value heads of a GatedDeltaNet layer.
        gdn_dim: Size of a GatedDeltaNet head.
        experts: Number of experts, 0 for a dense model.
        experts_used: Experts of a token.
        tied: Whether the head is the token embedding.
        vocab: Number of tokens.
        mtp: Whether there is a multi-token-prediction block.
    """

    arch: str
    layers: int
    embd: int
    ff: int
    heads: int
    heads_kv: int
    k_heads: int
    v_heads: int
    head_dim: int = 256
    rope_dim: int = 64
    gdn_dim: int = 128
    experts: int = 0
    experts_used: int = 0
    tied: bool = False
    vocab: int = 248_320
    mtp: bool = True


PRESETS = {
    "qwen35-0.8b": Shape("qwen35", 24, 1024, 3584, 8, 2, 16, 16, tied=True),
    "qwen35-4b": Shape("qwen35", 32, 2560, 9216, 16, 4, 16, 32, tied=True),
    "qwen36-27b": Shape("qwen35", 64, 5120, 17408, 24, 4, 16, 48),
    "qwen36-35b-a3b": Shape(
        "qwen35moe", 40, 2048, 512, 16, 2, 16, 32, experts=256, experts_used=8
    ),
    "tiny-qwen35": Shape(
        "qwen35", 4, 256, 512, 4, 2, 2, 4, head_dim=64, rope_dim=32, gdn_dim=64, tied=True, vocab=1024
    ),
    "tiny-qwen35moe": Shape(
        "qwen35moe", 4, 256, 256, 4, 2, 2, 4, head_dim=64, rope_dim=32, gdn_dim=64,
        experts=8, experts_used=2, vocab=1024,
    ),
    "tiny-qwen3next": Shape(
        "qwen3next", 4, 256, 256, 4, 2, 2, 4, head_dim=64, rope_dim=32, gdn_dim=64,
        experts=8, experts_used=2, vocab=1024, mtp=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: sizes outermost first, and how its values are drawn.

    Attributes:
        name: GGUF name.
        shape: Sizes, outermost first (numpy's order).
        scale: Standard deviation of the values.
        mean: Their mean.
        keep: Whether it stays F32 whatever type the file has.
        draw: Special values instead: ``decay``, ``dt`` or ``vocab``.
    """

    name: str
    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0
    keep: bool = False
    draw: str = ""


def preset(name: str, layers: int | None = None, vocab: int | None = None) -> Shape:
    """The preset `name`, with other numbers of layers and tokens when given."""
    shape = PRESETS[name]
    smallest = 256 + len(SPECIAL)
    if vocab is not None and vocab < smallest:
        raise ValueError(
            f"vocabulary of {vocab} tokens: bytes and special tokens alone are {smallest}"
        )
    if layers is not None and layers < 1:
        raise ValueError(f"{layers} layers: a model has at least one")
    return replace(shape, layers=layers or shape.layers, vocab=vocab or shape.vocab)


def tensors(shape: Shape) -> Iterator[Tensor]:
    """All tensors of a model, in the order of the file.

    Every matrix maps a vector of unit variance to one of unit variance, so that activations neither
    vanish nor grow; the head draws logits with a standard deviation of 3.
    """
    embd, vocab = shape.embd, shape.vocab
    head = 3 / math.sqrt(embd)
    yield Tensor("token_embd.weight", (vocab, embd), head if shape.tied else 1.0, draw="vocab")
    yield _norm("output_norm.weight", embd)
    if not shape.tied:
        yield Tensor("output.weight", (vocab, embd), head, draw="vocab")
    for layer in range(shape.layers + shape.mtp):
        block = f"blk.{layer}"
        yield _norm(f"{block}.attn_norm.weight", embd)
        yield _norm(f"{block}.post_attention_norm.weight", embd)
        mtp = layer == shape.layers
        yield from (_attention if mtp or (layer + 1) % 4 == 0 else _delta_net)(shape, block)
        yield from (_mixture if shape.experts else _dense)(shape, block)
        if mtp:
            yield _matrix(f"{block}.nextn.eh_proj.weight", embd, 2 * embd)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield _norm(f"{block}.nextn.{name}.weight", embd)


def _norm(name: str, size: int) -> Tensor:
    return Tensor(name, (size,), 0.1, mean=1.0, keep=True)


def _matrix(name: str, rows: int, columns: int, *outer: int, keep: bool = False) -> Tensor:
    return Tensor(name, (*outer, rows, columns), 1 / math.sqrt(columns), keep=keep)


def _attention(shape: Shape, block: str) -> Iterator[Tensor]:
    query, key = shape.head_dim * shape.heads, shape.head_dim * shape.heads_kv
    yield _matrix(f"{block}.attn_q.weight", 2 * query, shape.embd)
    yield _matrix(f"{block}.attn_k.weight", key, shape.embd)
    yield _matrix(f"{block}.attn_v.weight", key, shape.embd)
    yield _matrix(f"{block}.attn_output.weight", shape.embd, query)
    yield _norm(f"{block}.attn_q_norm.weight", shape.head_dim)
    yield _norm(f"{block}.attn_k_norm.weight", shape.head_dim)


def _delta_net(shape: Shape, block: str) -> Iterator[Tensor]:
    embd, value_heads = shape.embd, shape.v_heads
    keys, values = shape.k_heads * shape.gdn_dim, value_heads * shape.gdn_dim
    channels = 2 * keys + values
    yield _matrix(f"{block}.attn_qkv.weight", channels, embd)
    yield _matrix(f"{block}.attn_gate.weight", values, embd)
    yield Tensor(f"{block}.ssm_conv1d.weight", (channels, 4), 0.5, keep=True)
    yield Tensor(f"{block}.ssm_dt.bias", (value_heads,), 0, keep=True, draw="dt")
    yield Tensor(f"{block}.ssm_a", (value_heads,), 0, keep=True, draw="decay")
    if shape.arch == "qwen3next":
        yield _matrix(f"{block}.ssm_ba.weight", 2 * value_heads, embd)
    else:
        yield _matrix(f"{block}.ssm_alpha.weight", value_heads, embd)
        yield _matrix(f"{block}.ssm_beta.weight", value_heads, embd)
    yield _norm(f"{block}.ssm_norm.weight", shape.gdn_dim)
    yield _matrix(f"{block}.ssm_out.weight", embd, values)


def _dense(shape: Shape, block: str) -> Iterator[Tensor]:
    yield _matrix(f"{block}.ffn_gate.weight", shape.ff, shape.embd)
    yield _matrix(f"{block}.ffn_up.weight", shape.ff, shape.embd)
    yield _matrix(f"{block}.ffn_down.weight", shape.embd, shape.ff)


def _mixture(shape: Shape, block: str) -> Iterator[Tensor]:
    experts, ff, embd = shape.experts, shape.ff, shape.embd
    yield _matrix(f"{block}.ffn_gate_inp.weight", experts, embd, keep=True)
    yield _matrix(f"{block}.ffn_gate_exps.weight", ff, embd, experts)
    yield _matrix(f"{block}.ffn_up_exps.weight", ff, embd, experts)
    yield _matrix(f"{block}.ffn_down_exps.weight", embd, ff, experts)
    yield Tensor(f"{block}.ffn_gate_inp_shexp.weight", (embd,), 1 / math.sqrt(embd), keep=True)
    yield _matrix(f"{block}.ffn_gate_shexp.weight", ff, embd)
    yield _matrix(f"{block}.ffn_up_shexp.weight", ff, embd)
    yield _matrix(f"{block}.ffn_down_shexp.weight", embd, ff)


def values(tensor: Tensor, seed: int) -> np.ndarray:
    """The tensor's values; they depend on its name and the seed, not on the rest of the file."""
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    if tensor.draw == "decay":  # as models are initialised: decay rates of 1 to 16
        return -rng.uniform(1, 16, tensor.shape).astype(np.float32)
    if tensor.draw == "dt":  # the inverse softplus of time steps between 0.001 and 0.1
        step = np.exp(rng.uniform(math.log(0.001), math.log(0.1), tensor.shape))
        return np.log(np.expm1(step)).astype(np.float32)
    out = rng.standard_normal(tensor.shape, dtype=np.float32)
    out *= tensor.scale
    out += tensor.mean
    if tensor.draw == "vocab":  # special tokens are in no text, so the head should not choose them
        out[256 : 256 + len(SPECIAL)] *= 0.01
    return out


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary: tokens, their types, merges.

    The bytes, the special tokens, then words of two, three ... letters. The words of two letters
    have merges, the others are reached by no text.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = itertools.count(256)
    tokens = [chr(byte if byte in visible else next(hidden)) for byte in range(256)] + [*SPECIAL]
    types = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIAL)
    merges = []
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(tokens) == size:
                return tokens, [int(kind) for kind in types], merges
            tokens.append("".join(letters))
            types.append(gguf.TokenType.NORMAL)
            if length == 2:
                merges.append(" ".join(letters))
    raise AssertionError("unreachable")


def write(
    path: Path,
    shape: Shape,
    kind: str = "Q8_0",
    seed: int = 0,
    context: int = 32_768,
    progress: ProgressFn | None = None,
) -> None:
    """Write a model file; it appears whole or not at all.

    Args:
        path: The file.
        shape: What to write, see `preset`.
        kind: Type of the matrices, one of `TYPES`. Rows that its blocks do not divide become F16.
        seed: The same seed gives the same file, byte for byte.
        context: Context length that the file claims.
        progress: Called with a tensor's name and the numbers of tensors done and in all.
    """
    write_file(
        path, shape.arch, tensors(shape), lambda writer: _write_metadata(writer, shape, kind, context),
        kind, seed, progress,
    )  # fmt: skip


def write_file(
    path: Path,
    arch: str,
    content: Iterable[Tensor],
    metadata: Callable[[gguf.GGUFWriter], None],
    kind: str,
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> None:
    """Write a model of any architecture; as `write`, with its tensors and what adds its metadata."""
    plan = [(tensor, _type_of(tensor, kind)) for tensor in content]
    quantizer = _Quantizer()
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, arch)
    try:
        metadata(writer)
        for tensor, type_ in plan:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), _bytes(tensor.shape, type_), type_
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (tensor, type_) in enumerate(plan):
            if progress:
                progress(tensor.name, done, len(plan))
            writer.write_tensor_data(quantizer(values(tensor, seed), type_))
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if progress:
        progress(str(path), len(plan), len(plan))


def _type_of(tensor: Tensor, kind: str) -> Type:
    if tensor.keep:
        return Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[Type[kind]]
    return Type[kind] if tensor.shape[-1] % block == 0 else Type.F16


def _bytes(shape: tuple[int, ...], kind: Type) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape, kind: str, context: int) -> None:
    size = "MoE" if shape.experts else "dense"
    writer.add_name(f"synthetic {shape.arch} {size} {shape.layers} layers {kind}")
    writer.add_block_count(shape.layers + shape.mtp)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.embd)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.rope_dim)
    writer.add_rope_freq_base(10_000_000.0)
    if shape.arch != "qwen3next":
        sixth = shape.rope_dim // 6
        writer.add_rope_dimension_sections([shape.rope_dim // 2 - 2 * sixth, sixth, sixth, 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(shape.v_heads * shape.gdn_dim)
    writer.add_ssm_state_size(shape.gdn_dim)
    writer.add_ssm_time_step_rank(shape.v_heads)
    writer.add_ssm_group_count(shape.k_heads)
    writer.add_uint32(f"{shape.arch}.full_attention_interval", 4)
    if shape.mtp:
        writer.add_uint32(f"{shape.arch}.nextn_predict_layers", 1)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.ff)
        writer.add_expert_shared_feed_forward_length(shape.ff)
    write_vocabulary(writer, shape.vocab)


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add `vocabulary` with its tokenizer and chat template."""
    tokens, types, merges = vocabulary(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or ["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


class _Quantizer:
    """Quantises with gguf, and with the patched ggml where gguf only reads a type."""

    def __init__(self) -> None:
        self._ggml: ctypes.CDLL | None = None

    def __call__(self, data: np.ndarray, kind: Type) -> np.ndarray:
        try:
            return gguf.quantize(data, kind)
        except NotImplementedError:
            return self._with_ggml(data, kind)

    def _with_ggml(self, data: np.ndarray, kind: Type) -> np.ndarray:
        if self._ggml is None:
            from pyspec._libs import use_patched_libraries

            self._ggml = use_patched_libraries().llama_cpp._lib
            self._ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
            self._ggml.ggml_quantize_chunk.argtypes = [
                ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
                ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
            ]  # fmt: skip
        out = np.empty(_bytes(data.shape, kind), np.uint8)
        columns = data.shape[-1]
        self._ggml.ggml_quantize_chunk(
            int(kind), data.ctypes.data, out.ctypes.data, 0, data.size // columns, columns, None
        )
        return out
