"""Lossless speculative decoding for GatedDeltaNet hybrids on a patched llama.cpp.

import pyspec

with pyspec.Engine("model.gguf", draft="mtp") as engine:
    for piece in engine.generate("def main(", max_tokens=64, temperature=0):
        print(piece, end="", flush=True)
"""

from typing import TYPE_CHECKING

from pyspec._libs import set_library_path as _set_library_path

if TYPE_CHECKING:
    from pyspec.async_engine import AsyncEngine, AsyncGeneration, BlockingGeneration
    from pyspec.llama import Llama

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
    QueueFullError,
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
    "AsyncEngine",
    "AsyncGeneration",
    "BlockingGeneration",
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
    "Llama",
    "ModelError",
    "Outcome",
    "PyspecError",
    "QueueFullError",
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

#: Imported when they are asked for: these modules import `llama_cpp` or asyncio.
_LAZY = {
    "AsyncEngine": "pyspec.async_engine",
    "AsyncGeneration": "pyspec.async_engine",
    "BlockingGeneration": "pyspec.async_engine",
    "Llama": "pyspec.llama",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'pyspec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
