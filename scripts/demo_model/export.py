"""From a checkpoint to transformers' files, and through llama.cpp's converter to GGUF."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from .config import DemoConfig
from .data import CHAT_END, CHAT_TEMPLATE, END_OF_TEXT
from .model import DemoModel, grow

# The converter finds a pre-tokenizer's name by a hash of what the tokenizer does. This tokenizer is
# new to it, so it is told the answer.
CONVERT = """
import sys
tree = sys.argv.pop(1)
sys.path[:0] = [tree, tree + "/gguf-py"]
import conversion.base, convert_hf_to_gguf
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
convert_hf_to_gguf.main()
"""


def write_transformers(checkpoint: Path, layers: int, tokenizer: Path, folder: Path) -> None:
    """Write config, weights and tokenizer as transformers and the converter read them."""
    state = torch.load(checkpoint)
    model = DemoModel(DemoConfig(**state["config"]))
    model.load_state_dict(state["model"])
    if model.cfg.num_hidden_layers < layers:
        model = grow(model, layers)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: weight.contiguous() for name, weight in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copy(tokenizer, folder / "tokenizer.json")
    config = {
        **model.cfg.to_transformers(),
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "mtp_num_hidden_layers": 1,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": CHAT_END,
                "pad_token": END_OF_TEXT,
                "model_max_length": model.cfg.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
                "add_bos_token": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


def write_gguf(folder: Path, layers: int, llama_cpp: Path, outfile: Path, outtype: str) -> None:
    """Convert folder/checkpoint.pt with llama.cpp's converter; `outfile` appears whole or not."""
    write_transformers(
        folder / "checkpoint.pt", layers, folder / "tokenizer.json", folder / "transformers"
    )
    partial = outfile.with_suffix(".partial.gguf")
    subprocess.run(
        [
            sys.executable,
            "-c",
            CONVERT,
            str(llama_cpp),
            str(folder / "transformers"),
            "--outfile",
            str(partial),
            "--outtype",
            outtype,
            "--model-name",
            "pyspec demo",
        ],
        check=True,
    )
    os.replace(partial, outfile)


GGUF_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}


def read_gguf(path: Path) -> DemoModel:
    """The demo model with the weights of a GGUF file, dequantised to float32."""
    reader = GGUFReader(path)

    def key(name: str) -> int:
        return int(reader.fields[f"qwen35.{name}"].contents())

    trunk = key("block_count") - key("nextn_predict_layers")
    cfg = DemoConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=trunk,
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv"),
        head_dim=key("attention.key_length"),
        linear_num_key_heads=key("ssm.group_count"),
        linear_num_value_heads=key("ssm.time_step_rank"),
        linear_head_dim=key("ssm.state_size"),
        rope_theta=key("rope.freq_base"),
    )
    if cfg.linear_num_key_heads != 1:
        raise ValueError(
            f"reads files with 1 key head, got {cfg.linear_num_key_heads}: with more, the "
            "converter reorders the value heads"
        )
    model = DemoModel(cfg)
    expected, weights = model.state_dict(), {}
    for tensor in reader.tensors:
        name = gguf_to_transformers(tensor.name, trunk)
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith("A_log"):
            value = torch.log(-value)
        elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
            value = value - 1  # the file holds the gain, the model its distance from 1
        weights[name] = value.reshape(expected[name].shape)
    model.load_state_dict(weights)
    return model.eval()


def gguf_to_transformers(name: str, trunk: int) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    The block after the trunk is the MTP block.
    """
    if not name.startswith("blk."):
        return {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }[name]
    _, block, rest = name.split(".", 2)
    if int(block) < trunk:
        return f"model.layers.{block}.{GGUF_NAMES[rest]}"
    return (
        f"mtp.{GGUF_NAMES[rest]}"
        if rest.startswith("nextn.")
        else f"mtp.layers.0.{GGUF_NAMES[rest]}"
    )
