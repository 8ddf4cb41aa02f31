"""libpyspec in Python: the only package that touches the compiled module.

    with NativeEngine.open("model.gguf", EngineConfig(), max_nodes=8, mtp=True) as engine:
        engine.prefill(0, prompt[:-1])
        drafts = engine.mtp_draft([0], [prompt[-1]], depth=3)
        engine.verify([(0, [prompt[-1], *drafts.tokens[0, :, 0, 0]], [-1, 0, 1, 2])])
        nodes, bonus = engine.accept(engine.sampler(SamplingConfig(temperature=0)), 0, 4)
        engine.commit(0, nodes)

The contract of every call is stated in `include/pyspec.h`.
"""

from pyspec.native.binding import library_version
from pyspec.native.engine import (
    DflashDrafts,
    DflashInfo,
    MtpDrafts,
    NativeEngine,
    NativeInfo,
    NativeTimings,
)
from pyspec.native.sampler import NativeSampler

__all__ = [
    "DflashDrafts",
    "DflashInfo",
    "MtpDrafts",
    "NativeEngine",
    "NativeInfo",
    "NativeSampler",
    "NativeTimings",
    "library_version",
]
