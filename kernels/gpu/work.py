"""The plan of a launch, computed on the device from the lengths: a table of work items, and the merge of parts.

An item is a run of tokens of one row (as many as fill the kernel's query rows) and a run of KV blocks. Every shape
is static; lengths are data. Unused items at the end of the table have no tokens.
"""

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Item(IntEnum):
    """The columns of the table, i32."""

    TOKEN = 0  # its first token, an index of q
    NUM_TOKENS = 1  # 0: nothing to do
    POSITION = 2  # of its first token in the row; negative where a row has fewer keys than queries
    ROW = 3  # of page_indices
    KV_LEN = 4  # of the row: keys from it on do not exist
    KV_START = 5  # its first key: a multiple of the page size or, if smaller, of the block
    NUM_BLOCKS = 6  # of keys


class Work(NamedTuple):
    items: jax.Array  # i32[max_items, len(Item)]
    num_items: jax.Array  # i32[1]; the rest have no tokens


class KvBlocks(NamedTuple):
    """How the keys that a query may see are cut into blocks."""

    block_kv: int
    page_size: int
    causal: bool
    sliding_window: int | None

    def seen(self, position: jax.Array, last_position: jax.Array, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first key, and the number of blocks from it on, for queries at `position .. last_position`."""
        end = jnp.minimum(kv_len, last_position + 1) if self.causal else kv_len
        first = jnp.zeros_like(end)
        if self.sliding_window is not None:
            first = jnp.maximum(position - self.sliding_window + 1, 0)
        # A page that the window cuts is read as a whole, which keeps blocks and pages aligned.
        first = first // self.page_size * self.page_size
        return first, jnp.maximum(_cdiv(end - first, self.block_kv), 0)


def plan_decode(
    kv_lens: jax.Array, tokens: jax.Array, is_wanted: jax.Array, *, max_parts: int, kv_blocks: KvBlocks
) -> Work:
    """One token per row, its keys split into parts such that every SM has about the same to do.

    Args:
        kv_lens: i32[rows]; 0 where there is no such row.
        tokens: i32[rows], the row's token.
        is_wanted: bool[rows], whether its output is.
        max_parts: parts that all rows together may have beyond one each. 0 splits nothing.

    Returns:
        rows + max_parts items, the parts of a row side by side.
    """
    rows = kv_lens.shape[0]
    position = kv_lens - 1
    first, blocks = kv_blocks.seen(position, position, kv_lens)
    parts = jnp.ones_like(blocks)
    if max_parts:
        # ceil(b / n), summed over the rows, is at most sum(b) / n + rows: the table has room for all parts.
        blocks_per_part = jnp.maximum(_cdiv(jnp.sum(blocks), max_parts), _MIN_BLOCKS_PER_PART)
        parts = jnp.maximum(_cdiv(blocks, blocks_per_part), 1)
    blocks_per_part = _cdiv(blocks, parts)  # the same for all parts of a row
    row, part, is_used, num_items = _assign(parts, rows + max_parts)
    columns = {
        Item.TOKEN: tokens[row],
        Item.NUM_TOKENS: is_used & is_wanted[row],
        Item.POSITION: position[row],
        Item.ROW: row,
        Item.KV_LEN: kv_lens[row],
        Item.KV_START: first[row] + part * blocks_per_part[row] * kv_blocks.block_kv,
        Item.NUM_BLOCKS: jnp.clip(blocks[row] - part * blocks_per_part[row], 0, blocks_per_part[row]),
    }
    return Work(_table(columns), num_items)


# The prologue and the merge of a part cost about as much as the transfer of two blocks.
_MIN_BLOCKS_PER_PART = 4


def plan_prefill(
    kv_lens: jax.Array,
    q_lens: jax.Array,
    first_tokens: jax.Array,
    *,
    max_tokens: int,
    tokens_per_item: int,
    kv_blocks: KvBlocks,
) -> Work:
    """Rows of any number of tokens, cut into items of `tokens_per_item`.

    Args:
        kv_lens, q_lens, first_tokens: i32[rows], the last in ascending order.
        max_tokens: at least sum(q_lens).

    Returns:
        max_tokens // tokens_per_item + rows items, in the order of their tokens; unused ones start at max_tokens.
    """
    rows = kv_lens.shape[0]
    row, part, is_used, num_items = _assign(_cdiv(q_lens, tokens_per_item), max_tokens // tokens_per_item + rows)
    offset = part * tokens_per_item
    num_tokens = jnp.where(is_used, jnp.minimum(q_lens[row] - offset, tokens_per_item), 0)
    position = kv_lens[row] - q_lens[row] + offset
    first, blocks = kv_blocks.seen(position, position + num_tokens - 1, kv_lens[row])
    columns = {
        Item.TOKEN: jnp.where(is_used, first_tokens[row] + offset, max_tokens),
        Item.NUM_TOKENS: num_tokens,
        Item.POSITION: position,
        Item.ROW: row,
        Item.KV_LEN: kv_lens[row],
        Item.KV_START: first,
        Item.NUM_BLOCKS: blocks,
    }
    return Work(_table(columns), num_items)


def merge_parts(out: jax.Array, lse: jax.Array, work: Work, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Joins the parts of each row: `api.merge_states` of any number of them.

    Args:
        out: f32[max_items, num_heads, head_dim], normalised within the part. What is in unused items is ignored.
        lse: f32[max_items, num_heads].

    Returns:
        out f32[num_rows, num_heads, head_dim] and lse f32[num_rows, num_heads].

    FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 2.3) gives the formula.
    """
    is_used = jnp.arange(work.items.shape[0]) < work.num_items[0]
    row = jnp.where(is_used, work.items[:, Item.ROW], num_rows)  # past the end: dropped
    lse = jnp.where(is_used[:, None], lse, -jnp.inf)
    row_max = jax.ops.segment_max(lse, row, num_rows, indices_are_sorted=True)
    row_max = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    weight = jnp.exp(lse - jnp.take(row_max, row, axis=0, mode="clip"))
    total = jax.ops.segment_sum(weight, row, num_rows, indices_are_sorted=True)
    # What was never written may be NaN, and 0 * NaN is NaN.
    weighted = jnp.where((weight > 0)[..., None], weight[..., None] * out, 0.0)
    summed = jax.ops.segment_sum(weighted, row, num_rows, indices_are_sorted=True)
    return summed / jnp.where(total > 0, total, 1.0)[..., None], row_max + jnp.log(total)


def per_token(slots: jax.Array, work: Work, max_tokens: int) -> jax.Array:
    """From [max_items, num_kv_heads, tokens_per_item, group] of a prefill plan to [max_tokens, heads].

    What it says of tokens that are in no item is arbitrary.
    """
    first_tokens = work.items[:, Item.TOKEN]
    token = jnp.arange(max_tokens)
    item = jnp.maximum(jnp.searchsorted(first_tokens, token, side="right") - 1, 0)
    offset = jnp.clip(token - first_tokens[item], 0, slots.shape[2] - 1)
    return slots[item, :, offset].reshape(max_tokens, -1)


def _assign(items_per_row: jax.Array, max_items: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For each item its row, which of the row's items it is, and whether it is one; and i32[1], how many are."""
    ends = jnp.cumsum(items_per_row)
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.sum(ends[None] <= item[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, items_per_row.shape[0] - 1)
    part = item - (ends - items_per_row)[row]
    return row, part, item < ends[-1], ends[-1:].astype(jnp.int32)


def _table(columns: dict[Item, jax.Array]) -> jax.Array:
    return jnp.stack([columns[name].astype(jnp.int32) for name in Item], axis=1)


def _cdiv(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return -(-a // b)
