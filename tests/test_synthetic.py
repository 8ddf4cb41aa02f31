"""The script that writes random-weight models: what it writes loads, and is worth testing with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from pyspec import DraftConfig, Engine
from pyspec._libs import use_patched_libraries
from pyspec.model_file import ModelFile
from tests import synthetic_models  # puts scripts/ on the path
from tests.conftest import OpenEngine
from tests.prompts import CODE, PROSE
from tests.synthetic_models import Synthetic

import make_synthetic  # isort: skip
from padded_model import pad, times_for  # isort: skip
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


# ---- the padded demo ----


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model and its drafter at 20 MB."""
    path = tmp_path_factory.mktemp("padded") / "padded.gguf"
    run = CliRunner().invoke(
        make_synthetic.main, ["padded-demo", str(path), "--megabytes", "20"], catch_exceptions=False
    )
    assert run.exit_code == 0, run.output
    return path


def test_padding_widens_every_feed_forward_layer(padded: Path, model: Path) -> None:
    before, after = ModelFile.read(model), ModelFile.read(padded)
    assert after.path.stat().st_size == pytest.approx(20e6, rel=0.15)
    times = after.get("feed_forward_length") / before.get("feed_forward_length")
    assert times == 4 == times_for(model, 20)
    for name, tensor in before.tensors.items():
        wider = [
            old != new for old, new in zip(tensor.shape, after.tensors[name].shape, strict=True)
        ]
        assert sum(wider) == ("ffn_" in name), name
    assert after.tensors["blk.24.ffn_up.weight"].shape == (4 * 384, 160), "the MTP block's, too"


def test_padding_changes_no_bit(padded: Path, model: Path) -> None:
    """Prompts of many tokens, trees and single tokens; the MTP block's drafts, too."""

    def bits(path: Path) -> list[bytes]:
        with Engine(path, "mtp", n_ctx=512, n_threads=1) as engine:
            native, tokens = engine.native, engine.tokenize("".join(CODE[:6]))[:300]
            native.prefill(0, tokens)
            native.verify([(0, tokens[:9], [-1, 0, 0, 1, 2, 3, 3, 4, 5])])
            found = [native.logits(0, node).tobytes() for node in range(9)]
            native.commit(0, [0, 1, 3])
            drafts = native.mtp_draft([0], [tokens[0]], 3, 4)
            return [*found, drafts.log_probs.tobytes(), drafts.tokens.tobytes()]

    assert bits(padded) == bits(model)


@pytest.mark.parametrize("draft", ["none", "mtp", "dflash", "auto"])
def test_padded_demo_writes_the_demos_text(
    padded: Path, draft: str, open_engine: OpenEngine, plain: Engine
) -> None:
    limits = {"depth": 3} if draft in ("mtp", "dflash") else {}
    with Engine(padded, DraftConfig(draft, **limits), n_ctx=512, n_threads=1) as engine:
        same = open_engine(draft, n_ctx=512, **limits)
        for seed, prompt in enumerate((CODE[0], PROSE[0])):
            options = {"max_tokens": 40, "temperature": 0.8 * seed, "seed": seed}
            found = engine.complete(prompt, **options)
            assert found.tokens == plain.complete(prompt, **options).tokens
            if draft != "auto":  # which chooses by time
                stats = same.complete(prompt, **options).stats
                assert found.stats.accepted == stats.accepted


def test_the_drafter_of_the_package_fits_the_padded_demo(padded: Path, model: Path) -> None:
    drafter = model.with_name("demo-dflash.gguf")
    config = DraftConfig("dflash", depth=3, model=str(drafter))
    with Engine(padded, config, n_threads=1) as engine:
        assert engine.complete(CODE[0], max_tokens=20, temperature=0).stats.accepted > 0


def test_what_cannot_be_padded(model: Path, tmp_path: Path, synthetic: Synthetic) -> None:
    with pytest.raises(ValueError, match=r"7 megabytes: demo.gguf alone has 7\.7"):
        times_for(model, 7)
    with pytest.raises(ValueError, match="no dense feed-forward"):
        times_for(synthetic("tiny-qwen3next"), 100)
    for options in (["--type", "Q4_0"], ["--megabytes", "1"]):
        run = CliRunner().invoke(
            make_synthetic.main, ["padded-demo", str(tmp_path / "x"), *options]
        )
        assert run.exit_code == 2, run.output
    run = CliRunner().invoke(make_synthetic.main, ["tiny-qwen35", "x", "--megabytes", "1"])
    assert "tiny-qwen35 has no --megabytes" in run.output
    pad(synthetic("tiny-qwen35", "F16"), tmp_path / "f16.gguf", 2)
    wider = ModelFile.read(tmp_path / "f16.gguf").tensors["blk.0.ffn_down.weight"]
    assert wider.shape == (256, 1024)
    assert [path.name for path in tmp_path.iterdir()] == ["f16.gguf"]
