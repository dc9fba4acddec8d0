"""The public calls: check the arguments (`checks.py`), choose an implementation, fall back where none is faster.

An implementation is a module with `supports(call) -> str | None` (None, or why not) and
`ragged_paged_attention(...)` with the arguments of the public one except `implementation`, scales and sinks as
float32 arrays or None, and one more, `decode_only`: a promise that token i is the one query of row i.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .checks import (
    QUANTISED_DTYPES,
    as_integers,
    as_scale,
    as_sinks,
    check_arrays,
    check_interpret,
    check_options,
    check_pool,
)

_MODULES = {"reference": ".reference", "xla": ".xla", "pallas_tpu": ".tpu", "pallas_gpu": ".gpu"}
IMPLEMENTATIONS = tuple(_MODULES)
# What each platform (as `jax.devices()[0].platform` has it) prefers; "xla" runs everywhere and is the rest.
_PLATFORMS = ("cpu", "gpu", "tpu")
_PREFERRED = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
# The name under which `lax.platform_dependent` knows the platform an implementation is compiled for.
_LOWERING_PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """All that is static about one attention call: what an implementation is chosen by and compiled for."""

    max_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: str  # the numpy name: "bfloat16"
    kv_dtype: str
    num_pages: int
    page_size: int
    max_seqs: int
    pages_per_seq: int
    sm_scale: float = 1.0
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    k_scale: bool = False  # whether there is one
    v_scale: bool = False
    sinks: bool = False
    return_lse: bool = False
    interpret: Any = False  # bool, or the Pallas interpreter's parameters
    decode_only: bool = False


def ragged_paged_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    num_seqs: ArrayLike,
    *,
    sm_scale: float = 1.0,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    interpret: Any = False,
    implementation: str | None = None,
) -> Any:
    """Attention of a ragged batch, prefill chunks and decodes mixed, over a paged KV pool.

    Row r attends from tokens `cu_q_lens[r] .. cu_q_lens[r + 1]` of `q`, the last of its `kv_lens[r]` tokens, to
    the pages `page_indices[r]`, into which this step's keys and values are already written. Lengths are data:
    one compiled program serves every mix of them. The exact semantics are in `kernels/reference.py`. Under
    `jax.shard_map`, over KV heads, give that `check_vma=False`.

    Args:
        q: f32|bf16|f16[max_tokens, num_q_heads, head_dim], rows back to back. Tokens beyond
            `cu_q_lens[num_seqs[0]]` are padding: their output is 0 and their LSE -inf.
        kv_pages: f32|bf16|f16|int8|fp8[num_pages, page_size, 2 * num_kv_heads, head_dim], heads interleaved
            K0 V0 K1 V1. Query head h reads KV head `h // (num_q_heads // num_kv_heads)`.
        kv_lens: i32[max_seqs], tokens in the cache, this step's included; at most pages_per_seq * page_size.
        page_indices: i32[max_seqs, pages_per_seq]. Entries from `ceil(kv_len / page_size)` on are not read
            and may be anything; by convention num_pages means none.
        cu_q_lens: i32[max_seqs + 1], cumulative query lengths from 0. Rows of length 0 are allowed.
        num_seqs: i32[1]; rows from it on are padding and may hold anything.
        sm_scale: multiplies the logits, usually `head_dim ** -0.5`.
        causal: a token sees positions up to its own. False: all of them.
        sliding_window: a token sees the last so many positions, its own included. Needs `causal`. Positions before it
            must be finite where they share a page with it.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2, arXiv 2408.00118 section 2).
        k_scale, v_scale: scalars, which may be traced: the real K is the stored one times `k_scale`.
        sinks: f32[num_q_heads], a logit per head that takes part in the softmax with value zero, neither
            scaled nor capped (attention sinks as in gpt-oss). It counts in the LSE.
        return_lse: also return the natural log of the softmax denominator, for `merge_states`.
        interpret: run the chosen Pallas kernel, if one is chosen, in interpret mode; True, or the Pallas
            interpreter's parameters.
        implementation: one of `IMPLEMENTATIONS`, or None for the best that supports the call on jax's default
            platform; where the program is compiled for another one, that is "xla".

    Returns:
        out, of q's shape and dtype, or `(out, lse)` with lse f32[max_tokens, num_q_heads].

    Raises:
        ValueError: shapes, dtypes or options that contradict each other or the contract above.
        NotImplementedError: a named implementation that is not there or cannot do this; the message names the
            argument and its limit.

    Example:
        >>> out = ragged_paged_attention(
        ...     q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=head_dim**-0.5)

    PagedAttention: Kwon et al. 2023, arXiv 2309.06180, section 4.1.
    """
    return _attention(
        (q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs),
        {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks},
        {
            "sm_scale": sm_scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "return_lse": return_lse,
            "interpret": interpret,
        },
        implementation,
    )


def paged_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    sm_scale: float = 1.0,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    interpret: Any = False,
    implementation: str | None = None,
) -> Any:
    """Decode: one query token per sequence, the last of it, over a paged KV pool.

    `ragged_paged_attention` for a batch known to be all decodes, which spares the implementation the rest.

    Args:
        q: f32|bf16|f16[batch, num_q_heads, head_dim].
        kv_pages: as in `ragged_paged_attention`.
        block_tables: i32[batch, pages_per_seq], its `page_indices`.
        seq_lens: i32[batch], its `kv_lens`. A row of length 0 has output 0 and LSE -inf (with sinks: the sink).
        sm_scale, causal, sliding_window, soft_cap, k_scale, v_scale, sinks, return_lse, interpret,
            implementation: as there.

    Returns:
        out, of q's shape and dtype, or `(out, lse)` with lse f32[batch, num_q_heads].

    Raises:
        ValueError, NotImplementedError: as there.

    Example:
        >>> out = paged_attention(q, kv_pages, cache.block_tables, cache.seq_lens, sm_scale=head_dim**-0.5)
    """
    q = jnp.asarray(q)
    batch = q.shape[0] if q.ndim else 0
    tables = jnp.asarray(block_tables)
    if tables.ndim != 2 or tables.shape[0] != batch:
        raise ValueError(
            f"block_tables.shape={tables.shape} must be (batch, pages_per_seq) with batch={batch}, as in q"
        )
    return _attention(
        (q, kv_pages, seq_lens, tables, jnp.arange(batch + 1, dtype=jnp.int32), jnp.full(1, batch, jnp.int32)),
        {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks},
        {
            "sm_scale": sm_scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "return_lse": return_lse,
            "interpret": interpret,
            "decode_only": True,
        },
        implementation,
    )


def merge_states(out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Joins attention over two disjoint sets of keys into attention over both.

    `lse = log(exp(lse_a) + exp(lse_b))` and `out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b`. A side
    that saw nothing (lse -inf) counts for nothing, whatever its out holds. Where there are sinks, only one of the
    two sides may have been computed with them.

    Args:
        out_a, out_b: float[..., num_heads, head_dim].
        lse_a, lse_b: float[..., num_heads], natural logarithms.

    Returns:
        out [..., num_heads, head_dim] of the wider dtype of the two outs, and lse f32[..., num_heads].

    Raises:
        ValueError: shapes that do not fit together.

    Example:
        >>> out, lse = merge_states(*attention_over_prefix, *attention_over_suffix)

    FlashInfer, Ye et al. 2025, arXiv 2501.01005, section 2.2 (the state and its merge operator).
    """
    out_a, lse_a, out_b, lse_b = map(jnp.asarray, (out_a, lse_a, out_b, lse_b))
    if not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise ValueError(
            "merge_states needs out_a and out_b of one shape [..., num_heads, head_dim] and lse_a and lse_b of that "
            f"shape without its last axis; got {out_a.shape=}, {lse_a.shape=}, {out_b.shape=}, {lse_b.shape=}"
        )
    lse_a, lse_b = lse_a.astype(jnp.float32), lse_b.astype(jnp.float32)
    lse = jnp.logaddexp(lse_a, lse_b)
    # With nothing on either side both weights are exp(-inf - 0).
    finite_lse = jnp.where(lse == -jnp.inf, 0.0, lse)

    def weighted(out: jax.Array, side_lse: jax.Array) -> jax.Array:
        out = jnp.where((side_lse == -jnp.inf)[..., None], 0.0, out.astype(jnp.float32))
        return jnp.exp(side_lse - finite_lse)[..., None] * out

    out = weighted(out_a, lse_a) + weighted(out_b, lse_b)
    return out.astype(jnp.promote_types(out_a.dtype, out_b.dtype)), lse


def write_kv(
    kv_pages: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    interpret: Any = False,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the pool with the tokens' keys and values written to their slots.

    In place where the pool is donated to the surrounding jit. Where two tokens name one slot, which of them ends
    there is not defined.

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim], of any dtype the attention reads.
        k, v: float[num_tokens, num_kv_heads, head_dim].
        slot_mapping: i32[num_tokens], `page_id * page_size + offset`. A slot outside the pool, negative ones
            included, writes nowhere: pad with num_pages * page_size.
        k_scale, v_scale: scalars, which may be traced: the stored K is `k / k_scale`, for an int8 pool rounded
            and clipped to -128..127, for an fp8 pool clipped to its finite range.
        interpret: as in `ragged_paged_attention`.
        implementation: "xla", a scatter; "pallas_tpu", a copy for each token; or None for the better of those that
            can on jax's default platform.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
        NotImplementedError: a named implementation that cannot do this; the message names the limit.

    Example:
        >>> kv_pages = write_kv(kv_pages, k, v, page_id * page_size + offset)
    """
    kv_pages, k, v = map(jnp.asarray, (kv_pages, k, v))
    slots = as_integers("slot_mapping", slot_mapping)
    check_pool(kv_pages)
    check_interpret(interpret)
    *_, num_kv_heads_twice, head_dim = kv_pages.shape
    if not (k.ndim == 3 and k.shape == v.shape and k.shape[1:] == (num_kv_heads_twice // 2, head_dim)):
        raise ValueError(
            f"{k.shape=} and {v.shape=} must both be (num_tokens, {num_kv_heads_twice // 2}, {head_dim}): "
            f"num_kv_heads and head_dim as in {kv_pages.shape=}"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (k, v)):
        raise ValueError(f"{k.dtype=} and {v.dtype=} must be floating point; cast them")
    if slots.shape != k.shape[:1] or slots.dtype != jnp.int32:
        raise ValueError(
            f"{slots.shape=}, {slots.dtype=} of slot_mapping must be ({k.shape[0]},) and int32, a slot for each token; "
            "pad with num_pages * page_size, and use .astype(jnp.int32)"
        )
    k = _quantise(k, as_scale("k_scale", k_scale), kv_pages.dtype)
    v = _quantise(v, as_scale("v_scale", v_scale), kv_pages.dtype)
    kv = jnp.stack([k, v], axis=2).reshape(-1, num_kv_heads_twice, head_dim)

    return _change_pool("write", (kv_pages, kv, slots), _scatter, implementation, interpret)


def copy_pages(
    kv_pages: ArrayLike,
    src: ArrayLike,
    dst: ArrayLike,
    *,
    interpret: Any = False,
    implementation: str | None = None,
) -> jax.Array:
    """Copies pages of a pool onto others of it: the copy of copy-on-write (Kwon et al. 2023, section 4.4).

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim], as in `ragged_paged_attention`.
        src: i32[n], ids of the pages to copy.
        dst: i32[n], ids of the pages they are copied to, none of them twice, and none of them among `src`. Where it is
            out of range, negative ids included, nothing is copied: pad with num_pages.
        interpret: as in `ragged_paged_attention`.
        implementation: "xla"; "pallas_tpu", a copy from HBM to HBM for each page; or None for the better of them on
            jax's default platform.

    Returns:
        The pool, its pages `dst` as `src` were.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
        NotImplementedError: a named implementation that cannot do this; the message names the limit.

    Example:
        >>> kv_pages = copy_pages(kv_pages, shared_pages, new_pages)
    """
    kv_pages, src, dst = jnp.asarray(kv_pages), as_integers("src", src), as_integers("dst", dst)
    check_pool(kv_pages)
    check_interpret(interpret)
    if not (src.ndim == 1 and src.shape == dst.shape and src.dtype == dst.dtype == jnp.int32):
        raise ValueError(
            f"{src.shape=}, {src.dtype=} and {dst.shape=}, {dst.dtype=} must both be (n,) and int32; pad with num_pages"
        )
    return _change_pool("copy", (kv_pages, src, dst), _copy_rows, implementation, interpret)


def _change_pool(
    verb: str,
    arrays: tuple[jax.Array, ...],
    by_xla: Callable[..., jax.Array],
    implementation: str | None,
    interpret: Any,
) -> jax.Array:
    """Runs `by_xla`, or the TPU's kernel of that verb, on the pool, what goes into it, and where to."""
    if implementation not in (None, "xla", "pallas_tpu"):
        raise ValueError(f"{implementation=} must be None, 'xla' or 'pallas_tpu'")
    if implementation == "xla" or (implementation is None and _default_platform() != "tpu"):
        return by_xla(*arrays)
    tpu = _load("pallas_tpu")
    pool, *_, where = arrays
    if verb == "write":
        kernel, reason = tpu.write_tokens, tpu.cannot_write(pool.shape, pool.dtype, len(where))
    else:
        kernel, reason = tpu.copy_pages, tpu.cannot_copy(pool.dtype, len(where))
    if reason and implementation is None:
        return by_xla(*arrays)
    if reason:
        raise NotImplementedError(
            f"{implementation=} cannot {verb} this: {reason}; implementation=None chooses one that can"
        )
    _check_platform(implementation, interpret, *arrays)
    kernel = partial(kernel, interpret=interpret)
    if implementation is not None:
        return cast(jax.Array, kernel(*arrays))
    return jax.lax.platform_dependent(*arrays, tpu=kernel, default=by_xla)


@jax.jit
def _copy_rows(kv_pages: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """Jitted, so that it is traced once for all layers.

    On rows without inner structure: XLA's CPU code for the four-dimensional copy takes thirty times as long to compile.
    """
    rows = kv_pages.reshape(kv_pages.shape[0], -1)
    copied = jax.lax.optimization_barrier(rows.at[src].get(mode="clip", wrap_negative_indices=False))
    return rows.at[dst].set(copied, mode="drop", wrap_negative_indices=False).reshape(kv_pages.shape)


def _scatter(kv_pages: jax.Array, kv: jax.Array, slots: jax.Array) -> jax.Array:
    pool = kv_pages.reshape(-1, *kv_pages.shape[2:])
    return pool.at[slots].set(kv, mode="drop", wrap_negative_indices=False).reshape(kv_pages.shape)


def choose_implementation(call: AttentionCall, platform: str | None = None) -> tuple[str, str]:
    """Says which implementation `implementation=None` runs for a call, and why, in words for people.

    Args:
        call: the static facts of the call.
        platform: "cpu" | "gpu" | "tpu"; None means the platform jax uses by default.

    Returns:
        The implementation's name, and the reason.

    Raises:
        ValueError: another platform.

    Example:
        >>> choose_implementation(call)
        ('xla', "no kernel is written for platform 'cpu'; xla runs everywhere")
    """
    if platform not in (None, *_PLATFORMS):
        raise ValueError(f"{platform=} must be None or one of {', '.join(_PLATFORMS)}")
    platform = platform or _default_platform()
    name = _PREFERRED.get(platform)
    if name is None:
        return "xla", f"no kernel is written for platform {platform!r}; xla runs everywhere"
    reason = why_not(name, call)
    if reason is None:
        return name, f"the kernel for platform {platform!r} supports the call"
    return "xla", f"{name} cannot run the call ({reason}); xla runs everywhere"


def _attention(
    array_likes: tuple[ArrayLike, ...],
    extras: dict[str, ArrayLike | None],
    options: dict[str, Any],
    implementation: str | None,
) -> Any:
    q, kv_pages, *integers = array_likes
    names = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    arrays = (jnp.asarray(q), jnp.asarray(kv_pages), *map(as_integers, names, integers))
    check_arrays(*arrays)
    scales_and_sinks = {
        "k_scale": as_scale("k_scale", extras["k_scale"]),
        "v_scale": as_scale("v_scale", extras["v_scale"]),
        "sinks": as_sinks(extras["sinks"], num_q_heads=arrays[0].shape[1]),
    }
    options = check_options(**options)
    if options["sliding_window"] is not None:
        # No position is further from another; with much more, differences would overflow.
        longest = arrays[3].shape[1] * arrays[1].shape[1] + arrays[0].shape[0]
        options["sliding_window"] = min(options["sliding_window"], longest)
    call = _describe(arrays, scales_and_sinks, options)
    fallback = None
    if implementation is None:
        implementation, _ = choose_implementation(call)
        fallback = "xla" if implementation != "xla" else None
    elif implementation not in _MODULES:
        raise ValueError(f"{implementation=} must be None or one of {', '.join(IMPLEMENTATIONS)}")
    elif reason := why_not(implementation, call):
        raise NotImplementedError(
            f"{implementation=} cannot run this call: {reason}; implementation=None chooses one that can"
        )
    _check_platform(implementation, call.interpret, *arrays)
    return _run(arrays, scales_and_sinks, call=call, name=implementation, fallback=fallback)


# Jitted here, once for all implementations, so that an eager call compiles once per shape and not at every call.
@partial(jax.jit, static_argnames=("call", "name", "fallback"))
def _run(
    arrays: tuple[jax.Array, ...],
    scales_and_sinks: dict[str, jax.Array | None],
    *,
    call: AttentionCall,
    name: str,
    fallback: str | None,
) -> Any:
    if fallback is None:
        return _apply(name, call, arrays, scales_and_sinks)
    # The surrounding jit may yet be compiled for another platform than the default one, which the kernel chosen
    # for the default platform knows nothing of.
    return jax.lax.platform_dependent(
        arrays,
        scales_and_sinks,
        default=partial(_apply, fallback, call),
        **{_LOWERING_PLATFORM[name]: partial(_apply, name, call)},
    )


def _apply(
    name: str, call: AttentionCall, arrays: tuple[jax.Array, ...], scales_and_sinks: dict[str, jax.Array | None]
) -> Any:
    return _load(name).ragged_paged_attention(
        *arrays,
        **scales_and_sinks,
        sm_scale=call.sm_scale,
        causal=call.causal,
        sliding_window=call.sliding_window,
        soft_cap=call.soft_cap,
        return_lse=call.return_lse,
        interpret=call.interpret,
        decode_only=call.decode_only,
    )


def _load(name: str) -> ModuleType:
    # On first use: a Pallas backend is slow to import, and an optional part of the installation.
    return importlib.import_module(_MODULES[name], __package__)


def why_not(name: str, call: AttentionCall) -> str | None:
    """Why an implementation cannot run a call, or None if it can."""
    try:
        module = _load(name)
    except ImportError as error:
        return f"implementation {name!r} is not available here ({error}); use implementation='xla'"
    reason: str | None = module.supports(call)
    return reason


def _default_platform() -> str:
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _describe(
    arrays: tuple[jax.Array, ...], scales_and_sinks: dict[str, jax.Array | None], options: dict[str, Any]
) -> AttentionCall:
    q, kv_pages, _, page_indices, *_ = arrays
    return AttentionCall(
        max_tokens=q.shape[0],
        num_q_heads=q.shape[1],
        num_kv_heads=kv_pages.shape[2] // 2,
        head_dim=q.shape[2],
        q_dtype=q.dtype.name,
        kv_dtype=kv_pages.dtype.name,
        num_pages=kv_pages.shape[0],
        page_size=kv_pages.shape[1],
        max_seqs=page_indices.shape[0],
        pages_per_seq=page_indices.shape[1],
        **{name: array is not None for name, array in scales_and_sinks.items()},
        **options,
    )


def _check_platform(implementation: str | None, interpret: Any, *arrays: jax.Array) -> None:
    """Outside of a jit, which may be compiled for any platform, a call runs on the default one."""
    platform = _default_platform()
    if implementation not in _LOWERING_PLATFORM or _PREFERRED.get(platform) == implementation or interpret:
        return
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise NotImplementedError(
            f"{implementation=} does not run on {platform!r}, jax's default platform; interpret=True interprets it "
            "here, implementation=None chooses one that runs"
        )


def _quantise(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    if dtype.name not in QUANTISED_DTYPES and scale is None:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    x = x if scale is None else x / scale
    if dtype == jnp.int8:
        x = jnp.clip(jnp.round(x), -128, 127)
    elif dtype.name in QUANTISED_DTYPES:
        # A cast past the finite range gives NaN in e4m3fn and inf in e5m2.
        x = jnp.clip(x, float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max))
    return x.astype(dtype)
