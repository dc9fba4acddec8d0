"""Ragged paged attention for NVIDIA Hopper GPUs, in Pallas Mosaic GPU.

`attention.py` is the kernel, `work.py` what tells it what to do, `tiles.py` its block sizes. This module joins them
to the contract of `api.ragged_paged_attention`; `launch.py` runs one plan.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..api import AttentionCall
from . import _compat, launch, tiles

__all__ = ["ragged_paged_attention", "supports", "why_not_on"]

_HEAD_DIMS = (64, 96, 128, 256)
_PAGE_SIZES = (8, 16, 32, 64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
_INTERPRETED_SMS = 4  # enough to split sequences, few enough to be quick


def supports(call: AttentionCall) -> str | None:
    """Why this implementation cannot run `call`, or None if it can."""
    group = call.num_q_heads // call.num_kv_heads
    if call.q_dtype not in _DTYPES:
        return f"q_dtype={call.q_dtype!r} must be {' or '.join(_DTYPES)}, which the tensor cores multiply; cast q"
    if call.kv_dtype not in (call.q_dtype, *_NARROW_DTYPES):
        return (
            f"kv_dtype={call.kv_dtype!r} must be that of q, {call.q_dtype!r}, or one of {', '.join(_NARROW_DTYPES)}: "
            "the kernel converts nothing else; store the pool in one of them"
        )
    if call.head_dim not in _HEAD_DIMS:
        return f"head_dim={call.head_dim} must be one of {', '.join(map(str, _HEAD_DIMS))}; pad q and the pool"
    if call.page_size not in _PAGE_SIZES:
        return f"page_size={call.page_size} must be one of {', '.join(map(str, _PAGE_SIZES))}"
    if group > tiles.ROWS:
        return f"num_q_heads={call.num_q_heads} must be at most {tiles.ROWS} times num_kv_heads={call.num_kv_heads}"
    if call.interpret and call.interpret is not True and not isinstance(call.interpret, plgpu.InterpretGPUParams):
        return f"interpret={call.interpret!r} must be True or an InterpretGPUParams"
    capability = None if call.interpret else _compat.local_capability()
    return None if capability is None else why_not_on(capability)


def why_not_on(capability: str) -> str | None:
    """Why a GPU of this compute capability, such as "9.0", cannot run the kernel, or None if it can."""
    if capability.split(".")[0] == "9":
        return None
    return f"compute {capability=} of the GPU must be 9.0 (Hopper: H100, H200), whose wgmma the kernel is made of"


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
    call = AttentionCall(
        max_tokens=q.shape[0],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
        q_dtype=q.dtype.name,
        kv_dtype=kv_pages.dtype.name,
        num_pages=kv_pages.shape[0],
        page_size=kv_pages.shape[1],
        max_seqs=page_indices.shape[0],
        pages_per_seq=page_indices.shape[1],
        causal=causal,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=_compat.interpret_params(interpret),
        decode_only=decode_only,
    )
    kernels = launch.kernels_of(call, num_sms=_INTERPRETED_SMS if interpret else _compat.num_sms())
    logit_scale = sm_scale if k_scale is None else sm_scale * k_scale
    scales = jnp.stack([jnp.float32(logit_scale), jnp.float32(1.0) if v_scale is None else v_scale])

    rows = jnp.arange(page_indices.shape[0])
    is_row = rows < num_seqs[0]
    num_tokens = cu_q_lens[num_seqs[0]]
    first_tokens = jnp.where(is_row, cu_q_lens[:-1], num_tokens)
    q_lens = jnp.where(is_row, jnp.diff(cu_q_lens), 0)
    kv_lens = jnp.where(is_row, kv_lens, 0)

    packed_q = _pad_groups(q, num_kv_heads)
    decode = partial(launch.decode, kernels["paged_decode"], packed_q, kv_pages, page_indices, scales)
    if decode_only:
        out, lse = decode(kv_lens, rows, jnp.ones_like(is_row))
    else:
        is_decode = q_lens == 1
        out, lse = launch.prefill(
            kernels["paged_prefill"], packed_q, kv_pages, page_indices, scales, kv_lens,
            jnp.where(is_decode, 0, q_lens), first_tokens, num_tokens,
        )  # fmt: skip
        token = jnp.where(is_decode, first_tokens, q.shape[0])  # past the end: dropped
        decoded_out, decoded_lse = decode(
            jnp.where(is_decode, kv_lens, 0), jnp.minimum(token, q.shape[0] - 1), is_decode
        )
        out = out.at[token].set(decoded_out, mode="drop")
        lse = lse.at[token].set(decoded_lse, mode="drop")

    out, lse = (_unpad_groups(x, num_q_heads, num_kv_heads) for x in (out, lse))
    if sinks is not None:
        in_a_row = (rows < num_seqs[0]) if decode_only else (jnp.arange(q.shape[0]) < num_tokens)
        out, lse = _add_sinks(out, lse, jnp.where(in_a_row[:, None], sinks, -jnp.inf))
    return (out, lse) if return_lse else out


def _pad_groups(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[tokens, num_q_heads, head_dim] with as many heads to a KV head as the next power of two."""
    group = x.shape[1] // num_kv_heads
    missing = launch.padded_group(group) - group
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
