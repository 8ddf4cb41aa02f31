"""Types of attention caches, the target's and the drafters', chosen by side."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from pyspec import DraftConfig, DraftError, Engine, EngineConfig
from tests.prompts import FEW

F16 = ("f16", "f16")
PAIRS = [("q8_0", "q4_0"), ("f32", "q8_0")]


def bits(types: tuple[str, str]) -> float:
    """Bits of a key and a value together."""
    sizes = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] for name in types]
    return sum(8 * size / block for block, size in sizes)


def opened(
    plain: Engine, name: str, model: Path, target: tuple[str, str], draft: tuple[str | None, str | None]
) -> Engine:  # fmt: skip
    return Engine(
        model,
        DraftConfig(
            name,
            depth=3,
            model=str(model) if name == "draft-model" else None,
            cache_type_k=draft[0],
            cache_type_v=draft[1],
        ),
        EngineConfig(n_ctx=512, n_threads=1, cache_type_k=target[0], cache_type_v=target[1]),
        share=plain,
    )


@pytest.fixture(scope="module")
def owner(model: Path) -> Engine:
    """Holds the weights, the MTP block's among them."""
    return Engine(model, "mtp", n_ctx=64, n_threads=1)


@pytest.mark.parametrize("types", PAIRS, ids="/".join)
def test_a_drafter_s_cache_has_its_own_types(
    owner: Engine, model: Path, types: tuple[str, str]
) -> None:
    with opened(owner, "mtp", model, F16, (None, None)) as engine:
        before = engine.native.info
    with opened(owner, "mtp", model, F16, types) as engine:
        after = engine.native.info
    assert after.bytes_kv == before.bytes_kv
    assert after.bytes_mtp == before.bytes_mtp * bits(types) / bits(F16)


@pytest.mark.parametrize("types", PAIRS, ids="/".join)
def test_it_follows_the_target_where_nothing_is_said(
    owner: Engine, model: Path, types: tuple[str, str]
) -> None:
    with opened(owner, "mtp", model, F16, (None, None)) as engine:
        before = engine.native.info
    with opened(owner, "mtp", model, types, (None, None)) as engine:
        after = engine.native.info
    for name in ("bytes_kv", "bytes_mtp"):
        assert getattr(after, name) == getattr(before, name) * bits(types) / bits(F16)


@pytest.mark.parametrize("name", ["mtp", "dflash", "draft-model"])
def test_the_text_is_the_target_s_whatever_the_drafter_keeps(
    owner: Engine, model: Path, plain: Engine, name: str
) -> None:
    request = {"max_tokens": 64, "temperature": 0, "ignore_end": True}
    expected = [plain.complete(prompt, **request).tokens for prompt in FEW[:5]]
    drafted = []
    for types in (F16, ("q4_0", "q4_0")):
        with opened(owner, name, model, F16, types) as engine:
            found = [engine.complete(prompt, **request) for prompt in FEW[:5]]
        assert [one.tokens for one in found] == expected
        drafted.append([one.stats.steps for one in found])
    # The types were heard; the demo model's MTP block hardly minds.
    assert name == "mtp" or drafted[0] != drafted[1]


@pytest.mark.parametrize("name", ["mtp", "dflash"])
def test_quantized_values_need_flash_attention(owner: Engine, model: Path, name: str) -> None:
    config = EngineConfig(n_ctx=256, n_threads=1, flash_attn=False)
    with pytest.raises(DraftError, match=r"(?i)flash"):
        Engine(model, DraftConfig(name, cache_type_v="q8_0"), config, share=owner)
