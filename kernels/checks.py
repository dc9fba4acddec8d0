"""What the public calls refuse: each error names the argument, its value, the limit and the way out."""

import math
from dataclasses import is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Q_DTYPES = ("float32", "bfloat16", "float16")
QUANTISED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
KV_DTYPES = (*Q_DTYPES, *QUANTISED_DTYPES)
# Of numbers that scores are multiplied by: with a factor of their own, kernels must stay inside float32.
_LARGEST = 1e38


def product_dtype(q_dtype: Any, kv_dtype: Any) -> Any:
    """The narrowest dtype that holds both exactly; one byte per value fits into any float q has."""
    return q_dtype if kv_dtype.itemsize == 1 else jnp.promote_types(q_dtype, kv_dtype)


def check_pool(kv_pages: jax.Array) -> None:
    shape = kv_pages.shape
    if len(shape) != 4 or 0 in shape or shape[2] % 2:
        raise ValueError(
            f"kv_pages.{shape=} must be (num_pages, page_size, 2 * num_kv_heads, head_dim), no axis empty, K and V "
            "heads interleaved on the third; jnp.stack([k, v], axis=3) followed by a reshape makes it so"
        )
    if kv_pages.dtype.name not in KV_DTYPES:
        raise ValueError(f"{kv_pages.dtype=} must be one of {', '.join(KV_DTYPES)}; cast the pool")


def check_arrays(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> None:
    check_pool(kv_pages)
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{q.shape=} must be (tokens, num_q_heads, head_dim), no axis empty")
    if q.dtype.name not in Q_DTYPES:
        raise ValueError(f"{q.dtype=} must be one of {', '.join(Q_DTYPES)}; cast q")
    if q.shape[2] != kv_pages.shape[3]:
        raise ValueError(f"{q.shape=} and {kv_pages.shape=} must agree in head_dim, their last axis; pad the smaller")
    num_kv_heads = kv_pages.shape[2] // 2
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"num_q_heads={q.shape[1]} must be a multiple of num_kv_heads={num_kv_heads} (half of {kv_pages.shape[2]=})"
        )
    if page_indices.ndim != 2 or 0 in page_indices.shape:
        raise ValueError(f"{page_indices.shape=} must be (max_seqs, pages_per_seq), no axis empty")
    max_seqs = page_indices.shape[0]
    for name, array, shape in (
        ("kv_lens", kv_lens, (max_seqs,)),
        ("page_indices", page_indices, page_indices.shape),
        ("cu_q_lens", cu_q_lens, (max_seqs + 1,)),
        ("num_seqs", num_seqs, (1,)),
    ):
        if array.shape != shape:
            why = "" if name == "num_seqs" else f", with {max_seqs=} from page_indices"
            raise ValueError(f"{name}.shape={array.shape} must be {shape}{why}")
        if array.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={array.dtype} must be int32; use {name}.astype(jnp.int32)")


def check_options(*, sliding_window: int | None, soft_cap: float | None, **options: Any) -> dict[str, Any]:
    sm_scale, causal = options.pop("sm_scale"), options.pop("causal")
    check_interpret(options["interpret"])
    for name, flag in (("causal", causal), ("return_lse", options["return_lse"])):
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"{name}={flag!r} must be True or False, and static: it is compiled in")
    if not abs(_number(sm_scale)) <= _LARGEST:
        raise ValueError(
            f"{sm_scale=} must be a Python float of at most {_LARGEST} in size; multiply q by a traced scale instead"
        )
    if sliding_window is not None:
        window = _number(sliding_window)
        if isinstance(sliding_window, bool) or not (window >= 1 and window.is_integer()):
            raise ValueError(f"{sliding_window=} must be a whole number >= 1; use None for no window")
        if not causal:
            raise NotImplementedError(
                f"{sliding_window=} with causal=False is not defined (before the token, or to both sides?); "
                "use causal=True, or sliding_window=None"
            )
    if soft_cap is not None and not 0 < _number(soft_cap) <= _LARGEST:
        raise ValueError(f"{soft_cap=} must be > 0 and at most {_LARGEST}; use None for no cap")
    # Plain Python numbers: the options become a compilation key.
    return {
        "sm_scale": float(sm_scale),
        "causal": bool(causal),
        "sliding_window": None if sliding_window is None else int(sliding_window),
        "soft_cap": None if soft_cap is None else float(soft_cap),
        **options,
    }


def check_interpret(interpret: Any) -> None:
    # 1 is equal to True, and would be remembered as it.
    if not isinstance(interpret, bool) and not is_dataclass(interpret):
        raise ValueError(f"{interpret=} must be True, False or the parameters of a Pallas interpreter")


def as_scale(name: str, scale: ArrayLike | None) -> jax.Array | None:
    if scale is None:
        return None
    scale = jnp.asarray(scale)
    if scale.shape != () or not _is_real(scale):
        raise ValueError(
            f"{name} of shape {scale.shape}, dtype {scale.dtype} must be a real number: one scale per pool"
        )
    return scale.astype(jnp.float32)


def as_sinks(sinks: ArrayLike | None, num_q_heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != (num_q_heads,) or not _is_real(sinks):
        raise ValueError(f"{sinks.shape=}, {sinks.dtype=} must be ({num_q_heads},) and real: one logit per query head")
    return sinks.astype(jnp.float32)


def as_integers(name: str, values: ArrayLike) -> jax.Array:
    """As an array; jax would cut values of more than 32 bits without a word."""
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
        if values.dtype.kind in "iu" and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
            raise ValueError(
                f"{name} has {values.min()} to {values.max()}, which must fit int32; for no page use num_pages"
            )
    return jnp.asarray(values)


def _number(x: Any) -> float:
    """As a Python float; NaN for what is none, or not known yet."""
    if isinstance(x, jax.core.Tracer | str | bytes):
        return math.nan
    try:
        return float(x)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_real(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer))
