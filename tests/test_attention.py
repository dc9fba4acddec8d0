"""The attention contract: the reference against numbers worked out by hand, the rest against the reference."""

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BY_NAME,
    CASES,
    Batch,
    Case,
    assert_matches_reference,
    assert_state_matches_reference,
    make_batch,
    quick_attention,
    reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_paged import kernels
from jax_paged.kernels import api, xla

# These run here; the tests of the Pallas kernels hold the same cases against the same reference.
implementations = pytest.mark.parametrize("implementation", ["reference", "xla"])
LN3 = math.log(3)


def attend(batch: Batch, implementation: str, **options: Any) -> tuple[jax.Array, jax.Array]:
    options = batch.options | options
    out, lse = quick_attention()(*batch.arrays, **options, return_lse=True, implementation=implementation)
    return out, lse


# --- the reference ---


def two_tokens(q_len: int) -> Batch:
    """One head of dim 1, keys [0, ln 3], values [4, 8], queries 1, on pages 1 and 0 of one slot each."""
    return Batch(
        q=jnp.ones((q_len, 1, 1)),
        kv_pages=jnp.array([[LN3, 8.0], [0.0, 4.0]]).reshape(2, 1, 2, 1),
        kv_lens=jnp.array([2]),
        page_indices=jnp.array([[1, 0]]),
        cu_q_lens=jnp.array([0, q_len]),
        num_seqs=jnp.array([1]),
    )


@pytest.mark.parametrize(
    ("options", "out", "lse"),
    [
        # The first token sees weight 1 on value 4, the second weights 1 and 3 on 4 and 8.
        ({}, [4, (4 + 3 * 8) / 4], [0, math.log(4)]),
        ({"causal": False}, [7, 7], [math.log(4)] * 2),
        ({"sliding_window": 1}, [4, 8], [0, LN3]),
        ({"sinks": jnp.array([math.log(4)])}, [4 / (1 + 4), 28 / (4 + 4)], [math.log(5), math.log(8)]),
        ({"sm_scale": 2.0}, [4, (4 + 9 * 8) / 10], [0, math.log(10)]),
        ({"k_scale": 2.0}, [4, (4 + 9 * 8) / 10], [0, math.log(10)]),
        ({"v_scale": 0.5}, [2, 3.5], [0, math.log(4)]),
        # The second logit is ln 3 squared, and tanh(ln 3 / 2) = 1/2 makes it ln 3 again.
        ({"soft_cap": 2 * LN3, "sm_scale": LN3}, [4, 7], [0, math.log(4)]),
    ],
    ids=["plain", "not_causal", "window", "sinks", "sm_scale", "k_scale", "v_scale", "soft_cap"],
)
def test_the_reference_on_two_tokens_by_hand(options: dict[str, Any], out: Any, lse: Any) -> None:
    got = attend(two_tokens(2), "reference", **options)
    np.testing.assert_allclose(got[0].ravel(), out, rtol=1e-6)
    np.testing.assert_allclose(got[1].ravel(), lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_a_kernel_for_another_platform_says_how_it_can_be_run_here(implementation: str) -> None:
    batch = make_batch(BY_NAME["mixed"], 0, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="does not run on 'cpu', jax's default platform; interpret=True"):
        kernels.ragged_paged_attention(*batch.arrays, **batch.options, implementation=implementation)


@implementations
def test_a_decode_by_hand(implementation: str) -> None:
    out, lse = attend(two_tokens(1), implementation)
    assert (out.item(), lse.item()) == pytest.approx((7, math.log(4)), rel=1e-6)


@implementations
def test_query_heads_share_kv_heads_in_order(implementation: str) -> None:
    # One cached token, so every query head returns the value of its KV head: heads 0, 1 of the first, 2, 3 of the next.
    kv = jnp.array([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    batch = replace(two_tokens(1), q=jnp.ones((1, 4, 2)), kv_pages=jnp.stack([kv, kv])[:, None], kv_lens=jnp.array([1]))
    out, _ = attend(batch, implementation)
    np.testing.assert_array_equal(out[0], [[1, 2], [1, 2], [3, 4], [3, 4]])


@pytest.mark.parametrize("name", ["mixed", "fewer_keys_than_queries", "sinks", "not_causal", "everything", "int8_kv"])
def test_the_reference_matches_numpy_in_float64(name: str) -> None:
    assert_same_as_reference(make_batch(BY_NAME[name], 1, jnp.float32), "reference")


# --- the other implementations against it ---


def assert_same_as_reference(batch: Batch, implementation: str) -> None:
    assert_state_matches_reference(attend(batch, implementation), batch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_matches_the_reference_in_float32(case: Case) -> None:
    assert_same_as_reference(make_batch(case, 0, jnp.float32), "xla")


@pytest.mark.parametrize(
    "name", ["mixed", "chunked", "empty_rows", "everything", "large_logits", "int8_kv", "fp8_kv", "float32_kv"]
)
def test_xla_matches_the_reference_in_bfloat16(name: str) -> None:
    assert_same_as_reference(make_batch(BY_NAME[name], 0, jnp.bfloat16), "xla")


def test_xla_matches_the_reference_in_float16() -> None:
    assert_same_as_reference(make_batch(BY_NAME["mixed"], 0, jnp.float16), "xla")


# A window, and so on, is a constant of the compiled program: few programs, many lengths.
RANDOM_SHAPES = (
    Case(name="plain", kv_lens=(), q_lens=(), num_q_heads=6, head_dim=16, page_size=4),
    Case(name="window", kv_lens=(), q_lens=(), head_dim=16, page_size=1, sliding_window=9, soft_cap=3.0),
    Case(name="sinks", kv_lens=(), q_lens=(), head_dim=16, page_size=16, sliding_window=21, sinks=True, v_scale=2.0),
)


@st.composite
def ragged_cases(draw: st.DrawFn) -> Case:
    row = st.integers(0, 50).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m) | st.just(min(m, 1))))
    rows = draw(st.lists(row, max_size=5))
    shape = draw(st.sampled_from(RANDOM_SHAPES))
    return replace(
        shape,
        kv_lens=tuple(m for m, _ in rows),
        q_lens=tuple(n for _, n in rows),
        max_seqs=5,
        max_tokens=250,
        max_kv_len=50,
        pool_tokens=5 * 64,
    )


@settings(max_examples=40, deadline=None)
@given(case=ragged_cases(), seed=st.integers(0, 2**16))
def test_xla_matches_the_reference_on_random_ragged_batches(case: Case, seed: int) -> None:
    assert_same_as_reference(make_batch(case, seed, jnp.float32), "xla")


@implementations
def test_logits_far_apart_neither_overflow_nor_vanish(implementation: str) -> None:
    batch = make_batch(BY_NAME["mixed"], 0, jnp.float32)
    out, lse = attend(replace(batch, q=batch.q * 1e4), implementation)
    num_tokens = sum(BY_NAME["mixed"].q_lens)
    assert bool(jnp.isfinite(out).all())
    assert bool(jnp.isfinite(lse[:num_tokens]).all())


def assert_decode_matches_reference(case: Case, implementation: str) -> None:
    batch, n = make_batch(case, 0, jnp.float32), len(case.kv_lens)
    assert case.decode_only
    got = kernels.paged_attention(
        batch.q[:n],
        batch.kv_pages,
        batch.page_indices[:n],
        batch.kv_lens[:n],
        **batch.options,
        return_lse=True,
        implementation=implementation,
    )
    for x, want in zip(got, reference(batch), strict=True):
        assert_matches_reference(x, want[:n], jnp.float32)


@pytest.mark.parametrize("name", ["decode_lengths_around_a_page", "decode_one_row"])
@implementations
def test_paged_attention_is_ragged_attention_of_single_tokens(implementation: str, name: str) -> None:
    assert_decode_matches_reference(BY_NAME[name], implementation)


# Rows of several blocks, which XLA's path takes from one list, and enough of them to look for pages in common.
MANY_ROWS = Case(
    name="nothing_in_common", kv_lens=(300, 130, 0, 150, 257, 129, 256, 1, *[140] * 10), q_lens=(1,) * 18, head_dim=16,
    max_seqs=18, max_tokens=18, pool_tokens=18 * 320,
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        MANY_ROWS,
        replace(MANY_ROWS, name="windowed", sliding_window=9),
        # A block of 128 tokens in common, but for the empty row; several; one that a row is too short to have whole.
        replace(MANY_ROWS, name="a_block_in_common", kv_lens=(300, 257, 0, *[280] * 15), shared_pages=8),
        replace(MANY_ROWS, name="blocks_in_common", kv_lens=(300,) * 18, shared_pages=17, sinks=True, soft_cap=3.0),
        replace(MANY_ROWS, name="a_row_too_short", kv_lens=(300, 127, *[140] * 16), shared_pages=8, v_scale=2.0),
        # More blocks of one row than are taken together, and rows whose blocks are not all taken at once.
        replace(
            MANY_ROWS,
            name="one_long_row",
            kv_lens=(140, 1300, 0, 400),
            q_lens=(1,) * 4,
            max_seqs=4,
            max_tokens=4,
            max_kv_len=1312,
            pool_tokens=2000,
        ),
        replace(
            MANY_ROWS,
            name="more_blocks_than_at_once",
            kv_lens=(300,) * 40,
            q_lens=(1,) * 40,
            max_seqs=40,
            max_tokens=40,
            pool_tokens=40 * 320,
        ),
    ],
    ids=str,
)
def test_xla_matches_the_reference_on_decodes_of_many_rows(case: Case) -> None:
    assert_decode_matches_reference(case, "xla")


def test_a_row_of_an_exact_decode_has_the_same_bits_in_any_place_of_any_batch() -> None:
    exact = jax.jit(partial(xla.ragged_paged_attention, decode_only=True, share=False, return_lse=True))
    kv_lens = (150, 640, 300, 127, 500, 1, 0, 260, 400, 640, 90, 130, 256, 555, 384, 600, 129)
    case = replace(MANY_ROWS, kv_lens=kv_lens, q_lens=(1,) * 17, max_seqs=17, max_tokens=17, num_q_heads=4,
                   num_kv_heads=1, head_dim=64, max_kv_len=640, pool_tokens=17 * 640)  # fmt: skip
    batch = make_batch(case, 0, jnp.float32)
    q, pages = jnp.nan_to_num(batch.q), jnp.nan_to_num(batch.kv_pages)

    def attend_rows(rows: Any) -> list[jax.Array]:
        cu_q_lens, num_seqs = jnp.arange(len(rows) + 1), jnp.array([len(rows)])
        return list(exact(q[rows], pages, batch.kv_lens[rows], batch.page_indices[rows], cu_q_lens, num_seqs))

    want = attend_rows(jnp.arange(17))
    rng = np.random.default_rng(0)
    for rows in (rng.permutation(17), rng.permutation(17), rng.permutation(17), rng.permutation(17)[:3], np.arange(1)):
        for got, expected in zip(attend_rows(rows), want):
            np.testing.assert_array_equal(got, expected[rows])


def test_nan_of_one_row_reaches_no_other() -> None:
    case = replace(MANY_ROWS, kv_lens=(130, 300, 140), q_lens=(1,) * 3, max_seqs=3, max_tokens=3)
    batch = make_batch(case, 0, jnp.float32)
    broken = replace(batch, kv_pages=batch.kv_pages.at[batch.page_indices[1, 3]].set(jnp.nan))
    (out, lse), (sound_out, sound_lse) = (attend(b, "xla") for b in (broken, batch))
    assert bool(jnp.isnan(out[1]).all())
    for got, want in ((out, sound_out), (lse, sound_lse)):
        np.testing.assert_array_equal(got[jnp.array([0, 2])], want[jnp.array([0, 2])])


def test_lse_is_returned_only_when_asked_for_and_changes_nothing() -> None:
    batch = make_batch(BY_NAME["group_3_dim_64"], 0, jnp.bfloat16)
    out = quick_attention()(*batch.arrays, **batch.options)
    chex.assert_shape(out, batch.q.shape)
    assert out.dtype == jnp.bfloat16
    with_lse, lse = attend(batch, "xla")
    chex.assert_shape(lse, batch.q.shape[:2])
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(with_lse, np.float32))


def test_new_lengths_and_scales_do_not_retrace() -> None:
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(batch_arrays: tuple[jax.Array, ...], k_scale: jax.Array) -> Any:
        return kernels.ragged_paged_attention(*batch_arrays, k_scale=k_scale, implementation="xla")

    names = ("mixed", "decode_many_pages", "prefill_lengths_around_a_page", "nothing_but_padding")
    outs = [step(make_batch(BY_NAME[name], 0, jnp.float32).arrays, jnp.float32(i)) for i, name in enumerate(names)]
    assert float(jnp.abs(outs[0]).sum()) > 0
    assert float(jnp.abs(outs[-1]).sum()) == 0


# --- merging ---


def split(batch: Batch, pages: int) -> tuple[Batch, Batch]:
    """The same queries over the first pages of each row, all of whose tokens they see, and over the rest."""
    first_tokens = pages * batch.kv_pages.shape[1]
    first = replace(batch, kv_lens=jnp.full_like(batch.kv_lens, first_tokens))
    rest = replace(batch, kv_lens=batch.kv_lens - first_tokens, page_indices=batch.page_indices[:, pages:])
    return first, rest


class Variants(chex.TestCase):
    """Jitted and not."""

    @chex.variants(with_jit=True, without_jit=True)
    def test_attention_over_two_halves_merges_to_the_whole(self) -> None:
        # Rows of one token and of many; what is before their queries is at least the two pages split off.
        case = Case(name="long", kv_lens=(40, 60, 33), q_lens=(1, 20, 1), max_tokens=22, max_seqs=3, sinks=True)
        batch = make_batch(case, 0, jnp.float32)
        first, rest = split(batch, 2)
        first_state = attend(first, "xla", causal=False, sinks=None)
        merged = self.variant(kernels.merge_states)(*first_state, *attend(rest, "xla"))
        for got, want in zip(merged, reference(batch), strict=True):
            assert_matches_reference(got, want, jnp.float32)

    @chex.variants(with_jit=True, without_jit=True)
    def test_merging_with_nothing_changes_nothing(self) -> None:
        out, lse = jnp.array([[[1.0, -2.0]]]), jnp.array([[0.5]])
        nothing, no_lse = jnp.full_like(out, jnp.nan), jnp.array([[-jnp.inf]])
        merge = self.variant(kernels.merge_states)
        for merged in (merge(out, lse, nothing, no_lse), merge(nothing, no_lse, out, lse)):
            chex.assert_trees_all_equal(merged, (out, lse))
        chex.assert_trees_all_equal(merge(nothing, no_lse, nothing, no_lse), (jnp.zeros_like(out), no_lse))

    @chex.variants(with_jit=True, without_jit=True)
    def test_merging_by_hand(self) -> None:
        # Denominators 1 and 3, so out is a quarter of the way from the second to the first.
        out, lse = self.variant(kernels.merge_states)(
            jnp.array([[4.0]]), jnp.array([0.0]), jnp.array([[8.0]]), jnp.array([LN3])
        )
        assert (out.item(), lse.item()) == pytest.approx((7, math.log(4)), rel=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_writing_interleaves_keys_and_values(self) -> None:
        k = jnp.arange(1.0, 13.0).reshape(3, 2, 2)
        pages = self.variant(kernels.write_kv)(jnp.zeros((4, 2, 4, 2)), k, -k, jnp.array([7, 0, 3]))
        want = np.zeros((4, 2, 4, 2))
        for token, (page, offset) in enumerate([(3, 1), (0, 0), (1, 1)]):
            for head in range(2):
                want[page, offset, 2 * head] = k[token, head]
                want[page, offset, 2 * head + 1] = -k[token, head]
        np.testing.assert_array_equal(pages, want)

    @chex.variants(with_jit=True, without_jit=True)
    def test_writing_out_of_range_writes_nowhere(self) -> None:
        pages = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 2, 8)), jnp.bfloat16)
        slots = jnp.array([12, 13, -1, -12, 2**31 - 1, -(2**31)])
        k = jnp.ones((6, 1, 8), jnp.bfloat16)
        written = self.variant(kernels.write_kv)(pages, k, k, slots)
        np.testing.assert_array_equal(np.asarray(written).view(np.uint16), np.asarray(pages).view(np.uint16))


def test_merging_keeps_the_wider_dtype() -> None:
    out, lse = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.zeros((2, 3))
    assert kernels.merge_states(out, lse, out, lse)[0].dtype == jnp.bfloat16
    assert kernels.merge_states(out, lse, out.astype(jnp.float32), lse)[0].dtype == jnp.float32


def test_merging_shapes_that_do_not_fit_raises() -> None:
    with pytest.raises(ValueError, match=re.escape("lse_b.shape=(2, 4)")):
        kernels.merge_states(jnp.ones((2, 3, 4)), jnp.ones((2, 3)), jnp.ones((2, 3, 4)), jnp.ones((2, 4)))


# --- writing ---


def test_writing_to_int8_rounds_and_clips() -> None:
    k = jnp.array([0.24, 0.26, -100.0, 100.0]).reshape(1, 1, 4)
    pages = kernels.write_kv(
        jnp.zeros((1, 1, 2, 4), jnp.int8), k, k, jnp.array([0]), k_scale=0.5, v_scale=jnp.float32(1.0)
    )
    np.testing.assert_array_equal(pages[0, 0], [[0, 1, -128, 127], [0, 0, -100, 100]])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_writing_to_fp8_clips_to_the_finite_range(dtype: str) -> None:
    k = jnp.array([1.0, 1e9, -1e9]).reshape(1, 1, 3)
    pages = kernels.write_kv(jnp.zeros((1, 1, 2, 3), dtype), k, k, jnp.array([0]), k_scale=2.0)
    largest = float(jnp.finfo(dtype).max)
    want = [[0.5, largest, -largest], [1.0, largest, -largest]]
    np.testing.assert_array_equal(pages[0, 0].astype(jnp.float32), want)


def test_what_is_written_with_scales_is_read_with_them() -> None:
    rng = np.random.default_rng(0)
    k, v, q = (jnp.asarray(rng.standard_normal((20, heads, 16)), jnp.float32) for heads in (2, 2, 4))
    slots, tables = jnp.arange(20) + 8, jnp.array([[1, 2, 3]])
    rest = (jnp.array([20]), tables, jnp.array([0, 20]), jnp.array([1]))
    exact = kernels.write_kv(jnp.zeros((4, 8, 4, 16)), k, v, slots)
    scales: dict[str, Any] = {"k_scale": 0.03, "v_scale": 0.03}
    rounded = kernels.write_kv(jnp.zeros((4, 8, 4, 16), jnp.int8), k, v, slots, **scales)
    want = quick_attention()(q, exact, *rest, implementation="reference")
    got = quick_attention()(q, rounded, *rest, **scales)
    # Rounding to steps of 0.03 is off by at most 0.015, evenly spread: 0.03 / sqrt(12) of values of about 1.
    assert 0 < float(jnp.linalg.norm(got - want)) < 0.03 * float(jnp.linalg.norm(want))


def test_writing_to_a_donated_pool_copies_nothing() -> None:
    pages, k, slots = jnp.zeros((256, 16, 4, 64)), jnp.ones((8, 2, 64)), jnp.arange(8)
    compiled = jax.jit(kernels.write_kv, donate_argnums=0).lower(pages, k, k, slots).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.ones((3, 1, 8))}, "k.shape=(3, 1, 8)"),
        ({"slot_mapping": jnp.zeros(2, jnp.int32)}, "must be (3,) and int32"),
        ({"slot_mapping": jnp.zeros(3)}, "slots.dtype=dtype('float32')"),
        ({"kv_pages": jnp.zeros((2, 4, 3, 8))}, "shape=(2, 4, 3, 8)"),
        ({"kv_pages": jnp.zeros((2, 4, 4, 8), jnp.int32)}, "dtype('int32')"),
        ({"k_scale": jnp.ones(2)}, "k_scale of shape (2,)"),
    ],
)
def test_writing_what_does_not_fit_raises(change: dict[str, Any], message: str) -> None:
    k = jnp.ones((3, 2, 8))
    args = {"kv_pages": jnp.zeros((2, 4, 4, 8)), "k": k, "v": k, "slot_mapping": jnp.arange(3)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.write_kv(**args)


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_of_any_length_is_none_where_nothing_is_further_away(window: int) -> None:
    # With fewer keys than queries, positions are negative.
    batch = make_batch(BY_NAME["fewer_keys_than_queries"], 0, jnp.float32)
    for got, want in zip(attend(batch, "xla", sliding_window=window), reference(batch), strict=True):
        assert_matches_reference(got, want, jnp.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": np.array([0, 2**32 + 1])}, "src has 0 to 4294967297, which must fit int32"),
        ({"interpret": 1}, "interpret=1 must be True, False or the parameters of a Pallas interpreter"),
        ({"src": jnp.zeros(3, jnp.int32)}, "src.shape=(3,)"),
        ({"dst": jnp.zeros(2)}, "dst.dtype=dtype('float32')"),
        ({"kv_pages": jnp.zeros((2, 4, 3, 8))}, "shape=(2, 4, 3, 8)"),
        ({"implementation": "pallas_gpu"}, "implementation='pallas_gpu' must be None, 'xla' or 'pallas_tpu'"),
    ],
)
def test_copying_what_does_not_fit_raises(change: dict[str, Any], message: str) -> None:
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.copy_pages(**{"kv_pages": jnp.zeros((2, 4, 4, 8)), "src": ids, "dst": ids} | change)


# --- validation and choice ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((2, 4))}, "q.shape=(2, 4)"),
        ({"q": jnp.ones((2, 1, 1), jnp.int32)}, "q.dtype=dtype('int32')"),
        ({"q": jnp.ones((2, 1, 4))}, "must agree in head_dim"),
        ({"kv_pages": jnp.ones((2, 1, 4, 1))}, "num_q_heads=1 must be a multiple of num_kv_heads=2"),
        ({"kv_pages": jnp.ones((2, 2, 1))}, "(num_pages, page_size, 2 * num_kv_heads, head_dim)"),
        ({"kv_lens": jnp.array([2, 2])}, "kv_lens.shape=(2,) must be (1,)"),
        ({"kv_lens": jnp.array([2.0])}, "kv_lens.dtype=float32 must be int32"),
        ({"page_indices": jnp.array([1, 0])}, "page_indices.shape=(2,)"),
        ({"cu_q_lens": jnp.array([0])}, "cu_q_lens.shape=(1,) must be (2,)"),
        ({"num_seqs": jnp.array(1)}, "num_seqs.shape=() must be (1,)"),
        ({"sm_scale": math.inf}, "sm_scale=inf"),
        ({"sm_scale": 1e39}, "sm_scale=1e+39 must be a Python float of at most 1e+38 in size"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"soft_cap": 1e39}, "soft_cap=1e+39 must be > 0 and at most 1e+38"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": -1}, "use None for no window"),
        ({"sliding_window": math.inf}, "sliding_window=inf must be a whole number"),
        ({"sliding_window": math.nan}, "sliding_window=nan must be a whole number"),
        ({"sliding_window": "2"}, "sliding_window='2' must be a whole number"),
        ({"soft_cap": "x"}, "soft_cap='x'"),
        ({"sm_scale": None}, "sm_scale=None"),
        ({"return_lse": "yes"}, "return_lse='yes' must be True or False"),
        ({"causal": jnp.array(True)}, "must be True or False, and static"),
        ({"interpret": 1}, "interpret=1 must be True, False"),
        ({"k_scale": 1j}, "k_scale of shape (), dtype complex64 must be a real number"),
        ({"sinks": jnp.array([True])}, "sinks.dtype=dtype('bool')"),
        ({"page_indices": np.array([[2**32, 0]])}, "page_indices has 0 to 4294967296, which must fit int32"),
        ({"sinks": jnp.ones(2)}, "sinks.shape=(2,)"),
        ({"v_scale": jnp.ones(1)}, "v_scale of shape (1,)"),
        ({"implementation": "triton"}, "reference, xla, pallas_tpu, pallas_gpu"),
    ],
)
def test_arguments_that_do_not_fit_raise(change: dict[str, Any], message: str) -> None:
    batch = two_tokens(2)
    names = ("q", "kv_pages", "kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.ragged_paged_attention(**(dict(zip(names, batch.arrays, strict=True)) | change))


def test_a_block_table_of_another_batch_raises() -> None:
    batch = two_tokens(1)
    with pytest.raises(ValueError, match=re.escape("block_tables.shape=(2, 1)")):
        kernels.paged_attention(batch.q, batch.kv_pages, jnp.zeros((2, 1), jnp.int32), batch.kv_lens)


def test_a_window_without_causality_raises() -> None:
    with pytest.raises(NotImplementedError, match="sliding_window=4 with causal=False"):
        kernels.ragged_paged_attention(*two_tokens(2).arrays, sliding_window=4, causal=False)


@implementations
def test_interpreting_what_is_no_kernel_raises(implementation: str) -> None:
    with pytest.raises(NotImplementedError, match="interpret=True"):
        kernels.ragged_paged_attention(*two_tokens(2).arrays, interpret=True, implementation=implementation)


def some_call(**changes: Any) -> kernels.AttentionCall:
    shape: dict[str, Any] = {"max_tokens": 3, "num_q_heads": 5, "num_kv_heads": 1, "head_dim": 7}
    pool = {
        "q_dtype": "float32",
        "kv_dtype": "float32",
        "num_pages": 2,
        "page_size": 4,
        "max_seqs": 1,
        "pages_per_seq": 2,
    }
    return kernels.AttentionCall(**(shape | pool | changes))


def some_arrays() -> tuple[jax.Array, ...]:
    """Arrays of `some_call`'s shapes, which no other test has."""
    ints = ([3], [[0, 1]], [0, 3], [1])
    return jnp.ones((3, 5, 7)), jnp.ones((2, 4, 2, 7)), *(jnp.array(x, jnp.int32) for x in ints)


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for both Pallas packages: refuses windows, and returns sevens."""

    def supports(call: kernels.AttentionCall) -> str | None:
        return f"sliding_window={call.sliding_window} is too much" if call.sliding_window else None

    module = SimpleNamespace(supports=supports, ragged_paged_attention=lambda q, *_, **__: jnp.full_like(q, 7))
    load = api._load
    monkeypatch.setattr(api, "_load", lambda name: module if name.startswith("pallas") else load(name))
    return module


@pytest.mark.parametrize(("platform", "name"), [("tpu", "pallas_tpu"), ("gpu", "pallas_gpu"), ("cpu", "xla")])
def test_each_platform_prefers_its_kernel(fake_kernel: SimpleNamespace, platform: str, name: str) -> None:
    chosen, reason = kernels.choose_implementation(some_call(), platform)
    assert chosen == name
    assert repr(platform) in reason


def test_the_default_platform_here_is_asked_for() -> None:
    assert kernels.choose_implementation(some_call()) == kernels.choose_implementation(some_call(), "cpu")


def test_a_platform_that_jax_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"platform='cuda' must be None or one of cpu, gpu, tpu"):
        kernels.choose_implementation(some_call(), "cuda")


def test_what_a_kernel_does_not_support_falls_back_and_says_why(fake_kernel: SimpleNamespace) -> None:
    name, reason = kernels.choose_implementation(some_call(sliding_window=9), "tpu")
    assert name == "xla"
    assert "pallas_tpu" in reason
    assert "sliding_window=9 is too much" in reason


def test_naming_a_kernel_that_cannot_raises(fake_kernel: SimpleNamespace) -> None:
    with pytest.raises(NotImplementedError, match="sliding_window=9 is too much"):
        kernels.ragged_paged_attention(*some_arrays(), sliding_window=9, implementation="pallas_gpu")


def test_a_missing_kernel_package_falls_back_and_raises_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api._MODULES, "pallas_tpu", ".no_such_package")
    assert kernels.choose_implementation(some_call(), "tpu")[0] == "xla"
    with pytest.raises(NotImplementedError, match=r"no_such_package.*use implementation='xla'"):
        kernels.ragged_paged_attention(*some_arrays(), implementation="pallas_tpu")


def test_the_kernel_is_chosen_by_the_platform_that_is_compiled_for(
    fake_kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_default_platform", lambda: "tpu")
    on_cpu = kernels.ragged_paged_attention(*some_arrays())
    np.testing.assert_allclose(on_cpu, jnp.ones_like(on_cpu), rtol=1e-6)  # every value is 1
    traced = jax.jit(kernels.ragged_paged_attention).trace(*some_arrays())
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "dense<7.0" in text
    assert "dot_general" not in text
