"""What it costs to choose tokens from large vocabularies, on a model file (random weights will do).

    python tests/bench/sampling.py 08-q4_0.gguf --nodes 1 4 16

Draws and a drafter's selection from a row of logits; then passes of N nodes of which up to three rows
are walked greedily: with rows read in place, with all rows copied as llama.cpp does, and with the
tokens chosen on the graph. The ways take turns; medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pyspec.config import EngineConfig, SamplingConfig
from pyspec.native import NativeEngine
from pyspec.native.engine import SlotTree
from tests.bench.llama_tree import llama_cpp

DRAWS = {
    "greedy": SamplingConfig(temperature=0),
    "top_k 40": SamplingConfig(seed=1),
    "top_k 40, a bias": SamplingConfig(seed=1, logit_bias={3: 1.0}),
}
WALKED = 3


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def draws(engine: NativeEngine, rounds: int) -> dict[str, float]:
    """Median of drawing one token, by sampler, and of a drafter's selection."""
    engine.verify([(0, [1, 2, 3], [-1, 0, 1])])
    calls: dict[str, Callable[[int], object]] = {
        name: partial(engine.sample, engine.sampler(config), 0) for name, config in DRAWS.items()
    }
    calls["drafter's best 5"] = lambda node: engine.top(0, node, 5)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(partial(call, i % 3)))
    return {name: median(values) for name, values in times.items()}


def passes(engine: NativeEngine, nodes: int, rounds: int) -> dict[str, float]:
    """Median of a pass of a chain and a greedy walk, by the way that rows are read."""
    sampler = engine.sampler(DRAWS["greedy"])

    def step(tree: list[SlotTree], greedy: bool, copied: bool) -> None:
        engine.verify(tree, greedy=greedy)
        if copied:
            llama_cpp.llama_get_logits(engine.context_address)
        for node in range(min(WALKED, nodes)):
            engine.sample(sampler, 0, node)

    ways = {"in place": (False, False), "copied": (False, True), "graph": (True, False)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = [*ways]
    for i in range(rounds + 3):
        tokens = [(7 + i + 11 * node) % engine.info.n_vocab for node in range(nodes)]
        tree: list[SlotTree] = [(0, tokens, [node - 1 for node in range(nodes)])]
        order.append(order.pop(0))
        for name in order:
            times[name].append(timed(partial(step, tree, *ways[name])))
    return {name: median(values[3:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    config = EngineConfig(n_ctx=512, n_threads=args.threads, n_gpu_layers=0, graph_argmax=True)
    with NativeEngine.open(args.model, config, max_nodes=max(3, *args.nodes)) as engine:
        print(f"{engine.info.n_vocab} logits")
        for name, ms in draws(engine, args.rounds).items():
            print(f"  {name:20} {ms:.3f}")
        engine.reset(0)
        engine.prefill(0, list(range(1, 60)))
        for nodes in args.nodes:
            found = passes(engine, nodes, args.rounds)
            print(f"{nodes} nodes: " + ", ".join(f"{way} {ms:.2f}" for way, ms in found.items()))


if __name__ == "__main__":
    main()
