"""Changes the pool in place: new keys and values to their slots, and whole pages onto others. One copy from HBM to HBM
for each, all under way at once.
"""

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
    if jnp.dtype(dtype) == jnp.float16:
        return "kv_pages.dtype is float16, which TPUs do not have; use bfloat16"
    num_heads, pack = pool_shape[2], packing(dtype)
    if num_heads % pack:
        return (
            f"kv_pages has {num_heads // 2} KV heads of {jnp.dtype(dtype).name}: {pack} neighbouring K and V heads "
            f"must fill a 32-bit word; needs a multiple of {pack // 2}"
        )
    if num_tokens > _MAX_TOKENS:
        return (
            f"slot_mapping has {num_tokens} tokens: their slots must fit in scalar memory, which takes {_MAX_TOKENS}; "
            "write in parts"
        )
    return None


def cannot_copy(dtype: Any, num_pages: int) -> str | None:
    """Why `copy_pages` cannot copy so many pages of a pool, or None if it can."""
    if jnp.dtype(dtype) == jnp.float16:
        return "kv_pages.dtype is float16, which TPUs do not have; use bfloat16"
    if num_pages > _MAX_TOKENS // 2:
        return (
            f"src has {num_pages} pages: their ids must fit in scalar memory, which takes {_MAX_TOKENS // 2}; copy in "
            "parts"
        )
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
    if num_tokens == 0:  # Pallas has no empty arrays
        return kv_pages

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

    in_specs = [pl.BlockSpec(memory_space=pltpu.SMEM), _HBM, _HBM]
    return _in_place(kernel, kv_pages, in_specs, interpret, "write_kv_tokens")(slot_mapping, kv, kv_pages)


def copy_pages(kv_pages: jax.Array, src: jax.Array, dst: jax.Array, *, interpret: Any = False) -> jax.Array:
    """The pool with pages `src` copied to pages `dst`; the pool passed in is reused, not copied, where it is donated.

    XLA's own copy of a page makes it lay the whole pool out anew, before and after.

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim].
        src: i32[n], page ids.
        dst: i32[n], page ids, none twice and none among `src`; where it is outside the pool, nothing is copied.
        interpret: as in `pl.pallas_call`.
    """
    num_pages = kv_pages.shape[0]
    if src.shape[0] == 0:  # Pallas has no empty arrays
        return kv_pages

    def kernel(src: Any, dst: Any, _: Any, pool: Any, sem: Any) -> None:
        def for_each_copied(action: Any) -> None:
            def visit(i: Any, carry: None) -> None:
                @pl.when((dst[i] >= 0) & (dst[i] < num_pages))
                def _() -> None:
                    source = pool.at[jnp.clip(src[i], 0, num_pages - 1)]
                    action(pltpu.make_async_copy(source, pool.at[dst[i]], sem))

            jax.lax.fori_loop(0, src.shape[0], visit, None)

        for_each_copied(_start)
        for_each_copied(_wait)

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    return _in_place(kernel, kv_pages, [smem, smem, _HBM], interpret, "copy_kv_pages")(src, dst, kv_pages)


_HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def _in_place(kernel: Any, kv_pages: jax.Array, in_specs: list[Any], interpret: Any, name: str) -> Any:
    """A kernel whose last argument is the pool, which it changes."""
    if not isinstance(interpret, bool | pltpu.InterpretParams):
        raise ValueError(f"{interpret=} must be True, False or pallas.tpu.InterpretParams")
    return pl.pallas_call(
        kernel,
        in_specs=in_specs,
        out_specs=_HBM,
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={len(in_specs) - 1: 0},
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, has_side_effects=True),
        name=name,
    )


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()
