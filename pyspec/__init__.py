"""Lossless speculative decoding for GatedDeltaNet hybrids on a patched llama.cpp.

import pyspec

with pyspec.Engine("model.gguf", draft="mtp") as engine:
    for piece in engine.generate("def main(", max_tokens=64, temperature=0):
        print(piece, end="", flush=True)
"""

from pyspec._libs import set_library_path as _set_library_path

_set_library_path()  # before anything imports llama_cpp

from pyspec._version import __version__  # noqa: E402
from pyspec.accept import AcceptedPath, accept  # noqa: E402
from pyspec.config import DraftConfig, EngineConfig, SamplingConfig  # noqa: E402
from pyspec.drafter import DraftContext, Drafter, Outcome  # noqa: E402
from pyspec.errors import (  # noqa: E402
    AbortedError,
    AllocationError,
    ArgumentError,
    ComputeError,
    ContextError,
    DraftError,
    EncodingError,
    LibraryError,
    ModelError,
    PyspecError,
    SamplerError,
    StateError,
    TemplateError,
    TreeError,
)
from pyspec.generate import Engine, Generation, GenerationResult  # noqa: E402
from pyspec.stats import Stats  # noqa: E402
from pyspec.tree import DraftTree, merge  # noqa: E402

__all__ = [
    "AbortedError",
    "AcceptedPath",
    "AllocationError",
    "ArgumentError",
    "ComputeError",
    "ContextError",
    "DraftConfig",
    "DraftContext",
    "DraftError",
    "DraftTree",
    "Drafter",
    "EncodingError",
    "Engine",
    "EngineConfig",
    "Generation",
    "GenerationResult",
    "LibraryError",
    "ModelError",
    "Outcome",
    "PyspecError",
    "SamplerError",
    "SamplingConfig",
    "StateError",
    "Stats",
    "TemplateError",
    "TreeError",
    "__version__",
    "accept",
    "merge",
]
