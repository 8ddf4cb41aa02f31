"""Which types of weights give a token the same bits in a batch as alone.

Where every matrix of a model has such a type, the logits of a draft node are plain decoding's to
the bit. The table was measured, see docs/exactness.md; tests/test_exactness.py measures it again on
the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Exact on x86-64 with AVX2 or AVX-512, repacked or not, up to 128 columns at least.
_EXACT = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
          "IQ4_NL", "IQ4_XS", "MXFP4"}  # fmt: skip
#: Multiplied by other code from four or eight columns on, which rounds differently.
_INEXACT = {"Q2_K", "Q3_K", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"}
#: Parts of a build that multiply in ways that were not measured, or were found to differ.
_OTHER_KERNELS = {"LLAMAFILE", "BLAS", "AMX_INT8", "KLEIDIAI", "MTL", "CUDA", "VULKAN"}


def is_exact(type_name: str, system_info: str) -> bool | None:
    """Whether a column of a product with such weights is the same in a batch as alone.

    Args:
        type_name: A ggml type, as ``Q4_K``.
        system_info: What ``llama_print_system_info()`` says of the build and the processor.

    Returns:
        None where it was not measured.
    """
    flags = _flags(system_info)
    if "AVX2" not in flags or flags & _OTHER_KERNELS:
        return None
    name = type_name.upper()
    return True if name in _EXACT else False if name in _INEXACT else None


def by_exactness(type_names: Iterable[str], system_info: str) -> Mapping[str, list[str]]:
    """The types of a file, sorted into ``exact``, ``inexact`` and ``unknown``."""
    found: dict[str, list[str]] = {"exact": [], "inexact": [], "unknown": []}
    labels = {True: "exact", False: "inexact", None: "unknown"}
    for name in sorted(set(type_names)):
        found[labels[is_exact(name, system_info)]].append(name)
    return found


def _flags(system_info: str) -> set[str]:
    """The names that are set, from ``CPU : AVX2 = 1 | FMA = 0 | MTL : EMBED_LIBRARY = 1 |``."""
    flags = set()
    for item in system_info.split("|"):
        device, _, setting = item.rpartition(" : ")
        flags.add(device.strip())
        name, _, value = setting.partition("=")
        if value.strip() == "1":
            flags.add(name.strip())
    return flags
