"""The script that writes random-weight models: what it writes loads, and is worth testing with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from pyspec._libs import use_patched_libraries
from tests import synthetic_models  # puts scripts/ on the path
from tests.synthetic_models import Synthetic

import make_synthetic  # isort: skip
from synthetic_model import PRESETS, Shape, preset, tensors, vocabulary, write  # isort: skip

synthetic = synthetic_models.synthetic
TINY = [name for name in PRESETS if name.startswith("tiny")]
REAL = [name for name in PRESETS if not name.startswith("tiny")]


def open_model(path: Path):
    llama_cpp = use_patched_libraries()
    return llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)


def logits(model) -> np.ndarray:
    llama_cpp = use_patched_libraries()
    row = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return np.ctypeslib.as_array(row, (model.n_vocab(),)).copy()


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_loads_and_writes_varied_text(name: str, synthetic: Synthetic) -> None:
    model = open_model(synthetic(name))
    assert model.metadata["general.architecture"] == PRESETS[name].arch
    model.eval(model.tokenize(b"def main(", add_bos=False))
    text, gaps = [], []
    for _ in range(60):
        row = logits(model)
        second, first = np.partition(row, -2)[-2:]
        text.append(int(row.argmax()))
        gaps.append(first - second)
        model.eval(text[-1:])
    assert len(set(text)) > 30, "greedy text repeats itself"
    assert Counter(text).most_common(1)[0][1] < 15
    assert np.median(gaps) > 0.1, "logits are nearly equal"
    assert 1 < row.std() < 10
    assert not set(text) & {256, 257, 258}, "special tokens are never the most likely ones"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_types(kind: str, synthetic: Synthetic) -> None:
    path = synthetic("tiny-qwen35", kind)
    found = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)
    assert found[kind] > 30
    assert set(found) <= {kind, "F32"}
    model = open_model(path)
    model.eval([97, 98, 99])
    assert np.isfinite(logits(model)).all()


def test_same_seed_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, preset("tiny-qwen35", layers=1), seed=seed)
    first, same, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == same
    assert first != other


def test_more_layers_leave_the_first_ones_alone(tmp_path: Path) -> None:
    def read(layers: int) -> dict[str, bytes]:
        write(tmp_path / "model", preset("tiny-qwen35", layers=layers), seed=0)
        return {t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / "model").tensors}

    few, many = read(1), read(2)
    assert few["blk.0.attn_qkv.weight"] == many["blk.0.attn_qkv.weight"]


@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen35moe"])
def test_mtp_block(name: str, synthetic: Synthetic) -> None:
    reader = gguf.GGUFReader(synthetic(name))
    shape = PRESETS[name]
    names = {tensor.name for tensor in reader.tensors}
    assert f"blk.{shape.layers}.nextn.eh_proj.weight" in names
    blocks = reader.get_field(f"{shape.arch}.block_count").contents()
    assert (
        blocks == shape.layers + reader.get_field(f"{shape.arch}.nextn_predict_layers").contents()
    )


@pytest.mark.parametrize("name", REAL)
def test_real_shapes(name: str) -> None:
    """The shapes of the published models, from their number of parameters."""
    shape = preset(name)
    billions = sum(np.prod(tensor.shape, dtype=float) for tensor in tensors(shape)) / 1e9
    expected = {"qwen35-0.8b": 0.8, "qwen35-4b": 4.3, "qwen36-27b": 27, "qwen36-35b-a3b": 35}[name]
    assert billions == pytest.approx(expected, rel=0.06)


def test_vocabulary_covers_all_bytes(synthetic: Synthetic) -> None:
    tokens, types, _ = vocabulary(259)
    assert len(set(tokens)) == len(tokens) == len(types) == 259
    model = open_model(synthetic("tiny-qwen35"))
    text = bytes(range(1, 128)) + "Grüße, 世界 🙂".encode()
    assert model.detokenize(model.tokenize(text, add_bos=False, special=False)) == text


@pytest.mark.parametrize(
    ("sizes", "message"), [({"vocab": 10}, "are 259"), ({"layers": 0}, "at least one")]
)
def test_impossible_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("tiny-qwen35", **sizes)


def test_an_interrupted_file_does_not_appear(tmp_path: Path) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model.gguf", preset("tiny-qwen35"), progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    run = CliRunner().invoke(
        make_synthetic.main, ["tiny-qwen35", str(path), "--layers", "1", "--type", "q4_0"]
    )
    assert run.exit_code == 0, run.output
    assert "tensors" in run.output
    assert isinstance(preset("tiny-qwen35"), Shape)
    assert gguf.GGUFReader(path).get_field("qwen35.block_count").contents() == 2
