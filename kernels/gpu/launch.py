"""Which kernels a call runs, and one run of each: plan, kernel, and its results as rows or tokens."""

import jax
import jax.numpy as jnp

from ..api import AttentionCall
from . import tiles, work
from .attention import Kernel

_UNITS_PER_SM = 4  # with so many units of work, the SMs are busy for long enough without splitting


def padded_group(group: int) -> int:
    """The query heads to a KV head that the kernel works on: the next power of two, which fills its rows evenly."""
    return 1 << (group - 1).bit_length()


def kernels_of(call: AttentionCall, num_sms: int) -> dict[str, Kernel]:
    """The kernels that a call runs, by name: for rows of one token, and for the others unless all have one."""
    split = call.max_seqs * call.num_kv_heads < _UNITS_PER_SM * num_sms
    units = {
        "paged_decode": (call.max_seqs + (num_sms if split else 0)) * call.num_kv_heads,
        "paged_prefill": (call.max_tokens + call.max_seqs + 1) * call.num_kv_heads,
    }
    names = ["paged_decode"] if call.decode_only else ["paged_decode", "paged_prefill"]
    dtype, kv_dtype = jnp.dtype(call.q_dtype), jnp.dtype(call.kv_dtype)
    return {
        name: Kernel(
            name=name,
            tiles=tiles.choose(
                decode=name == "paged_decode",
                head_dim=call.head_dim,
                itemsize=dtype.itemsize,
                kv_itemsize=kv_dtype.itemsize,
                num_blocks=min(num_sms, units[name]),
            ),
            group=padded_group(call.num_q_heads // call.num_kv_heads),
            num_kv_heads=call.num_kv_heads,
            head_dim=call.head_dim,
            page_size=call.page_size,
            max_tokens=call.max_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            one_token=name == "paged_decode",
            partial_output=name == "paged_decode" and split,
            causal=call.causal,
            sliding_window=call.sliding_window,
            soft_cap=call.soft_cap,
            interpret=call.interpret,
        )
        for name in names
    }


def decode(
    kernel: Kernel,
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    scales: jax.Array,
    kv_lens: jax.Array,
    tokens: jax.Array,
    is_wanted: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one token of each row: [rows, num_heads, head_dim] and f32[rows, num_heads]."""
    split = kernel.partial_output
    max_parts = -(-kernel.tiles.num_blocks // kernel.num_kv_heads) if split else 0
    plan = work.plan_decode(kv_lens, tokens, is_wanted, max_parts=max_parts, kv_blocks=kernel.kv_blocks)
    out, lse = kernel(plan, page_indices, scales, q, kv_pages)
    lse = lse[:, :, : kernel.group].reshape(lse.shape[0], -1)
    if not split:
        return out[tokens], lse
    out = out[:, :, : kernel.group].reshape(*lse.shape, -1)
    out, lse = work.merge_parts(out, lse, plan, kv_lens.shape[0])
    return out.astype(q.dtype), lse


def prefill(
    kernel: Kernel,
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    scales: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    first_tokens: jax.Array,
    num_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the tokens of rows with `q_lens > 0`: [max_tokens, num_heads, head_dim] and its LSE.

    Those of other rows are left arbitrary. Those from `num_tokens` on, of no row, are a row that has no keys.
    """
    max_tokens = q.shape[0]
    padding = (jnp.int32(0), max_tokens - num_tokens, num_tokens)
    kv_lens, q_lens, first_tokens = map(jnp.append, (kv_lens, q_lens, first_tokens), padding)
    plan = work.plan_prefill(
        kv_lens, q_lens, first_tokens,
        max_tokens=max_tokens, tokens_per_item=kernel.tokens_per_item, kv_blocks=kernel.kv_blocks,
    )  # fmt: skip
    out, lse = kernel(plan, page_indices, scales, q, kv_pages)
    lse = lse.reshape(*lse.shape[:2], kernel.tokens_per_item, kernel.group)
    return out, work.per_token(lse, plan, max_tokens)
