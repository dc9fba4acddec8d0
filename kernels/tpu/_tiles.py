"""The arithmetic of one query tile, in two shapes: a decode's (`Rows`) and that of several tokens (`Tile`).

Heads lie on sublanes in a page (K0 V0 K1 V1 ...), so a strided load of 32-bit words fetches one head of many tokens
(`_load.py`); for prefill that is spread over many query rows. A decode has too few of them: it multiplies all query
heads with all heads' keys as they lie, and masks what is not its own. Statistics (m, l) and the accumulator are
float32, in base 2: p = exp2(s - m).

Online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; its tiling: Dao et al. 2022, arXiv 2205.14135.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._compat import cdiv, floordiv, round_up
from ._load import divide, load_all, load_words, packing, store_words, token_and_head, token_of_row, unpack
from ._plan import LANES, LOG2_E, MASKED, Plan


def clear(kv_buf: Any, slot: Any, begin: Any, end: Any) -> None:
    """Zeroes tokens `begin .. end`, which may hold NaN: the weight of an unseen value is 0, and 0 * NaN is NaN."""
    tiles, _, _, rows, lanes = kv_buf.shape

    def zero(start: Any, size: int) -> None:
        for t in range(tiles):
            kv_buf[t, slot, pl.ds(start, size)] = jnp.zeros((size, rows, lanes), kv_buf.dtype)

    aligned = jnp.minimum(round_up(begin, 8), end)
    jax.lax.fori_loop(begin, aligned, lambda i, _: zero(i, 1), None)
    jax.lax.fori_loop(floordiv(aligned, 8), floordiv(end, 8), lambda i, _: zero(pl.multiple_of(i * 8, 8), 8), None)


def _load_head(plan: Plan, refs: dict[str, Any], slot: Any, start: Any, row: int) -> jax.Array:
    """[compute_tokens, head_dim] of a row of the pool's head axis (K or V), tokens in the order of `token_of_row`."""
    kv_buf, pack = refs["kv_buf"], packing(refs["kv_buf"].dtype)
    parts = []
    for t in range(plan.lane_tiles):
        words = load_words(kv_buf.at[t], slot, start, plan.blocks.compute_tokens, row // pack, interpret=plan.interpret)
        parts.append(unpack(words, row % pack, kv_buf.dtype, interpret=plan.interpret).astype(plan.compute_dtype))
    return jnp.concatenate(parts, axis=1)


def _dot(plan: Plan, a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )


def _softmax_step(
    plan: Plan,
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


def _score_scale(plan: Plan, refs: dict[str, Any]) -> Any:
    """What makes a product of q and k a score in base 2, or with a soft cap the argument of its tanh."""
    call = plan.call
    scale = call.sm_scale * refs["scales"][0] if call.k_scale else call.sm_scale
    return scale * LOG2_E if call.soft_cap is None else scale / call.soft_cap


def _lanes_to(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], every lane alike, to [rows, width]: whole registers are named again, nothing moves."""
    return x[:, :width] if width < LANES else jnp.concatenate([x] * (width // LANES), axis=1)


class Cut(NamedTuple):
    """Positions that say which keys a query sees, for a step where not all see all."""

    q_pos: jax.Array  # of the tile's first query
    kv_pos: jax.Array  # of the step's first key
    kv_end: jax.Array  # behind the block's last key; what follows in the buffer is of no token


def _seen(plan: Plan, q_pos: jax.Array, kv_pos: jax.Array, kv_end: jax.Array) -> jax.Array:
    call = plan.call
    seen = kv_pos < (jnp.minimum(q_pos + 1, kv_end) if call.causal else kv_end)
    if call.sliding_window is not None:
        seen &= kv_pos > q_pos - call.sliding_window
    return seen


def whole_chunks(
    plan: Plan, tile: Any, block_pos: jax.Array, end: jax.Array, item: dict[str, jax.Array]
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


def _kv_pos(plan: Plan, refs: dict[str, Any], pos: jax.Array) -> jax.Array:
    chunk = plan.blocks.compute_tokens
    row = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
    return pos + token_of_row(row, chunk, refs["kv_buf"].dtype)


def _finish(
    plan: Plan, refs: dict[str, Any], acc: jax.Array, m: jax.Array, lane_sums: jax.Array
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


class Rows:
    """A decode tile: one token, whose query heads are the rows.

    All query heads are multiplied with the keys of all KV heads, and the products across heads masked away. That
    wastes matrix and exponential work that a decode has to spare, and saves what it has not: taking heads apart.
    """

    def __init__(self, plan: Plan, refs: dict[str, Any], slot: Any) -> None:
        self.plan, self.refs, self.slot = plan, refs, slot
        self.num_heads = plan.q_heads
        self.num_tokens, self.step = 1, plan.blocks.softmax_tokens

    def begin(self) -> None:
        refs = self.refs
        refs["row_acc"][...] = jnp.zeros(refs["row_acc"].shape, jnp.float32)
        refs["row_l"][...] = _first_lane(refs["row_l"].shape, 1.0 if self.plan.call.sinks else 0.0)
        refs["row_m"][...] = refs["sinks"][...]

    def attend(self, kv_slot: Any, start: Any, size: int, cut: Cut | None) -> None:
        plan, refs, step = self.plan, self.refs, self.step
        parts = [refs["q_buf"][t, self.slot, 0][: self.num_heads] for t in range(plan.lane_tiles)]
        q = jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)
        m, sums, acc = refs["row_m"][...], refs["row_l"][...], refs["row_acc"][...]
        # A pipeline of three stages, written out: while step i is in its softmax, the matrix units have the keys of
        # step i + 1 and the values of step i - 1 to work on.
        steps = range(0, size, step)
        scores = _dot(plan, q, self._load(kv_slot, start, 0), 1)
        waiting: Any = None
        for i in steps:
            s = scores
            if i + step in steps:
                scores = _dot(plan, q, self._load(kv_slot, start + (i + step), 0), 1)
            if waiting is not None:
                acc = self._accumulate(acc, kv_slot, start + (i - step), *waiting)
            here = None if cut is None else cut._replace(kv_pos=cut.kv_pos + i)
            p, shrink, m, sums = _softmax_step(plan, refs, s, self._hidden(here), m, sums)
            waiting = p, shrink
        acc = self._accumulate(acc, kv_slot, start + steps[-1], *waiting)
        refs["row_m"][...], refs["row_l"][...], refs["row_acc"][...] = m, sums, acc

    def _accumulate(self, acc: jax.Array, kv_slot: Any, start: Any, p: jax.Array, shrink: jax.Array) -> jax.Array:
        o = _dot(self.plan, p, self._load(kv_slot, start, 1), 0)
        return acc * _lanes_to(shrink, self.plan.call.head_dim) + o

    def _load(self, kv_slot: Any, start: Any, which: int) -> jax.Array:
        plan, kv_buf = self.plan, self.refs["kv_buf"]
        parts = [
            load_all(kv_buf.at[t], kv_slot, start, plan.blocks.softmax_tokens, which, interpret=plan.interpret)
            for t in range(plan.lane_tiles)
        ]
        return jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)

    def _hidden(self, cut: Cut | None) -> jax.Array:
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
        return jnp.where(_seen(plan, cut.q_pos, cut.kv_pos + token, cut.kv_end), bias, MASKED)

    def end(self) -> None:
        plan, refs = self.plan, self.refs
        rows = pl.ds(0, self.num_heads)
        out, lse = _finish(plan, refs, refs["row_acc"][...], refs["row_m"][...], refs["row_l"][...])
        for t in range(plan.lane_tiles):
            part = out[:, t * LANES : t * LANES + plan.lanes]
            refs["out_buf"][t, self.slot, 0, rows] = part.astype(refs["out_buf"].dtype)
        if plan.call.return_lse:
            refs["lse_buf"][0, self.slot, 0, rows] = lse


class Tile:
    """A tile of several tokens: for each KV head, rows are (query word, token, query head within the word)."""

    def __init__(self, plan: Plan, refs: dict[str, Any], slot: Any) -> None:
        self.plan, self.refs, self.slot = plan, refs, slot
        self.num_tokens, self.step = plan.blocks.q_tokens, plan.blocks.compute_tokens
        self.pack = packing(refs["q_buf"].dtype)
        self.words = plan.group // self.pack
        self.word_rows = plan.blocks.q_tokens * self.pack
        self.rows = self.words * self.word_rows

    def begin(self) -> None:
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
                        refs["q_buf"].at[t], self.slot, 0, plan.blocks.q_tokens, word, interpret=plan.interpret
                    )
                    q = pltpu.bitcast(words, refs["q_buf"].dtype).astype(jnp.float32) * scale
                    refs["tile_q"][head, rows, t * LANES : t * LANES + plan.lanes] = q.astype(plan.compute_dtype)
                if plan.call.sinks:
                    member = jax.lax.broadcasted_iota(jnp.int32, (self.word_rows, 1), 0) & (self.pack - 1)
                    sink = refs["sinks"][word * self.pack : (word + 1) * self.pack]
                    m = sink[:1] if self.pack == 1 else jnp.where(member == 0, sink[:1], sink[1:])
                    refs["tile_m"][head, rows] = jnp.broadcast_to(m, (self.word_rows, LANES))

    def _hidden(self, cut: Cut) -> jax.Array:
        row = jax.lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        token = floordiv(row, self.pack) & (self.plan.blocks.q_tokens - 1)
        seen = _seen(self.plan, cut.q_pos + token, _kv_pos(self.plan, self.refs, cut.kv_pos), cut.kv_end)
        return jnp.where(seen, 0.0, MASKED)

    def attend(self, kv_slot: Any, start: Any, size: int, cut: Cut | None) -> None:
        plan, refs = self.plan, self.refs
        hidden = None if cut is None else self._hidden(cut)
        # As in a decode, a pipeline of three stages, here over KV heads: the next one's keys, this one's softmax, the
        # last one's values.
        num_heads = plan.call.num_kv_heads
        scores = self._scores(kv_slot, start, 0)
        waiting: Any = None
        for head in range(num_heads):
            s = scores
            if head + 1 < num_heads:
                scores = self._scores(kv_slot, start, head + 1)
            if waiting is not None:
                self._accumulate(kv_slot, start, head - 1, *waiting)
            p, shrink, refs["tile_m"][head], refs["tile_l"][head] = _softmax_step(
                plan, refs, s, hidden, refs["tile_m"][head], refs["tile_l"][head], is_scaled=True
            )
            waiting = p, shrink
        self._accumulate(kv_slot, start, num_heads - 1, *waiting)

    def _scores(self, kv_slot: Any, start: Any, head: int) -> jax.Array:
        k = _load_head(self.plan, self.refs, kv_slot, start, 2 * head)
        return _dot(self.plan, self.refs["tile_q"][head], k, 1)

    def _accumulate(self, kv_slot: Any, start: Any, head: int, p: jax.Array, shrink: jax.Array) -> None:
        acc = self.refs["tile_acc"]
        o = _dot(self.plan, p, _load_head(self.plan, self.refs, kv_slot, start, 2 * head + 1), 0)
        acc[head] = acc[head] * _lanes_to(shrink, self.plan.call.head_dim) + o

    def end(self) -> None:
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
                    store_words(out_buf.at[t], self.slot, word, words, interpret=plan.interpret)
                if not plan.call.return_lse:
                    continue
                for i in range(self.pack):
                    # The rows of one query head lie `pack` apart.
                    own = refs["tile_m"][head, pl.ds(w * self.word_rows + i, plan.blocks.q_tokens, stride=self.pack), :]
                    words = jax.lax.bitcast_convert_type(own, jnp.uint32)
                    store_words(refs["lse_buf"].at[0], self.slot, word * self.pack + i, words, interpret=plan.interpret)
