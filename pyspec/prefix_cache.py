"""Checkpoints of sequences, to go on from instead of reading a prompt again.

A recurrent state cannot be cut back, so a prompt that shares a beginning with an earlier one needs
the state as it was at that very place. `PrefixCache` keeps such states, whole (attention cache,
recurrent state, MTP cache), under the tokens that led to them. `Slots` hands out the engine's
places and leaves in each what its last request made of it, for the next turn of that conversation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pyspec.errors import PyspecError
from pyspec.prefill import PrefillPlan
from pyspec.prefix import Checkpoint, Key, Prefix

if TYPE_CHECKING:
    from pyspec.native import NativeEngine
    from pyspec.prefix_store import PrefixStore

_log = logging.getLogger("pyspec")

PER_CONVERSATION = 4
"""Checkpoints kept of one chain of prefixes: the first, and the newest of the others. Each holds
its attention cache whole."""


def free_share() -> int:
    """A quarter of the memory that is free now, in bytes."""
    import psutil

    return psutil.virtual_memory().available // 4


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done: requests by outcome, tokens not read again, checkpoints dropped."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evicted: int = 0


@dataclass(slots=True)
class PrefixCache:
    """Checkpoints by prefix, the least recently used dropped first.

    Args:
        limit: Most bytes of states in memory; `held` says how many there are.
        store: Keeps them on disk as well; the cache closes it.
    """

    limit: int
    store: PrefixStore | None = None
    counts: CacheCounts = field(default_factory=CacheCounts)
    held: int = 0
    _entries: dict[Key, Checkpoint] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        if self.store is not None:
            for checkpoint in self.store.scan():  # the oldest first
                self._entries[checkpoint.key] = checkpoint

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix.key in self._entries

    def find(self, prompt: bytes, plan: PrefillPlan) -> Checkpoint | None:
        """The longest checkpoint that a prompt (int32 tokens as bytes) can go on from."""
        with self._lock:
            fitting = [entry for entry in self._entries.values() if entry.begins(prompt, plan)]
        return max(fitting, key=lambda entry: entry.length, default=None)

    def load(self, checkpoint: Checkpoint) -> bytes | None:
        """The state of a checkpoint; None where the disk has lost it, with a warning."""
        state = checkpoint.state
        if state is None and self.store is not None:
            state = self.store.read(checkpoint)
        with self._lock:
            if state is None:
                self._drop(checkpoint)
            elif checkpoint.key in self._entries:  # the last is the most recently used
                self._entries[checkpoint.key] = self._entries.pop(checkpoint.key)
        return state

    def add(self, prefix: Prefix, state: bytes) -> None:
        """Keeps a state, if it fits at all."""
        fits_disk = self.store is not None and len(state) <= self.store.limit
        if prefix in self or not (len(state) <= self.limit or fits_disk):
            return
        checkpoint = Checkpoint(prefix.tokens, prefix.passes, len(state), state)
        with self._lock:
            self._entries[checkpoint.key] = checkpoint
            self.held += checkpoint.size
            self._thin(checkpoint)
            if self.store is not None:
                self.store.put(checkpoint)
            self._shrink()

    def discard(self, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint that turned out to be useless."""
        with self._lock:
            self._drop(checkpoint)

    def close(self) -> None:
        """Finishes what is still to be written."""
        if self.store is not None:
            self.store.close()

    def _thin(self, newest: Checkpoint) -> None:
        """Drops the middle of a conversation that has more than its share."""
        chain = sorted(
            (entry for entry in self._entries.values() if newest.tokens.startswith(entry.tokens)),
            key=lambda entry: entry.length,
        )
        for entry in chain[1 : len(chain) - PER_CONVERSATION + 1]:
            self._drop(entry)

    def _shrink(self) -> None:
        in_memory = [entry for entry in self._entries.values() if entry.state is not None]
        for entry in in_memory:
            if self.held <= self.limit:
                return
            self.counts.evicted += 1
            if self.store is not None and self.store.write(entry):
                self._release(entry)
            else:
                self._drop(entry)

    def _release(self, entry: Checkpoint) -> None:
        if entry.state is not None:
            self.held -= entry.size
            entry.state = None

    def _drop(self, entry: Checkpoint) -> None:
        self._release(entry)
        self._entries.pop(entry.key, None)
        if self.store is not None:
            self.store.remove(entry)


class Slots:
    """The engine's free places, and what is left in them.

    Args:
        native: The engine's core.
        n_slots: Its number of places.
        forget: Called with a slot whose content is replaced.
        cache: Where states are kept; None reuses nothing, and a slot is empty once it is free.
    """

    def __init__(
        self,
        native: NativeEngine,
        n_slots: int,
        forget: Callable[[int], None],
        cache: PrefixCache | None = None,
    ) -> None:
        self.cache = cache
        self._native = native
        self._forget = forget
        self._free: dict[int, Prefix | None] = dict.fromkeys(range(n_slots))

    def __bool__(self) -> bool:
        return bool(self._free)

    def take(self, tokens: Many[int], plan: PrefillPlan) -> tuple[int, int]:
        """A free slot for a prompt, and how many of its tokens it holds already."""
        if self.cache is None:
            slot = min(self._free)
            del self._free[slot]
            return slot, 0
        prompt = _bytes(tokens)
        slot, length = self._resident(prompt, plan)
        checkpoint = self.cache.find(prompt, plan)
        if length == 0 or (checkpoint is not None and checkpoint.length > length):
            slot, length = self._emptied(), 0
        del self._free[slot]
        return slot, length

    def catch_up(self, slot: int, tokens: Many[int], plan: PrefillPlan, length: int) -> int:
        """How many tokens of a prompt a slot holds after going on from the best checkpoint.

        Asked when reading begins: requests that came together find what the first of them read.
        """
        if self.cache is None:
            return 0
        checkpoint = self.cache.find(_bytes(tokens), plan)
        if checkpoint is not None and checkpoint.length > length:
            length = self._restored(slot, checkpoint)
        counts = self.cache.counts
        counts.hits += length > 0
        counts.misses += length == 0
        counts.reused_tokens += length
        return length

    def keep(self, slot: int, tokens: Many[int], plan: PrefillPlan, length: int) -> None:
        """Takes a checkpoint of a slot that holds the first `length` of `tokens`."""
        if self.cache is not None:
            self._save(slot, Prefix.of(tokens, plan, length))

    def give_back(self, slot: int, tokens: Many[int], plan: PrefillPlan | None) -> None:
        """Frees a slot; with a plan, what it holds of `tokens` stays until the slot is needed."""
        if self.cache is not None and plan is not None and (held := self._native.length(slot)):
            self._free[slot] = Prefix.of(tokens, plan, held)
        else:
            self._native.reset(slot)
            self._free[slot] = None

    def close(self) -> None:
        """Saves what free slots hold, where it outlives the engine."""
        if self.cache is not None and self.cache.store is not None:
            for slot, prefix in self._free.items():
                if prefix is not None:
                    self._save(slot, prefix)
        if self.cache is not None:
            self.cache.close()

    def _resident(self, prompt: bytes, plan: PrefillPlan) -> tuple[int, int]:
        fitting = [
            (prefix.length, slot)
            for slot, prefix in self._free.items()
            if prefix is not None and prefix.begins(prompt, plan)
        ]
        length, slot = max(fitting, default=(0, -1))
        return slot, length

    def _restored(self, slot: int, checkpoint: Checkpoint) -> int:
        """Gives a slot a checkpoint's state; where that fails it is empty."""
        assert self.cache is not None
        self._forget(slot)
        state = self.cache.load(checkpoint)
        try:
            if state is not None:
                self._native.restore(slot, state)
                return checkpoint.length
        except PyspecError as error:
            _log.warning("a checkpoint of %d tokens is ignored: %s", checkpoint.length, error)
            self.cache.discard(checkpoint)
        self._native.reset(slot)
        return 0

    def _emptied(self) -> int:
        """The free slot that can best be spared, emptied: without content, else idle for longest."""
        slot = min(self._free, key=lambda free: self._free[free] is not None)
        prefix = self._free[slot]
        if prefix is not None:
            self._save(slot, prefix)
            self._native.reset(slot)
            self._free[slot] = None
        self._forget(slot)
        return slot

    def _save(self, slot: int, prefix: Prefix) -> None:
        assert self.cache is not None
        if prefix in self.cache:
            return
        try:
            self.cache.add(prefix, self._native.save(slot))
        except (PyspecError, MemoryError) as error:  # a request must not fail of it
            _log.warning("no checkpoint of %d tokens: %s", prefix.length, error)


def _bytes(tokens: Many[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
