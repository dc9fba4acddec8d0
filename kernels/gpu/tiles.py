"""Block sizes of the kernel, and what they take of a streaming multiprocessor (SM)."""

import math
from dataclasses import dataclass, replace

ROWS = 64  # query rows of a warpgroup: what one wgmma multiplies
_SMEM_BYTES = 227 * 1024  # that one block may have on compute capability 9.0 (CUDA Programming Guide, table 24)
_RESERVED_BYTES = 3 * 1024  # barriers, and what the compiler takes for reductions
_MAX_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes: `consumers` warpgroups of 64 query rows each share blocks of `block_kv` keys, `stages` in flight."""

    consumers: int
    block_kv: int
    stages: int
    converted: int = 0  # blocks as wgmma reads them, beside those in flight; 0 where these are the same
    num_blocks: int  # thread blocks: one to an SM, each of which works through many work items

    def smem_bytes(self, head_dim: int, itemsize: int, kv_itemsize: int) -> int:
        """Shared memory of one block: queries as loaded and as multiplied, outputs, and the rings of K and V."""
        queries = 3 * self.consumers * ROWS * head_dim * itemsize
        converted = 2 * self.converted * self.block_kv * head_dim * itemsize
        return queries + converted + self.bytes_in_flight(head_dim, kv_itemsize) + _RESERVED_BYTES

    def bytes_in_flight(self, head_dim: int, kv_itemsize: int) -> int:
        """Bytes of K and V that one SM has asked for and not yet received, at most."""
        return 2 * self.stages * self.block_kv * head_dim * kv_itemsize


def choose(*, decode: bool, head_dim: int, itemsize: int, kv_itemsize: int, num_blocks: int) -> Tiles:
    """The block sizes for a call: the largest that leave at least two stages, then as many stages as fit.

    Decoding is bound by the bytes in flight, so it takes one warpgroup and a deep ring; prefill by the tensor
    cores, so it takes two warpgroups, which share K and V. With heads of 256 the queries of two leave no room for
    two stages, and one warpgroup's registers hold scores of 64 keys beside the accumulator; so do those of two beside
    a converter, which converts a block ahead where that fits.
    """
    consumers = 1 if decode or head_dim > 128 else 2
    converts = kv_itemsize < itemsize
    block_kv = 64 if converts else 64 * consumers
    tiles = Tiles(consumers=consumers, block_kv=block_kv, stages=2, converted=int(converts), num_blocks=num_blocks)
    steps = [{"converted": 2}] if converts else []
    steps += [{"stages": stages} for stages in range(3, _MAX_STAGES + 1)]
    for step in steps:
        larger = replace(tiles, **step)
        if larger.smem_bytes(head_dim, itemsize, kv_itemsize) <= _SMEM_BYTES:
            tiles = larger
    return tiles


def swizzle_bytes(head_dim: int, itemsize: int) -> int:
    """The widest shared memory swizzle that divides a row: bank conflicts fall as it grows."""
    return math.gcd(head_dim * itemsize, 128)
