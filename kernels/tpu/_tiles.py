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

from .._compat import cdiv, floordiv
from ..tuning import CLEARED_TOKENS
from ._load import divide, load_all, load_words, packing, store_words, token_and_head, token_of_row, unpack
from ._plan import LANES, LOG2_E, MASKED, Plan

_PART_ROWS = 256


def clear(kv_buf: Any, slot: Any, begin: Any, end: Any) -> None:
    """Zeroes tokens `begin .. end`, which may hold NaN: the weight of an unseen value is 0, and 0 * NaN is NaN.

    Up to `CLEARED_TOKENS - 1` after them, too, which nothing reads, and for which the buffer has room.
    """
    tiles, _, _, rows, lanes = kv_buf.shape

    def zero(i: Any, _: Any) -> None:
        for t in range(tiles):
            target = pl.ds(begin + i * CLEARED_TOKENS, CLEARED_TOKENS)
            kv_buf[t, slot, target] = jnp.zeros((CLEARED_TOKENS, rows, lanes), kv_buf.dtype)

    jax.lax.fori_loop(0, cdiv(end - begin, CLEARED_TOKENS), zero, None)


def _load_head(plan: Plan, refs: dict[str, Any], slot: Any, start: Any, head: int) -> tuple[jax.Array, jax.Array]:
    """K and V of a KV head, [compute_tokens, head_dim] each, tokens in the order of `token_of_row`."""
    kv_buf, pack = refs["kv_buf"], packing(refs["kv_buf"].dtype)
    rows = 2 * head, 2 * head + 1
    parts: tuple[list[jax.Array], list[jax.Array]] = [], []
    for t in range(plan.lane_tiles):
        # K and V of one head share their words, but for 32-bit pools. Words are loaded a half at a time and joined,
        # which costs more than taking them apart.
        words = {
            row // pack: load_words(
                kv_buf.at[t], slot, start, plan.blocks.compute_tokens, row // pack, interpret=plan.interpret
            )
            for row in rows
        }
        for part, row in zip(parts, rows):
            values = unpack(words[row // pack], row % pack, kv_buf.dtype, interpret=plan.interpret)
            part.append(values.astype(plan.compute_dtype))
    return jnp.concatenate(parts[0], axis=1), jnp.concatenate(parts[1], axis=1)


def _dot(plan: Plan, a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )


def _softmax_step(
    plan: Plan, s: jax.Array, m_old: jax.Array, l_old: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Takes scores [rows, tokens], MASKED where unseen, into the statistics.

    Returns the weights; what the accumulator shrinks by, [rows, LANES] with every lane alike; the new m and l.
    """
    m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
    shrink = jnp.exp2(m_old - m_new)
    p = jnp.exp2(s - _lanes_to(m_new, s.shape[1]))
    # Lane by lane; the lanes are summed once, at the end.
    partial = functools.reduce(jnp.add, jnp.split(p, p.shape[1] // LANES, axis=1))
    return p.astype(plan.compute_dtype), shrink, m_new, l_old * shrink + partial


def _scores(plan: Plan, refs: dict[str, Any], products: jax.Array) -> jax.Array:
    """Products of q and k to scores in base 2. In float32: queries scaled beforehand would be rounded once more."""
    call = plan.call
    scale = call.sm_scale * refs["scales"][0] if call.k_scale else call.sm_scale
    if call.soft_cap is None:
        return products * (scale * LOG2_E)
    return (call.soft_cap * LOG2_E) * jnp.tanh(products * (scale / call.soft_cap))


def _lanes_to(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], every lane alike, to [rows, width]: whole registers are named again, nothing moves."""
    return x[:, :width] if width < LANES else jnp.concatenate([x] * (width // LANES), axis=1)


class Cut(NamedTuple):
    """Positions that say which keys a query sees, for a step where not all may see all."""

    q_pos: jax.Array  # of the tile's first query
    kv_pos: jax.Array  # of the step's first key
    kv_end: jax.Array  # behind the block's last key; what follows in the buffer is of no token


def _seen(plan: Plan, cut: Cut, query: Any, key: jax.Array) -> jax.Array:
    """Whether the query, counted from the tile's first, sees the key, counted from the step's first."""
    call, end = plan.call, cut.kv_end - cut.kv_pos
    last = cut.q_pos - cut.kv_pos + query
    seen = key < (jnp.minimum(last + 1, end) if call.causal else end)
    if call.sliding_window is not None:
        seen &= key > last - call.sliding_window
    return seen


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
        self.step = plan.blocks.decode_tokens

    def begin(self) -> None:
        refs = self.refs
        refs["row_acc"][...] = jnp.zeros(refs["row_acc"].shape, jnp.float32)
        refs["row_l"][...] = _first_lane(refs["row_l"].shape, 1.0 if self.plan.call.sinks else 0.0)
        refs["row_m"][...] = refs["sinks"][...]

    def attend_block(
        self, first_pos: jax.Array, kv_slot: Any, block_pos: jax.Array, end: jax.Array, num_steps: jax.Array
    ) -> None:
        # In each turn the matrix units work on the keys of a step while the step before is in its softmax. So there is
        # one turn more than steps; in the first, no key is seen. The mask is always on: a decode has the time, and a
        # second loop without it would be longer than the mask.
        plan, refs, step = self.plan, self.refs, self.step

        def turn(i: Any, _: Any) -> None:
            s = refs["row_s"][...]
            refs["row_s"][...] = self._products(kv_slot, jnp.minimum(i, num_steps - 1) * step)
            start = jnp.maximum(i - 1, 0) * step
            cut = Cut(first_pos, block_pos + start, block_pos + jnp.where(i == 0, 0, end))
            p, shrink, refs["row_m"][...], refs["row_l"][...] = _softmax_step(
                plan, self._masked(s, cut), refs["row_m"][...], refs["row_l"][...]
            )
            o = _dot(plan, p, self._load(kv_slot, start, 1), 0)
            refs["row_acc"][...] = refs["row_acc"][...] * _lanes_to(shrink, plan.call.head_dim) + o

        jax.lax.fori_loop(0, jnp.where(num_steps > 0, num_steps + 1, 0), turn, None)

    def _products(self, kv_slot: Any, start: Any) -> jax.Array:
        plan, q_buf = self.plan, self.refs["q_buf"]
        parts = [q_buf[t, self.slot, 0][: self.num_heads] for t in range(plan.lane_tiles)]
        q = jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)
        return _dot(plan, q, self._load(kv_slot, start, 0), 1)

    def _load(self, kv_slot: Any, start: Any, which: int) -> jax.Array:
        plan, kv_buf = self.plan, self.refs["kv_buf"]
        parts = [
            load_all(kv_buf.at[t], kv_slot, start, plan.blocks.decode_tokens, which, interpret=plan.interpret)
            for t in range(plan.lane_tiles)
        ]
        return jnp.concatenate(parts, axis=1).astype(plan.compute_dtype)

    def _masked(self, s: jax.Array, cut: Cut) -> jax.Array:
        """The scores [query heads, keys], MASKED for another head's keys and beyond the cut."""
        plan, kv_buf = self.plan, self.refs["kv_buf"]
        token, head = token_and_head(self.step, kv_buf.shape[3], kv_buf.dtype)
        width = head.shape[1]
        row = jax.lax.broadcasted_iota(jnp.int32, (self.num_heads, 1), 0)
        period = kv_buf.shape[3] if width % LANES == 0 and LANES % kv_buf.shape[3] == 0 else width
        if packing(kv_buf.dtype) <= 2 and period < width:
            # The heads come round again every `period` columns, so one register's worth says it all.
            bias = jnp.where(divide(row, plan.group) == head[:, :LANES], 0.0, MASKED)
            bias = jnp.concatenate([bias] * (width // LANES), axis=1)
        else:
            bias = jnp.where(divide(row, plan.group) == head, 0.0, MASKED)
        s = _scores(plan, self.refs, s)
        return jnp.where(_seen(plan, cut, 0, token), s + bias, MASKED)

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
        self.step = plan.blocks.compute_tokens
        self.pack = packing(refs["q_buf"].dtype)
        self.words = plan.group // self.pack
        self.word_rows = plan.blocks.q_tokens * self.pack
        self.rows = self.words * self.word_rows
        # Rows worked on together; a tile with one KV head has more than one part, so that there is a next one.
        count = cdiv(self.rows, _PART_ROWS)
        size = self.rows // count if self.rows % (16 * count) == 0 else self.rows
        self.parts = [slice(first, first + size) for first in range(0, self.rows, size)]

    def begin(self) -> None:
        plan, refs = self.plan, self.refs
        refs["tile_acc"][...] = jnp.zeros(refs["tile_acc"].shape, jnp.float32)
        refs["tile_l"][...] = _first_lane(refs["tile_l"].shape, 1.0 if plan.call.sinks else 0.0)
        refs["tile_m"][...] = jnp.full(refs["tile_m"].shape, MASKED)
        for head in range(plan.call.num_kv_heads):
            for w in range(self.words):
                word, rows = head * self.words + w, slice(w * self.word_rows, (w + 1) * self.word_rows)
                for t in range(plan.lane_tiles):
                    words = load_words(
                        refs["q_buf"].at[t], self.slot, 0, plan.blocks.q_tokens, word, interpret=plan.interpret
                    )
                    q = pltpu.bitcast(words, refs["q_buf"].dtype).astype(plan.compute_dtype)
                    refs["tile_q"][head, rows, t * LANES : t * LANES + plan.lanes] = q
                if plan.call.sinks:
                    member = jax.lax.broadcasted_iota(jnp.int32, (self.word_rows, 1), 0) & (self.pack - 1)
                    sink = refs["sinks"][word * self.pack : (word + 1) * self.pack]
                    m = sink[:1] if self.pack == 1 else jnp.where(member == 0, sink[:1], sink[1:])
                    refs["tile_m"][head, rows] = jnp.broadcast_to(m, (self.word_rows, LANES))

    def _hidden(self, cut: Cut) -> jax.Array:
        """What is added to the scores of each row, or, in one row, to those of all that see the same keys."""
        plan = self.plan
        row = jax.lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0)
        query = floordiv(row, self.pack) & (plan.blocks.q_tokens - 1)
        row = jax.lax.broadcasted_iota(jnp.int32, (1, self.step), 1)
        key = token_of_row(row, self.step, self.refs["kv_buf"].dtype)
        return jnp.where(_seen(plan, cut, query, key), 0.0, MASKED)

    def attend_block(
        self, first_pos: jax.Array, kv_slot: Any, block_pos: jax.Array, end: jax.Array, num_steps: jax.Array
    ) -> None:
        # Steps in the middle, of which every query sees every key, are spared the mask.
        call, step = self.plan.call, self.step
        seen_by_first = jnp.minimum(first_pos + 1 - block_pos, end) if call.causal else end
        first = jnp.int32(0)
        if call.sliding_window is not None:
            hidden_from_last = first_pos + self.plan.blocks.q_tokens - call.sliding_window - block_pos
            first = jnp.minimum(cdiv(jnp.maximum(hidden_from_last, 0), step), num_steps)
        num_whole = floordiv(jnp.maximum(seen_by_first - first * step, 0), step)

        def attend_whole(c: Any, _: Any) -> None:
            self._attend(kv_slot, (first + c) * step, None)

        def attend_cut(c: Any, _: Any) -> None:
            start = jnp.where(c < first, c, c + num_whole) * step
            self._attend(kv_slot, start, Cut(first_pos, block_pos + start, block_pos + end))

        jax.lax.fori_loop(0, num_whole, attend_whole, None)
        jax.lax.fori_loop(0, num_steps - num_whole, attend_cut, None)

    def _attend(self, kv_slot: Any, start: Any, cut: Cut | None) -> None:
        plan, refs = self.plan, self.refs
        hidden = None if cut is None else self._hidden(cut)
        # A pipeline of three stages over heads and parts of their rows, written out: the keys of the next, the softmax
        # of this one, the values of the last.
        parts = [(head, rows) for head in range(plan.call.num_kv_heads) for rows in self.parts]
        k, v = _load_head(plan, refs, kv_slot, start, 0)
        products = _dot(plan, refs["tile_q"][*parts[0]], k, 1)
        waiting: Any = None
        for here, following in zip(parts, [*parts[1:], None]):
            s, own_v = products, v
            if following is not None:
                if following[0] != here[0]:
                    k, v = _load_head(plan, refs, kv_slot, start, following[0])
                products = _dot(plan, refs["tile_q"][*following], k, 1)
            if waiting is not None:
                self._accumulate(*waiting)
            s = _scores(plan, refs, s)
            if hidden is not None:
                s += hidden if hidden.shape[0] == 1 else hidden[here[1]]
            p, shrink, refs["tile_m"][*here], refs["tile_l"][*here] = _softmax_step(
                plan, s, refs["tile_m"][*here], refs["tile_l"][*here]
            )
            waiting = here, p, shrink, own_v
        self._accumulate(*waiting)

    def _accumulate(self, part: tuple[int, slice], p: jax.Array, shrink: jax.Array, v: jax.Array) -> None:
        acc = self.refs["tile_acc"]
        acc[*part] = acc[*part] * _lanes_to(shrink, self.plan.call.head_dim) + _dot(self.plan, p, v, 0)

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
