"""Ragged paged attention on TPU: one program walks over query tiles, pages of KV stream in behind it.

The walk. A query tile is one decode token, or up to `q_tokens` neighbouring tokens of one row. For each tile the
program goes through the row's KV in blocks of `kv_tokens`, and while it works on one block the next is on its way,
be it of this tile or the first one of the next: the copies never pause between rows. Queries and page ids of the next
tile and the output of the last one travel in the same manner (`_copies.py`). What is done with a tile is in
`_tiles.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._compat import cdiv, floordiv, round_up
from ..api import AttentionCall
from ..checks import product_dtype
from ..tuning import VMEM_BYTES, Blocks, buffer_rows, choose_blocks
from . import _copies
from ._copies import Item
from ._load import packing
from ._plan import LANES, LOG2_E, MASKED, Plan
from ._tiles import Rows, Tile, clear

# Of the 1 MiB of scalar memory a core has; the rest is the compiler's.
_SMEM_BYTES = 768 * 1024


def supports(call: AttentionCall) -> str | None:
    """Why this implementation cannot run `call`, or None if it can."""
    if not isinstance(call.interpret, bool | pltpu.InterpretParams):
        return f"interpret={call.interpret!r} must be True, False or pallas.tpu.InterpretParams"
    for name in ("q_dtype", "kv_dtype"):
        if getattr(call, name) == "float16":
            return f"{name}='float16': TPU vector units have no float16; use bfloat16"
    kv_pack = packing(call.kv_dtype)
    if 2 * call.num_kv_heads % kv_pack:
        return (
            f"num_kv_heads={call.num_kv_heads} with kv_dtype={call.kv_dtype!r}: {kv_pack} neighbouring K and V heads "
            f"must fill a 32-bit word; needs a multiple of {kv_pack // 2}"
        )
    if call.head_dim > LANES and call.head_dim % LANES:
        return f"head_dim={call.head_dim}: above {LANES} it must be a multiple of {LANES}"
    smem_bytes = 4 * (2 * round_up(call.pages_per_seq, LANES) + 2 * call.max_seqs)
    if smem_bytes > _SMEM_BYTES:
        return (
            f"pages_per_seq={call.pages_per_seq}, max_seqs={call.max_seqs}: two rows of page ids and all rows' lengths "
            f"take {smem_bytes} bytes of scalar memory, of {_SMEM_BYTES}; use larger pages or fewer rows"
        )
    try:
        choose_blocks(call, _current_chip())
    except ValueError as error:
        return str(error)
    return None


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    interpret: Any = False,
    decode_only: bool = False,
    blocks: Blocks | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """As `reference.ragged_paged_attention`, which defines it; `blocks` overrides the choice of `tuning.py`."""
    max_tokens, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads_twice, _ = kv_pages.shape
    out_dtype = q.dtype
    group = num_q_heads // (num_kv_heads_twice // 2)
    if not decode_only and group % packing(q.dtype):
        # Two KV heads' queries would share words.
        q = q.astype(jnp.float32)
    call = AttentionCall(
        max_tokens=max_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads_twice // 2,
        head_dim=head_dim,
        q_dtype=q.dtype.name,
        kv_dtype=kv_pages.dtype.name,
        num_pages=num_pages,
        page_size=page_size,
        max_seqs=page_indices.shape[0],
        pages_per_seq=page_indices.shape[1],
        sm_scale=sm_scale,
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=k_scale is not None,
        v_scale=v_scale is not None,
        sinks=sinks is not None,
        return_lse=return_lse,
        decode_only=decode_only,
    )
    plan = Plan(
        call=call,
        blocks=blocks or choose_blocks(call, _current_chip()),
        compute_dtype=product_dtype(out_dtype, kv_pages.dtype),
        interpret=bool(interpret),
    )
    one = jnp.float32(1)
    scales = jnp.stack([one if k_scale is None else k_scale, one if v_scale is None else v_scale])
    added = plan.ids_per_row - page_indices.shape[1]
    page_ids = jnp.pad(page_indices, ((0, 0), (0, added))).reshape(-1)
    if interpret is True:  # which means an interpreter without copies of variable size
        interpret = pltpu.InterpretParams()
    out, lse = _run(q, kv_pages, kv_lens, page_ids, cu_q_lens, num_seqs, scales, sinks, plan, interpret)

    # Tokens of no row were never written.
    in_a_row = jnp.arange(max_tokens) < cu_q_lens[num_seqs[0]]
    out = jnp.where(in_a_row[:, None, None], out[:, :num_q_heads], 0).astype(out_dtype)
    if not return_lse:
        return out
    return out, jnp.where(in_a_row[:, None], lse[:, :num_q_heads, 0], -jnp.inf)


def _current_chip() -> str | None:
    """The chip this is traced for, as `tuning.py` names it, or None where that is no TPU, or an unknown one."""
    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except (ValueError, NotImplementedError):
        return None
    name = {"7x": "tpu7x"}.get(version, version)
    return name if name in VMEM_BYTES else None


def _run(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_ids: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    scales: jax.Array,
    sinks: jax.Array | None,
    plan: Plan,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    call, lanes, tiles = plan.call, plan.lanes, plan.lane_tiles
    q_tokens = plan.blocks.q_tokens
    heads, q_heads, group = call.num_kv_heads, plan.q_heads, plan.group
    q_rows, kv_rows = round_up(q_heads, 8 * packing(q.dtype)), buffer_rows(2 * heads, kv_pages.dtype.itemsize)
    lse_tokens, lse_rows = (q_tokens, round_up(q_heads, 8)) if call.return_lse else (1, 8)
    lse_shape = (call.max_tokens, q_heads, LANES) if call.return_lse else (1, 8, LANES)

    score_columns = plan.blocks.decode_tokens * kv_rows // 2
    tile_rows = 8 if call.decode_only else q_tokens * group
    tile_heads = 1 if call.decode_only else heads
    f32, operand = jnp.float32, plan.compute_dtype
    scratch = {
        "kv_buf": pltpu.VMEM((tiles, 2, plan.blocks.buffer_tokens, kv_rows, lanes), kv_pages.dtype),
        "q_buf": pltpu.VMEM((tiles, 2, q_tokens, q_rows, lanes), q.dtype),
        "out_buf": pltpu.VMEM((tiles, 2, q_tokens, q_rows, lanes), q.dtype),
        "lse_buf": pltpu.VMEM((1, 2, lse_tokens, lse_rows, LANES), f32),
        # Rows of a decode tile: the query heads.
        "row_s": pltpu.VMEM((q_heads, score_columns), f32),
        "row_acc": pltpu.VMEM((q_heads, call.head_dim), f32),
        "row_m": pltpu.VMEM((q_heads, LANES), f32),
        "row_l": pltpu.VMEM((q_heads, LANES), f32),
        # Rows of a larger tile: the tokens of the query heads of one KV head.
        "tile_q": pltpu.VMEM((tile_heads, tile_rows, call.head_dim), operand),
        "tile_acc": pltpu.VMEM((tile_heads, tile_rows, call.head_dim), f32),
        "tile_m": pltpu.VMEM((tile_heads, tile_rows, LANES), f32),
        "tile_l": pltpu.VMEM((tile_heads, tile_rows, LANES), f32),
        "ids_buf": pltpu.SMEM((2 * plan.ids_per_row,), jnp.int32),
        "sent": pltpu.SMEM((2,), jnp.int32),  # tokens on their way out, per slot
        "ids_sem": pltpu.SemaphoreType.DMA((2,)),
        "kv_sem": pltpu.SemaphoreType.DMA((2,)),
        "q_sem": pltpu.SemaphoreType.DMA((2,)),
        "out_sem": pltpu.SemaphoreType.DMA((2,)),
    }
    names = ("kv_lens", "page_ids", "cu_q_lens", "num_seqs", "scales", "sinks", "q", "kv", "out", "lse", *scratch)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    added_heads = (0, q_heads - call.num_q_heads)
    sink_rows = jnp.full((q_heads,), MASKED, f32)
    if sinks is not None:
        sink_rows = jnp.pad(sinks.astype(f32) * LOG2_E, added_heads, constant_values=MASKED)
    q = jnp.pad(q, ((0, 0), added_heads, (0, 0)))
    return pl.pallas_call(
        lambda *refs: _kernel(plan, dict(zip(names, refs, strict=True))),
        in_specs=[smem, hbm, smem, smem, smem, pl.BlockSpec(memory_space=pltpu.VMEM), hbm, hbm],
        out_specs=[hbm, hbm],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(lse_shape, f32)],
        scratch_shapes=list(scratch.values()),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=plan.blocks.vmem_bytes, disable_bounds_checks=True),
        name=f"ragged_paged_attention_{'decode' if call.decode_only else 'mixed'}",
    )(
        kv_lens,
        page_ids,
        cu_q_lens,
        num_seqs,
        scales,
        jnp.broadcast_to(sink_rows[:, None], (q_heads, LANES)),
        q,
        kv_pages,
    )


# --- the walk ---

# Row, tile within the row, tiles visited, blocks of KV visited: the last two say which of two buffers is whose.
_Walk = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _kernel(plan: Plan, refs: dict[str, Any]) -> None:
    num_rows = refs["num_seqs"][0]
    refs["sent"][0] = 0
    refs["sent"][1] = 0
    if refs["kv_buf"].shape[3] != 2 * plan.call.num_kv_heads:
        # Rows no copy ever fills: their weights are 0, and 0 * NaN is NaN.
        clear(refs["kv_buf"], 0, 0, plan.blocks.buffer_tokens)
        clear(refs["kv_buf"], 1, 0, plan.blocks.buffer_tokens)

    zero = jnp.int32(0)
    first = _describe(plan, refs, _next_row(plan, refs, zero), zero)

    @pl.when(first["row"] < num_rows)
    def _() -> None:
        _copies.start_ids(plan, refs, first, 0)
        _copies.start_q(plan, refs, first, 0)
        _copies.wait_ids(plan, refs, first, 0)
        _copies.start_kv(plan, refs, first, 0, 0, 0)

    def visit(state: _Walk) -> _Walk:
        row, tile, count, step = state
        item = _describe(plan, refs, row, tile)
        next_row, next_tile = _next_tile(plan, refs, item, row, tile)
        following = _describe(plan, refs, next_row, next_tile)
        slot = count & 1

        @pl.when(next_row < num_rows)
        def _() -> None:
            _copies.start_ids(plan, refs, following, 1 - slot)
            _copies.start_q(plan, refs, following, 1 - slot)

        _copies.wait_q(plan, refs, item, slot)
        _copies.wait_out(plan, refs, slot)
        if plan.call.decode_only:
            _attend(plan, refs, Rows(plan, refs, slot), item, following, slot, step)
        else:
            one_token = item["q_count"] == 1
            pl.when(one_token)(lambda: _attend(plan, refs, Rows(plan, refs, slot), item, following, slot, step))
            pl.when(~one_token)(lambda: _attend(plan, refs, Tile(plan, refs, slot), item, following, slot, step))
        _copies.start_out(plan, refs, item, slot)
        return next_row, next_tile, count + 1, step + item["num_blocks"]

    jax.lax.while_loop(lambda state: state[0] < num_rows, visit, (first["row"], zero, zero, zero))
    jax.lax.fori_loop(0, 2, lambda slot, _: _copies.wait_out(plan, refs, slot), None)


def _next_tile(
    plan: Plan, refs: dict[str, Any], item: Item, row: jax.Array, tile: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if plan.call.decode_only:
        return row + 1, tile
    is_last = tile + 1 >= item["num_tiles"]
    return jnp.where(is_last, _next_row(plan, refs, row + 1), row), jnp.where(is_last, 0, tile + 1)


def _next_row(plan: Plan, refs: dict[str, Any], row: jax.Array) -> jax.Array:
    """The first row from `row` on that has queries; in a decode all have."""
    if plan.call.decode_only:
        return row
    cu, last, num_rows = refs["cu_q_lens"], refs["cu_q_lens"].shape[0] - 2, refs["num_seqs"][0]

    def is_empty(row: jax.Array) -> jax.Array:
        safe = jnp.minimum(row, last)
        return (row < num_rows) & (cu[safe] == cu[safe + 1])

    return jax.lax.while_loop(is_empty, lambda row: row + 1, row)


def _describe(plan: Plan, refs: dict[str, Any], row: jax.Array, tile: jax.Array) -> Item:
    """The scalars of a tile. Past the last row: those of a tile with no pages."""
    call, cu, q_tokens = plan.call, refs["cu_q_lens"], plan.blocks.q_tokens
    is_row = row < refs["num_seqs"][0]
    safe = jnp.minimum(row, call.max_seqs - 1)
    kv_len = refs["kv_lens"][safe]
    # In a decode, token i is all there is of row i.
    start, end = (row, row + 1) if call.decode_only else (cu[safe], cu[safe + 1])
    q_begin = start + tile * q_tokens
    q_count = 1 if call.decode_only else jnp.minimum(end - q_begin, q_tokens)
    first_pos = kv_len - end + q_begin  # of the tile's first query
    kv_end = jnp.clip(first_pos + q_count, 0, kv_len) if call.causal else kv_len
    window = call.sliding_window
    first_page = jnp.int32(0) if window is None else floordiv(jnp.maximum(first_pos - window + 1, 0), call.page_size)
    kv_end = jnp.where(is_row, kv_end, 0)
    num_pages = jnp.maximum(cdiv(kv_end, call.page_size) - first_page, 0)
    return {
        "row": row,
        "q_begin": q_begin,
        "q_count": q_count,
        "num_tiles": 1 if call.decode_only else cdiv(end - start, q_tokens),
        "first_pos": first_pos,
        "kv_end": kv_end,
        "first_page": first_page,
        "num_pages": num_pages,
        "num_blocks": jnp.maximum(cdiv(num_pages, plan.pages_per_block), 1),
    }


def _attend(
    plan: Plan, refs: dict[str, Any], tile: Rows | Tile, item: Item, following: Item, slot: Any, step: Any
) -> None:
    """Goes through the KV of a tile block by block, and leaves its output in `out_buf[slot]`."""
    call = plan.call
    tile.begin()

    def block_step(block: Any, _: Any) -> None:
        kv_slot = (step + block) & 1
        is_last = block + 1 == item["num_blocks"]
        pl.when(is_last)(lambda: _copies.wait_ids(plan, refs, following, 1 - slot))
        source = {k: jnp.where(is_last, following[k], item[k]) for k in ("first_page", "num_pages")}
        next_block, ids_slot = jnp.where(is_last, 0, block + 1), jnp.where(is_last, 1 - slot, slot)
        _copies.start_kv(plan, refs, source, next_block, ids_slot, 1 - kv_slot)
        _copies.wait_kv(plan, refs, item, block, kv_slot)

        block_pos = (item["first_page"] + block * plan.pages_per_block) * call.page_size
        end = jnp.clip(item["kv_end"] - block_pos, 0, plan.blocks.kv_tokens)
        num_steps = cdiv(end, tile.step)
        clear(refs["kv_buf"], kv_slot, end, num_steps * tile.step)
        tile.attend_block(item["first_pos"], kv_slot, block_pos, end, num_steps)

    jax.lax.fori_loop(0, item["num_blocks"], block_step, None)
    tile.end()
