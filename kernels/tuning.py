"""Block sizes of the TPU kernel, per chip and shape."""

from dataclasses import dataclass, replace

from ._compat import round_up
from .api import AttentionCall

_MIB = 2**20
# On-chip vector memory of a core (jax's own table, `pltpu.get_tpu_info`).
VMEM_BYTES = {"v4": 16 * _MIB, "v5e": 128 * _MIB, "v5p": 64 * _MIB, "v6e": 128 * _MIB, "tpu7x": 64 * _MIB}
# Of an unknown chip, and of interpret mode.
_OTHER_VMEM_BYTES = 64 * _MIB
# For what `needed_bytes` leaves out: 0.2 MiB where it was seen to matter.
_SPARE_BYTES = _MIB // 2
# What one block of KV wants to be, in a decode and else. Two are on their way or in use at once, which covers the
# latency of HBM at any chip's bandwidth; and the loops inside are long enough to be worth their start.
_DECODE_BLOCK_BYTES, _BLOCK_BYTES = 8 * _MIB, 4 * _MIB
# Of one turn of a decode with up to 8 KV heads. Half of it takes 0.6 of the time; twice of it leaves more of a row's
# last turn unused.
_DECODE_TOKENS = 256
# Zeroed together behind a row's last token: as many stores as are worth a loop's turn.
CLEARED_TOKENS = 32
# A tile of memory: so many rows, or a smaller power of two of them, of so many lanes.
_ROWS, _LANES = 8, 128


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tile sizes of the TPU kernel, in tokens."""

    kv_tokens: int  # fetched together; a multiple of the page size
    compute_tokens: int  # of one turn of the inner loop; a multiple of 128
    decode_tokens: int  # of one turn of a decode's; a multiple of 128
    q_tokens: int  # of a tile, all of one row; a power of two
    vmem_bytes: int = _OTHER_VMEM_BYTES

    @property
    def buffer_tokens(self) -> int:
        """Room for `kv_tokens`, for the last turn over them, and for what is cleared behind that."""
        turns = max(round_up(self.kv_tokens, self.compute_tokens), round_up(self.kv_tokens, self.decode_tokens))
        return turns + CLEARED_TOKENS


def choose_blocks(call: AttentionCall, chip: str | None = None) -> Blocks:
    """Block sizes for a call, by rule: as large as the block's bytes and the chip's memory allow, and the call needs.

    The rule is what counting the compiled loops favoured (`jax-paged kernels --blocks`), in bundles per 512 tokens of
    the inner loop. There is no table beside it: where sizes were tried, the rule's were the least, or within 3% of it
    once the turn that each block of a decode adds is counted.

    * Decode, `decode_tokens` 128, 256, 512: Llama-3-8B on tpu7x 1,196, 1,000, not tried; on v5e 1,184, 1,012, 997;
      Gemma-3-4B on v5e 920, 824, 780. A row's last turn, and the turn more, cost twice as much with 512.
    * Decode with one KV head (Llama-3-70B, tensor-parallel 8) on tpu7x, `decode_tokens` 256, 512, 1,024: 152, 139, 115;
      with the turn more, a block of 2,048 tokens takes 684, 695, 690.
    * Prefill of Llama-3-8B on v6e, `compute_tokens` 256, 512, 1,024 at `q_tokens` 128: 6,506, 5,775, 5,608, and of the
      peak 21%, 21%, 18%, since larger chunks lose more to the mask. `q_tokens` 64, 128, 256: 3,387, 5,775, 10,509; a
      row of fewer tokens pays for the whole tile, hence not 256.

    Args:
        call: the attention call.
        chip: a name of `VMEM_BYTES`; None: one with 64 MiB.

    Raises:
        ValueError: not even the smallest blocks fit.
    """
    vmem = VMEM_BYTES[chip] if chip is not None else _OTHER_VMEM_BYTES
    wanted, block_bytes = (2048, _DECODE_BLOCK_BYTES) if call.decode_only else (512, _BLOCK_BYTES)
    while wanted > _LANES and wanted * _token_bytes(call) > block_bytes:
        wanted //= 2
    longest = call.pages_per_seq * call.page_size
    wanted = min(wanted, max(_LANES, 1 << (longest - 1).bit_length()))
    q_tokens = 1
    if not call.decode_only:
        q_tokens = min(128, max(16, 1 << (call.max_tokens - 1).bit_length()))
    # Smaller tiles cost least; then smaller blocks.
    while True:
        blocks = replace(_blocks(call, wanted, q_tokens), vmem_bytes=vmem)
        if needed_bytes(call, blocks) <= vmem - _SPARE_BYTES:
            return blocks
        if q_tokens > 8:
            q_tokens //= 2
        elif wanted > _LANES:
            wanted //= 2
        else:
            raise ValueError(
                f"num_q_heads={call.num_q_heads}, num_kv_heads={call.num_kv_heads}, head_dim={call.head_dim}, "
                f"page_size={call.page_size}: the smallest blocks need {needed_bytes(call, blocks)} bytes of vector "
                f"memory, of {vmem - _SPARE_BYTES} to be had on {chip or 'the chip'}; use smaller pages, or split the "
                "heads over more devices"
            )


def checked_blocks(call: AttentionCall, blocks: Blocks, chip: str) -> Blocks:
    """Block sizes of someone's own as the kernel takes them: a decode has tiles of one query.

    Raises:
        ValueError: they cannot be, or do not fit the chip's vector memory.
    """
    if call.decode_only:
        blocks = replace(blocks, q_tokens=1, compute_tokens=blocks.decode_tokens)
    if blocks.kv_tokens % call.page_size:
        raise ValueError(f"kv_tokens={blocks.kv_tokens} must be a multiple of page_size={call.page_size}")
    if blocks.q_tokens & (blocks.q_tokens - 1):
        raise ValueError(f"q_tokens={blocks.q_tokens} must be a power of two")
    blocks = replace(blocks, vmem_bytes=VMEM_BYTES[chip])
    needed, there = needed_bytes(call, blocks), VMEM_BYTES[chip] - _SPARE_BYTES
    if needed > there:
        raise ValueError(
            f"these blocks need {needed:,} bytes of vector memory, of {there:,} on {chip}; make them smaller"
        )
    return blocks


def _blocks(call: AttentionCall, wanted: int, q_tokens: int) -> Blocks:
    kv_tokens = max(wanted // call.page_size, 1) * call.page_size
    decode_tokens = min(wanted, _DECODE_TOKENS if call.num_kv_heads <= 8 else _LANES)
    compute_tokens = wanted if kv_tokens % wanted == 0 else round_up(kv_tokens, _LANES)
    if call.decode_only:
        compute_tokens = decode_tokens
    return Blocks(kv_tokens=kv_tokens, compute_tokens=compute_tokens, decode_tokens=decode_tokens, q_tokens=q_tokens)


def needed_bytes(call: AttentionCall, blocks: Blocks) -> int:
    """About what the kernel takes of vector memory: its buffers, and the scores of a tile, several times spilled."""
    width = round_up(call.head_dim, _LANES)
    q_rows = round_up(call.num_q_heads, 16) * blocks.q_tokens
    buffers = 2 * blocks.buffer_tokens * _token_bytes(call)
    group = call.num_q_heads // call.num_kv_heads
    # Groups that do not fill words of 32 bits are widened.
    is_widened = not call.decode_only and group * _itemsize(call.q_dtype) % 4
    buffers += 2 * 2 * q_rows * width * (4 if is_widened else _itemsize(call.q_dtype))
    if call.return_lse:
        buffers += 2 * q_rows * _LANES * 4
    state = q_rows * (2 * width + 2 * _LANES) * 4
    rows = group * blocks.q_tokens
    scores = call.num_q_heads * call.num_kv_heads * blocks.decode_tokens
    if not call.decode_only:
        scores = max(scores, rows * blocks.compute_tokens)
    return buffers + state + 3 * 4 * scores


def token_bytes(num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of a token's K and V, of one layer, in a TPU's memory, filled up to whole tiles of rows and lanes."""
    rows = 2 * num_kv_heads
    tile_rows = max(min(1 << (rows - 1).bit_length(), _ROWS), 4 // itemsize)
    return round_up(rows, tile_rows) * round_up(head_dim, _LANES) * itemsize


def buffer_rows(rows: int, itemsize: int) -> int:
    """Rows of vector memory that hold a token's K and V rows: small powers of two as they are, others whole tiles."""
    pack = 4 // itemsize
    tile = _ROWS * pack
    if rows < tile and rows & (rows - 1) == 0 and rows >= pack:
        return rows
    return round_up(rows, _ROWS if rows < _ROWS else tile)


def _token_bytes(call: AttentionCall) -> int:
    """Of vector memory."""
    itemsize = _itemsize(call.kv_dtype)
    return buffer_rows(2 * call.num_kv_heads, itemsize) * round_up(call.head_dim, _LANES) * itemsize


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
