"""Plain against speculative decoding, and against peers, measured fairly in one run."""

from pyspec.bench.figures import BenchResult, DraftResult
from pyspec.bench.peers import PeerConfig, read_peer
from pyspec.bench.prompts import BUILT_IN, SETS, BenchPrompt, built_in, read_prompts
from pyspec.bench.report import render
from pyspec.bench.runner import SCENARIOS, Sizes, every_draft, run

__all__ = [
    "BUILT_IN",
    "SCENARIOS",
    "SETS",
    "BenchPrompt",
    "BenchResult",
    "DraftResult",
    "PeerConfig",
    "Sizes",
    "built_in",
    "every_draft",
    "read_peer",
    "read_prompts",
    "render",
    "run",
]
