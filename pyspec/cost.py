"""`CostCurve`: milliseconds of a step by the number of tokens in the target's pass.

The curve has steps, where kernels switch, so it is measured, not assumed: once in a few passes
when an engine opens, thoroughly by ``pyspec tune``, and all the time while decoding.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyspec._version
from pyspec._libs import library_dir
from pyspec.errors import ArgumentError

if TYPE_CHECKING:
    from pyspec.config import EngineConfig
    from pyspec.model_file import ModelFile
    from pyspec.native import NativeEngine
    from pyspec.native.engine import SlotTree

COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sizes that are measured, and the only sizes of tree that a controller uses."""

_STEP = 0.1  # how far a measured size follows a new measurement
_DRIFT = (
    0.06  # how much of that all sizes follow: mostly the machine as a whole is slower or faster
)
_FAR = 1.4  # times the largest known size: too far to say anything of it
_LEAST, _MOST = 0.5, 1.25  # what a single measurement counts for, as a factor


class CostCurve:
    """Milliseconds of a step, linear between the measured sizes.

    Args:
        points: Columns and milliseconds, at least one.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        self._columns: list[int] = []
        self._ms: list[float] = []  # before the drift
        self._drift = 1.0
        self._observed = 0
        self._least: dict[int, tuple[int, float]] = {}  # see least_column_ms
        for columns, ms in sorted(points):
            self._columns.append(columns)
            self._ms.append(ms)
        if not self._columns or self._columns[0] < 1 or min(self._ms) <= 0:
            raise ArgumentError("cost curve needs points of at least 1 column and more than 0 ms")

    @property
    def points(self) -> list[tuple[int, float]]:
        """Columns and milliseconds."""
        return [(n, ms * self._drift) for n, ms in zip(self._columns, self._ms, strict=True)]

    def ms(self, columns: int) -> float:
        """Milliseconds of a step with so many columns; extrapolated beyond the last size."""
        at = bisect.bisect_left(self._columns, columns)
        if at < len(self._columns) and self._columns[at] == columns:
            return self._ms[at] * self._drift
        if len(self._columns) == 1:
            # Nothing else is known: half of a token's cost is shared.
            more = 0.5 * (columns - self._columns[0]) / self._columns[0]
            return self._ms[0] * (1 + more) * self._drift
        at = min(max(at, 1), len(self._columns) - 1)
        low, high = self._columns[at - 1], self._columns[at]
        slope = (self._ms[at] - self._ms[at - 1]) / (high - low)
        ms = self._ms[at - 1] + max(slope, 0.0) * (columns - low)
        return max(ms * self._drift, 1e-6)

    def least_column_ms(self, n: int, sizes: Sequence[int]) -> float:
        """What a node more costs at least: the lowest mean over the sizes of tree, for n trees.

        Up to 32 observations old.
        """
        at, ms = self._least.get(n, (-1, 0.0))
        if at != self._observed // 32:
            one = self.ms(n)
            ms = min(((self.ms(n * size) - one) / (size - 1) for size in sizes[1:]), default=0.0)
            self._least[n] = self._observed // 32, ms
        return ms

    def observe(self, columns: int, ms: float) -> None:
        """Follows a step that was measured while decoding.

        One that is larger than all that is known becomes a point of its own.
        """
        self._observed += 1
        usual = self.ms(columns)
        if columns > _FAR * self._columns[-1]:
            self._columns.append(columns)
            self._ms.append(max(min(ms, _MOST * usual) / self._drift, self._ms[-1]))
            return
        ratio = min(max(ms / usual, _LEAST), _MOST)
        self._drift *= ratio**_DRIFT
        step = ratio ** (_STEP - _DRIFT)
        at = bisect.bisect_left(self._columns, columns)
        if at < len(self._columns) and self._columns[at] == columns:
            self._ms[at] *= step
            return
        for near in (at - 1, at):
            if 0 <= near < len(self._ms):
                self._ms[near] *= step


@dataclass(frozen=True, slots=True)
class Measurement:
    """A round of `measure`.

    Attributes:
        columns: Tokens in the pass.
        ms: Milliseconds of the single passes.
    """

    columns: int
    ms: list[float]


def measure(
    native: NativeEngine,
    max_nodes: int,
    *,
    rounds: int = 3,
    seconds: float = 1.0,
    context: int = 0,
    brief: bool = False,
    slots: int = 1,
    progress: Callable[[float], object] | None = None,
) -> list[Measurement]:
    """Times passes of chains of every size on unused slots, in turn.

    Args:
        native: An engine whose slots are unused; they are left unused.
        max_nodes: Largest tree of the engine; larger sizes are spread over several slots.
        slots: How many may be used.
        rounds: Passes of every size; the first round is not counted when there are several.
        seconds: Ends after the round in which this much time has passed.
        context: Tokens that the sequence holds meanwhile.
        brief: Leave sizes out where a single pass takes long, so that opening a large model does
            not take several times as long as it must.
        progress: Called with the fraction done.
    """
    sizes = [n for n in COLUMNS if n <= max_nodes * slots and n + context <= native.info.n_ctx]
    times: dict[int, list[float]] = {n: [] for n in sizes}
    token = max(native.info.token_bos, 0)
    end = time.perf_counter() + seconds
    try:
        if context:
            native.prefill(0, [token] * context)
        if brief:
            native.verify([(0, [token], [-1])])  # reads the weights
            began = time.perf_counter()
            native.verify([(0, [token], [-1])])
            slow = time.perf_counter() - began
            few = (1, 4, 16) if slow > 0.3 else (1, 2, 4, 8, 32)
            keep = few[: len(few) - (slots == 1)] if slow > 0.03 else COLUMNS
            sizes = [n for n in sizes if n in keep]
            times = {n: times[n] for n in sizes}
        for done in range(rounds):
            for number, n in enumerate(sizes):
                began = time.perf_counter()
                native.verify(_chains(token, n, max_nodes))
                times[n].append(1e3 * (time.perf_counter() - began))
                if progress is not None:
                    progress((done + (number + 1) / len(sizes)) / rounds)
            if time.perf_counter() > end:
                break
    finally:
        for slot in range(slots):
            native.reset(slot)
    return [Measurement(n, times[n][1:] or times[n]) for n in sizes]


def _chains(token: int, n: int, most: int) -> list[SlotTree]:
    """Chains of `n` nodes in all, on as many slots as it takes, none longer than `most`."""
    slots = -(-n // most)
    lengths = [n // slots + (slot < n % slots) for slot in range(slots)]
    return [(slot, [token] * length, range(-1, length - 1)) for slot, length in enumerate(lengths)]


def curve_of(measured: Iterable[Measurement]) -> CostCurve:
    """The curve through the quickest passes: what delays a pass from outside is not its cost.

    It never falls. Where a larger pass was quicker than a smaller one, the smaller one was delayed.
    """
    points: list[tuple[int, float]] = []
    least = math.inf
    for one in sorted(measured, key=lambda one: -one.columns):
        least = min(least, min(one.ms))
        points.append((one.columns, least))
    return CostCurve(points)


def quickest(run: Callable[[], object], rounds: int = 5, seconds: float = 0.3) -> float:
    """Milliseconds of the quickest of some runs; stops after the one that ends past `seconds`."""
    times: list[float] = []
    while len(times) < rounds and sum(times) < 1e3 * seconds:
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def follow(known: float, measured: float, step: float = 0.15) -> float:
    """A running figure of a time, which falls quickly and rises slowly.

    Most of what is slower than usual was delayed from outside.

    Args:
        known: The figure so far; 0 for none.
        measured: A new measurement.
        step: How far a rise is followed.
    """
    if not known:
        return measured
    if measured < known:
        return known + 0.4 * (measured - known)
    return known + step * (min(measured, _MOST * known) - known)


_MANY_BYTES = 1 << 30  # weights that no single thread reads as fast as all together


def choose_threads(native: NativeEngine) -> int:
    """Lets verify passes use one thread where that is faster than all: in a small model.

    The two take turns, and the quickest pass of each counts: what delays some passes from outside
    decides nothing.

    Args:
        native: An engine whose slot 0 is unused; it is left unused.

    Returns:
        The number of threads.
    """
    most = native.info.n_threads
    if most == 1 or native.info.size_bytes > _MANY_BYTES:
        return most
    token = max(native.info.token_bos, 0)
    times: dict[int, list[float]] = {1: [], most: []}
    end = time.perf_counter() + 0.4
    best = most
    try:
        # The weights are read by one thread: where others use the cores, it has nobody to wait for.
        native.set_threads(1)
        native.verify([(0, [token], [-1])])
        for turn in range(6):
            if turn and time.perf_counter() > end:
                break
            for n, own in times.items():
                native.set_threads(n)
                began = time.perf_counter()
                native.verify([(0, [token], [-1])])
                own.append(time.perf_counter() - began)
        if min(times[1]) < 0.95 * min(times[most]):
            best = 1
    finally:
        native.reset(0)
        native.set_threads(best)
    return best


def settle_threads(
    native: NativeEngine, tuning: Tuning | None, like: NativeEngine | None = None
) -> int:
    """Threads of the verify passes of an engine that was opened with ``n_threads=0``.

    Those that ``pyspec tune`` found; without them those of `like`, where they were chosen, too, so
    that engines on the same weights agree; else what `choose_threads` finds.

    Args:
        native: As for `choose_threads`.
        tuning: What was kept for its model and options.
        like: Another engine of the same model.

    Returns:
        The number of threads.
    """
    known = 0
    if tuning is not None:
        known = tuning.threads
    elif like is not None and like.config.n_threads == 0:
        known = like.info.n_threads
    if not 1 <= known <= native.info.n_threads:
        return choose_threads(native)
    native.set_threads(known)
    return known


# ---- kept on disk ----


def cache_file(file: ModelFile, config: EngineConfig) -> Path:
    """Where the curve of a model on this machine is kept, under the user's cache directory."""
    stat = file.path.stat()
    parts = [
        file.path.resolve().as_posix(),
        stat.st_size,
        stat.st_mtime_ns,
        pyspec._version.__version__,
        _build(),
        platform.machine(),
        platform.processor(),
        os.cpu_count(),
        config.n_threads,
        config.n_gpu_layers,
        config.flash_attn,
        config.cache_type_k,
        config.cache_type_v,
    ]
    # No digest of hashlib, which brings OpenSSL along: a collision would cost speed, nothing else.
    name = f"{file.path.stem}-{zlib.crc32(repr(parts).encode()):08x}"
    return cache_dir() / "tune" / f"{name}.json"


def _build() -> list[tuple[str, int, int]]:
    """What tells one build of the libraries from another."""
    stats = [(path.name, path.stat()) for path in sorted(library_dir().glob("lib*"))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def cache_dir() -> Path:
    """The user's cache directory for pyspec; ``PYSPEC_CACHE_DIR`` puts another in its place."""
    if override := os.environ.get("PYSPEC_CACHE_DIR"):
        return Path(override)
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "pyspec"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyspec"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What ``pyspec tune`` keeps of a model on this machine.

    Attributes:
        model: Path of its file.
        threads: Threads of a verify pass.
        points: Columns and milliseconds.
    """

    model: str
    threads: int
    points: list[tuple[int, float]]

    @classmethod
    def load(cls, file: ModelFile, config: EngineConfig) -> Self | None:
        """What was kept for this model and these options; None when nothing usable was."""
        try:
            data: dict[str, Any] = json.loads(cache_file(file, config).read_text())
            points = [(int(n), float(ms)) for n, ms in data["points"]]
            tuning = cls(data["model"], int(data["threads"]), points)
            CostCurve(tuning.points)
        except (OSError, ValueError, KeyError, TypeError, ArgumentError):
            return None
        return tuning

    def save(self, file: ModelFile, config: EngineConfig) -> Path:
        """Keeps it; a reader sees the old file or the new one, whole."""
        import tempfile

        path = cache_file(file, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as out:
            json.dump(asdict(self), out, indent=1)
        os.replace(out.name, path)
        return path
