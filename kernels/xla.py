"""Paged attention in plain XLA operations: the path on CPU, and wherever no kernel is faster.

Two parts in one program, so that one compilation serves every mix of lengths:

* **decode**: the rows of one query token. Their blocks of KV are one list, row after row, and a loop takes so many of
  them at a time (split KV, as in Flash-Decoding): it costs what there is to read, however lengths differ. Leading pages
  that all rows have in common are read once (as in cascade inference, arXiv 2501.01005, section 3.1.2);
* **prefill**: the other rows, cut into tiles of query tokens, one tile at a time, a loop over its KV blocks.

Both loops run as often as the batch needs, not as often as the shapes allow, and a part with nothing to do costs next
to nothing. Both keep the running maximum `m`, denominator `l` and unnormalised output `acc` of
online softmax (FlashAttention, arXiv 2205.14135, section 3.1) in float32.
"""

import functools
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .api import AttentionCall
from .checks import product_dtype
from .sums import running_sums

# KV tokens of a block: fewer, larger operations win on CPU, until a short row pays for much it does not need.
_DECODE_BLOCK_TOKENS = 128
_PREFILL_BLOCK_TOKENS = 256
# Blocks of a decode's list taken together: one a row, but no fewer, and on a CPU no more, than these.
_MIN_DECODE_BLOCKS = 8
_MOST_DECODE_BLOCKS = 32
# Query tokens together: larger tiles serve long prompts, smaller ones the short rests of cached ones.
_PREFILL_TILE_TOKENS = 64
# A prefix that so many rows may share is worth the code that reads it once for all of them.
_MIN_ROWS_TO_SHARE = 16

# Where the running maximum starts: finite, so that a row that has seen nothing yet needs no special case, and a
# sum over it that is exactly 0.
_LOWEST = -1e37


class _Softmax(NamedTuple):
    m: jax.Array  # f32[..., queries], the largest logit so far
    l: jax.Array  # f32[..., queries], the sum of exp(logit - m)  # noqa: E741
    acc: jax.Array  # f32[..., queries, head_dim], the sum of exp(logit - m) * v


class _Options(NamedTuple):
    sm_scale: float
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None  # f32[num_q_heads]
    dot_dtype: Any  # of the operands; results are always float32


def supports(call: AttentionCall) -> str | None:
    """Why this implementation cannot run `call`, or None if it can."""
    if call.interpret:
        return f"interpret={call.interpret!r}: there is no Pallas kernel in it to interpret"
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
    share: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """As `api.ragged_paged_attention`; `decode_only` promises that token i is the one query of row i.

    `share` lets rows that begin with the same pages be computed together, which may change the last bits.
    """
    options = _Options(
        sm_scale, causal, sliding_window, soft_cap, k_scale, v_scale, sinks, _dot_dtype(q.dtype, kv_pages.dtype)
    )
    is_row = jnp.arange(kv_lens.shape[0]) < num_seqs[0]
    q_lens = jnp.where(is_row, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    kv_lens = jnp.where(is_row, kv_lens, 0)

    if decode_only:
        out, lse = _decode(q, kv_pages, kv_lens, page_indices, options, share)
        return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)

    # Tokens of no row stay as they are here.
    out = jnp.zeros(q.shape, q.dtype)
    lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32)

    one_token = q_lens == 1
    tokens = jnp.where(one_token, cu_q_lens[:-1], q.shape[0])  # past the end: reads anything, writes nowhere
    decoded = _decode(q.at[tokens].get(mode="clip"), kv_pages, jnp.where(one_token, kv_lens, 0), page_indices, options)
    out = out.at[tokens].set(decoded[0].astype(out.dtype), mode="drop")
    lse = lse.at[tokens].set(decoded[1], mode="drop")

    q_lens = jnp.where(one_token, 0, q_lens)
    out, lse = _prefill(out, lse, q, kv_pages, kv_lens, page_indices, cu_q_lens, q_lens, options)
    return (out, lse) if return_lse else out


def _decode(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    options: _Options,
    share: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One query token per row. q [rows, num_q_heads, head_dim]; returns the same in float32, and its LSE.

    `share` says whether the pages with which all rows begin are looked for. If not, a row's result depends to the bit
    on nothing but the row: not on others, since its blocks are merged one after the other, nor on the page size, since
    blocks are cut by position.
    """
    own_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_pages.shape[2] // 2
    # XLA's CPU code for exp may differ in the last bit with an array's size and the place in it, but for whole vectors.
    num_rows = own_rows if share else max(_MIN_DECODE_BLOCKS, 1 << (own_rows - 1).bit_length())
    q, kv_lens, page_indices = (
        jnp.pad(x, ((0, num_rows - own_rows), *[(0, 0)] * (x.ndim - 1))) for x in (q, kv_lens, page_indices)
    )
    q = q.astype(options.dot_dtype).reshape(-1, num_q_heads // num_kv_heads, head_dim)
    sinks = None if options.sinks is None else jnp.tile(options.sinks.reshape(num_kv_heads, -1), (num_rows, 1))
    state = _empty_softmax(q.shape[:2], head_dim, sinks)
    first_block = jnp.int32(0)
    if share and num_rows >= _MIN_ROWS_TO_SHARE and options.sliding_window is None:
        state, first_block = _decode_shared(state, q, kv_pages, kv_lens, page_indices, options)
    state = _decode_blocks(state, q, kv_lens, page_indices, first_block, kv_pages, options)
    out, lse = _normalised(state, options)
    return out.reshape(-1, num_q_heads, head_dim)[:own_rows], lse.reshape(-1, num_q_heads)[:own_rows]


def _decode_blocks(
    state: _Softmax,
    q: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    first_block: jax.Array,
    kv_pages: jax.Array,
    options: _Options,
) -> _Softmax:
    """Takes the blocks from `first_block` on, of each row as many as it has, into the state.

    Args:
      state: of [rows * num_kv_heads, group].
      q: [rows * num_kv_heads, group, head_dim].
      first_block: i32[]; with a window, each row has its own.
      kv_lens, page_indices, kv_pages, options: as in `_decode`.
    """
    num_pages, page_size, num_kv_heads_twice, head_dim = kv_pages.shape
    num_rows, num_kv_heads = kv_lens.shape[0], num_kv_heads_twice // 2
    # Keys and values are gathered a (token, head) at a time, straight into the order that makes one batched product
    # of all blocks and KV heads: [blocks * num_kv_heads, tokens, head_dim].
    vectors = kv_pages.reshape(-1, head_dim)
    head = jnp.arange(num_kv_heads)

    first_pos = _window_start(kv_lens - 1, options)
    first_block = jnp.maximum(first_block, first_pos // _DECODE_BLOCK_TOKENS)
    num_blocks = jnp.maximum(-(-kv_lens // _DECODE_BLOCK_TOKENS) - first_block, 0)
    # The list: row r has blocks starts[r] to ends[r] of it.
    ends = running_sums(num_blocks)
    starts = ends - num_blocks
    num_together = max(num_rows, _MIN_DECODE_BLOCKS)
    if jax.default_backend() == "cpu":
        num_together = min(num_together, _MOST_DECODE_BLOCKS)

    def step(i: jax.Array, state: _Softmax) -> _Softmax:
        listed = i * num_together + jnp.arange(num_together)
        # Past the list's end: the last row, after its last token.
        row = jnp.minimum(jnp.sum(ends <= listed[:, None], axis=1), num_rows - 1)
        block = first_block[row] + listed - starts[row]
        pos = block[:, None] * _DECODE_BLOCK_TOKENS + jnp.arange(_DECODE_BLOCK_TOKENS)
        seen = jnp.repeat((pos >= first_pos[row][:, None]) & (pos < kv_lens[row][:, None]), num_kv_heads, axis=0)
        page = page_indices.at[row[:, None], pos // page_size].get(mode="clip")
        slot = jnp.clip(page, 0, num_pages - 1) * page_size + pos % page_size
        at = (slot[:, None] * num_kv_heads_twice + 2 * head[:, None]).reshape(-1, _DECODE_BLOCK_TOKENS)
        k, v = (vectors.at[i].get(mode="promise_in_bounds").astype(options.dot_dtype) for i in (at, at + 1))
        # Gathered and masked here, not once more inside the products.
        k, v = jax.lax.optimization_barrier((k, jnp.where(seen[..., None], v, 0)))
        own_q = q[(row[:, None] * num_kv_heads + head).reshape(-1)]
        logits = _dot("bgd,btd->bgt", own_q, k, options)
        blocks = _empty_softmax(own_q.shape[:2], head_dim, None)
        blocks = _online_softmax(blocks, logits, seen[:, None], "bgt,btd->bgd", v, options)
        return merge(i * num_together, blocks, state)

    def merge(first_listed: jax.Array, blocks: _Softmax, state: _Softmax) -> _Softmax:
        # A row's blocks one after the other, so that its result depends on nothing but the row.
        start, end = (jnp.clip(x - first_listed, 0, num_together) for x in (starts, ends))

        def merge_one(j: jax.Array, state: _Softmax) -> _Softmax:
            at = ((start + j)[:, None] * num_kv_heads + head).reshape(-1)
            is_one = jnp.repeat(start + j < end, num_kv_heads)[:, None]
            merged = _merge(state, _Softmax(*(x.at[at].get(mode="clip") for x in blocks)))
            masks = _Softmax(is_one, is_one, is_one[..., None])
            return _Softmax(*map(jnp.where, masks, merged, state))

        return jax.lax.fori_loop(0, jnp.max(end - start), merge_one, state)

    return jax.lax.fori_loop(0, -(-ends[-1] // num_together), step, state)


def _decode_shared(
    state: _Softmax,
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    options: _Options,
) -> tuple[_Softmax, jax.Array]:
    """The blocks of tokens with which all rows begin, read once: rows times group queries of a KV head together.

    Args:
      state: of [rows * num_kv_heads, group].
      q: [rows * num_kv_heads, group, head_dim].
      kv_pages, kv_lens, page_indices, options: as in `_decode`; rows of length 0 do not count.

    Returns:
      The state with those blocks in it, and how many there were.
    """
    num_pages, page_size, num_kv_heads_twice, head_dim = kv_pages.shape
    num_rows, num_kv_heads = kv_lens.shape[0], num_kv_heads_twice // 2
    is_row = kv_lens > 0
    pages = page_indices[jnp.argmax(is_row)]
    is_same = jnp.all((page_indices == pages) | ~is_row[:, None], axis=0)
    num_same = jnp.argmin(jnp.append(is_same, False)) * page_size
    shortest = jnp.min(jnp.where(is_row, kv_lens, jnp.max(kv_lens)))
    num_shared = jnp.minimum(num_same, shortest) // _DECODE_BLOCK_TOKENS

    def by_head(x: jax.Array) -> jax.Array:
        """[rows * num_kv_heads, group, ...] to [num_kv_heads, rows * group, ...]"""
        x = jnp.swapaxes(x.reshape(num_rows, num_kv_heads, *x.shape[1:]), 0, 1)
        return x.reshape(num_kv_heads, -1, *x.shape[3:])

    def by_row(x: jax.Array) -> jax.Array:
        """And back."""
        x = jnp.swapaxes(x.reshape(num_kv_heads, num_rows, -1, *x.shape[2:]), 0, 1)
        return x.reshape(num_rows * num_kv_heads, *x.shape[2:])

    queries = by_head(q)

    def step(block: jax.Array, state: _Softmax) -> _Softmax:
        pos = block * _DECODE_BLOCK_TOKENS + jnp.arange(_DECODE_BLOCK_TOKENS)
        page_ids = jnp.clip(jnp.take(pages, pos // page_size, mode="clip"), 0, num_pages - 1)
        tokens = kv_pages.reshape(-1, num_kv_heads, 2, head_dim)
        kv = tokens.at[page_ids * page_size + pos % page_size].get(mode="promise_in_bounds")
        kv = jax.lax.optimization_barrier(kv.astype(options.dot_dtype))
        logits = _dot("kqd,tkd->kqt", queries, kv[:, :, 0], options)
        return _online_softmax(state, logits, jnp.bool_(True), "kqt,tkd->kqd", kv[:, :, 1], options)

    new = jax.lax.fori_loop(0, num_shared, step, _Softmax(*map(by_head, state)))
    rows = jnp.repeat(is_row, num_kv_heads)[:, None]
    masks = _Softmax(rows, rows, rows[..., None])
    return _Softmax(*(jnp.where(mask, by_row(x), old) for mask, x, old in zip(masks, new, state))), num_shared


def _prefill(
    out: jax.Array,
    lse: jax.Array,
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    q_lens: jax.Array,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Fills in `out` and `lse` for the rows with `q_lens` > 0, a tile of query tokens of one row at a time."""
    max_tokens = q.shape[0]
    tile_tokens = min(_PREFILL_TILE_TOKENS, 1 << (max_tokens - 1).bit_length())
    num_tiles = -(-q_lens // tile_tokens)  # of each row
    tiles_end = running_sums(num_tiles)
    # A tile may reach past its row's end, and past the end of the batch.
    q, out = (jnp.pad(x, ((0, tile_tokens), (0, 0), (0, 0))) for x in (q, out))
    lse = jnp.pad(lse, ((0, tile_tokens), (0, 0)))

    def step(tile: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = jnp.sum(tiles_end <= tile)
        offset = (tile - (tiles_end[row] - num_tiles[row])) * tile_tokens  # of the tile in its row
        start = cu_q_lens[row] + offset
        in_row = offset + jnp.arange(tile_tokens) < q_lens[row]
        q_tile = jax.lax.dynamic_slice_in_dim(q, start, tile_tokens)
        q_pos = kv_lens[row] - q_lens[row] + offset + jnp.arange(tile_tokens)
        q_pos = jnp.minimum(q_pos, kv_lens[row] - 1)  # past the row's end: as its last token
        tile_out, tile_lse = _prefill_tile(q_tile, q_pos, kv_pages, kv_lens[row], page_indices[row], options)
        out, lse = results
        return _update_rows(out, tile_out, start, in_row), _update_rows(lse, tile_lse, start, in_row)

    out, lse = jax.lax.fori_loop(0, tiles_end[-1], step, (out, lse))
    return out[:max_tokens], lse[:max_tokens]


def _prefill_tile(
    q: jax.Array, q_pos: jax.Array, kv_pages: jax.Array, kv_len: jax.Array, pages: jax.Array, options: _Options
) -> tuple[jax.Array, jax.Array]:
    """Query tokens of one row, at positions `q_pos` i32[tokens], ascending, over its pages."""
    _, page_size, num_kv_heads_twice, head_dim = kv_pages.shape
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads = num_kv_heads_twice // 2
    group = num_q_heads // num_kv_heads
    pages_per_block = _pages_per_block(_PREFILL_BLOCK_TOKENS, page_size, pages.shape[0])

    # The queries that share a KV head side by side: [num_kv_heads, tokens * group, head_dim].
    q = q.astype(options.dot_dtype).reshape(num_tokens, num_kv_heads, group, head_dim)
    q = q.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)

    end = jnp.minimum(kv_len, q_pos[-1] + 1) if options.causal else kv_len
    first_pos = _window_start(q_pos[0], options)
    first_page = first_pos // page_size
    num_pages = jnp.maximum(-(-end // page_size) - first_page, 0)

    def step(block: jax.Array, state: _Softmax) -> _Softmax:
        page = first_page + block * pages_per_block + jnp.arange(pages_per_block)
        pos = (page[:, None] * page_size + jnp.arange(page_size)).reshape(-1)
        kv = jnp.take(kv_pages, jnp.take(pages, page, mode="clip"), axis=0, mode="clip")
        # What no token of the tile sees may hold anything.
        readable = (pos >= first_pos) & (pos < end)
        kv = _masked(kv.reshape(-1, num_kv_heads, 2, head_dim), readable[:, None, None, None], options)
        k, v = kv[:, :, 0], kv[:, :, 1]
        seen = jnp.repeat(_visible(q_pos[:, None], pos, options) & readable, group, axis=0)
        logits = _dot("kqd,tkd->kqt", q, k, options)
        return _online_softmax(state, logits, seen, "kqt,tkd->kqd", v, options)

    sinks = None if options.sinks is None else jnp.tile(options.sinks.reshape(num_kv_heads, group), num_tokens)
    state = _empty_softmax((num_kv_heads, num_tokens * group), head_dim, sinks)
    state = jax.lax.fori_loop(0, -(-num_pages // pages_per_block), step, state)
    out, lse = _normalised(state, options)
    out = out.reshape(num_kv_heads, num_tokens, group, head_dim).transpose(1, 0, 2, 3)
    lse = lse.reshape(num_kv_heads, num_tokens, group).transpose(1, 0, 2)
    return out.reshape(num_tokens, num_q_heads, head_dim), lse.reshape(num_tokens, num_q_heads)


def _empty_softmax(queries: tuple[int, ...], width: int, sinks: jax.Array | None) -> _Softmax:
    m = jnp.full(queries, _LOWEST, jnp.float32)
    l = jnp.zeros(queries, jnp.float32)  # noqa: E741
    if sinks is not None:
        # A sink is a logit seen before all others, whose value is zero.
        m = jnp.maximum(m, sinks)
        l = jnp.exp(sinks - m)  # noqa: E741
    return _Softmax(m, l, jnp.zeros((*queries, width), jnp.float32))


def _online_softmax(
    state: _Softmax, logits: jax.Array, seen: jax.Array, pv: str, v: jax.Array, options: _Options
) -> _Softmax:
    """Takes one more block of keys into the state. `v` holds no NaN, seen or not: 0 * NaN is NaN."""
    scale = options.sm_scale if options.k_scale is None else options.sm_scale * options.k_scale
    logits = logits * scale
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(seen, logits, -jnp.inf)
    m = jnp.maximum(state.m, jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - m[..., None])
    decay = jnp.exp(state.m - m)
    acc = decay[..., None] * state.acc + _dot(pv, weights.astype(options.dot_dtype), v, options)
    return _Softmax(m, decay * state.l + jnp.sum(weights, axis=-1), acc)


def _merge(a: _Softmax, b: _Softmax) -> _Softmax:
    """The state of the keys of both."""
    m = jnp.maximum(a.m, b.m)
    decay_a, decay_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    acc = decay_a[..., None] * a.acc + decay_b[..., None] * b.acc
    return _Softmax(m, decay_a * a.l + decay_b * b.l, acc)


def _normalised(state: _Softmax, options: _Options) -> tuple[jax.Array, jax.Array]:
    """The softmax's output and its LSE: 0 and -inf where nothing was seen."""
    empty = state.l == 0
    l = jnp.where(empty, 1.0, state.l)  # noqa: E741
    scale = 1.0 / l if options.v_scale is None else options.v_scale / l
    return state.acc * scale[..., None], jnp.where(empty, -jnp.inf, state.m + jnp.log(l))


def _masked(kv: jax.Array, readable: jax.Array, options: _Options) -> jax.Array:
    """Gathered keys and values, ready for the products, with 0 where nothing may be read."""
    kv = jnp.where(readable, kv.astype(options.dot_dtype), 0)
    # Gathered and masked once, not once more inside each of the two products.
    return jax.lax.optimization_barrier(kv)


def _dot(spec: str, x: jax.Array, y: jax.Array, options: _Options) -> jax.Array:
    # Float32 operands mean that float32 is wanted, where TPUs and GPUs would round them first.
    precision = jax.lax.Precision.HIGHEST if options.dot_dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


def _dot_dtype(q_dtype: Any, kv_dtype: Any) -> Any:
    """As `product_dtype`, but float32 on a CPU without matrix units for bfloat16: widened once as they are gathered,
    the small products of attention take less time, even where vector units multiply bfloat16.
    """
    if jax.default_backend() == "cpu" and not _cpu_has_matrix_units():
        return jnp.float32
    return product_dtype(q_dtype, kv_dtype)


@functools.cache
def _cpu_has_matrix_units() -> bool:
    """Whether this computer's CPU has AMX; unknown counts as no."""
    try:
        return "amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _visible(q_pos: jax.Array, kv_pos: jax.Array, options: _Options) -> jax.Array:
    if not options.causal:
        return jnp.full(jnp.broadcast_shapes(q_pos.shape, kv_pos.shape), True)
    return (kv_pos <= q_pos) & (kv_pos >= _window_start(q_pos, options))


def _window_start(q_pos: jax.Array, options: _Options) -> jax.Array:
    """The first position that a token at q_pos sees."""
    if options.sliding_window is None:
        return jnp.zeros_like(q_pos)
    return jnp.maximum(q_pos + 1 - options.sliding_window, 0)


def _pages_per_block(block_tokens: int, page_size: int, pages_per_seq: int) -> int:
    return min(max(1, math.ceil(block_tokens / page_size)), pages_per_seq)


def _update_rows(x: jax.Array, update: jax.Array, start: jax.Array, mask: jax.Array) -> jax.Array:
    """Writes those rows of `update` where `mask` holds to x[start:]."""
    old = jax.lax.dynamic_slice_in_dim(x, start, update.shape[0])
    mask = mask.reshape(-1, *([1] * (x.ndim - 1)))
    new = jnp.where(mask, update.astype(x.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=0)
