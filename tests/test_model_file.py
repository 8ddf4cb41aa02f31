"""The header of GGUF files, read without loading them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyspec import ModelError
from pyspec.model_file import ModelFile, resolve_model

gguf = pytest.importorskip("gguf")


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bé", "c" * 300])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_float32("qwen35.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_scalars_and_skips_arrays(small_file: Path) -> None:
    file = ModelFile.read(small_file)
    assert file.arch == "qwen35"
    assert file.mtp_layers == 1
    assert file.get("rope.freq_base") == 1e4
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert "tokenizer.ggml.tokens" not in file.metadata


def test_type_of_a_file(small_file: Path, model: Path) -> None:
    file = ModelFile.read(model)
    assert file.file_type == "Q8_0"
    assert replace(file, metadata={"general.file_type": 15}).file_type == "Q4_K_M"
    for metadata in ({}, {"general.file_type": 9999}, {"general.file_type": "?"}):
        assert replace(file, metadata=metadata).file_type == "Q8_0"  # of most weights, not tensors
    assert ModelFile.read(small_file).file_type == "F32"
    assert replace(file, metadata={}, tensors={}).file_type == "unknown"


def test_file_cut_anywhere_in_its_header_is_refused(small_file: Path) -> None:
    data = small_file.read_bytes()
    end = data.index(b"token_embd.weight")
    cut = small_file.with_name("cut.gguf")
    for size in range(0, end - 40, 7):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            ModelFile.read(cut)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: No such file"):
        ModelFile.read(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="Is a directory"):
        ModelFile.read(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is not a GGUF file"):
        ModelFile.read(other)


def test_demo_is_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPEC_DEMO_MODEL", raising=False)
    assert resolve_model("demo").name == "demo.gguf"
    assert resolve_model("demo").parent.name == "models"
    monkeypatch.setenv("PYSPEC_DEMO_MODEL", "other.gguf")
    assert resolve_model("demo") == Path("other.gguf")
    assert resolve_model("./demo") == Path("./demo")
