"""`make_batch` and `PagedAttention`, against attention written out over each sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged as jp

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4


def filled_cache(lengths: list[int]) -> jp.PagedCache:
    """NaN everywhere, and room for so many tokens a slot."""
    spec = jp.CacheSpec(
        num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, num_pages=16, page_size=PAGE, max_seqs=4,
        max_pages_per_seq=4, dtype="float32",
    )  # fmt: skip
    cache = jp.poison(jp.init_cache(spec), np.zeros(16, bool))
    for slot, length in enumerate(lengths):
        cache = jp.allocate(cache, slot, length)
    return cache


def test_make_batch_describes_the_newest_tokens_of_each_slot():
    cache = filled_cache([6, 3, 9, 0])
    batch = jp.make_batch(cache, jnp.array([0, 2, 4, 4]), jnp.array([1, 3, 0, 0]), 6)
    assert batch.positions.tolist() == [5, 6, 7, 8, 0, 0]
    tables = np.asarray(cache.block_tables)
    places = [tables[0, 1] * 4 + 1, tables[2, 1] * 4 + 2, tables[2, 1] * 4 + 3, tables[2, 2] * 4]
    assert batch.slot_mapping[:4].tolist() == places
    assert (batch.slot_mapping[4:] >= 16 * 4).all()
    assert batch.kv_lens.tolist() == [6, 9, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 4, 4, 4]
    assert batch.num_seqs.tolist() == [2]
    assert batch.last_tokens[:2].tolist() == [0, 3]
    np.testing.assert_array_equal(batch.page_indices[:2], tables[[0, 2]])


def test_make_batch_with_one_token_rows_has_a_row_for_each_token():
    cache = filled_cache([6, 3, 9, 0])
    batch = jp.make_batch(cache, jnp.array([0, 2, 4, 4]), jnp.array([1, 3, 0, 0]), 6, one_token_rows=True)
    assert batch.kv_lens.tolist() == [6, 7, 8, 9, 0, 0]
    assert batch.cu_q_lens.tolist() == list(range(7))
    assert batch.num_seqs.tolist() == [4]
    assert batch.last_tokens[:2].tolist() == [0, 3]
    np.testing.assert_array_equal(batch.page_indices[:4], np.asarray(cache.block_tables)[[0, 2, 2, 2]])


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """The last len(q) tokens of one sequence attend to all of it, or to the `window` latest."""
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * 0.3
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    scores = np.where((distance >= 0) & (distance < (window or len(k))), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("exact", [False, True])
def test_paged_attention_reads_a_pool_of_8_bits_with_the_scales_it_was_written_with(exact: bool):
    spec = jp.CacheSpec(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, num_pages=4, page_size=PAGE, max_seqs=1,
        max_pages_per_seq=4, dtype="int8",
    )  # fmt: skip
    cache = jp.allocate(jp.init_cache(spec), 0, 6)
    batch = jp.make_batch(cache, jnp.array([0]), jnp.array([6]), 6, one_token_rows=True, exact=exact)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, heads, DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, cache = jp.PagedAttention(0, sm_scale=0.3)(q, k, v, cache, batch, k_scale=0.03, v_scale=jnp.float32(0.02))
    stored_k, stored_v = (np.asarray(x, np.float32) for x in jp.gather(cache, 0, 0))
    np.testing.assert_allclose(stored_k * 0.03, k, atol=0.016)
    expected = causal_attention(q, stored_k * 0.03, stored_v * 0.02, None)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("one_token_rows", [False, True])
def test_paged_attention_over_several_steps_is_attention_over_each_sequence(one_token_rows: bool, window: int | None):
    rng = np.random.default_rng(0)
    lengths = [10, 5]
    q = [rng.standard_normal((n, HEADS, DIM)).astype(np.float32) for n in lengths]
    k, v = ([rng.standard_normal((n, KV_HEADS, DIM)).astype(np.float32) for n in lengths] for _ in range(2))
    attention = jp.PagedAttention(1, sm_scale=0.3, sliding_window=window)

    @jax.jit
    def step(cache, q_lens, *arrays):
        slots = jnp.where(q_lens > 0, jnp.array([0, 1]), 4)
        batch = jp.make_batch(cache, slots, q_lens, 8, one_token_rows=one_token_rows)
        return attention(*arrays, cache, batch)

    cache, at = filled_cache([0, 0]), [0, 0]
    for counts in ([5, 3], [4, 1], [1, 1]):  # prefill, a chunk beside a decode, decodes
        for slot, count in enumerate(counts):
            cache = jp.allocate(cache, slot, count)
        spans = [slice(start, start + count) for start, count in zip(at, counts)]
        packed = [np.concatenate([x[i][span] for i, span in enumerate(spans)]) for x in (q, k, v)]
        padded = [np.pad(x, ((0, 8 - len(x)), (0, 0), (0, 0)), constant_values=7.0) for x in packed]
        out, cache = step(cache, jnp.array(counts), *padded)
        expected = [causal_attention(q[i][s], k[i][: s.stop], v[i][: s.stop], window) for i, s in enumerate(spans)]
        np.testing.assert_allclose(out[: sum(counts)], np.concatenate(expected), atol=1e-5)
        np.testing.assert_array_equal(out[sum(counts) :], 0)
        at = [start + count for start, count in zip(at, counts)]

    for slot in range(2):  # what was written where, and the other layer untouched
        stored_k, stored_v = jp.gather(cache, 1, slot)
        np.testing.assert_array_equal(stored_k, k[slot])
        np.testing.assert_array_equal(stored_v, v[slot])
    assert np.isnan(cache.kv_pages[0]).all()
    written = int((~np.isnan(np.asarray(cache.kv_pages[1])[:, :, 0, 0])).sum())
    assert written == sum(lengths)
