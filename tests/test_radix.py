"""The radix tree against its scenarios, and against a model that is a plain dictionary of prefixes."""

import doctest
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Hashable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jax_paged import radix, radix_node
from jax_paged.bench import radix as bench
from jax_paged.errors import InvariantError, OutOfPages
from jax_paged.radix import CacheEvent, Node, RadixTree, common_prefix_length

P = 4


def pages_of(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def snapshot(tree: RadixTree) -> list[object]:
    """Everything that an operation could change."""
    nodes = [
        (id(n), n.namespace, bytes(n.edge), tuple(n.pages), n.locks, n.last_used, n.hits, n.created, n.ticket)
        for n in tree.nodes()
    ]
    return [nodes, tree.pages(), tree.evictable_pages, tree.root.locks, tree.namespaces, list(tree._queue.heap)]


def lines_executed(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs: its work, without a clock."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


# -- The source material's example (S4) --------------------------------------------------------------------------------


def test_longest_match_of_inserted_sequences():
    tree = RadixTree(page_size=1)
    tree.insert([0, 1, 2, 3], [10, 11, 12, 13])
    tree.insert([0, 1, 2, 3, 4], [10, 11, 12, 13, 14])
    tree.insert([9, 9, 9], [20, 21, 22])
    tokens = [0, 1, 2, 3, 4, 5]
    m = tree.match(tokens)
    assert m.num_tokens == 5
    assert m.pages == [10, 11, 12, 13, 14]
    assert (tokens[: m.num_tokens], tokens[m.num_tokens :]) == ([0, 1, 2, 3, 4], [5])
    assert tree.match([7, 6, 5]).num_tokens == 0
    tree.check()


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([1, 2, 3], [1, 2, 4], 2), ([7, 8], [7, 8, 9, 10], 2), ([], [1], 0), ([5], [5], 1), ([1], [257], 0)],
)
def test_common_prefix_length(a, b, length):
    assert common_prefix_length(a, b) == length
    assert common_prefix_length(np.array(b, np.int64), a) == length


# -- Matching ----------------------------------------------------------------------------------------------------------


def test_a_locked_match_and_its_ancestors_survive_eviction_of_everything():  # B1
    tree = RadixTree(P)
    tree.insert(range(12), [0, 1, 2])
    tree.insert([*range(12), *range(50, 58)], [0, 1, 2, 3, 4])
    tree.insert([*range(8), *range(70, 78)], [0, 1, 5, 6])
    m = tree.match(range(12))
    tree.lock(m.node)
    assert (tree.protected_pages, tree.evictable_pages) == (3, 4)
    assert sorted(tree.evict(100)) == [3, 4, 5, 6]
    assert tree.match(range(12)).pages == m.pages == [0, 1, 2]
    tree.check()


def test_locking_a_match_that_ends_inside_an_edge_protects_the_match_and_no_more():
    tree = RadixTree(P)
    tree.insert(range(32), pages_of(8))
    tree.lock(tree.match(range(12)).node)
    assert tree.protected_pages == 3
    assert sorted(tree.evict(100)) == [3, 4, 5, 6, 7]


def test_a_split_leaves_the_end_of_a_locked_edge_with_its_holder():
    tree = RadixTree(P)
    tree.insert(range(32), pages_of(8))
    long = tree.match(range(32)).node
    tree.lock(long)
    short = tree.match(range(12)).node
    assert (short.pages, long.pages) == ([0, 1, 2], [3, 4, 5, 6, 7])
    assert tree.protected_pages == 8
    tree.lock(short)
    tree.unlock(long)
    assert (tree.protected_pages, tree.evictable_pages) == (3, 5)
    tree.check()


@pytest.mark.parametrize("num_tokens", [0, 1, P - 1, P, P + 1])
def test_keys_around_one_page(num_tokens):  # B4
    tree = RadixTree(P)
    full = num_tokens // P
    assert tree.match(range(num_tokens)).node is tree.root
    inserted = tree.insert(range(num_tokens), pages_of(full + 1))
    assert inserted.kept == [(i, i) for i in range(full)]
    assert (tree.num_pages, tree.evictable_pages, tree.num_nodes) == (full, full, full)
    m = tree.match(range(num_tokens))
    assert (m.num_tokens, m.pages, m.partial) == (full * P, pages_of(full), None)
    assert tree.namespaces == [None] * full
    tree.check()


@pytest.mark.parametrize(
    "convert", [list, tuple, np.array, lambda t: np.array(t, np.int64), lambda t: np.array(t, "u2")]
)
def test_tokens_may_be_any_flat_sequence_of_integers(convert):
    tree = RadixTree(P)
    tree.insert(convert(range(9)), convert([5, 6]))
    assert tree.match(convert(range(8))).pages == [5, 6]
    assert all(type(page) is int for page in tree.match(range(8)).pages)


def test_a_strided_view_is_matched_by_its_values():
    tree = RadixTree(P)
    tree.insert(np.arange(0, 16, 2, dtype=np.int32), [0, 1])
    assert tree.match(np.arange(16, dtype=np.int32)[::2]).pages == [0, 1]


def test_peek_changes_nothing_and_finds_what_match_finds():
    tree = RadixTree(P)
    tree.insert(range(32), pages_of(8))
    tree.insert([*range(8), *range(90, 98)], [0, 1, 20, 21])
    before = snapshot(tree)
    queries = [range(n) for n in range(36)] + [[*range(8), 90, 91, 92, 93, 0], [5], []]
    found = [tree.peek(q) for q in queries]
    assert snapshot(tree) == before
    assert found == [tree.match(q).num_tokens for q in queries]
    assert tree.peek(range(32), namespace="unknown") == 0
    assert tree.namespaces == [None]


def test_the_partial_page_is_the_one_that_agrees_longest():
    tree = RadixTree(P)
    tree.insert([1, 1, 1, 1, 5, 6, 9, 9], [0, 1])
    tree.insert([1, 1, 1, 1, 5, 6, 7, 9], [0, 2])
    tree.insert([1, 1, 1, 1, 5, 5, 5, 5], [0, 3])
    m = tree.match([1, 1, 1, 1, 5, 6, 7, 8, 9])
    assert (m.num_tokens, m.partial.page_id, m.partial.num_tokens) == (4, 2, 3)
    m = tree.match([1, 1, 1, 1, 5, 6])  # the tokens end inside a page: either will do
    assert (m.partial.page_id in (1, 2), m.partial.num_tokens) == (True, 2)
    assert tree.match([1, 1, 1, 1, 8]).partial is None
    assert tree.match([1, 1, 1, 1]).partial is None


def test_the_partial_page_may_be_the_rest_of_the_matched_edge():
    tree = RadixTree(P)
    tree.insert(range(16), [0, 1, 2, 3])
    m = tree.match([*range(10), 99, 99])
    assert (m.pages, m.partial.page_id, m.partial.num_tokens) == ([0, 1], 2, 2)
    m = tree.match([0, 1, 2])
    assert (m.pages, m.node, m.partial.page_id, m.partial.num_tokens) == ([], tree.root, 0, 3)


def test_locking_the_node_of_a_partial_page_keeps_the_page():
    tree = RadixTree(P)
    tree.insert(range(16), [0, 1, 2, 3])
    m = tree.match([*range(10), 99])
    tree.lock(m.partial.node)
    assert 2 not in tree.evict(100)
    tree.unlock(m.partial.node)
    assert sorted(tree.evict(100)) == [0, 1, 2, 3]


def test_the_partial_page_among_many_siblings_is_found_as_by_comparing_all():
    rng = np.random.default_rng(0)
    tree = RadixTree(P)
    siblings = np.unique(rng.integers(0, 600, (200, P)), axis=0)
    siblings[:, 0] %= 5
    siblings = np.unique(siblings, axis=0)
    for i, page in enumerate(siblings):
        tree.insert(page, [i])
    for query in rng.integers(0, 600, (100, P)):
        query[0] %= 7
        lengths = [common_prefix_length(query, page) for page in siblings]
        m = tree.match(query)
        if max(lengths) == 0:
            assert m.partial is None
        elif max(lengths) < P:
            assert m.partial.num_tokens == max(lengths)
            assert lengths[m.partial.page_id] == max(lengths)


def test_namespaces_never_match_one_another():  # F1
    tree = RadixTree(P)
    tree.insert(range(8), [0, 1], namespace="a")
    tree.insert(range(8), [2, 3], namespace=("b", 1))
    assert tree.match(range(8), namespace="a").pages == [0, 1]
    assert tree.match(range(8), namespace=("b", 1)).pages == [2, 3]
    other = tree.match(range(8))
    assert (other.num_tokens, other.partial) == (0, None)
    assert tree.namespaces == ["a", ("b", 1)]
    tree.check()


# -- Inserting ---------------------------------------------------------------------------------------------------------


def test_insert_says_what_it_kept_and_what_it_already_had():
    tree = RadixTree(P)
    tree.insert(range(8), [0, 1])
    inserted = tree.insert(range(18), [0, 7, 8, 9, 10])
    assert inserted.duplicates == [(1, 7, 1)]  # page 0 is the tree's own already: neither kept nor a duplicate
    assert inserted.kept == [(2, 8), (3, 9)]  # the last two tokens fill no page
    assert tree.match(range(18)).pages == [0, 1, 8, 9]
    assert not tree.held(7)
    assert not tree.held(10)
    tree.check()


def test_the_inserted_node_ends_where_the_insertion_does():
    tree = RadixTree(P)
    tree.insert(range(32), pages_of(8))
    for n in (8, 20, 32, 40):
        tree.lock(inserted := tree.insert(range(n), pages_of(n // P)).node)
        assert tree.protected_pages == n // P
        tree.unlock(inserted)
    assert tree.insert([], []).node is tree.root


@pytest.mark.parametrize(
    ("tokens", "pages", "says"),
    [
        (range(20, 28), [7], "1 pages given for 2 full pages"),
        (range(20, 28), [7, -1], "page id -1 at index 1"),
        (range(20, 28), [7, 7], r"pages \[7\] are given more than once"),
        (range(20, 28), [7, 1], r"already holds pages \[1\]"),
        ([*range(4), *range(20, 24)], [1, 7], r"already holds pages \[1\]"),
        ([*range(8), 8, 8, 8, 8], [0, 1, 2], r"already holds pages \[2\]"),
        (range(20, 24), [1.5], "flat list or array of integers"),
        (range(20, 24), [[7]], "flat list or array of integers"),
        ([0.5] * 4, [7], "flat list or array of integers"),
        ([[20, 21, 22, 23]], [7], "flat list or array of integers"),
        ([2**31] * 4, [7], "do not fit int32"),
        ([-(2**31) - 1] * 4, [7], "do not fit int32"),
    ],
)
def test_wrong_input_raises_and_changes_nothing(tokens, pages, says):
    tree = RadixTree(P)
    tree.insert(range(16), [0, 1, 2, 3])
    before = snapshot(tree)
    with pytest.raises(ValueError, match=says):
        tree.insert(tokens, pages)
    assert snapshot(tree) == before


def test_a_page_evicted_and_used_again_by_another_sequence_is_a_miss_for_the_first():  # A7
    tree = RadixTree(P)
    tree.insert(range(8), [0, 1])
    assert sorted(tree.evict(2)) == [0, 1]
    tree.insert(range(100, 108), [0, 1])
    assert tree.match(range(8)).pages == []
    assert tree.match(range(100, 108)).pages == [0, 1]
    tree.check()


def test_every_page_is_free_or_in_the_tree_or_private_through_a_long_run():  # A8
    rng = np.random.default_rng(1)
    tree, total = RadixTree(P), 40
    free, locked = set(range(total)), []
    for _ in range(500):
        tokens = rng.integers(0, 3, rng.integers(0, 40))
        m = tree.match(tokens)
        tree.lock(m.node)
        need = len(tokens) // P - len(m.pages)
        if need <= len(free) + tree.evictable_pages:
            free |= set(tree.evict(max(0, need - len(free))))
            private = [free.pop() for _ in range(need)]
            inserted = tree.insert(tokens, m.pages + private)
            assert [page for _, page in inserted.kept] == private
            locked.append(m.node)
        else:
            tree.unlock(m.node)
        while len(locked) > 3:
            tree.unlock(locked.pop(int(rng.integers(len(locked)))))
        assert not free & tree.pages()
        assert free | tree.pages() == set(range(total))
        assert len(free) + tree.evictable_pages <= total
        tree.check()
    for node in locked:
        tree.unlock(node)
    assert free | set(tree.evict(total)) == set(range(total))


# -- Locks and eviction ------------------------------------------------------------------------------------------------


def test_the_pages_of_a_hit_are_not_evictable_for_the_one_who_hit_them():  # A6
    tree = RadixTree(P)
    tree.insert(range(20), pages_of(5))
    tree.insert(range(100, 120), pages_of(5, first=5))
    before = tree.evictable_pages
    m = tree.match(range(40))
    tree.lock(m.node)
    assert (before, tree.evictable_pages) == (10, 5)  # so 6 more cannot be had
    tree.unlock(m.node)
    assert tree.evictable_pages == 10


def test_locks_are_counted():
    tree = RadixTree(P)
    node = tree.insert(range(8), [0, 1]).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(2) == []
    tree.unlock(node)
    assert tree.evict(2) == [1, 0]


def test_unlocking_a_node_that_is_not_locked_raises():
    tree = RadixTree(P)
    upper = tree.insert(range(8), [0, 1]).node
    lower = tree.insert(range(16), [0, 1, 2, 3]).node
    tree.lock(lower)
    before = snapshot(tree)
    with pytest.raises(ValueError, match="is not locked itself"):
        tree.unlock(upper)
    with pytest.raises(ValueError, match="is not locked itself"):
        tree.unlock(tree.root)
    assert snapshot(tree) == before
    tree.unlock(lower)
    with pytest.raises(ValueError, match="is not locked itself"):
        tree.unlock(lower)


@pytest.mark.parametrize("remove", [lambda tree: tree.evict(2), lambda tree: tree.reset()])
def test_locking_a_node_that_has_left_the_tree_raises(remove):
    tree = RadixTree(P)
    tree.insert(range(8), [0, 1])
    node = tree.match(range(8)).node
    remove(tree)
    with pytest.raises(ValueError, match="was evicted after it was matched"):
        tree.lock(node)
    tree.check()


def test_the_untouched_half_of_an_edge_goes_before_what_was_used_since():  # B3
    for page_size in (1, 4):
        tree = RadixTree(page_size)
        a, b = list(range(8)), [90, 91, 92, 93]
        tree.insert(a, pages_of(8 // page_size))
        tree.insert(b, pages_of(4 // page_size, first=50))
        tree.match(a[:4])
        tree.evict(4 // page_size)
        assert tree.peek(b) == 4
        assert tree.peek(a) == 4


def test_evict_gives_what_there_is():  # B6
    tree = RadixTree(P)
    assert tree.evict(5) == []
    node = tree.insert(range(20), pages_of(5)).node
    assert tree.evict(0) == []
    assert tree.evict(2) == [4, 3]  # from the end, so that what stays is still a prefix
    assert tree.match(range(20)).pages == [0, 1, 2]
    tree.lock(node)
    assert tree.evict(100) == []
    tree.unlock(node)
    assert tree.evict(100) == [2, 1, 0]
    assert (tree.num_pages, tree.evictable_pages, tree.num_nodes, tree.namespaces) == (0, 0, 0, [])
    with pytest.raises(ValueError, match="must not be negative"):
        tree.evict(-1)
    tree.check()


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [1, 0, 3, 2]),
        ("lfu", [1, 3, 0, 2]),
        ("fifo", [0, 1, 2, 3]),
        (lambda node: -node.last_used, [2, 3, 0, 1]),  # a key that falls with use
        (lambda node: -node.pages[0], [3, 2, 1, 0]),
        (lambda node: 0, [1, 0, 3, 2]),  # equal keys: least recently used first
    ],
)
def test_the_policy_orders_eviction(policy, order):
    tree = RadixTree(1, policy)
    for page in range(4):
        tree.insert([page], [page])
    for page in (2, 0, 0, 3, 2, 2):
        tree.match([page])
    tree.check()
    assert tree.evict(4) == order


def test_a_policy_may_protect_a_namespace():
    tree = RadixTree(1, lambda node: (node.namespace == "vip", node.last_used))
    tree.insert([1, 2], [0, 1], namespace="vip")
    tree.insert([1, 2], [2, 3], namespace="any")
    assert tree.evict(3) == [3, 2, 1]


def test_a_policy_sees_what_a_split_and_a_trim_left():
    tree = RadixTree(1, lambda node: -node.num_tokens)  # longest leaf first
    tree.insert([1, 2, 3, 4, 5, 6], pages_of(6))
    tree.insert([11, 12, 13, 14], pages_of(4, first=10))
    tree.match([1, 2, 3])  # leaves the three tokens [4, 5, 6] as the leaf
    assert tree.evict(2) == [13, 12]  # leaves the two tokens [11, 12]
    assert tree.evict(1) == [5]


def test_both_parts_of_a_split_edge_keep_their_time_of_insertion():
    tree = RadixTree(1, "fifo")
    first = tree.insert([1], [0]).node
    tree.insert([5, 6, 7], [1, 2, 3])
    tree.lock(first)
    tree.match([5, 6])
    assert tree.evict(1) == [3]
    tree.unlock(first)
    assert tree.evict(2) == [0, 2]


def test_an_unknown_policy_or_page_size_is_refused():
    with pytest.raises(ValueError, match="policy='mru' is not one of lru, lfu, fifo"):
        RadixTree(policy="mru")
    for page_size in (0, 2.5):
        with pytest.raises(ValueError, match=f"page_size={page_size} must be an integer of at least 1"):
            RadixTree(page_size=page_size)


def test_reset_is_refused_while_anything_is_locked_and_else_gives_every_page():  # F2
    tree = RadixTree(P)
    tree.insert(range(8), [3, 1])
    tree.insert(range(8), [0, 2], namespace="a")
    for locked in (tree.match(range(8)).node, tree.root):
        tree.lock(locked)
        before = snapshot(tree)
        assert tree.reset() is None
        assert snapshot(tree) == before
        tree.unlock(locked)
    assert tree.reset() == [0, 1, 2, 3]
    assert (tree.num_pages, tree.peek(range(8)), tree.namespaces) == (0, 0, [])
    tree.insert(range(8), [0, 1])
    tree.check()


# -- Uses --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_match_without_touch_does_not_count_as_a_use_until_it_is_noted(policy):
    for is_used, loser in ((False, [1, 0]), (True, [3, 2])):
        tree = RadixTree(P, policy)
        tree.insert(range(8), [0, 1])
        tree.insert(range(50, 58), [2, 3])
        for _ in range(5):  # a request that waits, and looks each step
            m = tree.match(range(8), touch=False)
            tree.lock(m.node)
            tree.unlock(m.node)
        if is_used:
            tree.note_reused(m.node)
        assert tree.evict(2) == loser
        tree.check()


def test_a_match_without_touch_finds_the_same_and_changes_nothing_at_the_end_of_an_edge():
    tree = RadixTree(P)
    tree.insert(range(16), pages_of(4))
    tree.insert([*range(8), *range(50, 58)], [0, 1, 8, 9])
    before = snapshot(tree)
    for tokens in (range(16), range(11), [*range(8), 50, 51], [7], []):
        m = tree.match(tokens, touch=False)
        assert snapshot(tree) == before
        assert tree.peek(tokens) == m.num_tokens
        again = tree.match(tokens)
        assert (m.pages, m.node, m.partial) == (again.pages, again.node, again.partial)
        before = snapshot(tree)


def test_noting_a_reuse_touches_the_match_and_nothing_behind_it():
    tree = RadixTree(P)
    tree.insert(range(16), pages_of(4))
    tree.insert(range(50, 58), [8, 9])
    tree.note_reused(tree.match(range(8), touch=False).node)
    assert tree.evict(4) == [3, 2, 9, 8]
    tree.check()


def test_a_noted_reuse_is_a_hit_for_least_frequently_used():
    tree = RadixTree(P, "lfu")
    tree.insert(range(8), [0, 1])
    tree.note_reused(tree.match(range(8), touch=False).node)
    tree.insert(range(50, 58), [2, 3])  # later, but never reused
    assert tree.evict(2) == [3, 2]


def test_noting_the_reuse_of_nothing_does_nothing_and_of_an_evicted_node_raises():
    events: list[CacheEvent] = []
    tree = RadixTree(P, on_event=events.append)
    tree.insert(range(8), [0, 1])
    node = tree.match(range(8), touch=False).node
    before = snapshot(tree)
    tree.note_reused(tree.match([5], touch=False).node)
    assert snapshot(tree) == before
    tree.evict(2)
    with pytest.raises(ValueError, match="was evicted after it was matched"):
        tree.note_reused(node)
    assert [event.kind for event in events] == ["stored", "evicted"]


# -- Events ------------------------------------------------------------------------------------------------------------


def told(events: list[CacheEvent]) -> list[tuple[object, ...]]:
    """The events so far, which are taken out of the list."""
    seen = [(event.kind, event.namespace, event.tokens.tolist(), event.pages) for event in events]
    events.clear()
    return seen


def test_events_tell_prefixes_and_their_last_pages():
    events: list[CacheEvent] = []
    tree = RadixTree(2, on_event=events.append)
    tree.insert([1, 2, 3, 4, 5], [0, 1], namespace="a")
    assert told(events) == [("stored", "a", [1, 2, 3, 4], [0, 1])]
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [0, 9, 2, 3], namespace="a")
    assert told(events) == [("stored", "a", [1, 2, 3, 4, 5, 6, 7, 8], [2, 3])]
    tree.insert([1, 2, 9, 9], [0, 4], namespace="a")
    assert told(events) == [("stored", "a", [1, 2, 9, 9], [4])]
    tree.note_reused(tree.match([1, 2, 3, 4, 5, 6], "a", touch=False).node)
    assert told(events) == [("reused", "a", [1, 2, 3, 4, 5, 6], [0, 1, 2])]
    assert tree.evict(3) == [3, 4, 2]
    assert told(events) == [
        ("evicted", "a", [1, 2, 3, 4, 5, 6, 7, 8], [3]),
        ("evicted", "a", [1, 2, 9, 9], [4]),
        ("evicted", "a", [1, 2, 3, 4, 5, 6], [2]),
    ]
    tree.insert([7, 7], [5])
    assert tree.reset() == [0, 1, 5]
    assert told(events)[1:] == [("reset", None, [], [0, 1, 5])]


def test_evicting_a_path_of_many_nodes_is_one_event():
    events: list[CacheEvent] = []
    tree = RadixTree(1, on_event=events.append)
    tree.insert(range(100), pages_of(100))
    for n in range(99, 0, -1):
        tree.match(range(n))
    tree.note_reused(tree.match(range(100), touch=False).node)
    assert tree.num_nodes == 100
    told(events)
    tree.evict(70)
    assert told(events) == [("evicted", None, list(range(100)), list(range(30, 100)))]


def test_queries_and_refused_calls_are_no_events():
    events: list[CacheEvent] = []
    tree = RadixTree(P, on_event=events.append)
    tree.insert(range(8), [0, 1])
    told(events)
    tree.peek(range(8))
    tree.lock(tree.match(range(8)).node)
    tree.insert(range(8), [0, 1])
    tree.insert(range(8), [5, 6])
    tree.evict(5)
    tree.reset()
    tree.why_missed([9] * 4)
    with pytest.raises(ValueError, match="already holds"):
        tree.insert(range(50, 54), [0])
    assert events == []


def test_the_tokens_of_an_event_cannot_be_written_and_its_pages_are_the_listeners():
    def on_event(event: CacheEvent) -> None:
        events.append(event)
        event.pages.clear()

    events: list[CacheEvent] = []
    tree = RadixTree(P, on_event=on_event)
    assert tree.insert(range(8), [0, 1]).kept == [(0, 0), (1, 1)]
    assert events[0].tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        events[0].tokens[0] = 5
    assert tree.reset() == [0, 1]


def test_what_a_listener_raises_is_logged_once_and_disturbs_nothing(caplog):
    def on_event(event: CacheEvent) -> None:
        tree.check()
        kinds.append(event.kind)
        raise KeyError("no such router")

    kinds: list[str] = []
    tree = RadixTree(P, on_event=on_event)
    assert tree.insert(range(8), [0, 1]).kept == [(0, 0), (1, 1)]
    tree.note_reused(tree.match(range(8), touch=False).node)
    assert tree.evict(1) == [1]
    assert tree.reset() == [0]
    assert kinds == ["stored", "reused", "evicted", "reset"]
    (record,) = caplog.records
    assert "on_event failed for a 'stored' event" in record.message
    assert "no such router" in caplog.text


# -- Why nothing was reused --------------------------------------------------------------------------------------------


def test_why_nothing_was_reused():
    tree = RadixTree(P)
    assert tree.why_missed(range(8)) == "no full page is cached yet"
    tree.insert(range(8), [0, 1])
    tree.insert([0, 1, 9, 9], [2])
    tree.insert([5] * 8, [3, 4], namespace="tenant-7")
    assert tree.why_missed(range(4)) is None
    assert tree.why_missed([0, 1, 2]) == "too short: 3 tokens looked up, a page holds 4"
    differs = "differs at position 2: token 7, the nearest cached sequence has "
    assert tree.why_missed([0, 1, 7, 3]) in (differs + "2", differs + "9")
    assert tree.why_missed([-8] * 9).startswith("differs at position 0: token -8, the nearest cached sequence has 0")
    assert tree.why_missed([5] * 4) == "cached under another namespace"
    assert tree.why_missed(np.full(4, 5)) == "cached under another namespace"
    assert tree.why_missed(range(8), namespace="new") == "cached under another namespace"
    assert tree.why_missed([8] * 8, namespace="new") == "no full page is cached in its namespace"
    tree.match(range(8))
    tree.match([0, 1, 9, 9])
    assert tree.evict(2) == [4, 3]
    assert tree.why_missed([5] * 4, namespace="tenant-7") == "evicted (prefixes evicted since: 0)"
    tree.evict(100)
    assert tree.why_missed([5] * 4, namespace="tenant-7") == "evicted (prefixes evicted since: 2)"
    assert tree.why_missed([5] * 4) == "no full page is cached yet"  # was never cached in this namespace
    tree.reset()
    assert tree.why_missed([5] * 4, namespace="tenant-7") == "no full page is cached yet"


def test_why_nothing_was_reused_when_parts_of_pages_are():
    tree = RadixTree(P)
    tree.insert(range(8), [0, 1])
    assert tree.why_missed([0, 1, 7, 3], partial_hits=True) is None
    assert tree.why_missed([0], partial_hits=True) is None
    assert tree.why_missed([3], partial_hits=True) == (
        "differs at position 0: token 3, the nearest cached sequence has 0"
    )
    assert tree.why_missed([], partial_hits=True) == "too short: 0 tokens looked up, a page holds 4"


def test_wrong_tokens_have_no_reason():
    with pytest.raises(ValueError, match="flat list or array of integers"):
        RadixTree(P).why_missed([0.5] * 4)


def test_evicted_prefixes_are_remembered_up_to_a_limit():
    tree = RadixTree(1)
    for token in range(5000):
        tree.insert([token], [0])
        assert tree.evict(1) == [0]
    assert tree.why_missed([4999]) == "evicted (prefixes evicted since: 0)"
    assert tree.why_missed([5000 - 4096]) == "evicted (prefixes evicted since: 4095)"
    assert tree.why_missed([5000 - 4097]) == "no full page is cached yet"
    tree.insert([4000], [0])
    tree.evict(1)
    assert tree.why_missed([4000]) == "evicted (prefixes evicted since: 0)"  # the last time counts


def test_the_reason_costs_the_same_in_a_large_tree_and_changes_nothing():
    def work(num_others: int) -> int:
        tree = RadixTree(2)
        for i in range(num_others):
            tree.insert([i, i, i, i], [2 * i, 2 * i + 1])
        before = snapshot(tree)
        lines = lines_executed(lambda: tree.why_missed(np.tile([1, 2], 50_000)))
        assert snapshot(tree) == before
        return lines

    assert work(100) == work(2000)


# -- Cost --------------------------------------------------------------------------------------------------------------


def chain(num_nodes: int, pages_per_node: int, page_size: int) -> tuple[RadixTree, np.ndarray, list[int]]:
    tree = RadixTree(page_size)
    step = pages_per_node * page_size
    tokens = np.arange(num_nodes * step, dtype=np.int32)
    pages = pages_of(num_nodes * pages_per_node)
    tree.insert(tokens, pages)
    for i in range(num_nodes - 1, 0, -1):
        tree.match(tokens[: i * step])
    assert tree.num_nodes == num_nodes
    return tree, tokens, pages


def work_on_chain(num_nodes: int) -> list[int]:
    tree, tokens, pages = chain(num_nodes, pages_per_node=10, page_size=10)
    assert len(tokens) == 100 * num_nodes
    node = tree.match(tokens).node
    twice = np.concatenate([tokens, tokens])
    return [
        lines_executed(lambda: tree.match(tokens)),
        lines_executed(lambda: tree.peek(tokens)),
        lines_executed(lambda: tree.insert(tokens, pages)),
        lines_executed(lambda: tree.insert(twice, pages_of(2 * len(pages)))),
        lines_executed(lambda: tree.lock(node)),
        lines_executed(lambda: tree.unlock(node)),
        lines_executed(lambda: tree.evict(2 * len(pages))),
    ]


def test_work_grows_linearly_with_nodes():  # B5: 100,000 tokens over 1,000 nodes
    half, full = np.array(work_on_chain(500)), np.array(work_on_chain(1000))
    assert (full > 1000).all()  # at least a line for each node
    assert (full <= 2.02 * half).all()


def work_on_one_edge(num_pages: int) -> list[int]:
    tree = RadixTree(10)
    tokens = np.arange(num_pages * 10, dtype=np.int32)
    tree.insert(tokens, pages_of(num_pages))
    other = tokens.copy()
    other[-15] = -1
    return [lines_executed(lambda: tree.peek(tokens)), lines_executed(lambda: tree.peek(other))]


def test_tokens_of_one_edge_are_compared_at_once():
    assert work_on_one_edge(100) == work_on_one_edge(10_000)


def work_beside(num_others: int) -> list[int]:
    tree = RadixTree(2)
    for i in range(num_others):
        tree.insert([i, i], [i])
    tree.insert([-1] * 20, pages_of(10, first=num_others))
    return [
        lines_executed(lambda: tree.match([-1] * 9 + [-2])),
        lines_executed(lambda: tree.evict(1)),
        lines_executed(lambda: tree.num_pages + tree.evictable_pages + tree.protected_pages),
    ]


def test_work_does_not_depend_on_what_else_the_tree_holds():
    assert work_beside(100) == work_beside(5000)


def test_nothing_recurses():
    depth = 2 * sys.getrecursionlimit()
    tree, tokens, pages = chain(depth, pages_per_node=1, page_size=1)
    m = tree.match(tokens)
    assert m.pages == pages
    tree.lock(m.node)
    tree.check()
    assert "1 tokens" in tree.render(limit=20)
    tree.unlock(m.node)
    assert tree.evict(depth // 2) == pages[::-1][: depth // 2]
    assert len(tree.reset()) == depth - depth // 2
    assert repr(m).startswith("Match(")


def test_host_memory_per_cached_token_is_bounded():  # B7
    rng = np.random.default_rng(2)
    tracemalloc.start()
    try:
        tree, free = RadixTree(16), list(range(2000))
        for i in range(3000):  # long prompts, shared and split at random places, in far too few pages
            prompt = np.concatenate([np.full(rng.integers(1, 1600), i % 7), rng.integers(0, 99, 160)]).astype(np.int32)
            namespace = i % 3 and i  # two of three requests come from a tenant never seen again
            m = tree.match(prompt, namespace)
            need = len(prompt) // 16 - len(m.pages)
            tree.lock(m.node)
            free += tree.evict(max(0, need - len(free)))
            tree.unlock(m.node)
            tree.insert(prompt, m.pages + [free.pop() for _ in range(need)], namespace)
            if i == 500:
                early = tracemalloc.get_traced_memory()[0]
        late = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    tree.check()
    assert tree.num_pages > 1500
    assert late < 1.2 * early
    assert late / (16 * tree.num_pages) < 40  # bytes per token
    assert len(tree.namespaces) < 500


def test_the_record_of_uses_stays_small_however_often_a_leaf_is_used():
    tree = RadixTree(P)
    node = tree.insert(range(8), [0, 1]).node
    for _ in range(1000):
        tree.match(range(8))
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._queue.heap) < 100
    tree.check()


def test_small_parts_of_a_large_edge_do_not_keep_it_alive():
    tracemalloc.start()
    try:
        tree = RadixTree(16)
        tree.insert(np.arange(1_600_000, dtype=np.int32), np.arange(100_000))
        large = tracemalloc.get_traced_memory()[0]
        tree.match(np.arange(160))
        tree.evict(99_990)
        small = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert tree.num_pages == 10
    assert small < large / 50


def test_the_benchmark_measures_every_operation_on_both_shapes(capsys, monkeypatch):
    shapes = {"num_tokens": 256, "tree_tokens": 2048, "page_size": 4, "repeats": 3}
    results = bench.measure(**shapes) + bench.measure(**shapes, pages_per_node=1)
    assert [result.num_nodes for result in results] == [1] * 6 + [64] * 6
    assert all(0 < result.median_s < 1 for result in results)
    measure = bench.measure
    monkeypatch.setattr(bench, "measure", lambda **options: measure(**shapes, **options))
    bench.main(as_json=True)
    assert [row["operation"] for row in json.loads(capsys.readouterr().out)][:2] == ["peek", "match"]
    bench.main()
    assert "all within their targets" in capsys.readouterr().out


# -- The integrity check and what people see ---------------------------------------------------------------------------


def three_nodes() -> RadixTree:
    tree = RadixTree(P)
    tree.insert(range(16), pages_of(4))
    tree.insert([*range(8), *range(50, 58)], [0, 1, 8, 9])
    tree.check()
    return tree


def upper(tree: RadixTree) -> Node:
    return next(node for node in tree.nodes() if node.pages == [0, 1])


def leaf(tree: RadixTree) -> Node:
    return next(node for node in tree.nodes() if node.pages == [2, 3])


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (lambda tree: leaf(tree).pages.append(99), "8 tokens for 3 pages"),
        (lambda tree: leaf(tree).pages.__setitem__(0, 8), r"pages \[8\] are in the tree more than once"),
        (lambda tree: leaf(tree).pages.__setitem__(0, 77), r"pages \[2, 77\] are not where"),
        (lambda tree: tree._held.add(55), r"pages \[55\] are not where"),
        (lambda tree: leaf(tree).edge.__setitem__(0, 77), "not filed under its first page"),
        (lambda tree: setattr(leaf(tree), "locks", 1), "locks"),
        (lambda tree: setattr(upper(tree), "own_locks", 1), "locks"),
        (lambda tree: setattr(tree.root, "locks", 1), "the root counts 1 locks"),
        (lambda tree: setattr(leaf(tree), "last_used", 10**6), "used later than itself"),
        (lambda tree: setattr(leaf(tree), "namespace", "x"), "another parent or namespace"),
        (lambda tree: setattr(leaf(tree), "parent", tree.root), "another parent or namespace"),
        (lambda tree: setattr(leaf(tree), "ticket", 0), "up for eviction"),
        (lambda tree: upper(tree).sorted_keys.pop(), "sorted keys"),
        (lambda tree: leaf(tree).pages.clear(), "has no pages"),
        (lambda tree: tree._queue.heap.clear(), "candidates for eviction in the heap says 0, the tree has 2"),
        (lambda tree: setattr(tree, "_evictable", 3), "evictable_pages says 3, the tree has 6"),
        (lambda tree: setattr(tree, "_num_nodes", 9), "num_nodes says 9, the tree has 3"),
    ],
)
def test_check_names_what_is_wrong(corrupt, says):
    tree = three_nodes()
    corrupt(tree)
    with pytest.raises(InvariantError, match=says):
        tree.check()


def test_render_shows_tokens_pages_locks_and_age():
    tree = three_nodes()
    tree.insert(range(4), [20], namespace="tenant [a]")
    tree.lock(leaf(tree))
    lines = tree.render().splitlines()
    assert lines[0] == "7 pages of 4 tokens in 4 nodes, 4 protected, 3 evictable"
    assert [line.strip(" │├└─") for line in lines[1:]] == [
        "namespace None",
        "8 tokens, pages 0-1, 1 locks, age 1: 0 1 2 3 4 5 6 7",
        "8 tokens, pages 2-3, 1 locks, age 2: 8 9 10 11 12 13 14 15",
        "8 tokens, pages 8-9, age 1: 50 51 52 53 54 55 56 57",
        "namespace 'tenant [a]'",
        "4 tokens, pages 20, age 0: 0 1 2 3",
    ]


def test_render_decodes_and_stops_at_its_limit():
    tree = RadixTree(1)
    for i in range(9):
        tree.insert([i, *range(100, 110)], pages_of(11, first=20 * i))
    text = tree.render(limit=2, decode=lambda ids: "[b]" + "-".join(map(str, ids)))
    assert len(text.splitlines()) == 5
    assert "'[b]0-100-101-102-103-104-105-106' ..." in text
    assert "... 7 more, and what follows them" in text
    assert "[b]2-" not in text
    assert "RadixTree" not in repr(tree.rich_tree().label)


def test_page_ids_are_shown_as_ranges():
    assert radix_node.ranges([3, 4, 5, 9]) == "pages 3-5 9"
    assert radix_node.ranges([1, 3, 5, 7, 9, 11]) == "pages 1 3 5 7 ... (6)"
    assert radix_node.ranges([]) == "no pages"


def test_out_of_pages_says_oom():
    assert issubclass(OutOfPages, RuntimeError)
    assert str(OutOfPages("3 pages needed, 1 free")) == "OOM: 3 pages needed, 1 free"
    assert str(OutOfPages("OOM already")) == "OOM already"
    assert issubclass(InvariantError, RuntimeError)


def test_the_docstring_example_runs():
    assert doctest.testmod(radix).failed == 0
    assert doctest.testmod(radix).attempted > 0


def test_the_tree_needs_no_jax():
    package = radix.__file__.rsplit("/", 1)[0]
    code = (
        "import sys, types; package = types.ModuleType('jax_paged'); package.__path__ = [sys.argv[1]];"
        "sys.modules['jax_paged'] = package; import jax_paged.radix, jax_paged.bench.radix;"
        "sys.exit(sum(name in sys.modules for name in ('jax', 'jaxlib', 'flax', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code, package], check=False).returncode == 0


# -- Against the model -------------------------------------------------------------------------------------------------

type Key = tuple[Hashable, tuple[int, ...]]  # a namespace and the tokens from the start to the end of one page


class Model:
    """What the tree should hold: one entry per page, under all the tokens that lead to its end."""

    def __init__(self, page_size: int, policy: str):
        self.page_size = page_size
        self.policy = policy
        self.clock = 0
        self.page: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.hits: dict[Key, int] = {}
        self.created: dict[Key, int] = {}
        self.evicted: list[Key] = []  # the first pages among those that were
        self.locks: list[Key] = []

    def keys(self, namespace: Hashable, tokens: list[int]) -> list[Key]:
        return [(namespace, tuple(tokens[:end])) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def prefix(self, namespace: Hashable, tokens: list[int]) -> list[Key]:
        found = []
        for key in self.keys(namespace, tokens):
            if key not in self.page:
                break
            found.append(key)
        return found

    def protected(self, key: Key) -> bool:
        return any(starts_with(locked, key) for locked in self.locks)

    def evictable(self) -> int:
        return sum(not self.protected(key) for key in self.page)

    def last_pages(self) -> list[Key]:
        parents = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.page}
        return [key for key in self.page if key not in parents]

    def order(self, key: Key) -> tuple[int, ...]:
        if self.policy == "lfu":
            return (self.hits[key], self.used[key])
        return (self.used[key] if self.policy == "lru" else self.created[key],)

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages:
            loose = [key for key in self.last_pages() if not self.protected(key)]
            if not loose:
                break
            key = min(loose, key=self.order)
            freed.append(self.page.pop(key))
            self.evicted += [key] * (len(key[1]) == self.page_size)
        return freed

    def use(self, keys: list[Key]) -> None:
        self.clock += 1
        for key in keys:
            self.used[key] = self.clock
            self.hits[key] += 1

    def reasons(self, namespace: Hashable, tokens: list[int], partial_hits: bool) -> list[str | None]:
        """What `why_missed` may say: one of these."""
        if self.prefix(namespace, tokens) or (
            partial_hits and max(self.partial(namespace, tokens).values(), default=0)
        ):
            return [None]
        size = self.page_size
        if len(tokens) < (1 if partial_hits else size):
            return [f"too short: {len(tokens)} tokens looked up, a page holds {size}"]
        first = (namespace, tuple(tokens[:size]))
        if first in self.evicted:
            return [f"evicted (prefixes evicted since: {self.evicted[::-1].index(first)})"]
        if any(path == first[1] for _, path in self.page):
            return ["cached under another namespace"]
        cached = [path for space, path in self.page if space == namespace and len(path) == size]
        if not cached:
            return [f"no full page is cached {'in its namespace' if self.page else 'yet'}"]
        at = max(agreeing(path, tokens) for path in cached)
        differs = f"differs at position {at}: token {tokens[at]}, the nearest cached sequence has "
        return [f"{differs}{path[at]}" for path in cached if agreeing(path, tokens) == at]

    def partial(self, namespace: Hashable, tokens: list[int]) -> dict[int, int]:
        """Page id -> tokens in common, for each page that could follow the longest match."""
        at = len(self.prefix(namespace, tokens)) * self.page_size
        following = [
            (key[1], page)
            for key, page in self.page.items()
            if starts_with(key, (namespace, tuple(tokens[:at]))) and len(key[1]) == at + self.page_size
        ]
        return {page: agreeing(path[at:], tokens[at:]) for path, page in following}


def starts_with(key: Key, prefix: Key) -> bool:
    return key[0] == prefix[0] and key[1][: len(prefix[1])] == prefix[1]


def agreeing(a, b) -> int:
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count


# Sequences are made of few kinds of pages, which differ at their start, middle or end, so that they often share some.
SEQUENCES = st.tuples(st.lists(st.integers(0, 3), max_size=7), st.integers(0, 3), st.integers(0, 15))
NAMESPACES = st.sampled_from([None, None, "a", ("b", 1)])


class RadixMachine(RuleBasedStateMachine):
    steps = 0

    @initialize(page_size=st.sampled_from([1, 2, 4, 16]), policy=st.sampled_from(["lru", "lfu", "fifo"]))
    def start(self, page_size, policy):
        self.tree = RadixTree(page_size, policy, on_event=self.on_event)
        self.model = Model(page_size, policy)
        self.mirror: dict[Key, int] = {}  # what the tree holds, from its events alone
        self.reused: list[tuple[Hashable, list[int], list[int]]] = []
        self.problem: Exception | None = None  # of a listener; the tree keeps what that raises to itself
        self.nodes: list[Node] = []  # one for each entry of model.locks
        self.free: list[int] = []  # page ids to use again, the latest first
        self.next_page = 0

    def tokens(self, sequence) -> list[int]:
        size = self.model.page_size
        half = size // 2
        kinds = [[0] * size, [1] * size, [0] * (size - 1) + [2], [0] * half + [3] * (size - half)]
        body, tail, tail_length = sequence
        return [token for kind in body for token in kinds[kind]] + kinds[tail][: tail_length % size]

    def on_event(self, event: CacheEvent) -> None:
        try:
            self.tree.check()
            self.follow(event)
        except Exception as error:
            self.problem = self.problem or error

    def follow(self, event: CacheEvent) -> None:
        keys = self.model.keys(event.namespace, event.tokens.tolist())
        last = keys[len(keys) - len(event.pages) :]
        if event.kind == "stored":
            assert not self.mirror.keys() & set(last)
            assert self.mirror.keys() >= set(keys) - set(last)
            self.mirror |= dict(zip(last, event.pages, strict=True))
        elif event.kind == "evicted":
            assert [self.mirror.pop(key) for key in last] == event.pages
        elif event.kind == "reused":
            assert [self.mirror[key] for key in keys] == event.pages
            self.reused.append((event.namespace, event.tokens.tolist(), event.pages))
        else:
            assert (event.kind, event.pages) == ("reset", sorted(self.mirror.values()))
            self.mirror.clear()

    def take_page(self) -> int:
        if self.free:
            return self.free.pop()
        self.next_page += 1
        return self.next_page

    @rule(namespace=NAMESPACES, sequence=SEQUENCES, own=st.lists(st.booleans(), min_size=7, max_size=7))
    def insert(self, namespace, sequence, own):
        tokens, model = self.tokens(sequence), self.model
        keys, present = model.keys(namespace, tokens), model.prefix(namespace, tokens)
        # Where the tree has a page already, offer sometimes that page and sometimes another.
        offered = [model.page[key] if key in present and own[i] else self.take_page() for i, key in enumerate(keys)]
        result = self.tree.insert(tokens, offered, namespace)
        assert result.kept == list(enumerate(offered))[len(present) :]
        duplicates = [(i, offered[i], model.page[k]) for i, k in enumerate(present) if offered[i] != model.page[k]]
        assert result.duplicates == duplicates
        self.free += [page for _, page, _ in duplicates]
        model.clock += 1
        for key, page in zip(keys[len(present) :], offered[len(present) :]):
            model.page[key], model.hits[key], model.created[key] = page, 0, model.clock
        for key in keys:
            model.used[key] = model.clock

    @precondition(lambda self: self.model.page)
    @rule(data=st.data(), namespace=NAMESPACES, sequence=SEQUENCES)
    def insert_a_page_that_is_held_elsewhere(self, data, namespace, sequence):
        tokens = self.tokens(sequence)
        keys = self.model.keys(namespace, tokens)
        if keys:
            at = data.draw(st.integers(0, len(keys) - 1))
            pages = [self.next_page + 1 + i for i in range(len(keys))]
            pages[at] = data.draw(st.sampled_from(list(self.model.page.values())))
            if pages[at] != self.model.page.get(keys[at]):
                with pytest.raises(ValueError, match="already holds pages"):
                    self.tree.insert(tokens, pages, namespace)

    @rule(namespace=NAMESPACES, sequence=SEQUENCES, lock=st.booleans(), touch=st.booleans())
    def match(self, namespace, sequence, lock, touch):
        tokens, model = self.tokens(sequence), self.model
        prefix, partial = model.prefix(namespace, tokens), model.partial(namespace, tokens)
        assert self.tree.peek(tokens, namespace) == len(prefix) * model.page_size
        for partial_hits in (False, True):
            reason = self.tree.why_missed(tokens, namespace, partial_hits=partial_hits)
            assert reason in model.reasons(namespace, tokens, partial_hits)
        m = self.tree.match(tokens, namespace, touch=touch)
        assert m.pages == [model.page[key] for key in prefix]
        assert m.num_tokens == len(prefix) * model.page_size
        longest = max(partial.values(), default=0)
        assert longest == (m.partial.num_tokens if m.partial else 0)
        if m.partial:
            assert partial[m.partial.page_id] == longest
        if touch:
            model.use(prefix)
        if lock:
            self.tree.lock(m.node)
            self.nodes.append(m.node)
            model.locks.append(prefix[-1] if prefix else (namespace, ()))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def note_reused(self, data):
        i = data.draw(st.integers(0, len(self.nodes) - 1))
        namespace, tokens = self.model.locks[i]
        prefix = self.model.prefix(namespace, list(tokens))
        self.tree.note_reused(self.nodes[i])
        self.model.use(prefix)
        pages = [self.model.page[key] for key in prefix]
        assert self.reused == ([(namespace, list(tokens), pages)] if pages else [])
        self.reused.clear()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def unlock(self, data):
        i = data.draw(st.integers(0, len(self.nodes) - 1))
        self.tree.unlock(self.nodes.pop(i))
        self.model.locks.pop(i)

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages):
        count = min(num_pages, self.model.evictable())
        expected = self.model.evict(num_pages)
        assert len(expected) == count
        assert self.tree.evict(num_pages) == expected
        self.free += expected

    @rule()
    def reset(self):
        if self.nodes:
            assert self.tree.reset() is None
        else:
            pages = sorted(self.model.page.values())
            assert self.tree.reset() == pages
            self.model.page.clear()
            self.model.evicted.clear()
            self.free += pages

    @invariant()
    def tree_and_model_agree(self):
        RadixMachine.steps += 1
        self.tree.check()
        if self.problem:
            raise self.problem
        assert self.mirror == self.model.page
        assert self.reused == []
        assert self.tree.pages() == set(self.model.page.values())
        assert self.tree.num_pages == len(self.model.page)
        assert self.tree.evictable_pages == self.model.evictable()
        assert self.tree.protected_pages == len(self.model.page) - self.model.evictable()
        assert set(self.tree.namespaces) == {namespace for namespace, _ in self.model.page}


def test_the_tree_does_what_a_dictionary_of_prefixes_would():  # B2, and everything above at random
    RadixMachine.steps = 0
    run_state_machine_as_test(
        RadixMachine,
        settings=settings(
            max_examples=max(60, settings.default.max_examples),  # the profile in force says if more
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert RadixMachine.steps >= 2000
