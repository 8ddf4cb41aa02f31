"""Plain against speculative decoding, measured fairly in one process."""

from pyspec.bench.prompts import BUILT_IN, read_prompts
from pyspec.bench.report import render
from pyspec.bench.runner import BenchResult, DraftResult, run

__all__ = ["BUILT_IN", "BenchResult", "DraftResult", "read_prompts", "render", "run"]
