"""Random-weight models of architectures that `scripts/make_synthetic.py` does not write: for tests.

``gemma3`` has sliding-window attention; ``kimi-linear``, ``kimi-k3`` and ``bailingmoe3`` have Kimi
delta attention (arXiv 2510.26692): a gate per channel, convolutions of q, k and v apart, and
attention over a compressed cache (MLA). Names and sizes as their loaders in llama.cpp ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
from synthetic_model import Tensor, write_file, write_vocabulary

LAYERS, EMBD, FF, HEADS, HEAD_DIM, VOCAB = 4, 256, 512, 4, 64, 1024
WINDOW = 9  # of the sliding layers; texts and accepted paths are longer
EXPERTS, EXPERTS_USED, EXPERT_FF = 8, 2, 128
INNER = HEADS * HEAD_DIM
KV_RANK, ROPE, NOPE = 64, 32, 32
RMS_EPS = 1e-6


def _norm(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.weight", (size,), 0.1, mean=1.0, keep=True)


def _matrix(name: str, rows: int, columns: int, *outer: int) -> Tensor:
    return Tensor(f"{name}.weight", (*outer, rows, columns), columns**-0.5)


def _common(writer: gguf.GGUFWriter, arch: str) -> None:
    writer.add_name(f"tiny {arch}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(EMBD)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    write_vocabulary(writer, VOCAB)


def _ends(embedding: float) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (VOCAB, EMBD), embedding, draw="vocab")
    yield _norm("output_norm", EMBD)
    yield Tensor("output.weight", (VOCAB, EMBD), 3 * EMBD**-0.5, draw="vocab")


def _gemma3_metadata(writer: gguf.GGUFWriter) -> None:
    _common(writer, "gemma3")
    writer.add_head_count_kv(HEADS // 2)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(WINDOW)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)


def _gemma3() -> Iterator[Tensor]:
    yield from _ends(EMBD**-0.5)  # the graph multiplies with sqrt(embd)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            yield _norm(f"{block}.{name}", EMBD)
        yield _matrix(f"{block}.attn_q", INNER, EMBD)
        yield _matrix(f"{block}.attn_k", INNER // 2, EMBD)
        yield _matrix(f"{block}.attn_v", INNER // 2, EMBD)
        yield _matrix(f"{block}.attn_output", EMBD, INNER)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield _norm(f"{block}.{name}", HEAD_DIM)
        yield from _dense(block)


def _dense(block: str) -> Iterator[Tensor]:
    yield _matrix(f"{block}.ffn_gate", FF, EMBD)
    yield _matrix(f"{block}.ffn_up", FF, EMBD)
    yield _matrix(f"{block}.ffn_down", EMBD, FF)


def _kimi_metadata(arch: str) -> Callable[[gguf.GGUFWriter], None]:
    def metadata(writer: gguf.GGUFWriter) -> None:
        _common(writer, arch)
        writer.add_head_count_kv([0, 0, 0, 1])  # 0: a delta net layer
        writer.add_key_length(KV_RANK + ROPE)
        writer.add_value_length(KV_RANK)
        writer.add_key_length_mla(NOPE + ROPE)
        writer.add_value_length_mla(NOPE)
        writer.add_kv_lora_rank(KV_RANK)
        writer.add_rope_dimension_count(ROPE)
        writer.add_ssm_conv_kernel(4)
        writer.add_uint32(f"{arch}.kda.head_dim", HEAD_DIM)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(EXPERTS_USED)
        writer.add_expert_feed_forward_length(EXPERT_FF)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_scale(2.0)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(1)
        if arch != "kimi-linear":
            writer.add_float32(f"{arch}.kda.gate_lower_bound", -5.0)
        if arch == "kimi-k3":
            writer.add_uint32(f"{arch}.attn_res.block_size", 2)
            writer.add_uint32(f"{arch}.expert_latent_length", EMBD // 2)
            writer.add_float32(f"{arch}.activation.situ_beta", 4.0)
            writer.add_float32(f"{arch}.activation.situ_linear_beta", 25.0)

    return metadata


def _kimi(arch: str) -> Callable[[], Iterator[Tensor]]:
    def tensors() -> Iterator[Tensor]:
        yield from _ends(1.0)
        if arch == "kimi-k3":
            yield _score("output_res_score")
        for layer in range(LAYERS):
            block = f"blk.{layer}"
            yield _norm(f"{block}.attn_norm", EMBD)
            yield _norm(f"{block}.ffn_norm", EMBD)
            if arch == "kimi-k3":
                yield _score(f"{block}.attn_res_score")
                yield _score(f"{block}.ffn_res_score")
            yield from (_compressed_attention if layer == LAYERS - 1 else _kda)(arch, block)
            yield from (_dense(block) if layer == 0 else _mixture(arch, block))

    return tensors


def _score(name: str) -> Tensor:
    return Tensor(f"{name}.weight", (EMBD,), EMBD**-0.5, keep=True)


def _kda(arch: str, block: str) -> Iterator[Tensor]:
    for name in "qkv":
        yield _matrix(f"{block}.attn_{name}", INNER, EMBD)
        yield Tensor(f"{block}.ssm_conv1d_{name}.weight", (1, INNER, 1, 4), 0.5, keep=True)
    low_rank = arch != "bailingmoe3"
    yield _matrix(f"{block}.ssm_f_a", HEAD_DIM if low_rank else INNER, EMBD)
    if low_rank:
        yield _matrix(f"{block}.ssm_f_b", INNER, HEAD_DIM)
    yield _matrix(f"{block}.ssm_beta", HEADS, EMBD)
    decay = (HEADS,) if arch == "kimi-k3" else (HEADS, 1)
    yield Tensor(f"{block}.ssm_a", decay, 0, keep=True, draw="decay")
    yield Tensor(f"{block}.ssm_dt.bias", (INNER,), 0, keep=True, draw="dt")
    if arch == "kimi-k3":
        yield _matrix(f"{block}.ssm_g", INNER, EMBD)
    else:
        yield _matrix(f"{block}.ssm_g_a", HEAD_DIM if low_rank else INNER, EMBD)
    if arch == "kimi-linear":
        yield _matrix(f"{block}.ssm_g_b", INNER, HEAD_DIM)
    yield _norm(f"{block}.ssm_norm", HEAD_DIM)
    yield _matrix(f"{block}.attn_output", EMBD, INNER)


def _compressed_attention(arch: str, block: str) -> Iterator[Tensor]:
    yield _matrix(f"{block}.attn_q", HEADS * (NOPE + ROPE), EMBD)
    yield _matrix(f"{block}.attn_kv_a_mqa", KV_RANK + ROPE, EMBD)
    yield _norm(f"{block}.attn_kv_a_norm", KV_RANK)
    yield _matrix(f"{block}.attn_k_b", KV_RANK, NOPE, HEADS)
    yield _matrix(f"{block}.attn_v_b", NOPE, KV_RANK, HEADS)
    if arch != "kimi-linear":
        gates = HEADS * NOPE if arch == "kimi-k3" else HEADS
        yield _matrix(f"{block}.attn_gate", gates, EMBD)
    yield _matrix(f"{block}.attn_output", EMBD, HEADS * NOPE)


def _mixture(arch: str, block: str) -> Iterator[Tensor]:
    width = EMBD // 2 if arch == "kimi-k3" else EMBD
    yield Tensor(f"{block}.ffn_gate_inp.weight", (EXPERTS, EMBD), EMBD**-0.5, keep=True)
    yield Tensor(f"{block}.exp_probs_b.bias", (EXPERTS,), 0.1, keep=True)
    yield _matrix(f"{block}.ffn_gate_exps", EXPERT_FF, width, EXPERTS)
    yield _matrix(f"{block}.ffn_up_exps", EXPERT_FF, width, EXPERTS)
    yield _matrix(f"{block}.ffn_down_exps", width, EXPERT_FF, EXPERTS)
    if arch == "kimi-k3":
        yield _matrix(f"{block}.ffn_routed_down", width, EMBD)
        yield _matrix(f"{block}.ffn_routed_up", EMBD, width)
        yield _norm(f"{block}.ffn_routed_norm", width)
    yield _matrix(f"{block}.ffn_gate_shexp", EXPERT_FF, EMBD)
    yield _matrix(f"{block}.ffn_up_shexp", EXPERT_FF, EMBD)
    yield _matrix(f"{block}.ffn_down_shexp", EMBD, EXPERT_FF)


ARCHITECTURES = {
    "gemma3": (_gemma3, _gemma3_metadata),
    **{arch: (_kimi(arch), _kimi_metadata(arch)) for arch in ("kimi-linear", "kimi-k3", "bailingmoe3")},
}  # fmt: skip


def write(path: Path, arch: str, kind: str = "Q8_0") -> None:
    """Write the tiny model of an architecture; `kind` is the type of its matrices."""
    tensors, metadata = ARCHITECTURES[arch]
    write_file(path, arch, tensors(), metadata, kind)
