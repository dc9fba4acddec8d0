"""Writes new keys and values to their slots in the pool, in place: one copy per token, all under way at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._compat import floordiv
from ._load import packing

# Of scalar memory, for the slots.
_MAX_TOKENS = 128 * 1024


def cannot_write(pool_shape: tuple[int, ...], dtype: Any, num_tokens: int) -> str | None:
    """Why `write_tokens` cannot write to a pool, or None if it can."""
    num_heads, pack = pool_shape[2], packing(dtype)
    if num_heads % pack:
        return (
            f"{num_heads // 2} KV heads of {jnp.dtype(dtype).name}: {pack} neighbouring K and V heads must fill a "
            f"32-bit word; needs a multiple of {pack // 2}"
        )
    if num_tokens > _MAX_TOKENS:
        return f"{num_tokens} tokens: their slots must fit in scalar memory, which takes {_MAX_TOKENS}; write in parts"
    return None


def write_tokens(kv_pages: jax.Array, kv: jax.Array, slot_mapping: jax.Array, *, interpret: Any = False) -> jax.Array:
    """The pool with each token's heads at its slot; the pool passed in is reused, not copied, where it is donated.

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim].
        kv: [num_tokens, 2 * num_kv_heads, head_dim] of the pool's dtype, heads interleaved as in the pool.
        slot_mapping: i32[num_tokens], `page_id * page_size + offset`. A slot outside the pool writes nowhere. Where two
            tokens name one slot, their copies race, and what ends there may be part of each.
        interpret: as in `pl.pallas_call`.
    """
    num_pages, page_size = kv_pages.shape[:2]
    num_tokens = kv.shape[0]
    interpret = pltpu.InterpretParams() if interpret is True else interpret

    def kernel(slots: Any, kv_ref: Any, _: Any, pool: Any, sem: Any) -> None:
        def for_each_written(action: Any) -> None:
            def visit(token: Any, carry: None) -> None:
                slot = slots[token]
                page = floordiv(slot, page_size)

                @pl.when((slot >= 0) & (slot < num_pages * page_size))
                def _() -> None:
                    target = pool.at[page, slot - page * page_size]
                    action(pltpu.make_async_copy(kv_ref.at[token], target, sem))

            jax.lax.fori_loop(0, num_tokens, visit, None)

        for_each_written(_start)
        for_each_written(_wait)

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


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()
