"""Paged attention as a Flax layer, for this library's models and for other people's.

A model takes `(tokens, cache, batch)` and returns `(hidden, cache)`. In its layers, where plain attention stood, it
calls `PagedAttention`, which writes the new keys and values into the pool and attends to everything its sequence
has there.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.typing import ArrayLike

from jax_paged.cache import FILL, PagedCache, slot_mapping
from jax_paged.kernels import api as kernels
from jax_paged.kernels import xla
from jax_paged.kernels.sums import running_sums

__all__ = ["Batch", "PagedAttention", "attend", "attend_to_pages", "make_batch"]


class Batch(struct.PyTreeNode, kw_only=True):
    """Which tokens one step computes: sequences back to back, each with its newest tokens. Made by `make_batch`.

    A *row* is a sequence; where `one_token_rows` is set, each token is a row of its own, and attention need not
    deal with more.
    """

    positions: jax.Array  # i32[num_tokens], of each token in its sequence; 0 for padding
    slot_mapping: jax.Array  # i32[num_tokens], where its key and value go; past the pool's end for padding
    kv_lens: jax.Array  # i32[num_rows], tokens in the cache that the row's last token sees, itself included
    page_indices: jax.Array  # i32[num_rows, max_pages_per_seq]
    cu_q_lens: jax.Array  # i32[num_rows + 1]
    num_seqs: jax.Array  # i32[1], rows that are not padding
    last_tokens: jax.Array  # i32[num_sequences], the last token of each sequence, whose logits are wanted
    one_token_rows: bool = struct.field(pytree_node=False, default=False)
    exact: bool = struct.field(pytree_node=False, default=False)


def make_batch(
    cache: PagedCache,
    slots: jax.Array,
    q_lens: jax.Array,
    num_tokens: int,
    *,
    one_token_rows: bool = False,
    exact: bool = False,
) -> Batch:
    """Describes a step over the last `q_lens[i]` tokens of each slot `slots[i]`, which have room in the cache already.

    Args:
      cache: the cache, after `allocate` or `append`.
      slots: i32[num_sequences]; entries with a slot out of range are padding and come last.
      q_lens: i32[num_sequences], 0 for padding.
      num_tokens: static, at least the sum of `q_lens`; the tokens past it are padding.
      one_token_rows: static; the better way for decode, and for a few tokens of short sequences.
      exact: static, with `one_token_rows`; attention gives each token the same bits whatever else is in the batch.

    Returns:
      The batch, to be passed through the model.
    """
    real = (slots >= 0) & (slots < cache.max_seqs)
    slots = jnp.where(real, slots, cache.max_seqs)
    lens = cache.seq_lens.at[slots].get(fill_value=0, **FILL)
    ends = running_sums(q_lens).astype(jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
    is_token = token < ends[-1]
    positions = jnp.where(is_token, (lens - ends).at[sequence].get(mode="clip", wrap_negative_indices=False) + token, 0)
    token_slots = jnp.where(is_token, slots.at[sequence].get(mode="clip", wrap_negative_indices=False), cache.max_seqs)
    row_slots = token_slots if one_token_rows else slots
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return Batch(
        positions=positions,
        slot_mapping=slot_mapping(cache, token_slots, positions),
        kv_lens=jnp.where(is_token, positions + 1, 0) if one_token_rows else lens,
        page_indices=cache.block_tables.at[row_slots].get(fill_value=cache.num_pages, **FILL),
        cu_q_lens=jnp.arange(num_tokens + 1, dtype=jnp.int32) if one_token_rows else starts,
        num_seqs=(ends[-1] if one_token_rows else jnp.sum(real, dtype=jnp.int32))[None],
        last_tokens=jnp.maximum(ends - 1, 0),
        one_token_rows=one_token_rows,
        exact=exact,
    )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    batch: Batch,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes a layer's new keys and values to its pages, then attends to all of each sequence.

    Args:
      q: dtype[num_tokens, num_q_heads, head_dim], positions already encoded.
      k, v: dtype[num_tokens, num_kv_heads, head_dim].
      pages: the layer's part of the pool, `cache.kv_pages[layer]`.
      batch: see `make_batch`.
      sm_scale, sliding_window, soft_cap, sinks, implementation: as in `jax_paged.kernels.ragged_paged_attention`.
      k_scale, v_scale: what is stored is `k / k_scale` and `v / v_scale`, and read times those: for pools of 8 bits.

    Returns:
      The attention's output, dtype[num_tokens, num_q_heads, head_dim], zero for padding, and the pages.
    """
    pages = kernels.write_kv(pages, k, v, batch.slot_mapping, k_scale=k_scale, v_scale=v_scale)
    out = attend_to_pages(
        q,
        pages,
        batch,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        implementation=implementation,
    )
    return out, pages


def attend_to_pages(
    q: jax.Array,
    pages: jax.Array,
    batch: Batch,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The second half of `attend`, for pages to which the new keys and values have been written.

    Arguments and result are those of `attend`.
    """
    options: dict[str, Any] = {
        "sm_scale": sm_scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": sinks,
    }
    rows = (batch.kv_lens, batch.page_indices, batch.cu_q_lens, batch.num_seqs)
    if batch.exact:
        # Past the choice of an implementation: what no kernel promises.
        arrays = map(jnp.asarray, (q, pages, *rows))
        return cast(jax.Array, xla.ragged_paged_attention(*arrays, **options, decode_only=True, share=False))
    options["implementation"] = implementation
    if batch.one_token_rows:
        return kernels.paged_attention(q, pages, batch.page_indices, batch.kv_lens, **options)
    return kernels.ragged_paged_attention(q, pages, *rows, **options)


class PagedAttention(nnx.Module):
    """Attention over the paged cache, for one layer. It has no weights; project queries, keys and values yourself.

    Args:
      layer: which layer of the cache it reads and writes.
      sm_scale: the queries' factor, usually `head_dim ** -0.5`.
      sliding_window, soft_cap, implementation: as in `jax_paged.kernels.ragged_paged_attention`.
    """

    def __init__(
        self,
        layer: int,
        *,
        sm_scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        implementation: str | None = None,
    ) -> None:
        self.layer = layer
        self.sm_scale = sm_scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.implementation = implementation

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: PagedCache,
        batch: Batch,
        sinks: jax.Array | None = None,
        *,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> tuple[jax.Array, PagedCache]:
        """As `attend`, on this layer's pages of the cache, which is returned with them changed."""
        out, pages = attend(
            q,
            k,
            v,
            cache.kv_pages[self.layer],
            batch,
            sm_scale=self.sm_scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            implementation=self.implementation,
        )
        kv_pages = (*cache.kv_pages[: self.layer], pages, *cache.kv_pages[self.layer + 1 :])
        return out, cache.replace(kv_pages=kv_pages)
