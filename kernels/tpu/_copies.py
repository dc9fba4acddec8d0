"""The kernel's copies between HBM and on-chip memory.

Each kind (page ids, queries, pages of KV, outputs) has two buffers, a semaphore for each, and one wait. Buffers are
named by `slot`: those of a tile by whether its number is odd, those of KV by whether the block's is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._compat import cdiv, floordiv
from ._plan import LANES, Plan

# The scalars of a tile, as `attention.describe_tile` makes them.
Item = dict[str, jax.Array]


def start_ids(plan: Plan, refs: dict[str, Any], item: Item, slot: Any) -> None:
    """Brings a row's page ids into scalar memory, one tile ahead of the copies of pages that need them."""

    @pl.when(item["num_pages"] > 0)
    def _() -> None:
        count = _num_ids(item)
        first = pl.multiple_of(item["row"] * plan.ids_per_row, LANES)
        source = refs["page_ids"].at[pl.ds(first, count)]
        pltpu.make_async_copy(source, _ids(plan, refs, slot, count), refs["ids_sem"].at[slot]).start()


def wait_ids(plan: Plan, refs: dict[str, Any], item: Item, slot: Any) -> None:
    @pl.when(item["num_pages"] > 0)
    def _() -> None:
        ids = _ids(plan, refs, slot, _num_ids(item))
        pltpu.make_async_copy(ids, ids, refs["ids_sem"].at[slot]).wait()


def _num_ids(item: Item) -> jax.Array:
    return pl.multiple_of(cdiv(item["first_page"] + item["num_pages"], LANES) * LANES, LANES)


def _ids(plan: Plan, refs: dict[str, Any], slot: Any, count: jax.Array) -> Any:
    return refs["ids_buf"].at[pl.ds(pl.multiple_of(slot * plan.ids_per_row, LANES), count)]


def start_q(plan: Plan, refs: dict[str, Any], item: Item, slot: Any) -> None:
    count = item["q_count"]
    for t in range(plan.lane_tiles):
        pltpu.make_async_copy(
            refs["q"].at[pl.ds(item["q_begin"], count), :, pl.ds(t * LANES, plan.lanes)],
            refs["q_buf"].at[t, slot, pl.ds(0, count), pl.ds(0, plan.q_heads)],
            refs["q_sem"].at[slot],
        ).start()


def wait_q(plan: Plan, refs: dict[str, Any], item: Item, slot: Any) -> None:
    _wait_tokens(refs["q_buf"], plan.q_heads, slot, item["q_count"], refs["q_sem"])


def pages_in_block(plan: Plan, item: Item, block: Any) -> jax.Array:
    return jnp.clip(item["num_pages"] - block * plan.pages_per_block, 0, plan.pages_per_block)


def start_kv(plan: Plan, refs: dict[str, Any], item: Item, block: Any, ids_slot: Any, slot: Any) -> None:
    """Starts a copy for each page of a block; the row's ids must be there."""
    call = plan.call
    ids = ids_slot * plan.ids_per_row + item["first_page"] + block * plan.pages_per_block

    def start(i: Any) -> None:
        page = refs["ids_buf"][ids + i]
        for t in range(plan.lane_tiles):
            pltpu.make_async_copy(
                refs["kv"].at[page, :, :, pl.ds(t * LANES, plan.lanes)],
                refs["kv_buf"].at[t, slot, pl.ds(i * call.page_size, call.page_size), pl.ds(0, 2 * call.num_kv_heads)],
                refs["kv_sem"].at[slot],
            ).start()

    # Several to a turn, so that the scalar unit works on the next address while it waits for this one.
    unroll = math.gcd(8, plan.pages_per_block)
    count = pages_in_block(plan, item, block)

    def start_group(group: Any, _: Any) -> None:
        for i in range(unroll):
            start(group * unroll + i)

    groups = floordiv(count, unroll)
    jax.lax.fori_loop(0, groups, start_group, None)
    jax.lax.fori_loop(groups * unroll, count, lambda i, _: start(i), None)


def wait_kv(plan: Plan, refs: dict[str, Any], item: Item, block: Any, slot: Any) -> None:
    pages = pages_in_block(plan, item, block)

    @pl.when(pages > 0)
    def _() -> None:
        tokens = pages * plan.call.page_size
        _wait_tokens(refs["kv_buf"], 2 * plan.call.num_kv_heads, slot, tokens, refs["kv_sem"])


def start_out(plan: Plan, refs: dict[str, Any], item: Item, slot: Any) -> None:
    count, sem = item["q_count"], refs["out_sem"].at[slot]
    rows, tokens = pl.ds(0, plan.q_heads), pl.ds(item["q_begin"], count)
    for t in range(plan.lane_tiles):
        pltpu.make_async_copy(
            refs["out_buf"].at[t, slot, pl.ds(0, count), rows],
            refs["out"].at[tokens, :, pl.ds(t * LANES, plan.lanes)],
            sem,
        ).start()
    if plan.call.return_lse:
        pltpu.make_async_copy(refs["lse_buf"].at[0, slot, pl.ds(0, count), rows], refs["lse"].at[tokens], sem).start()
    refs["sent"][slot] = count


def wait_out(plan: Plan, refs: dict[str, Any], slot: Any) -> None:
    """Waits until the output last sent from this slot, if any, has left it."""
    count = refs["sent"][slot]

    @pl.when(count > 0)
    def _() -> None:
        _wait_tokens(refs["out_buf"], plan.q_heads, slot, count, refs["out_sem"])
        if plan.call.return_lse:
            _wait_tokens(refs["lse_buf"], plan.q_heads, slot, count, refs["out_sem"])


def _wait_tokens(buffer: Any, rows: int, slot: Any, num_tokens: jax.Array, sem: Any) -> None:
    """Waits for copies that fill, or empty, the first `num_tokens` of a slot."""
    for t in range(buffer.shape[0]):
        part = buffer.at[t, slot, pl.ds(0, num_tokens), pl.ds(0, rows)]
        pltpu.make_async_copy(part, part, sem.at[slot]).wait()
