"""What rollback costs in memory, for a large model's shapes, without loading it."""

from __future__ import annotations

import ctypes

from pyspec._libs import SUFFIX, library_dir

NODES = 16
LAYERS, KEY_HEADS, VALUE_HEADS, HEAD = 30, 16, 32, 128  # the GatedDeltaNet layers of 35B-A3B
CHANNELS = 2 * KEY_HEADS * HEAD + VALUE_HEADS * HEAD
FLOAT = 4


def test_tape_of_35b_a3b() -> None:
    """At most 32 MiB of tape a slot at 16 nodes; the states that snapshots keep take 1005 MiB."""
    ggml = ctypes.CDLL(str(library_dir() / f"libggml-base{SUFFIX}"))
    size = ggml.ggml_gated_delta_net_tree_tape_size
    size.restype = ctypes.c_int64
    size.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool, ctypes.c_int64]
    innovations = size(HEAD, KEY_HEADS, VALUE_HEADS, False, NODES)
    assert innovations == NODES * (VALUE_HEADS * HEAD + KEY_HEADS * HEAD + VALUE_HEADS)
    tape = LAYERS * (innovations + NODES * CHANNELS) * FLOAT
    state = LAYERS * (VALUE_HEADS * HEAD * HEAD + 3 * CHANNELS) * FLOAT
    assert tape <= 32 * 2**20, f"{tape / 2**20:.1f} MiB"
    assert tape < 0.03 * NODES * state
