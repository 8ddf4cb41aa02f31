"""Configurations refuse what breaks a rule, and name option, value and rule."""

from __future__ import annotations

import dataclasses
import re

import pytest

from pyspec import ArgumentError, DraftConfig, EngineConfig, SamplingConfig


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (EngineConfig, "n_ctx", 3),
        (EngineConfig, "n_slots", 0),
        (EngineConfig, "n_threads", -1),
        (EngineConfig, "n_batch", 0),
        (EngineConfig, "cache_type_k", "q3"),
        (EngineConfig, "split_mode", "columns"),
        (EngineConfig, "main_gpu", -1),
        (EngineConfig, "tensor_split", (0.0, 0.0)),
        (EngineConfig, "tensor_split", (1.0, -1.0)),
        (EngineConfig, "tensor_split", (1.0,) * 17),
        (EngineConfig, "tensor_split", (float("nan"), 1.0)),
        (DraftConfig, "cache_type_k", "q3"),
        (DraftConfig, "cache_type_v", "F16"),
        (DraftConfig, "depth", 0),
        (DraftConfig, "nodes", 65),
        (DraftConfig, "nodes", 0),
        (DraftConfig, "top_k", 0),
        (SamplingConfig, "temperature", -0.1),
        (SamplingConfig, "temperature", float("nan")),
        (SamplingConfig, "top_p", 0.0),
        (SamplingConfig, "top_k", -1),
        (SamplingConfig, "min_p", 1.5),
        (SamplingConfig, "seed", -1),
        (SamplingConfig, "seed", 2**32),
        (SamplingConfig, "penalty_last_n", -2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_refuses(kind: type, option: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"{option} is {value!r}, must be ")):
        kind(**{option: value})


def test_refuses_grammar_with_schema_and_bad_json() -> None:
    with pytest.raises(ArgumentError, match="at most one"):
        SamplingConfig(grammar='root ::= "a"', json_schema={})
    with pytest.raises(ArgumentError, match="json_schema is not JSON"):
        SamplingConfig(json_schema="{")


def test_are_frozen() -> None:
    for config in (EngineConfig(), DraftConfig(), SamplingConfig()):
        name = dataclasses.fields(config)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 1)


def test_greedy() -> None:
    assert SamplingConfig(temperature=0).greedy
    assert not SamplingConfig().greedy
