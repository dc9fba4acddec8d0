"""Ragged paged attention on TPU: one program walks over query tiles, pages of KV stream in behind it.

The walk. A query tile is one decode token, or up to `q_tokens` neighbouring tokens of one row. For each tile the
program goes through the row's KV in blocks of `kv_tokens`, and while it works on one block the next is on its way,
be it of this tile or the first one of the next: the copies never pause between rows. Queries of the next tile and
the output of the last one travel in the same manner.

The arithmetic. Heads lie on sublanes in a page (K0 V0 K1 V1 ...), so a strided load of 32-bit words fetches one head
of many tokens (`_load.py`); for prefill that is spread over many query rows. A decode has too few of them: it
multiplies all query heads with all heads' keys as they lie, and masks what is not its own. Statistics (m, l) and the
accumulator are float32, in base 2: p = exp2(s - m).

Online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; its tiling: Dao et al. 2022, arXiv 2205.14135.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._compat import cdiv, floordiv, round_up
from ..api import AttentionCall
from ..tuning import Blocks, choose_blocks
from ._load import divide, load_all, load_words, packing, store_words, token_and_head, token_of_row, unpack

LOG2_E = math.log2(math.e)
# Stands for -inf in scores and maxima: differences of it are 0, not NaN. Real scores never come near it.
MASKED = -1e30
LANES = 128


def supports(call: AttentionCall) -> str | None:
    """Why this implementation cannot run `call`, or None if it can."""
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
    table_bytes = 4 * call.max_seqs * call.pages_per_seq
    if table_bytes > _SMEM_TABLE_BYTES:
        return (
            f"page_indices of {call.max_seqs} x {call.pages_per_seq} ({table_bytes} bytes): the table must fit in "
            f"{_SMEM_TABLE_BYTES} bytes of scalar memory; use fewer rows or larger pages"
        )
    return None


_SMEM_TABLE_BYTES = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """All that is static in the kernel."""

    call: AttentionCall
    blocks: Blocks
    compute_dtype: Any  # of the matrix products' operands
    interpret: bool

    @property
    def group(self) -> int:
        return self.call.num_q_heads // self.call.num_kv_heads

    @property
    def q_heads(self) -> int:
        """Query heads with those added that fill the last register of 8; a copy cannot end within one."""
        return round_up(self.call.num_q_heads, 8)

    @property
    def lane_tiles(self) -> int:
        return cdiv(self.call.head_dim, LANES)

    @property
    def lanes(self) -> int:
        return min(self.call.head_dim, LANES)

    @property
    def pages_per_block(self) -> int:
        return self.blocks.kv_tokens // self.call.page_size

    @property
    def buffer_tokens(self) -> int:
        return round_up(self.blocks.kv_tokens, self.blocks.compute_tokens)

    @property
    def precision(self) -> Any:
        return jax.lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else jax.lax.Precision.DEFAULT


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
    plan = _Plan(
        call=call,
        blocks=blocks or choose_blocks(call),
        compute_dtype=jnp.dtype(out_dtype),
        interpret=bool(interpret),
    )
    one = jnp.float32(1)
    scales = jnp.stack([one if k_scale is None else k_scale, one if v_scale is None else v_scale])
    out, lse = _run(q, kv_pages, kv_lens, page_indices.reshape(-1), cu_q_lens, num_seqs, scales, sinks, plan, interpret)

    # Tokens of no row were never written.
    in_a_row = jnp.arange(max_tokens) < cu_q_lens[num_seqs[0]]
    out = jnp.where(in_a_row[:, None, None], out[:, :num_q_heads], 0).astype(out_dtype)
    if not return_lse:
        return out
    return out, jnp.where(in_a_row[:, None], lse[:, :num_q_heads, 0], -jnp.inf)


def _run(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_ids: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    scales: jax.Array,
    sinks: jax.Array | None,
    plan: _Plan,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    call, lanes, tiles = plan.call, plan.lanes, plan.lane_tiles
    q_tokens = plan.blocks.q_tokens
    heads, q_heads, group = call.num_kv_heads, plan.q_heads, plan.group
    q_rows, kv_rows = round_up(q_heads, 8 * packing(q.dtype)), _padded_rows(2 * heads, kv_pages.dtype)
    lse_tokens, lse_rows = (q_tokens, round_up(q_heads, 8)) if call.return_lse else (1, 8)
    lse_shape = (call.max_tokens, q_heads, LANES) if call.return_lse else (1, 8, LANES)

    tile_rows = 8 if call.decode_only else q_tokens * group
    tile_heads = 1 if call.decode_only else heads
    f32, operand = jnp.float32, plan.compute_dtype
    scratch = {
        "kv_buf": pltpu.VMEM((tiles, 2, plan.buffer_tokens, kv_rows, lanes), kv_pages.dtype),
        "q_buf": pltpu.VMEM((tiles, 2, q_tokens, q_rows, lanes), q.dtype),
        "out_buf": pltpu.VMEM((tiles, 2, q_tokens, q_rows, lanes), q.dtype),
        "lse_buf": pltpu.VMEM((1, 2, lse_tokens, lse_rows, LANES), f32),
        # Rows of a decode tile: the query heads.
        "row_acc": pltpu.VMEM((q_heads, call.head_dim), f32),
        "row_m": pltpu.VMEM((q_heads, LANES), f32),
        "row_l": pltpu.VMEM((q_heads, LANES), f32),
        # Rows of a larger tile: the tokens of the query heads of one KV head.
        "tile_q": pltpu.VMEM((tile_heads, tile_rows, call.head_dim), operand),
        "tile_acc": pltpu.VMEM((tile_heads, tile_rows, call.head_dim), f32),
        "tile_m": pltpu.VMEM((tile_heads, tile_rows, LANES), f32),
        "tile_l": pltpu.VMEM((tile_heads, tile_rows, LANES), f32),
        "sent": pltpu.SMEM((2,), jnp.int32),  # tokens on their way out, per slot
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
        in_specs=[smem] * 5 + [pl.BlockSpec(memory_space=pltpu.VMEM), hbm, hbm],
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


def _padded_rows(rows: int, dtype: Any) -> int:
    """Rows of a VMEM tile that holds `rows` heads: small powers of two fit as they are, others to the next tile."""
    pack = packing(dtype)
    tile = 8 * pack
    if rows < tile and rows & (rows - 1) == 0 and rows >= pack:
        return rows
    return round_up(rows, 8 if rows < 8 else tile)


# --- the walk ---

# Row, tile within the row, tiles visited, blocks of KV visited: the last two say which of two buffers is whose.
_Walk = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _kernel(plan: _Plan, refs: dict[str, Any]) -> None:
    num_rows = refs["num_seqs"][0]
    refs["sent"][0] = 0
    refs["sent"][1] = 0
    if refs["kv_buf"].shape[3] != 2 * plan.call.num_kv_heads:
        # Rows no copy ever fills: their weights are 0, and 0 * NaN is NaN.
        _clear(refs["kv_buf"], 0, 0, plan.buffer_tokens)
        _clear(refs["kv_buf"], 1, 0, plan.buffer_tokens)

    first = _describe(plan, refs, _next_row(refs, 0, num_rows), 0)

    @pl.when(first["row"] < num_rows)
    def _() -> None:
        _start_q(plan, refs, first, 0)
        _start_kv(plan, refs, first, 0, 0)

    def visit(state: _Walk) -> _Walk:
        row, tile, count, step = state
        item = _describe(plan, refs, row, tile)
        is_last_tile = tile + 1 >= item["num_tiles"]
        next_row = jnp.where(is_last_tile, _next_row(refs, row + 1, num_rows), row)
        next_tile = jnp.where(is_last_tile, 0, tile + 1)
        following = _describe(plan, refs, next_row, next_tile)
        slot = count & 1

        @pl.when(next_row < num_rows)
        def _() -> None:
            _start_q(plan, refs, following, 1 - slot)

        _wait_tokens(refs, "q_buf", plan.q_heads, slot, item["q_count"], refs["q_sem"])
        _wait_sent(plan, refs, slot)
        if plan.call.decode_only:
            _attend(plan, refs, _Rows(plan, refs), item, following, slot, step)
        else:
            one_token = item["q_count"] == 1
            pl.when(one_token)(lambda: _attend(plan, refs, _Rows(plan, refs), item, following, slot, step))
            pl.when(~one_token)(lambda: _attend(plan, refs, _Tile(plan, refs), item, following, slot, step))
        _send(plan, refs, item, slot)
        return next_row, next_tile, count + 1, step + item["num_blocks"]

    zero = jnp.int32(0)
    jax.lax.while_loop(lambda state: state[0] < num_rows, visit, (first["row"], zero, zero, zero))
    _wait_sent(plan, refs, 0)
    _wait_sent(plan, refs, 1)


def _next_row(refs: dict[str, Any], row: Any, num_rows: jax.Array) -> jax.Array:
    """The first row from `row` on that has queries."""
    cu, last = refs["cu_q_lens"], refs["cu_q_lens"].shape[0] - 2

    def is_empty(row: jax.Array) -> jax.Array:
        safe = jnp.minimum(row, last)
        return (row < num_rows) & (cu[safe] == cu[safe + 1])

    return jax.lax.while_loop(is_empty, lambda row: row + 1, jnp.asarray(row, jnp.int32))


def _describe(plan: _Plan, refs: dict[str, Any], row: jax.Array, tile: Any) -> dict[str, jax.Array]:
    """The scalars of a tile. Past the last row: those of a tile with no pages."""
    call, cu = plan.call, refs["cu_q_lens"]
    is_row = row < refs["num_seqs"][0]
    safe = jnp.minimum(row, call.max_seqs - 1)
    kv_len, start, end = refs["kv_lens"][safe], cu[safe], cu[safe + 1]
    q_begin = start + tile * plan.blocks.q_tokens
    q_count = jnp.minimum(end - q_begin, plan.blocks.q_tokens)
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
        "num_tiles": cdiv(end - start, plan.blocks.q_tokens),
        "first_pos": first_pos,
        "kv_end": kv_end,
        "first_page": first_page,
        "num_pages": num_pages,
        "num_blocks": jnp.maximum(cdiv(num_pages, plan.pages_per_block), 1),
    }


# --- copies ---


def _start_q(plan: _Plan, refs: dict[str, Any], item: dict[str, jax.Array], slot: Any) -> None:
    for t in range(plan.lane_tiles):
        pltpu.make_async_copy(
            refs["q"].at[pl.ds(item["q_begin"], item["q_count"]), :, pl.ds(t * LANES, plan.lanes)],
            refs["q_buf"].at[t, slot, pl.ds(0, item["q_count"]), pl.ds(0, plan.q_heads)],
            refs["q_sem"].at[slot],
        ).start()


def _block_pages(plan: _Plan, item: dict[str, jax.Array], block: Any) -> jax.Array:
    return jnp.minimum(item["num_pages"] - block * plan.pages_per_block, plan.pages_per_block)


def _start_kv(plan: _Plan, refs: dict[str, Any], item: dict[str, jax.Array], block: Any, slot: Any) -> None:
    call = plan.call
    table = item["row"] * call.pages_per_seq + item["first_page"] + block * plan.pages_per_block

    def start(i: Any) -> None:
        page = refs["page_ids"][table + i]
        for t in range(plan.lane_tiles):
            pltpu.make_async_copy(
                refs["kv"].at[page, :, :, pl.ds(t * LANES, plan.lanes)],
                refs["kv_buf"].at[t, slot, pl.ds(i * call.page_size, call.page_size), pl.ds(0, 2 * call.num_kv_heads)],
                refs["kv_sem"].at[slot],
            ).start()

    # Several to a turn, so that the scalar unit works on the next address while it waits for this one.
    unroll = math.gcd(8, plan.pages_per_block)
    count = jnp.maximum(_block_pages(plan, item, block), 0)

    def start_group(group: Any, _: Any) -> None:
        for i in range(unroll):
            start(group * unroll + i)

    groups = floordiv(count, unroll)
    jax.lax.fori_loop(0, groups, start_group, None)
    jax.lax.fori_loop(groups * unroll, count, lambda i, _: start(i), None)


def _wait_tokens(refs: dict[str, Any], name: str, rows: int, slot: Any, num_tokens: jax.Array, sem: Any) -> None:
    """Waits for copies into `refs[name]` that fill the first `num_tokens` of a slot."""
    for t in range(refs[name].shape[0]):
        buf = refs[name].at[t, slot, pl.ds(0, num_tokens), pl.ds(0, rows)]
        pltpu.make_async_copy(buf, buf, sem.at[slot]).wait()


def _wait_sent(plan: _Plan, refs: dict[str, Any], slot: Any) -> None:
    count = refs["sent"][slot]

    @pl.when(count > 0)
    def _() -> None:
        _wait_tokens(refs, "out_buf", plan.q_heads, slot, count, refs["out_sem"])
        if plan.call.return_lse:
            _wait_tokens(refs, "lse_buf", plan.q_heads, slot, count, refs["out_sem"])


def _send(plan: _Plan, refs: dict[str, Any], item: dict[str, jax.Array], slot: Any) -> None:
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


# --- one tile ---


def _attend(
    plan: _Plan,
    refs: dict[str, Any],
    tile: Any,
    item: dict[str, jax.Array],
    following: dict[str, jax.Array],
    slot: Any,
    step: Any,
) -> None:
    """Goes through the KV of a tile block by block."""
    call = plan.call
    tile.begin(slot)

    def block_step(block: Any, _: Any) -> None:
        kv_slot = (step + block) & 1
        is_last = block + 1 == item["num_blocks"]
        source = {k: jnp.where(is_last, following[k], item[k]) for k in ("row", "first_page", "num_pages")}
        _start_kv(plan, refs, source, jnp.where(is_last, 0, block + 1), 1 - kv_slot)
        pages = _block_pages(plan, item, block)

        @pl.when(pages > 0)
        def wait() -> None:
            _wait_tokens(refs, "kv_buf", 2 * call.num_kv_heads, kv_slot, pages * call.page_size, refs["kv_sem"])

        block_pos = (item["first_page"] + block * plan.pages_per_block) * call.page_size
        end = jnp.clip(item["kv_end"] - block_pos, 0, plan.blocks.kv_tokens)
        num_steps = cdiv(end, tile.step)
        _clear(refs["kv_buf"], kv_slot, end, num_steps * tile.step)

        # Where every query sees every key, in the middle, whole chunks are spared the mask. What lies before and
        # after goes in the smaller steps.
        first, chunks = _whole_chunks(plan, tile, block_pos, end, item)
        steps_per_chunk = plan.blocks.compute_tokens // tile.step

        def whole_chunk(c: Any, _: Any) -> None:
            tile.attend(kv_slot, first * tile.step + c * plan.blocks.compute_tokens, plan.blocks.compute_tokens, None)

        def cut_step(i: Any, _: Any) -> None:
            start = jnp.where(i < first, i, i + chunks * steps_per_chunk) * tile.step
            tile.attend(kv_slot, start, tile.step, (block_pos + start, item))

        jax.lax.fori_loop(0, chunks, whole_chunk, None)
        jax.lax.fori_loop(0, num_steps - chunks * steps_per_chunk, cut_step, None)

    jax.lax.fori_loop(0, item["num_blocks"], block_step, None)
    tile.end(slot)


def _clear(kv_buf: Any, slot: Any, begin: Any, end: Any) -> None:
    """Zeroes tokens `begin .. end`, which may hold NaN: the weight of an unseen value is 0, and 0 * NaN is NaN."""
    tiles, _, _, rows, lanes = kv_buf.shape

    def clear(start: Any, size: int) -> None:
        for t in range(tiles):
            kv_buf[t, slot, pl.ds(start, size)] = jnp.zeros((size, rows, lanes), kv_buf.dtype)

    aligned = jnp.minimum(round_up(begin, 8), end)
    jax.lax.fori_loop(begin, aligned, lambda i, _: clear(i, 1), None)
    jax.lax.fori_loop(floordiv(aligned, 8), floordiv(end, 8), lambda i, _: clear(pl.multiple_of(i * 8, 8), 8), None)


def _load_head(plan: _Plan, refs: dict[str, Any], slot: Any, start: Any, row: int) -> jax.Array:
    """[compute_tokens, head_dim] of a row of the pool's head axis (K or V), tokens in the order of `token_of_row`."""
    kv_buf, pack = refs["kv_buf"], packing(refs["kv_buf"].dtype)
    parts = []
    for t in range(plan.lane_tiles):
        words = load_words(kv_buf.at[t], slot, start, plan.blocks.compute_tokens, row // pack, interpret=plan.interpret)
        parts.append(unpack(words, row % pack, kv_buf.dtype, interpret=plan.interpret).astype(plan.compute_dtype))
    return jnp.concatenate(parts, axis=1)


def _dot(plan: _Plan, a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )


def _softmax_step(
    plan: _Plan,
    refs: dict[str, Any],
    s: jax.Array,
    hidden: jax.Array | None,
    m_old: jax.Array,
    l_old: jax.Array,
    *,
    is_scaled: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Takes scores [rows, tokens] into the statistics, `hidden`, 0 or MASKED, added to them where there is one.

    Returns the weights; what the accumulator shrinks by, [rows, LANES] with every lane alike; the new m and l.
    """
    if not is_scaled:
        s = s * _score_scale(plan, refs)
    if plan.call.soft_cap is not None:
        s = (plan.call.soft_cap * LOG2_E) * jnp.tanh(s)
    if hidden is not None:
        s = s + hidden
    m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
    shrink = jnp.exp2(m_old - m_new)
    p = jnp.exp2(s - _lanes_to(m_new, s.shape[1]))
    # Lane by lane; the lanes are summed once, at the end.
    partial = functools.reduce(jnp.add, jnp.split(p, p.shape[1] // LANES, axis=1))
    return p.astype(plan.compute_dtype), shrink, m_new, l_old * shrink + partial


def _score_scale(plan: _Plan, refs: dict[str, Any]) -> Any:
    """What makes a product of q and k a score in base 2, or with a soft cap the argument of its tanh."""
    call = plan.call
    scale = call.sm_scale * refs["scales"][0] if call.k_scale else call.sm_scale
    return scale * LOG2_E if call.soft_cap is None else scale / call.soft_cap


def _lanes_to(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], every lane alike, to [rows, width]: whole registers are named again, nothing moves."""
    return x[:, :width] if width < LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def _seen(plan: _Plan, q_pos: jax.Array, kv_pos: jax.Array, kv_end: jax.Array) -> jax.Array:
    call = plan.call
    seen = kv_pos <= q_pos if call.causal else kv_pos < kv_end
    if call.sliding_window is not None:
        seen &= kv_pos > q_pos - call.sliding_window
    return seen


def _whole_chunks(
    plan: _Plan, tile: Any, block_pos: jax.Array, end: jax.Array, item: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The first step, and the number of chunks from it on, whose keys all of the tile's queries see."""
    call = plan.call
    seen_by_first = jnp.minimum(item["first_pos"] + 1 - block_pos, end) if call.causal else end
    first = jnp.int32(0)
    if call.sliding_window is not None:
        too_old = item["first_pos"] + tile.num_tokens - call.sliding_window - block_pos  # for the last of them
        first = jnp.minimum(cdiv(jnp.maximum(too_old, 0), tile.step), cdiv(end, tile.step))
    whole_tokens = jnp.maximum(seen_by_first - first * tile.step, 0)
    return first, floordiv(whole_tokens, plan.blocks.compute_tokens)


def _kv_pos(plan: _Plan, refs: dict[str, Any], pos: jax.Array) -> jax.Array:
    chunk = plan.blocks.compute_tokens
    row = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
    return pos + token_of_row(row, chunk, refs["kv_buf"].dtype)


def _finish(
    plan: _Plan, refs: dict[str, Any], acc: jax.Array, m: jax.Array, lane_sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output [rows, head_dim] in float32, and the LSE [rows, LANES], every lane alike."""
    total = jnp.sum(lane_sums, axis=1, keepdims=True)
    nothing = m[:, :1] <= MASKED / 2
    weight = refs["scales"][1] / total if plan.call.v_scale else 1.0 / total
    out = jnp.where(nothing, 0.0, acc * weight)
    lse = jnp.where(m <= MASKED / 2, -jnp.inf, (m + jnp.log2(total)) * (1 / LOG2_E))
    return out, lse


def _first_lane(shape: tuple[int, ...], value: float) -> jax.Array:
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) == 0, value, 0.0)


class _Rows:
    """A decode tile: one token, whose query heads are the rows.

    All query heads are multiplied with the keys of all KV heads, and the products across heads masked away. That
    wastes matrix and exponential work that a decode has to spare, and saves what it has not: taking heads apart.
    """

    def __init__(self, plan: _Plan, refs: dict[str, Any]) -> None:
        self.plan, self.refs = plan, refs
        self.num_heads = plan.q_heads
        self.num_tokens, self.step = 1, plan.blocks.softmax_tokens

    def begin(self, slot: Any) -> None:
        refs = self.refs
        refs["row_acc"][...] = jnp.zeros(refs["row_acc"].shape, jnp.float32)
        refs["row_l"][...] = _first_lane(refs["row_l"].shape, 1.0 if self.plan.call.sinks else 0.0)
        refs["row_m"][...] = refs["sinks"][...]

    def attend(self, slot: Any, start: Any, size: int, cut: tuple[jax.Array, dict[str, jax.Array]] | None) -> None:
        plan, refs, step = self.plan, self.refs, self.step
        parts = [refs["q_buf"][t, slot, 0][: self.num_heads] for t in range(plan.lane_tiles)]
        q = jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)
        m, sums, acc = refs["row_m"][...], refs["row_l"][...], refs["row_acc"][...]
        # A pipeline of three stages, written out: while step i is in its softmax, the matrix units have the keys of
        # step i + 1 and the values of step i - 1 to work on.
        steps = range(0, size, step)
        scores = _dot(plan, q, self._load(slot, start, 0), 1)
        waiting: Any = None
        for i in steps:
            s = scores
            if i + step in steps:
                scores = _dot(plan, q, self._load(slot, start + (i + step), 0), 1)
            if waiting is not None:
                acc = self._accumulate(acc, slot, start + (i - step), *waiting)
            here = None if cut is None else (cut[0] + i, cut[1])
            p, shrink, m, sums = _softmax_step(plan, refs, s, self._hidden(here), m, sums)
            waiting = p, shrink
        acc = self._accumulate(acc, slot, start + steps[-1], *waiting)
        refs["row_m"][...], refs["row_l"][...], refs["row_acc"][...] = m, sums, acc

    def _accumulate(self, acc: jax.Array, slot: Any, start: Any, p: jax.Array, shrink: jax.Array) -> jax.Array:
        o = _dot(self.plan, p, self._load(slot, start, 1), 0)
        return acc * _lanes_to(shrink, self.plan.call.head_dim) + o

    def _load(self, slot: Any, start: Any, which: int) -> jax.Array:
        plan, kv_buf = self.plan, self.refs["kv_buf"]
        parts = [
            load_all(kv_buf.at[t], slot, start, plan.blocks.softmax_tokens, which, interpret=plan.interpret)
            for t in range(plan.lane_tiles)
        ]
        return jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)

    def _hidden(self, cut: tuple[jax.Array, dict[str, jax.Array]] | None) -> jax.Array:
        """f32[query heads, keys]: what to add to the scores; MASKED for another head's keys, and beyond a cut."""
        plan, kv_buf = self.plan, self.refs["kv_buf"]
        token, head = token_and_head(plan.blocks.softmax_tokens, kv_buf.shape[3], kv_buf.dtype)
        width = head.shape[1]
        row = jax.lax.broadcasted_iota(jnp.int32, (self.num_heads, 1), 0)
        period = kv_buf.shape[3] if width % LANES == 0 and LANES % kv_buf.shape[3] == 0 else width
        if packing(kv_buf.dtype) <= 2 and period < width:
            # The heads come round again every `period` columns, so one register's worth says it all.
            bias = jnp.where(divide(row, plan.group) == head[:, :LANES], 0.0, MASKED)
            bias = jnp.concatenate([bias] * (width // LANES), axis=1)
        else:
            bias = jnp.where(divide(row, plan.group) == head, 0.0, MASKED)
        if cut is None:
            return bias
        pos, item = cut
        return jnp.where(_seen(plan, item["first_pos"], pos + token, item["kv_end"]), bias, MASKED)

    def end(self, slot: Any) -> None:
        plan, refs = self.plan, self.refs
        rows = pl.ds(0, self.num_heads)
        out, lse = _finish(plan, refs, refs["row_acc"][...], refs["row_m"][...], refs["row_l"][...])
        for t in range(plan.lane_tiles):
            part = out[:, t * LANES : t * LANES + plan.lanes]
            refs["out_buf"][t, slot, 0, rows] = part.astype(refs["out_buf"].dtype)
        if plan.call.return_lse:
            refs["lse_buf"][0, slot, 0, rows] = lse


class _Tile:
    """A tile of several tokens: for each KV head, rows are (query word, token, query head within the word)."""

    def __init__(self, plan: _Plan, refs: dict[str, Any]) -> None:
        self.plan, self.refs = plan, refs
        self.num_tokens, self.step = plan.blocks.q_tokens, plan.blocks.compute_tokens
        self.pack = packing(refs["q_buf"].dtype)
        self.words = plan.group // self.pack
        self.word_rows = plan.blocks.q_tokens * self.pack
        self.rows = self.words * self.word_rows

    def begin(self, slot: Any) -> None:
        plan, refs = self.plan, self.refs
        refs["tile_acc"][...] = jnp.zeros(refs["tile_acc"].shape, jnp.float32)
        refs["tile_l"][...] = _first_lane(refs["tile_l"].shape, 1.0 if plan.call.sinks else 0.0)
        refs["tile_m"][...] = jnp.full(refs["tile_m"].shape, MASKED)
        # Here once per tile, and not on every score; a decode has the time, and keeps q as it is.
        scale = _score_scale(plan, refs)
        for head in range(plan.call.num_kv_heads):
            for w in range(self.words):
                word, rows = head * self.words + w, slice(w * self.word_rows, (w + 1) * self.word_rows)
                for t in range(plan.lane_tiles):
                    words = load_words(
                        refs["q_buf"].at[t], slot, 0, plan.blocks.q_tokens, word, interpret=plan.interpret
                    )
                    q = pltpu.bitcast(words, refs["q_buf"].dtype).astype(jnp.float32) * scale
                    refs["tile_q"][head, rows, t * LANES : t * LANES + plan.lanes] = q.astype(plan.compute_dtype)
                if plan.call.sinks:
                    member = jax.lax.broadcasted_iota(jnp.int32, (self.word_rows, 1), 0) & (self.pack - 1)
                    sink = refs["sinks"][word * self.pack : (word + 1) * self.pack]
                    m = sink[:1] if self.pack == 1 else jnp.where(member == 0, sink[:1], sink[1:])
                    refs["tile_m"][head, rows] = jnp.broadcast_to(m, (self.word_rows, LANES))

    def _hidden(self, pos: jax.Array, item: dict[str, jax.Array]) -> jax.Array:
        row = jax.lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        token = floordiv(row, self.pack) & (self.plan.blocks.q_tokens - 1)
        seen = _seen(self.plan, item["first_pos"] + token, _kv_pos(self.plan, self.refs, pos), item["kv_end"])
        return jnp.where(seen, 0.0, MASKED)

    def attend(self, slot: Any, start: Any, size: int, cut: tuple[jax.Array, dict[str, jax.Array]] | None) -> None:
        plan, refs = self.plan, self.refs
        hidden = None if cut is None else self._hidden(*cut)
        # As in a decode, a pipeline of three stages, here over KV heads: the next one's keys, this one's softmax, the
        # last one's values.
        num_heads = plan.call.num_kv_heads
        scores = self._scores(slot, start, 0)
        waiting: Any = None
        for head in range(num_heads):
            s = scores
            if head + 1 < num_heads:
                scores = self._scores(slot, start, head + 1)
            if waiting is not None:
                self._accumulate(slot, start, head - 1, *waiting)
            p, shrink, refs["tile_m"][head], refs["tile_l"][head] = _softmax_step(
                plan, refs, s, hidden, refs["tile_m"][head], refs["tile_l"][head], is_scaled=True
            )
            waiting = p, shrink
        self._accumulate(slot, start, num_heads - 1, *waiting)

    def _scores(self, slot: Any, start: Any, head: int) -> jax.Array:
        k = _load_head(self.plan, self.refs, slot, start, 2 * head)
        return _dot(self.plan, self.refs["tile_q"][head], k, 1)

    def _accumulate(self, slot: Any, start: Any, head: int, p: jax.Array, shrink: jax.Array) -> None:
        acc = self.refs["tile_acc"]
        o = _dot(self.plan, p, _load_head(self.plan, self.refs, slot, start, 2 * head + 1), 0)
        acc[head] = acc[head] * _lanes_to(shrink, self.plan.call.head_dim) + o

    def end(self, slot: Any) -> None:
        plan, refs = self.plan, self.refs
        out_buf = refs["out_buf"]
        for head in range(plan.call.num_kv_heads):
            out, lse = _finish(plan, refs, refs["tile_acc"][head], refs["tile_m"][head], refs["tile_l"][head])
            if plan.call.return_lse:
                refs["tile_m"][head] = lse
            for w in range(self.words):
                word, rows = head * self.words + w, slice(w * self.word_rows, (w + 1) * self.word_rows)
                for t in range(plan.lane_tiles):
                    part = out[rows, t * LANES : t * LANES + plan.lanes].astype(out_buf.dtype)
                    words = pltpu.bitcast(part, jnp.uint32)
                    store_words(out_buf.at[t], slot, word, words, interpret=plan.interpret)
                if not plan.call.return_lse:
                    continue
                for i in range(self.pack):
                    # The rows of one query head lie `pack` apart.
                    own = refs["tile_m"][head, pl.ds(w * self.word_rows + i, plan.blocks.q_tokens, stride=self.pack), :]
                    words = jax.lax.bitcast_convert_type(own, jnp.uint32)
                    store_words(refs["lse_buf"].at[0], slot, word * self.pack + i, words, interpret=plan.interpret)
