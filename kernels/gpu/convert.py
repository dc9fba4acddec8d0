"""What is done to blocks of keys and values in shared memory before wgmma, which converts nothing, multiplies them.

Everything is done in pieces, since it takes registers and there are few.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat
from .tiles import ROWS, swizzle_bytes


def convert(source: Any, target: Any) -> None:
    """Writes a block of 8 bits into one of bfloat16 or float16, which hold all its values exactly.

    Args:
        source: i8|fp8[block_kv, head_dim], swizzled.
        target: bf16|f16[block_kv, head_dim], swizzled.
    """
    for rows, columns in _pieces(source.shape, math.gcd(source.shape[1], 128)):
        x = plgpu.load(source.at[rows, columns], layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        _compat.store(target.at[rows, columns], _widened(x, target.dtype))


def zero_from(block: Any, first: jax.Array) -> None:
    """Zeroes the rows from `first` on of a block [block_kv, head_dim], whatever they hold, NaN included."""
    itemsize = block.dtype.itemsize
    for rows, columns in _pieces(block.shape, swizzle_bytes(block.shape[1], itemsize) // itemsize):
        ref = block.at[rows, columns]
        x = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
        index = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
        _compat.store(ref, jnp.where(index < first - rows.start, x, jnp.zeros_like(x)))


def _widened(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if x.dtype == jnp.int8 or dtype == jnp.float16:
        return x.astype(dtype)
    # Hopper converts float8 to float16 alone.
    return x.astype(jnp.float16).astype(jnp.float32).astype(dtype)


def _pieces(shape: tuple[int, ...], num_columns: int) -> list[tuple[Any, Any]]:
    return [
        (pl.ds(row, ROWS), pl.ds(column, num_columns))
        for row in range(0, shape[0], ROWS)
        for column in range(0, shape[1], num_columns)
    ]
