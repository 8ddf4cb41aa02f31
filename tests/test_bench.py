"""The benchmark: its scenarios and outputs, its prompts, and an honest baseline."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from pyspec import ArgumentError, DraftConfig, EngineConfig, SamplingConfig
from pyspec.bench import (
    BUILT_IN,
    SCENARIOS,
    SETS,
    BenchPrompt,
    BenchResult,
    Sizes,
    built_in,
    read_prompts,
    render,
    run,
)
from pyspec.bench.machine import busy_elsewhere
from pyspec.bench.report import to_csv
from pyspec.cli import main

GREEDY = SamplingConfig(temperature=0, seed=0)
ONE_THREAD = EngineConfig(n_threads=1)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def result(model: Path):
    """Every scenario, small."""
    return run(
        str(model),
        [DraftConfig("mtp", depth=2), DraftConfig("auto"), DraftConfig("none")],
        [*built_in(["code"])[:2], *built_in(["copy"])[:1]],
        config=ONE_THREAD,
        sampling=GREEDY,
        sizes=Sizes(16, 2, (32, 100_000), (1, 3), (48, 100_000), 8),
        scenario=SCENARIOS,
    )


def test_plain_comes_first_and_once(result) -> None:
    assert [one.draft for one in result.results] == ["none", "mtp/depth=2", "auto"]
    plain, mtp, _ = result.results
    assert plain.speedup.median == plain.speedup.min == plain.speedup.max == 1
    assert plain.tokens_per_step == 1 and plain.acceptance_by_depth == []
    assert mtp.tokens_per_step > 1 and len(mtp.acceptance_by_depth) == 2
    assert mtp.decode_tps.min <= mtp.decode_tps.median <= mtp.decode_tps.max
    assert result.divergent == {"mtp/depth=2": 0, "auto": 0}
    assert [one.identical for one in result.results] == [1, 1, 1]
    assert len(plain.runs) == 6 and plain.threads == 1


def test_acceptance_by_source_and_sizes(result) -> None:
    plain, mtp, auto = result.results
    assert plain.acceptance_by_source == {} and set(plain.trees) == {1}
    assert set(mtp.acceptance_by_source) == {"mtp"} and max(mtp.trees) == 3
    assert set(auto.acceptance_by_source) <= {"mtp", "ngram", "dflash"}
    assert all(0 <= rate <= 1 for rate in mtp.acceptance_by_source.values())
    assert set(mtp.speedup_by_set) == {"code", "copy"}


def test_stages_hold_what_native_code_takes(result) -> None:
    for one in result.results:
        assert 0 < one.native_ms <= sum(one.ms.values())
        assert 0 <= one.graph_reuse <= 1


def test_reading_a_prompt_does_not_count_as_reuse_of_a_step(model: Path) -> None:
    """The passes that read a long prompt keep their graph, too."""
    result = run(
        str(model),
        [DraftConfig("none")],
        [BenchPrompt(tuple(i % 200 for i in range(2000)), "")],
        config=ONE_THREAD,
        sampling=GREEDY,
        sizes=Sizes(2, 2),
    )
    assert 0.5 <= result.results[0].graph_reuse <= 1


def test_prompts_contexts_concurrency(result) -> None:
    assert {(one.draft, one.tokens) for one in result.prompt} >= {("none", 32), ("auto", 32)}
    assert {one.tokens for one in result.context} == {48}
    assert [one.speedup for one in result.context if one.draft == "none"] == [1]
    assert {one.sequences for one in result.concurrency} == {1, 3}
    assert all(one.tps.min > 0 for one in (*result.prompt, *result.concurrency))
    assert any("100000" in note for note in result.notes)


def test_cost_memory_layers(result) -> None:
    assert [one.nodes for one in result.cost] == [1, 2, 3, 4, 6, 8]
    assert result.cost[0].of_one == 1
    memory = {one.draft: one for one in result.memory}
    assert memory["none"].rollback == 0 or memory["none"].nodes == 1
    assert 0 < memory["mtp/depth=2"].rollback < memory["mtp/depth=2"].snapshots
    assert memory["mtp/depth=2"].peak_rss > memory["mtp/depth=2"].weights
    assert [one.nodes for one in result.layers] == [1, 4]
    for one in result.layers:
        assert all(one.ms[kind] > 0 for kind in ("gdn", "attention", "ffn", "head"))


def test_csv_has_every_figure(result) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert {row["scenario"] for row in rows} == set(SCENARIOS)
    decode = [row for row in rows if row["scenario"] == "decode"]
    assert [row["draft"] for row in decode] == ["none", "mtp/depth=2", "auto"]
    assert float(decode[1]["speedup.median"]) == result.results[1].speedup.median


def test_page(result, monkeypatch) -> None:
    from pyspec.bench.page import page

    text = page(result)
    assert text.count("<svg") == 6  # the plots of all that was measured
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace("http://creativecommons.org", "")  # fmt: skip
    assert "<script" not in text and "mtp/depth=2" in text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r"pip install \"pyspec\[plot\]\""):
        page(result)
    done = CliRunner().invoke(main, ["bench", "demo", "--html", "x.html"])
    assert done.exit_code == 1 and "pyspec[plot]" in done.output


def test_interrupted_run_tells_what_it_has(model: Path) -> None:
    @contextmanager
    def progress(name: str):
        def report(done: float) -> None:
            if name == "decode" and done > 0.7:
                raise KeyboardInterrupt

        yield report

    result = run(
        str(model),
        [DraftConfig("mtp", depth=2)],
        built_in()[:2],
        config=ONE_THREAD,
        sampling=GREEDY,
        sizes=Sizes(8, 1),
        scenario=["decode", "prompt"],
        progress=progress,
    )
    assert result.interrupted and not result.prompt
    assert [len(one.runs) for one in result.results] == [1, 1]  # the turn that was finished


def test_all_engines_of_a_run_have_one_number_of_threads(model: Path, probes: list) -> None:
    result = run(
        str(model),
        [DraftConfig("mtp", depth=2), DraftConfig("auto")],
        built_in()[:1],
        config=EngineConfig(),
        sampling=GREEDY,
        sizes=Sizes(4, 1, nodes=2, sequences=(2,)),
        scenario=["decode", "concurrency", "cost", "layers"],
    )
    assert len({one.threads for one in result.results}) == len(probes) == 1


def test_measurements_start_without_the_packages_of_the_tests() -> None:
    """`scripts/setup` alone installs none of them."""
    code = """
import runpy, sys
for name in ("anthropic", "httpx", "hypothesis", "matplotlib", "openai", "pytest", "selenium"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

    def must_show(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "tests/bench/must_show.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    listed = must_show("list")
    assert listed.returncode == 0 and "memory-serve" in listed.stdout, listed.stderr
    served = must_show("run", "memory-serve")
    assert served.returncode == 1
    assert served.stderr.startswith("Error: memory-serve needs httpx, one of the packages")


@pytest.fixture
def played_processors(monkeypatch) -> SimpleNamespace:
    """Processor time grows as `every` and `own` say, in cores; a second passes where one waits."""
    played = SimpleNamespace(now=0.0, every={}, own=0.0)

    def cpu_times() -> SimpleNamespace:
        spent = {kind: 1e4 + played.now * cores for kind, cores in played.every.items()}
        return SimpleNamespace(nice=0.0, system=0.0, **spent)

    own = SimpleNamespace(
        cpu_times=lambda: SimpleNamespace(user=played.now * played.own, system=7.0)
    )
    monkeypatch.setattr("psutil.cpu_times", cpu_times)
    monkeypatch.setattr("psutil.Process", lambda: own)
    monkeypatch.setattr("time.perf_counter", lambda: played.now)
    monkeypatch.setattr("time.sleep", lambda _: setattr(played, "now", played.now + 1.0))
    return played


@pytest.mark.parametrize(
    ("every", "own", "expected"),
    [
        pytest.param({"user": 0.0, "idle": 2.0}, 0.0, 0.0, id="quiet-whatever-was-before"),
        pytest.param({"user": 1.0, "idle": 1.0}, 1.0, 0.0, id="what-it-takes-itself"),
        pytest.param({"user": 1.5, "idle": 0.5}, 1.0, 0.5, id="what-others-take"),
        pytest.param({"user": 0.1, "steal": 0.4, "iowait": 1.0}, 0.1, 0.4, id="what-a-host-takes"),
    ],
)
def test_a_machine_is_as_busy_as_others_make_it_now(
    played_processors, every: dict[str, float], own: float, expected: float
) -> None:
    played_processors.every, played_processors.own = every, own
    assert busy_elsewhere() == pytest.approx(expected)


def test_another_process_makes_a_machine_busy() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1
    )
    try:
        process.stdout.readline()
        assert busy_elsewhere() > 0.5
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("busy", "warns"), [(None, False), (0.4, False), (1.2, True)])
def test_a_busy_machine_is_told(busy: float | None, warns: bool) -> None:
    out = io.StringIO()
    about = {"cpu": "x", "cores": 4, "system": "y", "pyspec": "1", "busy": busy}
    render(BenchResult("m.gguf", about), Console(file=out, width=200))
    assert ("other processes used 1.2 of 4 cores" in out.getvalue()) == warns
    assert ("warning" in out.getvalue()) == warns


def test_oracle_is_right_as_often_as_it_says(model: Path) -> None:
    result = run(
        str(model),
        [DraftConfig("oracle:1", depth=3), DraftConfig("oracle:0", depth=3)],
        built_in()[:2],
        config=ONE_THREAD,
        sampling=GREEDY,
        sizes=Sizes(16, 1, sequences=(2,)),
        scenario=["decode", "concurrency"],
    )
    _, right, wrong = result.results
    assert right.acceptance_by_depth[0] == 1 and wrong.acceptance_by_depth[0] == 0
    assert result.divergent == {"oracle:1/depth=3": 0, "oracle:0/depth=3": 0}
    assert {one.draft for one in result.concurrency} == {"none", right.draft, wrong.draft}


def test_json_of_the_command(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n\ndef f(\n")
    out, table = tmp_path / "bench.json", tmp_path / "bench.csv"
    options = ["--prompts", str(prompts), "-n", "8", "--repeat", "1", "--threads", "1"]
    drafts = "mtp,mtp/depth=2/top_k=2"
    done = CliRunner().invoke(
        main,
        ["bench", "demo", "--draft", drafts, *options, "--json", str(out), "--csv", str(table)],
    )
    assert done.exit_code == 0, done.output
    assert "speed-up" in done.output
    found = json.loads(out.read_text())
    assert list(found)[:4] == ["model", "machine", "settings", "results"]
    assert {"cpu", "cores", "memory", "system", "pyspec"} <= set(found["machine"])
    assert [one["draft"] for one in found["results"]] == ["none", "mtp", "mtp/depth=2/top_k=2"]
    for one in found["results"]:
        assert list(one["speedup"]) == list(one["decode_tps"]) == ["median", "min", "max"]
        assert list(one["ms"]) == ["draft", "verify", "sample", "commit", "other"]
    assert table.read_text().startswith("scenario,draft,")


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--json"], ["--json", "demo"], ["--json", "-", "demo"], ["demo", "--json", "-"]],
    ids=" ".join,
)
def test_json_without_a_file_goes_to_standard_output(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments, "-n", "2", "--repeat", "1"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["settings"]["max_tokens"] == 2
    assert "speed-up" in done.stderr


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "-"], ["--json=demo"], []])
def test_the_model_is_asked_for(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0 and "Missing argument 'MODEL'" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scenario", "speed"], "no scenario is called 'speed', there are: decode, "),
        (["--set", "poems"], "no prompt set is called 'poems', there are: all, code, "),
        (["--draft", "mtp/deep=2"], "--draft has the limit 'deep=2', must be depth=N"),
        (["--concurrency", "1,x"], "--concurrency is '1,x', must be numbers above 0"),
        (["--peer", "other=/x"], "peer is 'other=/x', must be llama-server=PATH"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["bench", "demo", *options])
    assert done.exit_code == 1 and message in " ".join(done.output.split()), done.output


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


def test_jsonl_and_sets(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n\n{"prompt": "two"}\n{"text": "three"}\n')
    assert read_prompts(path) == ["one", "two", "three"]
    for text, message in [("{", "line 1 is not JSON"), ("[1]", "line 1 must be a string or an")]:
        path.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            read_prompts(path)
    every = built_in(["all"])
    assert (
        {prompt.group for prompt in every} == set(SETS) == {"code", "prose", "chat", "json", "copy"}
    )
    assert built_in(["code", "code"]) == built_in(["code"])
