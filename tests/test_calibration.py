"""`Calibration`: native code counts as the reference does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspec import DraftTree
from pyspec.calibration import NO_CLASS, Calibration
from pyspec.errors import ArgumentError, TreeError
from pyspec.reference import calibration as reference

NAMES = ("a", "b")
SETS = [frozenset(one) for one in ([], ["a"], ["b"], ["a", "b"])]
ASKED = SETS[1:]
SLOTS = 3


def both() -> tuple[Calibration, reference.Calibration]:
    """The two, with the same numbers for classes."""
    native, naive = Calibration(), reference.Calibration()
    for asked in ASKED:
        for sources in SETS:
            first = native.first_class(asked, sources)
            # Depth 1, first child, certain: how far it is from the first class, the reference says.
            kind = naive.class_of(asked, sources, 1, True, 0.0)
            assert kind // reference._CLASSES * reference._CLASSES == first
    return native, naive


# The edges of its classes are among them, and more than certainty.
log_probs = st.floats(-9.0, 0.5, width=32) | st.sampled_from(
    [0.0, -0.0, -0.03, -0.15, -0.45, -1.0, -2.2, -60.0]
)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(1, 14))
    parents = [-1, *[draw(st.integers(max(0, i - 5), i - 1)) for i in range(1, n)]]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    marks = [frozenset(), *[draw(st.sampled_from(SETS)) for _ in range(1, n)]]
    scores = [0.0, *[draw(log_probs) for _ in range(1, n)]]
    # Every token differs: a path is told by its last node.
    return DraftTree.trusted(list(range(100, 100 + n)), parents, depths, scores, tuple(marks))


def path_of(tree: DraftTree, data: st.DataObject) -> tuple[list[int], list[int]]:
    """Some path from the root, and a token that was drawn behind each of its nodes."""
    nodes, drawn = [0], []
    while True:
        children = [i for i, parent in enumerate(tree.parent_list) if parent == nodes[-1]]
        child = data.draw(st.sampled_from([None, *children]))
        if child is None:
            # None of them, or one behind which the path was cut.
            drawn.append(data.draw(st.sampled_from([7, *[tree.token_list[i] for i in children]])))
            return nodes, drawn
        nodes.append(child)
        drawn.append(tree.token_list[child])


def learn_naively(
    naive: reference.Calibration,
    slot: int,
    tree: DraftTree,
    classes: list[int],
    nodes: list[int],
    drawn: list[int],
) -> None:
    for child, kind in enumerate(classes, start=1):
        parent = tree.parent_list[child]
        if parent in nodes and kind != reference.NO_CLASS:
            naive.observe(slot, kind, tree.token_list[child] == drawn[nodes.index(parent)])


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_it_is_the_reference(data: st.DataObject) -> None:
    native, naive = both()
    for _ in range(data.draw(st.integers(1, 8))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        kind = data.draw(st.integers(0, 60 * len(ASKED) * len(SETS) - 1))
        action = data.draw(st.sampled_from(["tree", "tree", "tree", "observe", "forget"]))
        if action == "observe":
            for hit in data.draw(st.lists(st.booleans(), min_size=1, max_size=5)):
                native.observe(slot, kind, hit)
                naive.observe(slot, kind, hit)
        elif action == "forget":
            native.forget(slot)
            naive.forget(slot)
        else:
            tree, asked = data.draw(trees()), data.draw(st.sampled_from(ASKED))
            floor = data.draw(st.sampled_from([0.0, 0.02, 0.2, 0.9, 1.5]))
            values, classes = native.values(slot, tree, asked, floor)
            expected, numbers = naive.values(slot, tree, asked, floor)
            assert values == pytest.approx(expected, abs=1e-12)
            assert classes == [NO_CLASS, *numbers]
            nodes, drawn = path_of(tree, data)
            counted = data.draw(st.integers(1, len(tree)))
            native.learn(slot, tree, classes[:counted], nodes, drawn)
            learn_naively(naive, slot, tree, numbers[: counted - 1], nodes, drawn)
        log_prob = data.draw(log_probs)
        for other in range(SLOTS + 1):
            assert native.probability(other, kind, log_prob) == pytest.approx(
                naive.probability(other, kind, log_prob), abs=1e-12
            )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=200))
def test_counts_are_the_references(lessons: list[tuple[int, int, bool]]) -> None:
    """Long: they fade."""
    native, naive = both()
    for slot, kind, hit in lessons:
        native.observe(slot, 17 * kind, hit)
        naive.observe(slot, 17 * kind, hit)
    for slot in range(4):
        for kind in range(4):
            assert native.probability(slot, 17 * kind, -0.4) == pytest.approx(
                naive.probability(slot, 17 * kind, -0.4), abs=1e-12
            )


def test_what_a_request_has_taught_goes_and_what_all_have_stays() -> None:
    native, naive = both()
    for calibration in (native, naive):
        for _ in range(50):
            calibration.observe(1, 5, False)
    mine = native.probability(1, 5, -0.1)
    native.forget(1)
    naive.forget(1)
    left = native.probability(1, 5, -0.1)
    assert left == pytest.approx(naive.probability(1, 5, -0.1), abs=1e-12)
    assert mine < left == native.probability(2, 5, -0.1) < 0.2
    native.forget(77)  # never seen
    native.forget(-1)


def test_wrong_arguments_are_named() -> None:
    calibration = Calibration()
    tree = DraftTree.from_parents([5, 6, 7], [-1, 0, 1], [0, -0.3, -1.6]).marked(SETS[1])
    values, classes = calibration.values(0, tree, SETS[1], 0.0)
    with pytest.raises(ArgumentError, match="slot -1"):
        calibration.values(-1, tree, SETS[1], 0.0)
    for slot, kind in ((-1, 0), (0, -1), (1 << 16, 0), (0, 1 << 20)):
        with pytest.raises(ArgumentError, match=f"slot is {slot} and class {kind}"):
            calibration.observe(slot, kind, True)
    for slot, kind in ((-1, 0), (0, -1)):
        with pytest.raises(ArgumentError, match=f"slot is {slot} and class {kind}"):
            calibration.probability(slot, kind, -0.5)
    with pytest.raises(ArgumentError, match="slot is -1"):
        calibration.learn(-1, tree, classes, [0], [6])
    with pytest.raises(ArgumentError, match="0 nodes"):
        calibration.learn(0, tree, [], [0], [6])
    with pytest.raises(ArgumentError, match="0 of a path"):
        calibration.learn(0, tree, classes, [], [])
    marks = (frozenset(), SETS[1], SETS[1])
    for parents, depths in (
        ([-1, 1, 1], [0, 1, 2]),
        ([-1, 0, -1], [0, 1, 1]),
        ([-1, 0, 5], [0] * 3),
    ):
        broken = DraftTree.trusted([5, 6, 7], parents, depths, [0.0, -0.3, -1.6], marks)
        with pytest.raises(TreeError, match="calibration: node"):
            calibration.values(0, broken, SETS[1], 0.0)
    for depth in (0, -3):
        broken = DraftTree.trusted([5, 6], [-1, 0], [0, depth], [0.0, -0.3], marks[:2])
        with pytest.raises(TreeError, match=f"depth {depth}"):
            calibration.values(0, broken, SETS[1], 0.0)
    assert calibration.values(0, tree, SETS[1], 0.0) == (values, classes), "it is as before"


def test_a_tree_without_marks_is_nobodys() -> None:
    calibration, nobody = Calibration(), frozenset[str]()
    tree = DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 1, 2], [0.0, -0.1, -0.1, -0.1])
    _, classes = calibration.values(0, tree, nobody, 0.0)
    marked = calibration.values(0, tree.marked(nobody), nobody, 0.0)[1]
    assert classes == marked and min(classes[1:]) >= calibration.first_class(nobody, nobody)


def test_what_is_learned_must_fit_the_tree() -> None:
    tree = DraftTree.from_parents([1, 2], [-1, 0], [0.0, -0.1])
    with pytest.raises(ArgumentError, match="3 classes of 2 nodes"):
        Calibration().learn(0, tree, [-1, 0, 0], [0], [2])
    with pytest.raises(ArgumentError, match="1 tokens drawn at 2"):
        Calibration().learn(0, tree, [-1, 0], [0, 1], [2])
