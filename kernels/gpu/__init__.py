"""Ragged paged attention for NVIDIA Hopper GPUs, in Pallas Mosaic GPU.

`attention.py` is the kernel, `work.py` what tells it what to do, `tiles.py` its block sizes. This module joins them
to the contract of `api.ragged_paged_attention`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..api import AttentionCall
from . import _compat, tiles, work
from .attention import Kernel

__all__ = ["ragged_paged_attention", "supports"]

_HEAD_DIMS = (64, 96, 128, 256)
_PAGE_SIZES = (8, 16, 32, 64, 128, 256)
_DTYPES = ("bfloat16", "float16")


def supports(call: AttentionCall) -> str | None:
    """Why this implementation cannot run `call`, or None if it can."""
    group = call.num_q_heads // call.num_kv_heads
    if call.q_dtype not in _DTYPES:
        return f"q_dtype={call.q_dtype!r} must be {' or '.join(_DTYPES)}, which the tensor cores multiply; cast q"
    if call.kv_dtype != call.q_dtype:
        return f"kv_dtype={call.kv_dtype!r} must be q's, {call.q_dtype!r}"
    if call.head_dim not in _HEAD_DIMS:
        return f"head_dim={call.head_dim} must be one of {', '.join(map(str, _HEAD_DIMS))}; pad q and the pool"
    if call.page_size not in _PAGE_SIZES:
        return f"page_size={call.page_size} must be one of {', '.join(map(str, _PAGE_SIZES))}"
    if group > tiles.ROWS:
        return f"num_q_heads={call.num_q_heads} must be at most {tiles.ROWS} times num_kv_heads={call.num_kv_heads}"
    if call.interpret and call.interpret is not True and not isinstance(call.interpret, _compat.interpreter_type()):
        return f"interpret={call.interpret!r} must be True or an InterpretGPUParams"
    return _compat.why_no_hopper(interpreted=bool(call.interpret))


class _Options(NamedTuple):
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    interpret: Any


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
    """As `api.ragged_paged_attention`: rows of one token by the decode plan, the others by the prefill plan.

    Args, returns: as there; `decode_only` promises that token i is the one query of row i.
    """
    num_q_heads, num_kv_heads = q.shape[1], kv_pages.shape[2] // 2
    options = _Options(causal, sliding_window, soft_cap, _compat.interpret_params(interpret))
    logit_scale = sm_scale if k_scale is None else sm_scale * k_scale
    scales = jnp.stack([jnp.float32(logit_scale), jnp.float32(1.0) if v_scale is None else v_scale])

    rows = jnp.arange(page_indices.shape[0])
    is_row = rows < num_seqs[0]
    num_tokens = cu_q_lens[num_seqs[0]]
    first_tokens = jnp.where(is_row, cu_q_lens[:-1], num_tokens)
    q_lens = jnp.where(is_row, jnp.diff(cu_q_lens), 0)
    kv_lens = jnp.where(is_row, kv_lens, 0)

    packed_q = _pad_groups(q, num_kv_heads)
    attend = partial(_decode, packed_q, kv_pages, page_indices, scales, options=options)
    if decode_only:
        out, lse = attend(kv_lens, rows, jnp.ones_like(is_row))
    else:
        is_decode = q_lens == 1
        out, lse = _prefill(
            packed_q, kv_pages, page_indices, scales, kv_lens,
            jnp.where(is_decode, 0, q_lens), first_tokens, num_tokens, options=options,
        )  # fmt: skip
        token = jnp.where(is_decode, first_tokens, q.shape[0])  # past the end: dropped
        decoded_out, decoded_lse = attend(
            jnp.where(is_decode, kv_lens, 0), jnp.minimum(token, q.shape[0] - 1), is_decode
        )
        out = out.at[token].set(decoded_out, mode="drop")
        lse = lse.at[token].set(decoded_lse, mode="drop")

    out, lse = (_unpad_groups(x, num_q_heads, num_kv_heads) for x in (out, lse))
    if sinks is not None:
        in_a_row = (rows < num_seqs[0]) if decode_only else (jnp.arange(q.shape[0]) < num_tokens)
        out, lse = _add_sinks(out, lse, jnp.where(in_a_row[:, None], sinks, -jnp.inf))
    return (out, lse) if return_lse else out


def _decode(
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    scales: jax.Array,
    kv_lens: jax.Array,
    tokens: jax.Array,
    is_wanted: jax.Array,
    *,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one token of each row: [rows, num_heads, head_dim] and f32[rows, num_heads].

    Where there are several units of work to an SM without it, nothing is split and nothing merged.
    """
    (rows, num_kv_heads), num_sms = (kv_lens.shape[0], kv_pages.shape[2] // 2), _compat.num_sms(options.interpret)
    split = rows * num_kv_heads < _UNITS_PER_SM * num_sms
    kernel = _kernel(q, kv_pages, options, decode=True, partial_output=split, max_items=rows + num_sms)
    max_parts = -(-kernel.tiles.num_blocks // num_kv_heads) if split else 0
    plan = work.plan_decode(kv_lens, tokens, is_wanted, max_parts=max_parts, kv_blocks=kernel.kv_blocks)
    out, lse = kernel(plan, page_indices, scales, q, kv_pages)
    lse = lse[:, :, : kernel.group].reshape(lse.shape[0], -1)
    if not split:
        return out[tokens], lse
    out = out[:, :, : kernel.group].reshape(*lse.shape, -1)
    out, lse = work.merge_parts(out, lse, plan, rows)
    return out.astype(q.dtype), lse


_UNITS_PER_SM = 4  # from so many on, the SMs are busy for long enough without splitting


def _prefill(
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    scales: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    first_tokens: jax.Array,
    num_tokens: jax.Array,
    *,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the tokens of rows with `q_lens > 0`: [max_tokens, num_heads, head_dim] and its LSE.

    Those of other rows are left arbitrary. Those from `num_tokens` on, of no row, are a row that has no keys.
    """
    max_tokens, rows = q.shape[0], kv_lens.shape[0]
    kernel = _kernel(q, kv_pages, options, decode=False, partial_output=False, max_items=max_tokens + rows + 1)
    padding = (jnp.int32(0), max_tokens - num_tokens, num_tokens)
    kv_lens, q_lens, first_tokens = map(jnp.append, (kv_lens, q_lens, first_tokens), padding)
    plan = work.plan_prefill(
        kv_lens, q_lens, first_tokens,
        max_tokens=max_tokens, tokens_per_item=kernel.tokens_per_item, kv_blocks=kernel.kv_blocks,
    )  # fmt: skip
    out, lse = kernel(plan, page_indices, scales, q, kv_pages)
    lse = lse.reshape(*lse.shape[:2], kernel.tokens_per_item, kernel.group)
    return out, work.per_token(lse, plan, max_tokens)


def _kernel(
    q: jax.Array, kv_pages: jax.Array, options: _Options, *, decode: bool, partial_output: bool, max_items: int
) -> Kernel:
    num_kv_heads, head_dim, page_size = kv_pages.shape[2] // 2, q.shape[2], kv_pages.shape[1]
    return Kernel(
        tiles=tiles.choose(
            decode=decode,
            head_dim=head_dim,
            page_size=page_size,
            dtype=q.dtype,
            kv_dtype=kv_pages.dtype,
            num_blocks=min(_compat.num_sms(options.interpret), max_items * num_kv_heads),
        ),
        group=q.shape[1] // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_tokens=q.shape[0],
        dtype=q.dtype,
        partial_output=partial_output,
        decode_only=decode,
        **options._asdict(),
    )


def _pad_groups(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[tokens, num_q_heads, head_dim] with as many heads to a KV head as the next power of two."""
    group = x.shape[1] // num_kv_heads
    missing = (1 << (group - 1).bit_length()) - group
    if not missing:
        return x
    x = x.reshape(x.shape[0], num_kv_heads, group, -1)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return x.reshape(x.shape[0], num_kv_heads * (group + missing), -1)


def _unpad_groups(x: jax.Array, num_q_heads: int, num_kv_heads: int) -> jax.Array:
    """[tokens, heads, ...] without the heads that `_pad_groups` added."""
    if x.shape[1] == num_q_heads:
        return x
    grouped = x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])
    return grouped[:, :, : num_q_heads // num_kv_heads].reshape(x.shape[0], num_q_heads, *x.shape[2:])


def _add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Out and LSE with one more logit, of value zero, in each softmax. sinks: f32[tokens, num_heads]."""
    with_sinks = jnp.logaddexp(lse, sinks)
    share = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - with_sinks))
    return (out * share[..., None]).astype(out.dtype), with_sinks
