"""The ops of `ggml_patches/`, stated in NumPy float64: naive, to be read and to test against.

One module for each patch that adds ops, with the same stem. Nothing but tests imports this.
"""

from pyspec.reference.gated_delta_net_tree import (
    Tape,
    gated_delta_net,
    gated_delta_net_replay,
    gated_delta_net_tree,
)
from pyspec.reference.ssm_conv_tree import ssm_conv, ssm_conv_replay, ssm_conv_tree

__all__ = [
    "Tape",
    "gated_delta_net",
    "gated_delta_net_replay",
    "gated_delta_net_tree",
    "ssm_conv",
    "ssm_conv_replay",
    "ssm_conv_tree",
]
