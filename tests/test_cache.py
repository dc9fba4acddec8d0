"""The page operations: the source papers' small examples, the scenarios of page accounting, and a state machine."""

from collections import Counter
from functools import partial

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jax_paged as jp
from jax_paged.cache import _copy_pages


def make_cache(
    num_pages: int, page_size: int, max_seqs: int = 4, max_pages_per_seq: int | None = None
) -> jp.PagedCache:
    spec = jp.CacheSpec(
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        num_pages=num_pages,
        page_size=page_size,
        max_seqs=max_seqs,
        max_pages_per_seq=max_pages_per_seq or num_pages,
        dtype="float32",
    )
    return poisoned(jp.init_cache(spec))


def poisoned(cache: jp.PagedCache, tree_pages: tuple[int, ...] = ()) -> jp.PagedCache:
    """A copy with NaN wherever nothing has been written."""
    mask = np.zeros(cache.num_pages, bool)
    mask[list(tree_pages)] = True
    return jp.poison(jax.tree.map(jnp.copy, cache), mask)


@jax.jit
def write_all(cache: jp.PagedCache, slot: int, positions: jax.Array, values: jax.Array) -> jp.PagedCache:
    k = jnp.broadcast_to(values[:, None, None], (len(values), 1, 2))
    for layer in range(2):
        cache = jp.write_kv(cache, layer, k, -k, slot, positions)
    return cache


def write(cache: jp.PagedCache, slot: int, start: int, values: list[float]) -> jp.PagedCache:
    """Writes values as keys, and their negatives as values, to both layers."""
    padding = 12 - len(values)  # so that one program does for all numbers of them
    positions = np.pad(start + np.arange(len(values)), (0, padding), constant_values=-1)
    return write_all(cache, slot, positions, np.pad(np.array(values, np.float32), (0, padding)))


def read(cache: jp.PagedCache, slot: int) -> list[float]:
    """The keys of a slot, after making sure that both layers and the values agree with them."""
    k, v = jp.gather(cache, 0, slot)
    k1, v1 = jp.gather(cache, 1, slot)
    chex.assert_shape((k, v, k1, v1), (int(cache.seq_lens[slot]), 1, 2))
    np.testing.assert_array_equal(k, -v)
    np.testing.assert_array_equal(k, k1)
    np.testing.assert_array_equal(v, v1)
    return k[:, 0, 0].tolist()


def assert_same(a: jp.PagedCache, b: jp.PagedCache) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- The source material's own examples ---


def test_s1_appends_take_a_page_only_when_the_last_is_full():
    cache = jp.allocate(make_cache(10, 4), 0, 6)
    assert int(cache.num_free) == 8
    free_after = []
    for _ in range(3):
        cache = jp.append(cache, np.arange(4) == 0)
        free_after.append(int(cache.num_free))
    assert free_after == [8, 8, 7]
    cache = write(cache, 0, 0, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert read(cache, 0) == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    jp.check(cache)


def test_s2_a_full_page_is_followed_by_a_second_one():
    cache = jp.allocate(make_cache(4, 4), 0, 4)
    assert int(cache.num_free) == 3
    cache = jp.append(cache, np.arange(4) == 0)
    assert int(cache.num_free) == 2
    cache = write(cache, 0, 0, [5, 6, 7, 8, 9])
    assert read(cache, 0) == [5, 6, 7, 8, 9]


def test_s3_a_prefill_larger_than_the_pool_says_oom_and_changes_nothing():
    cache = make_cache(1, 4)
    before = jax.tree.map(jnp.copy, cache)
    with pytest.raises(RuntimeError, match=r"^OOM: 2 pages needed for 5 more tokens, 1 of 1 free.*num_pages") as error:
        jp.allocate(cache, 0, 5)
    assert isinstance(error.value, jp.OutOfPages)
    assert_same(cache, before)


def test_s5_waste_is_confined_to_the_last_page():
    rng = np.random.default_rng(0)
    # Lengths like ShareGPT's: a median of some hundred tokens and a long tail.
    lengths = np.clip(rng.lognormal(5.5, 1.0, size=64), 1, 2048).astype(int)
    cache = make_cache(4000, 16, max_seqs=64, max_pages_per_seq=128)
    allocate = jax.jit(jp.allocate, donate_argnums=0)
    for slot, length in enumerate(lengths):
        cache = allocate(cache, slot, length)
    used = (4000 - int(cache.num_free)) * 16
    assert not cache.oom
    assert used - lengths.sum() <= 64 * 15
    assert (used - lengths.sum()) / used < 0.04


def test_s6_each_fork_that_diverges_costs_one_page_copy():
    cache = write(jp.allocate(make_cache(8, 4), 0, 6), 0, 0, [1, 2, 3, 4, 5, 6])
    cache = jp.fork(jp.fork(cache, 0, 1), 0, 2)
    assert int(cache.num_free) == 6
    assert cache.ref_counts[:3].tolist() == [3, 3, 0]
    cache = write(jp.append(cache, np.arange(4) == 1), 1, 6, [70])
    assert int(cache.num_free) == 5
    cache = write(jp.append(cache, np.arange(4) == 2), 2, 6, [80])
    assert int(cache.num_free) == 4
    cache = write(jp.append(cache, np.arange(4) == 0), 0, 6, [90])  # the last holder keeps the page
    assert int(cache.num_free) == 4
    prompt = [1, 2, 3, 4, 5, 6]
    assert [read(cache, slot) for slot in range(3)] == [[*prompt, 90], [*prompt, 70], [*prompt, 80]]
    jp.check(cache)


def test_forks_that_write_in_the_same_step_copy_one_page_less_than_there_are_of_them():
    cache = write(jp.allocate(make_cache(8, 4), 0, 2), 0, 0, [1, 2])
    for slot in (1, 2, 3):
        cache = jp.fork(cache, 0, slot)
    cache = jp.append(cache, np.ones(4, bool))
    assert int(cache.num_free) == 8 - 4
    for slot in range(4):
        cache = write(cache, slot, 2, [10 + slot])
    assert [read(cache, slot) for slot in range(4)] == [[1, 2, 10 + slot] for slot in range(4)]
    jp.check(cache)


# --- Page accounting ---


@pytest.mark.parametrize("ref_count", [1, 2, 3])
def test_a5_releasing_a_page_twice_frees_it_at_most_once(ref_count: int):
    cache = jp.allocate(make_cache(4, 4), 0, 4)
    page = int(cache.block_tables[0, 0])
    for slot in range(1, ref_count):
        cache = jp.fork(cache, 0, slot)
    cache = jp.release(cache, [page, page])
    assert int(cache.ref_counts[page]) == max(ref_count - 2, 0)
    free = cache.free_list[: int(cache.num_free)].tolist()
    assert free.count(page) == (ref_count <= 2)
    assert len(free) == len(set(free)) == 3 + (ref_count <= 2)


def test_a3_pages_taken_after_a_release_are_valid_and_disjoint():
    cache = jp.allocate(jp.allocate(make_cache(4, 4), 0, 4), 1, 4)
    cache = jp.allocate(jp.free(cache, 0), 2, 12)
    assert sorted([*cache.block_tables[1, :1].tolist(), *cache.block_tables[2, :3].tolist()]) == [0, 1, 2, 3]
    jp.check(cache)


def test_releasing_or_retaining_a_free_page_raises():
    cache = make_cache(4, 4)
    with pytest.raises(ValueError, match="page 2 is free: there is nothing to release"):
        jp.release(cache, [2])
    with pytest.raises(ValueError, match="page 3 is free: there is nothing to retain"):
        jp.retain(cache, [3])


def test_a_retained_page_outlives_its_sequence_and_can_be_assigned():
    cache = write(jp.allocate(make_cache(4, 2), 0, 4), 0, 0, [1, 2, 3, 4])
    held = cache.block_tables[0, :2].tolist()
    cache = jp.free(jp.retain(cache, held), 0)
    jp.check(cache, held)
    assert int(cache.num_free) == 2
    cache = jp.assign(cache, 3, held, 3)  # ends inside a page, which the next write must copy
    cache = write(jp.append(cache, np.arange(4) == 3), 3, 3, [40])
    assert read(cache, 3) == [1, 2, 3, 40]
    assert int(cache.num_free) == 1
    cache = jp.assign(cache, 2, held, 4)
    assert read(cache, 2) == [1, 2, 3, 4]
    jp.check(cache, held)


def test_padding_ids_slots_and_tokens_change_nothing():
    cache = write(jp.allocate(make_cache(4, 2), 0, 3), 0, 0, [1, 2, 3])
    padding = jnp.array([4, 99, -1, -4])
    assert_same(jp.retain(cache, padding), cache)
    assert_same(jp.release(cache, padding), cache)
    new = jnp.full((4, 1, 2), 7.0)
    zeros = jnp.zeros(4, jnp.int32)
    for slots, positions in ((jnp.array([4, -1, 9, 1]), zeros), (zeros, jnp.array([3, -1, 4, 99]))):
        assert_same(jp.write_kv(cache, 0, new, new, slots, positions), cache)


def test_forking_onto_a_slot_in_use_releases_what_it_held():
    cache = jp.allocate(jp.allocate(make_cache(4, 2), 0, 4), 1, 3)
    assert int(cache.num_free) == 0
    cache = jp.fork(cache, 0, 1)
    assert int(cache.num_free) == 2
    assert_same(jp.fork(cache, 1, 1), cache)
    jp.check(cache)


def test_check_names_the_pages_that_are_wrong():
    cache = jp.allocate(make_cache(4, 4), 0, 6)
    jp.check(cache)
    with pytest.raises(jp.InvariantError, match=r"reference count.*\[2\].*both free and held: \[2\]"):
        jp.check(cache, [2])
    with pytest.raises(jp.InvariantError, match=r"neither free nor held: \[2\]"):
        jp.check(cache.replace(num_free=cache.num_free - 1))
    with pytest.raises(jp.InvariantError, match=r"slots whose table does not match their length: \[0\]"):
        jp.check(cache.replace(seq_lens=cache.seq_lens.at[0].set(9)))
    with pytest.raises(jp.InvariantError, match=r"reference count.*\[1\]"):
        jp.check(cache.replace(ref_counts=cache.ref_counts.at[1].set(2)))


# --- Inside jit ---

JITTED_COPIES = {op: jax.jit(op) for op in (jp.allocate, jp.free, jp.fork, jp.assign)}


def test_inside_jit_an_operation_that_does_not_fit_sets_oom_and_nothing_else():
    cache = jp.allocate(make_cache(4, 2), 0, 3)
    after = JITTED_COPIES[jp.allocate](cache, 1, 5)
    assert after.oom
    assert_same(after.replace(oom=cache.oom), cache)
    again = jax.jit(jp.append)(after, np.arange(4) == 0)  # this one fits, but the flag stays
    assert again.oom
    assert int(again.seq_lens[0]) == 4


@pytest.mark.parametrize("num_tokens", [-1, -5, -(2**31)])
def test_inside_jit_a_negative_number_of_tokens_is_none(num_tokens: int):
    cache = jp.allocate(make_cache(4, 2), 0, 3)
    assert_same(JITTED_COPIES[jp.allocate](cache, 0, num_tokens), cache)


@pytest.mark.parametrize("num_tokens", [9, 2**31 - 5, 2**31 - 3, 2**31 - 1])
def test_as_many_tokens_as_overflow_are_out_of_pages(num_tokens: int):
    cache = jp.allocate(make_cache(4, 2), 0, 3)
    needed = -(-(3 + num_tokens) // 2) - 2
    with pytest.raises(jp.OutOfPages, match=rf"^OOM: {needed} pages needed for {num_tokens} more tokens, 2 of 4 free"):
        jp.allocate(cache, 0, num_tokens)
    after = JITTED_COPIES[jp.allocate](cache, 0, num_tokens)
    assert after.oom
    assert_same(after.replace(oom=cache.oom), cache)


@pytest.mark.parametrize("padding", [-1, 4, 2**31 - 1, -(2**31)])
def test_inside_jit_a_slot_out_of_range_is_padding_for_every_operation(padding: int):
    cache = write(jp.allocate(jp.allocate(make_cache(4, 2), 0, 3), 3, 1), 0, 0, [1, 2, 3])
    held = cache.block_tables[0]
    for op, *args in (
        *((jp.allocate, padding, 1), (jp.free, padding), (jp.fork, 0, padding), (jp.fork, padding, 2)),
        *((jp.assign, padding, held, 3), (jp.fork, padding, padding)),
    ):
        assert_same(JITTED_COPIES[op](cache, *args), cache)
    k, v = jax.jit(jp.gather, static_argnums=1)(cache, 0, padding)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize(("num_tokens", "page"), [(-1, 0), (5, 0), (2**31 - 1, 0), (2, 3), (2, 4), (2, -1)])
def test_inside_jit_what_cannot_be_assigned_sets_oom_and_nothing_else(num_tokens: int, page: int):
    cache = jp.allocate(make_cache(4, 2), 0, 3)
    after = JITTED_COPIES[jp.assign](cache, 1, np.array([page, 1]), num_tokens)
    assert after.oom
    assert_same(after.replace(oom=cache.oom), cache)


@pytest.mark.parametrize("ids", [[1.5], [True], np.array([2**32 + 1]), np.array([-(2**63)]), "1", [None]])
def test_pages_that_are_no_integers_are_refused(ids):
    cache = jp.allocate(make_cache(4, 2), 0, 4)
    for op in (jp.retain, jp.release):
        with pytest.raises(ValueError, match=r"page_ids=.* must be integers of 32 bits"):
            op(cache, ids)


@pytest.mark.parametrize("slot", [1.5, True, np.float32(1), "1", None])
def test_slots_and_lengths_that_are_no_integers_are_refused(slot):
    cache = make_cache(4, 2)
    with pytest.raises(ValueError, match=r"slot=.* must be an integer"):
        jp.free(cache, slot)
    with pytest.raises(ValueError, match=r"num_tokens=.* must be an integer"):
        jp.allocate(cache, 0, slot)


def test_a_sequence_longer_than_its_table_row_is_out_of_pages():
    cache = make_cache(8, 2, max_pages_per_seq=2)
    with pytest.raises(jp.OutOfPages, match="5 tokens does not fit its block-table row of 2 pages of 2"):
        jp.allocate(cache, 0, 5)
    assert jax.jit(jp.allocate)(cache, 0, 5).oom


def test_a_generation_loop_in_one_jit_takes_pages_on_demand():
    @partial(jax.jit, donate_argnums=0)
    def generate(cache: jp.PagedCache) -> tuple[jp.PagedCache, jax.Array]:
        def body(state: tuple[jp.PagedCache, jax.Array]) -> tuple[jp.PagedCache, jax.Array]:
            cache, i = state
            cache = jp.append(cache, jnp.arange(4) < 2)
            kv = jnp.full((2, 1, 2), i.astype(jnp.float32))
            for layer in range(2):
                cache = jp.write_kv(cache, layer, kv, -kv, jnp.arange(2), jnp.full(2, i))
            return cache, i + 1

        return jax.lax.while_loop(lambda state: ~state[0].oom & (state[1] < 9), body, (cache, jnp.int32(0)))

    cache, steps = generate(make_cache(6, 4))
    assert int(steps) == 9
    assert not cache.oom
    assert int(cache.num_free) == 0
    assert read(cache, 0) == read(cache, 1) == list(range(9))
    jp.check(cache)


def test_a_donated_step_holds_no_second_pool():
    cache = make_cache(4096, 16)

    def step(cache: jp.PagedCache) -> jp.PagedCache:
        cache = jp.append(cache, jnp.ones(4, bool))
        kv = jnp.ones((4, 1, 2))
        for layer in range(2):
            cache = jp.write_kv(cache, layer, kv, kv, jnp.arange(4), cache.seq_lens - 1)
        return cache

    stats = jax.jit(step, donate_argnums=0).lower(cache).compile().memory_analysis()
    layer_bytes = cache.kv_pages[0].nbytes
    assert stats.temp_size_in_bytes < layer_bytes / 4
    assert stats.alias_size_in_bytes >= 2 * layer_bytes


def test_operations_are_traced_once_for_all_lengths_and_slots():
    allocate = jax.jit(chex.assert_max_traces(jp.allocate, n=1))
    cache = make_cache(32, 2)
    for slot, length in ((0, 5), (1, 1), (2, 7), (3, 2)):
        cache = allocate(cache, slot, length)
    assert cache.seq_lens.tolist() == [5, 1, 7, 2]


def test_page_copies_are_right_for_neighbouring_pages():
    # XLA has mistaken shifted copies within one buffer for copies in place.
    for offset in (-1, 1, 2):
        cache = make_cache(10, 4)
        layers = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(cache.kv_pages)]
        cache = cache.replace(kv_pages=tuple(layers))
        src, dst = jnp.array([2, 3, 7, 4]), jnp.array([2 + offset, 10, 7 + offset, 10])
        copied = jax.jit(_copy_pages, donate_argnums=0)(jax.tree.map(jnp.copy, cache), src, dst)
        for before, after in zip(cache.kv_pages, copied.kv_pages):
            expected = np.array(before)
            expected[[2 + offset, 7 + offset]] = expected[[2, 7]]
            np.testing.assert_array_equal(after, expected)


# --- Wrong arguments ---


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"page_size": 0}, "page_size=0 must be an integer of at least 1"),
        ({"num_pages": -1}, "num_pages=-1"),
        ({"max_seqs": 2.5}, "max_seqs=2.5"),
        ({"dtype": "int32"}, "dtype='int32' must be"),
        ({"dtype": "float64"}, "dtype='float64' must be one of float32, bfloat16, float16, int8"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change: dict, match: str):
    names = ("num_layers", "num_kv_heads", "head_dim", "num_pages", "page_size", "max_seqs", "max_pages_per_seq")
    sizes = dict.fromkeys(names, 2)
    with pytest.raises(ValueError, match=match):
        jp.CacheSpec(**(sizes | change))


def test_wrong_arguments_name_the_value_and_the_limit():
    cache = make_cache(4, 2)
    with pytest.raises(ValueError, match=r"slot=4 is not a slot of this cache: 0 <= slot < 4"):
        jp.allocate(cache, 4, 1)
    with pytest.raises(ValueError, match="num_tokens=-1 must be >= 0"):
        jp.allocate(cache, 0, -1)
    with pytest.raises(ValueError, match=r"slots_mask is bool\[3\], must be bool\[4\]"):
        jp.append(cache, np.ones(3, bool))
    with pytest.raises(ValueError, match="num_tokens=5 needs 3 pages of 2, got 1"):
        jp.assign(jp.allocate(cache, 0, 2), 1, [0], 5)
    with pytest.raises(ValueError, match="layer=2 is not a layer"):
        jp.write_kv(cache, 2, jnp.ones((1, 1, 2)), jnp.ones((1, 1, 2)), 0)


# --- Everything at random, against a model of lists ---

PAGES, SIZE, SLOTS, ROW = 12, 3, 4, 5


class Page:
    """A page of the model: an object that several lists may hold."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


@partial(jax.jit, donate_argnums=0)
def write_new(cache: jp.PagedCache, old_lens: jax.Array, first: jax.Array) -> jp.PagedCache:
    """Writes first, first + 1, ... to the tokens past `old_lens`, slot by slot."""
    longest = ROW * SIZE
    slots = jnp.repeat(jnp.arange(SLOTS), longest)
    positions = jnp.tile(jnp.arange(longest), SLOTS)
    new = (positions >= old_lens[slots]) & (positions < cache.seq_lens[slots])
    values = first + jnp.cumsum(new) - 1
    k = jnp.broadcast_to(values.astype(jnp.float32)[:, None, None], (SLOTS * longest, 1, 2))
    for layer in range(2):
        cache = jp.write_kv(cache, layer, k, -k, jnp.where(new, slots, SLOTS), positions)
    return cache


JITTED = {
    op: jax.jit(op, donate_argnums=0)
    for op in (jp.allocate, jp.append, jp.fork, jp.free, jp.retain, jp.release, jp.assign)
}


class PageOperations(RuleBasedStateMachine):
    """Drives the jitted operations beside lists of page objects, where sharing is holding the same object."""

    @initialize()
    def start(self) -> None:
        self.cache = make_cache(PAGES, SIZE, SLOTS, ROW)
        self.pages: list[list[Page]] = [[] for _ in range(SLOTS)]
        self.lens = [0] * SLOTS
        self.tree: dict[int, Page] = {}  # page id -> page
        self.counter = 1

    def ids(self, slot: int) -> list[int]:
        return np.asarray(self.cache.block_tables)[slot, : len(self.pages[slot])].tolist()

    def num_used(self, pages: list[list[Page]]) -> int:
        return len({id(page) for row in [*pages, list(self.tree.values())] for page in row})

    def holders(self, page: Page) -> int:
        rows = [*self.pages, list(self.tree.values())]
        return sum(page is other for row in rows for other in row)

    def grow(self, op, num_new: list[int], *args) -> None:
        """Runs `op`, which grows slots, and the model's growth: sequence by sequence, each copying before it writes."""
        pages, lens = [list(row) for row in self.pages], list(self.lens)
        fresh = []
        for slot in range(SLOTS):  # all copies first, so that the last holder of a page sees that it is alone
            if num_new[slot] and lens[slot] % SIZE:
                page = pages[slot][-1]
                others = sum(page is p for row in pages for p in row) + sum(page is p for p in self.tree.values()) - 1
                writing = [s for s in range(SLOTS) if num_new[s] and lens[s] % SIZE]
                writers = [s for s in writing if self.pages[s][-1] is page]
                if others and not (slot == writers[0] and len(writers) == self.holders(page)):
                    pages[slot][-1] = Page(page.values[: lens[slot] % SIZE])
                    fresh.append(pages[slot][-1])
        for slot in range(SLOTS):
            while len(pages[slot]) * SIZE < lens[slot] + num_new[slot]:
                pages[slot].append(Page([]))
                fresh.append(pages[slot][-1])
            lens[slot] += num_new[slot]
        fits = len(fresh) <= PAGES - self.num_used(self.pages) and max(map(len, pages)) <= ROW
        old_lens = jnp.asarray(self.lens)
        self.cache = JITTED[op](self.cache, *args)
        assert bool(self.cache.oom) == (not fits)
        self.cache = self.cache.replace(oom=jnp.bool_(False))
        if not fits:
            return
        self.cache = write_new(self.cache, old_lens, self.counter)
        for slot in range(SLOTS):
            for position in range(self.lens[slot], lens[slot]):
                page = pages[slot][position // SIZE]
                page.values[position % SIZE :] = [float(self.counter)]
                self.counter += 1
        self.pages, self.lens = pages, lens

    @rule(slot=st.integers(0, SLOTS - 1), num_tokens=st.integers(0, 8))
    def allocate(self, slot: int, num_tokens: int) -> None:
        self.grow(jp.allocate, [num_tokens * (s == slot) for s in range(SLOTS)], slot, num_tokens)

    @rule(mask=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
    def append(self, mask: list[bool]) -> None:
        self.grow(jp.append, [int(m) for m in mask], np.array(mask))

    @rule(src=st.integers(0, SLOTS - 1), dst=st.integers(0, SLOTS - 1))
    def fork(self, src: int, dst: int) -> None:
        self.cache = JITTED[jp.fork](self.cache, src, dst)
        self.pages[dst], self.lens[dst] = list(self.pages[src]), self.lens[src]

    @rule(slot=st.integers(0, SLOTS - 1))
    def free(self, slot: int) -> None:
        self.cache = JITTED[jp.free](self.cache, slot)
        self.pages[slot], self.lens[slot] = [], 0

    @rule(slot=st.integers(0, SLOTS - 1))
    def retain(self, slot: int) -> None:
        """The tree takes the full pages of a slot that it has not."""
        new = {
            page_id: page
            for page_id, page in zip(self.ids(slot), self.pages[slot][: self.lens[slot] // SIZE])
            if page_id not in self.tree
        }
        padded = np.array([*new, *[PAGES] * (ROW - len(new))])
        self.cache = JITTED[jp.retain](self.cache, padded)
        self.tree |= new

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """The tree lets some of its pages go."""
        gone = data.draw(st.lists(st.sampled_from(sorted(self.tree)), unique=True, max_size=ROW))
        self.cache = JITTED[jp.release](self.cache, np.array([*gone, *[-1] * (ROW - len(gone))]))
        for page_id in gone:
            del self.tree[page_id]

    @precondition(lambda self: self.tree)
    @rule(slot=st.integers(0, SLOTS - 1), data=st.data())
    def assign(self, slot: int, data: st.DataObject) -> None:
        """A slot starts from pages of the tree, the last perhaps only in part."""
        ids = data.draw(st.lists(st.sampled_from(sorted(self.tree)), unique=True, min_size=1, max_size=ROW))
        num_tokens = data.draw(st.integers(SIZE * (len(ids) - 1) + 1, SIZE * len(ids)))
        padded = np.array([*ids, *[PAGES] * (ROW - len(ids))])
        self.cache = JITTED[jp.assign](self.cache, slot, padded, num_tokens)
        self.pages[slot], self.lens[slot] = [self.tree[i] for i in ids], num_tokens

    @invariant()
    def the_books_balance_and_every_sequence_reads_what_was_written(self) -> None:
        if not hasattr(self, "cache"):
            return
        jp.check(self.cache, self.tree)
        assert int(self.cache.num_free) == PAGES - self.num_used(self.pages)
        assert self.cache.seq_lens.tolist() == self.lens
        self.cache = jp.poison(self.cache, np.isin(np.arange(PAGES), list(self.tree)))
        kv = np.asarray(self.cache.kv_pages[0])[:, :, 0, 0]
        for slot in range(SLOTS):
            values = [v for page in self.pages[slot] for v in page.values[:SIZE]][: self.lens[slot]]
            stored = np.concatenate([kv[i] for i in self.ids(slot)] or [[]])[: self.lens[slot]].tolist()
            assert stored == values, f"slot {slot}"
        counts = Counter([*self.tree, *(i for slot in range(SLOTS) for i in self.ids(slot))])
        assert {i: c for i, c in enumerate(self.cache.ref_counts.tolist()) if c} == counts


PageOperations.TestCase.settings = hypothesis.settings(stateful_step_count=50)
TestPageOperations = PageOperations.TestCase


def test_the_state_machine_takes_at_least_two_thousand_steps():
    settings = PageOperations.TestCase.settings
    assert settings.max_examples * settings.stateful_step_count >= 2000
