"""The roofline's bytes: against the files that are written, and what the engine allocates."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import roofline
from synthetic_model import PRESETS, _bytes, _type_of, tensors

from pyspec import EngineConfig
from pyspec.native import NativeEngine
from tests import synthetic_models

synthetic = synthetic_models.synthetic
Q8_0_BITS = 8.5


@pytest.mark.parametrize("name", list(roofline.MODELS.values()))
def test_weights_are_those_of_the_file(name: str) -> None:
    """With all experts in use, layers and head are the file without embeddings and MTP block."""
    shape = PRESETS[name]
    sizes = {one.name: _bytes(one.shape, _type_of(one, "Q8_0")) for one in tensors(shape)}
    mtp = [key for key in sizes if key.startswith(f"blk.{shape.layers}.")]
    rest = sum(sizes.values()) - sum(sizes[key] for key in mtp)
    if not shape.tied:
        rest -= sizes["token_embd.weight"]
    trunk, block, head = roofline.weights(shape, Q8_0_BITS, nodes=100_000)
    assert trunk + head == pytest.approx(rest, rel=1e-6)
    if shape.experts:
        assert block < sum(sizes[key] for key in mtp)
    else:
        assert block == pytest.approx(sum(sizes[key] for key in mtp), rel=1e-6)


def test_state_tape_and_cache_are_what_an_engine_allocates(synthetic) -> None:
    shape = PRESETS["tiny-qwen35"]
    with NativeEngine.open(
        synthetic("tiny-qwen35"), EngineConfig(n_threads=1), n_ctx=256, max_nodes=16, mtp=True
    ) as native:
        info = native.info
    step = roofline.step(shape, bits=8.5, context=256, nodes=16, passes=3)
    assert step.state == 2 * info.bytes_state
    assert step.tape == 2 * info.bytes_rollback
    assert step.cache == info.bytes_kv


def test_expected_tokens() -> None:
    for depth in range(6):
        for accept in (0.0, 0.3, 0.8):
            direct = sum(accept**k for k in range(depth + 1))
            assert math.isclose(roofline.expected_tokens(accept, depth), direct)
        assert roofline.expected_tokens(1, depth) == depth + 1


def test_more_experts_are_read_for_more_nodes() -> None:
    shape = PRESETS["qwen36-35b-a3b"]
    read = [roofline.weights(shape, 4.85, nodes)[0] for nodes in (1, 2, 4, 16)]
    assert read == sorted(read) and read[3] < 16 * read[0]
