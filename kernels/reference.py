"""The definition of ragged paged attention: dense, float32, one query token at a time. Slow on purpose.

Every other implementation is compared with this one, so it favours being obvious over everything else.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .api import AttentionCall


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of ragged queries over paged keys and values: the specification.

    Row r, of `n` query tokens and `m` cached ones, owns tokens `cu_q_lens[r] .. cu_q_lens[r + 1]`. Its cached
    position p lies at page `page_indices[r, p // page_size]`, slot `p % page_size`. Query token i stands at
    position `m - n + i`. With `q`, `k` and `v` in float32 and `k`, `v` multiplied by their scales:

        s[p] = sm_scale * dot(q, k[p]);  s[p] = soft_cap * tanh(s[p] / soft_cap) if there is a cap
        p is seen if  0 <= p < m,  p <= own position (causal),  p > own position - sliding_window
        lse  = log(sum of exp(s[p]) over seen p, plus exp(sink) if there are sinks)
        out  = sum of exp(s[p] - lse) * v[p] over seen p

    So a sink takes part in the softmax with value zero, scaled and capped by nothing, and counts in `lse`. A
    token that sees nothing has out 0 and lse -inf (with sinks: lse = sink). A token that belongs to no row
    (beyond `cu_q_lens[num_seqs[0]]`) has out 0 and lse -inf, sinks or not. What none of a row's queries sees is not
    read: NaN there changes nothing. With one exception, for the Pallas kernels: of a page that a window cuts, positions
    before the window must hold finite numbers, as they do where sequences were written from their start. NaN that one
    query sees may reach the others of its row, and its other heads, in all implementations but this one.

    Args, returns: as in `api.ragged_paged_attention`; `decode_only` changes no result.
    """
    max_tokens, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads_twice, _ = kv_pages.shape
    max_seqs, pages_per_seq = page_indices.shape
    queries_per_kv_head = num_q_heads // (num_kv_heads_twice // 2)
    kv_pos = jnp.arange(pages_per_seq * page_size)

    def attend(token: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Its row is the number of rows that end at or before it.
        real_rows = jnp.arange(max_seqs) < num_seqs[0]
        row = jnp.sum(real_rows & (cu_q_lens[1:] <= token))
        in_a_row = row < num_seqs[0]
        q_pos = kv_lens[row] - (cu_q_lens[row + 1] - token)

        seen = in_a_row & (kv_pos < kv_lens[row])
        if causal:
            seen &= kv_pos <= q_pos
        if sliding_window is not None:
            seen &= kv_pos > q_pos - sliding_window

        kv = jnp.take(kv_pages, page_indices[row], axis=0, mode="clip").astype(jnp.float32)
        kv = kv.reshape(-1, num_kv_heads_twice, head_dim)
        kv = jnp.where(seen[:, None, None], kv, 0.0)
        k = jnp.repeat(kv[:, 0::2], queries_per_kv_head, axis=1)  # [kv_pos, num_q_heads, head_dim]
        v = jnp.repeat(kv[:, 1::2], queries_per_kv_head, axis=1)
        k = k if k_scale is None else k * k_scale
        v = v if v_scale is None else v * v_scale

        s = sm_scale * jnp.einsum("hd,phd->hp", q[token].astype(jnp.float32), k, precision="highest")
        s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
        s = jnp.where(seen, s, -jnp.inf)
        if sinks is not None:
            s = jnp.concatenate([s, jnp.where(in_a_row, sinks, -jnp.inf)[:, None]], axis=1)
            v = jnp.concatenate([v, jnp.zeros_like(v[:1])])
        lse = jax.nn.logsumexp(s, axis=1)
        weights = jnp.exp(s - jnp.where(lse == -jnp.inf, 0.0, lse)[:, None])
        return jnp.einsum("hp,phd->hd", weights, v, precision="highest"), lse

    out, lse = jax.lax.map(attend, jnp.arange(max_tokens))
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out
