"""The benchmark: its JSON object, its prompts, and an honest baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyspec import ArgumentError, DraftConfig, EngineConfig, SamplingConfig
from pyspec.bench import BUILT_IN, read_prompts, run
from pyspec.cli import main


@pytest.fixture(scope="module")
def result(model: Path):
    return run(
        str(model),
        [DraftConfig("mtp", depth=2), DraftConfig("none")],
        BUILT_IN[:2],
        max_tokens=24,
        repeat=2,
        config=EngineConfig(n_threads=1),
        sampling=SamplingConfig(temperature=0),
    )


def test_plain_comes_first_and_once(result) -> None:
    assert [one.draft for one in result.results] == ["none", "mtp"]
    plain, mtp = result.results
    assert plain.speedup.median == plain.speedup.min == plain.speedup.max == 1
    assert plain.tokens_per_step == 1 and plain.acceptance_by_depth == []
    assert mtp.tokens_per_step > 1 and len(mtp.acceptance_by_depth) == 2
    assert mtp.decode_tps.min <= mtp.decode_tps.median <= mtp.decode_tps.max
    assert result.divergent == {"mtp": 0}


def test_json_of_the_command(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n\ndef f(\n")
    out = tmp_path / "bench.json"
    options = ["--prompts", str(prompts), "-n", "8", "--repeat", "1", "--threads", "1"]
    done = CliRunner().invoke(
        main, ["bench", "demo", "--draft", "mtp", *options, "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "speed-up" in done.output
    found = json.loads(out.read_text())
    assert list(found) == ["model", "machine", "results"]
    for one in found["results"]:
        assert list(one) == [
            "draft",
            "decode_tps",
            "speedup",
            "tokens_per_step",
            "acceptance_by_depth",
            "ms",
        ]
        assert list(one["speedup"]) == list(one["decode_tps"]) == ["median", "min", "max"]
        assert list(one["ms"]) == ["draft", "verify", "sample", "commit", "other"]


def test_prompts(tmp_path: Path) -> None:
    assert read_prompts(None) == list(BUILT_IN)
    path = tmp_path / "prompts"
    path.write_text('["one\\ntwo", "three"]')
    assert read_prompts(path) == ["one\ntwo", "three"]
    for text, message in [("", "has no prompt"), ("[1]", "array of strings"), ("[", "not JSON")]:
        path.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            read_prompts(path)
    with pytest.raises(ArgumentError, match="No such file"):
        read_prompts(tmp_path / "none")
