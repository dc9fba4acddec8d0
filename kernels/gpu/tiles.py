"""Block sizes of the kernel, and what they take of a streaming multiprocessor (SM)."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

ROWS = 64  # query rows of a warpgroup: what one wgmma multiplies
_SMEM_BYTES = 227 * 1024  # that one block may have on compute capability 9.0 (CUDA Programming Guide, table 24)
_RESERVED_BYTES = 3 * 1024  # barriers, and what the compiler takes for reductions


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes: `consumers` warpgroups of 64 query rows each share blocks of `block_kv` keys, `stages` in flight."""

    consumers: int
    block_kv: int
    stages: int
    num_blocks: int  # thread blocks: one to an SM, each of which works through many work items

    def smem_bytes(self, head_dim: int, itemsize: int, kv_itemsize: int) -> int:
        """Shared memory of one block: queries twice (as loaded, as multiplied), outputs, the ring of K and V."""
        queries = 3 * self.consumers * ROWS * head_dim * itemsize
        ring = 2 * self.stages * self.block_kv * head_dim * kv_itemsize
        unpacked = 2 * self.block_kv * head_dim * itemsize if kv_itemsize != itemsize else 0
        return queries + ring + unpacked + _RESERVED_BYTES

    def bytes_in_flight(self, head_dim: int, kv_itemsize: int) -> int:
        """Bytes of K and V that one SM has asked for and not yet received, at most."""
        return 2 * self.stages * self.block_kv * head_dim * kv_itemsize


def choose(*, decode: bool, head_dim: int, dtype: jnp.dtype, kv_dtype: jnp.dtype, num_blocks: int) -> Tiles:
    """The block sizes for a call: the largest that leave at least two stages, then as many stages as fit.

    Decoding is bound by the bytes in flight, so it takes one warpgroup and a deep ring; prefill by the tensor
    cores, so it takes two warpgroups, which share K and V. Quantised keys are unpacked by the warpgroup that
    multiplies them, and one does that: two would have to wait for each other.
    """
    itemsize, kv_itemsize = dtype.itemsize, kv_dtype.itemsize
    consumers = 1 if decode or head_dim > 128 or kv_itemsize != itemsize else 2
    # 64 is what the registers of one warpgroup hold beside an accumulator of 256 columns.
    block_kv = 128 if consumers == 2 else 64
    stages = 2

    def tiles(stages: int) -> Tiles:
        return Tiles(consumers=consumers, block_kv=block_kv, stages=stages, num_blocks=num_blocks)

    while stages < 8 and tiles(stages + 1).smem_bytes(head_dim, itemsize, kv_itemsize) <= _SMEM_BYTES:
        stages += 1
    return tiles(stages)


def swizzle_bytes(head_dim: int, itemsize: int) -> int:
    """The widest shared memory swizzle that divides a row: bank conflicts fall as it grows."""
    return min(128, math.gcd(head_dim * itemsize, 128))
