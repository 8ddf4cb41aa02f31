"""`pyspec.reference.gated_delta_net_tree`: a tree is all its paths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec.reference import Tape, gated_delta_net, gated_delta_net_replay, gated_delta_net_tree

Floats = np.ndarray


@dataclass(frozen=True)
class Case:
    parents: list[int]
    q: Floats
    k: Floats
    v: Floats
    g: Floats
    beta: Floats
    state: Floats

    def path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = self.parents[node]
        return path

    def tree(self) -> tuple[Floats, Tape]:
        return gated_delta_net_tree(
            self.q, self.k, self.v, self.g, self.beta, self.state, self.parents
        )

    def plain(self, path: list[int]) -> tuple[Floats, Floats]:
        tokens = (array[path] for array in (self.q, self.k, self.v, self.g, self.beta))
        return gated_delta_net(*tokens, self.state)


def make(parents: list[int], seed: int, dk: int, dv: int, hk: int, repeat: int, kda: bool) -> Case:
    rng = np.random.default_rng(seed)
    n, hv = len(parents), hk * repeat

    def unit(*shape: int) -> Floats:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    # from no decay to one that leaves nothing
    scale = rng.choice([0, 0.1, 20], size=(n, hv, 1))
    return Case(
        parents,
        unit(n, hk, dk),
        unit(n, hk, dk),
        rng.normal(size=(n, hv, dv)),
        -scale * rng.uniform(size=(n, hv, dk if kda else 1)),
        rng.uniform(size=(n, hv)),
        rng.normal(size=(hv, dk, dv)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 20))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    small = st.integers(1, 3)
    return make(
        parents,
        draw(st.integers(0, 2**32 - 1)),
        4 * draw(small),
        4 * draw(small),
        draw(small),
        draw(small),
        draw(st.booleans()),
    )


@given(cases())
@settings(deadline=None)
def test_every_path_equals_the_recurrence(case: Case) -> None:
    o, tape = case.tree()
    for node in range(len(case.parents)):
        path = case.path_to(node)
        plain, state = case.plain(path)
        np.testing.assert_allclose(o[path], plain, atol=1e-12, err_msg="output")
        np.testing.assert_allclose(
            gated_delta_net_replay(case.state, tape, path),
            state,
            atol=1e-12,
            err_msg="gdn_state after replay",
        )


@given(cases(), st.data())
@settings(deadline=None)
def test_a_node_is_blind_to_all_but_its_ancestors(case: Case, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(case.parents) - 1))
    others = [i for i in range(len(case.parents)) if i not in case.path_to(node)]
    blanked = {}
    for name in ("q", "k", "v", "g", "beta"):
        blanked[name] = getattr(case, name).copy()
        blanked[name][others] = np.nan
    np.testing.assert_array_equal(replace(case, **blanked).tree()[0][node], case.tree()[0][node])


@given(cases(), st.data())
@settings(deadline=None)
def test_steps_of_verify_and_replay_equal_plain_decoding(case: Case, data: st.DataObject) -> None:
    state = plain = case.state
    for _ in range(3):
        node = data.draw(st.integers(0, len(case.parents) - 1))
        step, path = replace(case, state=state), case.path_to(node)
        o, tape = step.tree()
        expected, plain = replace(case, state=plain).plain(path)
        state = gated_delta_net_replay(state, tape, path)
        np.testing.assert_allclose(o[path], expected, atol=1e-11, err_msg="output")
        np.testing.assert_allclose(state, plain, atol=1e-11, err_msg="gdn_state")


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_a_head_uses_the_key_head_of_its_index_modulo_their_number(kda: bool) -> None:
    case = make([-1, 0, 0], 1, 8, 8, 2, 3, kda)
    o, _ = case.tree()
    for h in range(6):
        heads = replace(
            case,
            q=case.q[:, [h % 2]],
            k=case.k[:, [h % 2]],
            v=case.v[:, [h]],
            g=case.g[:, [h]],
            beta=case.beta[:, [h]],
            state=case.state[[h]],
        )
        np.testing.assert_allclose(heads.tree()[0][:, 0], o[:, h], atol=1e-14)


def test_an_equal_gate_for_all_channels_is_the_scalar_gate() -> None:
    case = make([-1, 0, 1, 1, 0], 2, 8, 4, 1, 2, kda=False)
    spread = replace(case, g=np.repeat(case.g, 8, axis=2))
    np.testing.assert_allclose(spread.tree()[0], case.tree()[0], atol=1e-14)
