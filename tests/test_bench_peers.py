"""Peers of the benchmark: a stand-in for llama-server, and what is said when there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pyspec import ArgumentError, DraftConfig, EngineConfig, SamplingConfig
from pyspec.bench import PeerConfig, Sizes, built_in, read_peer, run
from pyspec.bench.peers import LlamaServer, _spec_flags
from pyspec.errors import ComputeError

GREEDY = SamplingConfig(temperature=0, seed=0)
FAKE = Path(__file__).with_name("fake_llama_server.py")


def program(folder: Path, text: str) -> Path:
    path = folder / "llama-server"
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return program(tmp_path, f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')


def start(path: Path, model: Path, kind: str | None = None, **options) -> LlamaServer:
    config = PeerConfig("llama-server", path)
    sizes = {"n_max": 2, "n_ctx": 4096, "threads": 1, **options}
    return LlamaServer(config, model, GREEDY, kind=kind, **sizes)


def test_a_request(server: Path, model: Path) -> None:
    one = start(server, model, "draft-mtp", slots=2)
    try:
        run_ = one.decode([7, 8, 9], 5)
        assert run_.tokens == [10, 11, 12, 13, 14]
        # The first token comes out of the prompt's pass: four were decoded, in 40 ms.
        assert run_.decoded == 4 and run_.decode_tps == 100
        assert (run_.prompt_tokens, run_.prompt_ms) == (3, 6.0)
        assert (run_.drafted, run_.accepted) == (4, 2)
        assert one.decode_together([[1], [2]], 5) > 0
        assert one.decode_together([[1]] * 3, 5) is None  # it has two slots
        assert one.peak_rss > 1 << 20
        with pytest.raises(ComputeError, match=r"status 400.*exceeds the available context"):
            one.decode([1] * 4001, 5)
    finally:
        one.close()
    with pytest.raises(ComputeError):
        one.decode([1], 2)


def test_it_is_ended(server: Path, model: Path) -> None:
    one = start(server, model)
    pid = one._process.pid
    os.kill(pid, 0)
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_in_a_run(server: Path, model: Path) -> None:
    peer = PeerConfig("llama-server", server, kinds=("draft-mtp",), n_max=(1, 3))
    result = run(
        str(model),
        [DraftConfig("mtp", depth=2)],
        built_in(["code"])[:2],
        config=EngineConfig(n_threads=1),
        sampling=GREEDY,
        sizes=Sizes(8, 2, sequences=(1, 2)),
        scenario=["decode", "concurrency", "memory"],
        peers=[peer],
    )
    assert [one.draft for one in result.results] == [
        "none",
        "mtp/depth=2",
        "llama-server none",
        "llama-server draft-mtp/1",
        "llama-server draft-mtp/3",
    ]
    none, one = result.results[2:4]
    assert none.kind == "llama-server" and none.decode_tps.median == 100
    assert none.tokens_per_step == 1 and none.acceptance_by_source == {}
    assert one.tokens_per_step == round(7 / 4, 4)  # 3 of the 7 were drafts
    assert one.acceptance_by_source == {"llama-server draft-mtp/1": round(3 / 7, 4)}
    assert result.divergent["mtp/depth=2"] == 0
    assert result.divergent["llama-server none"] == 2 and none.identical == 0
    own = [(one.draft, one.sequences) for one in result.concurrency]
    assert ("llama-server draft-mtp/3", 2) in own and ("mtp/depth=2", 1) in own
    peaks = {one.draft: one.peak_rss for one in result.memory}
    assert peaks["mtp/depth=2"] > 1 << 24 and peaks["llama-server none"] > 1 << 20


def test_plain_llama(model: Path) -> None:
    """The class as it is, in a process of its own; here on the same libraries, so equal."""
    from pyspec._libs import library_dir
    from pyspec.bench.peers import LlamaCppPython

    config = PeerConfig("llama-cpp-python", library_dir())
    one = LlamaCppPython(config, model, GREEDY, n_ctx=256, threads=1)
    try:
        first, second = one.decode([100, 101, 102], 8), one.decode([100, 101, 102], 8)
        assert first.tokens == second.tokens and len(first.tokens) == 8
        assert first.decoded == 7 and first.decode_ms > 0 and first.prompt_ms > 0
    finally:
        one.close()
    with pytest.raises(ArgumentError, match="peer llama-cpp-python: "):
        LlamaCppPython(config, model.with_name("none.gguf"), GREEDY, n_ctx=256, threads=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm=/x", "peer is 'vllm=/x', must be llama-server=PATH"),
        ("llama-server", "must be llama-server=PATH"),
        ("llama-server=/no/such", "there is no file /no/such"),
        (f"llama-server={FAKE.with_name('conftest.py')}", "is not a program"),
        ("llama-cpp-python=/no/such", "there is no folder"),
    ],
)
def test_wrong_peers(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_peer(text)


def test_right_peers(server: Path) -> None:
    assert read_peer(f"llama-server={server}", n_max=(5,)) == PeerConfig(
        "llama-server", server, n_max=(5,)
    )
    assert read_peer("llama-cpp-python").path is None


def test_no_llama_server(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ArgumentError, match=r"ended with status 3 before it served: .*sorry"):
        start(program(tmp_path, "#!/bin/sh\necho sorry\nexit 3\n"), model)
    web = f'#!/bin/sh\nexec "{sys.executable}" -m http.server --bind 127.0.0.1 "$6"\n'
    with pytest.raises(ArgumentError, match="is no llama-server"):
        start(program(tmp_path, web), model)
    with pytest.raises(ArgumentError, match="Exec format error"):
        start(program(tmp_path, ""), model)


def test_refused_options_are_told(server: Path, model: Path) -> None:
    with pytest.raises(ArgumentError, match="unknown speculative type: draft-unknown"):
        start(server, model, "draft-unknown")


def test_flags() -> None:
    assert _spec_flags(None, 0, None, None) == []
    assert _spec_flags("draft-mtp", 3, 0.5, None) == [
        *("--spec-type", "draft-mtp", "--spec-draft-n-max", "3"),
        *("--spec-synth-rates", "0.500000,0.250000,0.125000"),
    ]
    drafter = Path("d.gguf")
    assert _spec_flags("draft-dflash", 3, None, drafter)[-2:] == ["--spec-draft-model", "d.gguf"]
    assert "--spec-ngram-simple-size-m" in _spec_flags("ngram-simple", 3, None, drafter)
