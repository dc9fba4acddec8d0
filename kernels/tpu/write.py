"""Writes new keys and values to their slots in the pool, in place: one copy per token, all under way at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def write_tokens(kv_pages: jax.Array, kv: jax.Array, slot_mapping: jax.Array, *, interpret: Any = False) -> jax.Array:
    """The pool with each token's heads at its slot; the pool passed in is reused, not copied, where it is donated.

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim].
        kv: [num_tokens, 2 * num_kv_heads, head_dim] of the pool's dtype, heads interleaved as in the pool.
        slot_mapping: i32[num_tokens], `page_id * page_size + offset`. A slot outside the pool writes nowhere. Slots
            must differ: where two tokens name one, their copies race.
        interpret: as in `pl.pallas_call`.
    """
    num_pages, page_size = kv_pages.shape[:2]
    num_tokens = kv.shape[0]

    def kernel(slots: Any, kv_ref: Any, _: Any, pool: Any, sem: Any) -> None:
        def copy(token: Any) -> Any:
            slot = slots[token]
            page = jax.lax.div(slot, jnp.int32(page_size))
            return pltpu.make_async_copy(kv_ref.at[token], pool.at[page, slot - page * page_size], sem)

        def for_each_written(action: Any) -> None:
            def visit(token: Any, _: Any) -> None:
                in_pool = (slots[token] >= 0) & (slots[token] < num_pages * page_size)
                pl.when(in_pool)(lambda: action(copy(token)))

            jax.lax.fori_loop(0, num_tokens, visit, None)

        for_each_written(lambda c: c.start())
        for_each_written(lambda c: c.wait())

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), hbm, hbm],
        out_specs=hbm,
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={2: 0},
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, has_side_effects=True),
        name="write_kv_tokens",
    )(slot_mapping, kv, kv_pages)
