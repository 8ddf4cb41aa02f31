"""What `pyspec info` tells of a model: layers, the drafters it can feed, memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pyspec._libs import use_patched_libraries
from pyspec.controller import Controller
from pyspec.exactness import by_exactness
from pyspec.generate import Engine
from pyspec.registry import offers

_DEAR = 3.0  # what 4 nodes cost, in passes of one, where it is worth a warning


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model as it was opened.

    Attributes:
        path: The file.
        arch: ``general.architecture``.
        description: Architecture, number of weights and type in a line, as ``qwen35 7.1M Q8_0``.
        parameters: Number of weights.
        context: ``used`` and ``trained``, in tokens.
        layers: Number of layers by kind: ``recurrent``, ``attention``, ``mtp``.
        exactness: Types of the file's matrices: ``exact`` ones give a draft node the bits of plain
            decoding here, ``inexact`` ones the same up to rounding, of ``unknown`` ones it was not
            measured.
        drafts: Drafters that the file can feed.
        missing: For the other drafters, what the file lacks.
        memory: Bytes: ``weights``, ``compute``, and per slot ``attention_cache``, ``state``,
            ``rollback``, ``mtp_cache`` and their sum ``per_slot``.
        verify_ms: Milliseconds of a verify pass by number of nodes, briefly measured; empty where
            nothing is drafted.
        warnings: What will not work, or not pay.
    """

    path: str
    arch: str
    description: str
    parameters: int
    context: dict[str, int]
    layers: dict[str, int]
    exactness: dict[str, list[str]]
    drafts: list[str]
    missing: dict[str, str]
    memory: dict[str, int]
    verify_ms: dict[int, float]
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The object that ``pyspec info --json`` prints."""
        return asdict(self)


def report(engine: Engine) -> ModelReport:
    """Describes the model that `engine` has open."""
    native, slots = engine.native.info, engine.config.n_slots
    found = offers(engine.file)
    return ModelReport(
        path=str(engine.file.path),
        arch=native.arch,
        description=f"{native.arch} {_short(native.n_params)} {engine.file.file_type}",
        parameters=native.n_params,
        context={"used": engine.n_ctx, "trained": native.n_ctx_train},
        layers={
            "recurrent": native.n_layer_recurrent,
            "attention": native.n_layer - native.n_layer_recurrent,
            "mtp": native.n_layer_mtp,
        },
        exactness=_exactness(engine),
        drafts=[offer.name for offer in found if offer.missing is None],
        missing={offer.name: offer.missing for offer in found if offer.missing is not None},
        memory=_memory(native, slots),
        verify_ms=_verify_ms(engine),
        warnings=_warnings(engine),
    )


def _short(count: int) -> str:
    """A number of weights with one decimal: ``7.1M``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _exactness(engine: Engine) -> dict[str, list[str]]:
    llama_cpp = use_patched_libraries()
    build = llama_cpp.llama_print_system_info().decode()
    return dict(by_exactness(engine.file.matrix_types, build))


def _memory(native: Any, slots: int) -> dict[str, int]:
    per_slot = {
        "attention_cache": native.bytes_kv // slots,
        "state": native.bytes_state,
        "rollback": native.bytes_rollback,
        "mtp_cache": native.bytes_mtp // slots,
    }
    return {
        "weights": native.size_bytes,
        "compute": native.bytes_compute,
        **per_slot,
        "per_slot": sum(per_slot.values()),
    }


def _verify_ms(engine: Engine) -> dict[int, float]:
    drafter = engine.drafter
    points = drafter.curve.points if isinstance(drafter, Controller) else []
    return {nodes: round(ms, 3) for nodes, ms in points}


def _warnings(engine: Engine) -> list[str]:
    native = engine.native.info
    warnings = []
    if engine.plain_because:
        warnings.append(engine.plain_because)
    elif not native.tree:
        warnings.append("drafts are verified as chains: --draft-top-k above 1 has no effect")
    if inexact := _exactness(engine)["inexact"]:
        warnings.append(
            f"with {', '.join(inexact)} weights, speculative text can leave plain text where two "
            "tokens are nearly equal"
        )
    cost = _verify_ms(engine)
    if 1 in cost and 4 in cost and cost[4] > _DEAR * cost[1]:
        warnings.append(
            f"a pass of 4 nodes takes {cost[4] / cost[1]:.1f} times as long as one of 1: with these "
            "types on this machine speculation can gain little"
        )
    if not engine.plain_because and engine.drafter.name == "none":
        warnings.append("no drafter fits this file: it is decoded plainly")
    if not engine.native.chat_template:
        warnings.append(
            "the file has no chat template: --chat and /v1/chat/completions will refuse"
        )
    if engine.n_ctx > native.n_ctx_train:
        warnings.append(
            f"context of {engine.n_ctx} tokens is longer than the {native.n_ctx_train} of training"
        )
    return warnings
