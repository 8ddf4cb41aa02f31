"""`pyspec.reference.ssm_conv_tree`: a tree is all its paths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyspec.reference import ssm_conv, ssm_conv_replay, ssm_conv_tree


def path_to(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@st.composite
def cases(draw: st.DrawFn):
    """parents, x, window, weights"""
    n = draw(st.integers(1, 24))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    k, channels = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x, window, weights = (rng.normal(size=(m, channels)) for m in (n, k - 1, k))
    return parents, x, window, weights


@given(cases())
def test_every_path_equals_the_plain_convolution(case) -> None:
    parents, x, window, weights = case
    y = ssm_conv_tree(x, window, weights, parents)
    for node in range(len(x)):
        path = path_to(parents, node)
        plain, after = ssm_conv(x[path], window, weights)
        np.testing.assert_allclose(y[path], plain, atol=1e-13, err_msg="output")
        np.testing.assert_array_equal(
            ssm_conv_replay(window, x, path), after, err_msg="conv_state after replay"
        )


@given(cases(), st.data())
def test_a_node_is_blind_to_all_but_its_ancestors(case, data: st.DataObject) -> None:
    parents, x, window, weights = case
    node = data.draw(st.integers(0, len(x) - 1))
    others = [i for i in range(len(x)) if i not in path_to(parents, node)]
    changed = x.copy()
    changed[others] = np.nan
    np.testing.assert_array_equal(
        ssm_conv_tree(changed, window, weights, parents)[node],
        ssm_conv_tree(x, window, weights, parents)[node],
    )


def test_a_path_longer_than_the_window_leaves_nothing_of_it() -> None:
    x = np.arange(5.0)[:, None]
    assert ssm_conv_replay(np.full((3, 1), 9.0), x, [0, 1, 2, 3, 4])[:, 0].tolist() == [2, 3, 4]
    assert ssm_conv_replay(np.full((3, 1), 9.0), x, [0, 4])[:, 0].tolist() == [9, 0, 4]
