"""Named attention batches, shared by the tests of every implementation and by the benchmarks.

A `Case` says lengths, shapes and options; `make_batch` builds its arrays, with NaN in every page and slot that
no query may read, shuffled page ids, padding rows full of garbage and table entries out of range.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged import kernels


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch: row r has `kv_lens[r]` cached tokens, of which the last `q_lens[r]` are this step's queries.

    Cases that differ in lengths alone have one set of array shapes, and so share one compilation.
    """

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    max_seqs: int = 8  # the rest are padding rows
    max_tokens: int = 128  # the rest are padding tokens
    max_kv_len: int = 320  # of the table
    pool_tokens: int = 640
    shared_pages: int = 0  # so many first pages of each row are the first row's
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    k_scale: float | None = None
    v_scale: float | None = None
    kv_dtype: str | None = None  # None: q's
    q_size: float = 1.0  # standard deviation of the queries, and so of the logits

    def __str__(self) -> str:
        return self.name

    @property
    def decode_only(self) -> bool:
        """Whether every row has one query token, so that `paged_attention` serves it too."""
        return all(n == 1 for n in self.q_lens)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of `ragged_paged_attention`."""

    q: jax.Array
    kv_pages: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.q, self.kv_pages, self.kv_lens, self.page_indices, self.cu_q_lens, self.num_seqs


CASES = (
    # Lengths around a page, and the ways to mix them.
    Case(name="mixed", kv_lens=(33, 60, 5, 18, 80), q_lens=(1, 60, 1, 3, 16)),
    Case(name="decode_lengths_around_a_page", kv_lens=(1, 15, 16, 17, 100, 0), q_lens=(1,) * 6),
    Case(name="decode_many_pages", kv_lens=(300, 3, 260), q_lens=(1,) * 3),
    Case(name="prefill_lengths_around_a_page", kv_lens=(2, 15, 16, 17, 33), q_lens=(2, 15, 16, 17, 33)),
    Case(name="chunked", kv_lens=(300, 40, 17), q_lens=(20, 7, 16)),
    Case(name="empty_rows", kv_lens=(20, 0, 30, 0, 7, 40), q_lens=(0, 0, 1, 1, 7, 0)),
    Case(name="fewer_keys_than_queries", kv_lens=(0, 3, 2), q_lens=(4, 6, 2)),
    Case(name="nothing_but_padding", kv_lens=(), q_lens=()),
    Case(name="no_padding", kv_lens=(10,) * 6 + (108, 20), q_lens=(1,) * 6 + (104, 18)),
    Case(name="shared_prefix", kv_lens=(70, 50, 65, 64), q_lens=(1, 2, 17, 1), shared_pages=3),
    # Other array shapes.
    Case(name="prefill_many_tiles", kv_lens=(250, 9), q_lens=(250, 9), max_tokens=300),
    Case(name="decode_one_row", kv_lens=(37,), q_lens=(1,), max_seqs=1, max_tokens=1, max_kv_len=40),
    Case(name="prefill_one_row", kv_lens=(21,), q_lens=(21,), max_seqs=1, max_tokens=21, max_kv_len=21),
    # Groups of query heads, and head dims.
    Case(name="group_1_dim_80", kv_lens=(20, 35), q_lens=(1, 18), num_q_heads=3, num_kv_heads=3, head_dim=80),
    Case(name="group_3_dim_64", kv_lens=(20, 35), q_lens=(1, 18), num_q_heads=9, num_kv_heads=3),
    Case(name="group_4_dim_128", kv_lens=(20, 35), q_lens=(1, 18), num_q_heads=8, head_dim=128),
    Case(name="group_8_dim_96", kv_lens=(20, 35), q_lens=(1, 18), num_q_heads=16, head_dim=96),
    Case(name="one_kv_head_dim_256", kv_lens=(20, 35), q_lens=(1, 18), num_kv_heads=1, head_dim=256),
    # Page sizes.
    Case(name="page_size_1", kv_lens=(1, 2, 40, 20), q_lens=(1, 2, 1, 5), page_size=1, max_kv_len=40),
    Case(name="page_size_8", kv_lens=(7, 8, 9, 40), q_lens=(1, 8, 1, 20), page_size=8),
    Case(name="page_size_64", kv_lens=(63, 64, 65, 129), q_lens=(1, 64, 1, 10), page_size=64),
    Case(name="page_size_128", kv_lens=(127, 128, 129, 260), q_lens=(1, 20, 1, 2), page_size=128, pool_tokens=1024),
    # Options.
    Case(name="window_1", kv_lens=(20, 35, 40), q_lens=(1, 35, 1), sliding_window=1),
    Case(name="window_inside_a_page", kv_lens=(20, 35, 5), q_lens=(1, 35, 5), sliding_window=7),
    Case(name="window_of_pages", kv_lens=(200, 300, 30), q_lens=(1, 50, 1), sliding_window=33),
    Case(name="window_longer_than_all", kv_lens=(20, 35), q_lens=(1, 18), sliding_window=1000),
    Case(name="not_causal", kv_lens=(20, 35, 3), q_lens=(1, 18, 5), causal=False),
    Case(name="not_causal_group_8", kv_lens=(40, 9), q_lens=(17, 9), num_q_heads=8, num_kv_heads=1, causal=False),
    Case(name="soft_cap", kv_lens=(20, 35), q_lens=(1, 18), soft_cap=2.0),
    Case(name="sinks", kv_lens=(20, 35, 0, 0, 200), q_lens=(1, 18, 1, 2, 1), sinks=True),
    Case(name="scales", kv_lens=(20, 35), q_lens=(1, 18), k_scale=0.5, v_scale=3.0),
    Case(
        name="everything",
        kv_lens=(90, 100, 20),
        q_lens=(1, 30, 20),
        num_q_heads=6,
        sliding_window=24,
        soft_cap=5.0,
        sinks=True,
        k_scale=0.7,
        v_scale=1.3,
    ),
    Case(name="large_logits", kv_lens=(20, 35), q_lens=(1, 18), num_q_heads=9, num_kv_heads=3, q_size=16.0),
    # KV of another dtype than q's.
    Case(name="int8_kv", kv_lens=(20, 35), q_lens=(1, 18), kv_dtype="int8", k_scale=0.02, v_scale=0.03),
    Case(name="fp8_kv", kv_lens=(20, 35), q_lens=(1, 18), kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=0.25),
    Case(name="bfloat16_kv", kv_lens=(20, 35), q_lens=(1, 18), kv_dtype="bfloat16"),
    Case(name="float32_kv", kv_lens=(20, 35), q_lens=(1, 18), kv_dtype="float32"),
)

BY_NAME = {case.name: case for case in CASES}


def make_batch(case: Case, seed: int, dtype: Any) -> Batch:
    """Builds the arrays of a case: inputs from a normal distribution, poison wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    tables, num_pages = _tables(case, rng)
    kv_dtype = jnp.dtype(case.kv_dtype or dtype)
    pool_shape = (num_pages, case.page_size, 2 * case.num_kv_heads, case.head_dim)
    kv_pages = _normal_pool(rng, pool_shape, kv_dtype, case)
    poison = 127 if kv_dtype == jnp.int8 else np.nan
    kv_pages = np.where(_readable(case, tables, num_pages)[..., None, None], kv_pages, poison)

    num_tokens, padding_rows = sum(case.q_lens), case.max_seqs - len(case.kv_lens)
    q = case.q_size * rng.standard_normal((case.max_tokens, case.num_q_heads, case.head_dim))
    q[num_tokens:] = np.nan
    garbage = rng.integers(-(2**31), 2**31 - 1, padding_rows)
    cu_q_lens = np.concatenate([[0], np.cumsum(case.q_lens, dtype=np.int64), garbage])
    return Batch(
        q=jnp.asarray(q, dtype),
        kv_pages=jnp.asarray(kv_pages, jnp.float32).astype(kv_dtype),
        kv_lens=jnp.asarray([*case.kv_lens, *garbage], jnp.int32),
        page_indices=jnp.asarray(tables, jnp.int32),
        cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
        num_seqs=jnp.asarray([len(case.kv_lens)], jnp.int32),
        options=_options(case, rng),
    )


@cache
def quick_attention() -> Any:
    """`ragged_paged_attention`, jitted to compile soon rather than run fast: compiling is most of a test's time."""
    static = ("sm_scale", "causal", "sliding_window", "soft_cap", "return_lse", "interpret", "implementation")
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(kernels.ragged_paged_attention, static_argnames=static, compiler_options=options)


def reference(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """What `ragged_paged_attention` is to give, and its LSE: in float64, one row, head and token at a time, over the
    row's contiguous keys.
    """
    q, pages = (np.asarray(x, np.float64) for x in (batch.q, batch.kv_pages))
    opt = {name: None if x is None else np.asarray(x, np.float64) for name, x in batch.options.items()}
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    group = q.shape[1] // (pages.shape[2] // 2)
    for row in range(int(batch.num_seqs[0])):
        start, end, m = int(batch.cu_q_lens[row]), int(batch.cu_q_lens[row + 1]), int(batch.kv_lens[row])
        slots = [(int(batch.page_indices[row, p // pages.shape[1]]), p % pages.shape[1]) for p in range(m)]
        kv = np.array([pages[slot] for slot in slots]).reshape(m, *pages.shape[2:])
        for h in range(q.shape[1]):
            for token in range(start, end):
                pos = m - end + token
                stop = max(pos + 1, 0) if opt["causal"] else m
                first = 0 if opt["sliding_window"] is None else max(pos + 1 - int(opt["sliding_window"]), 0)
                k, v = kv[first:stop, 2 * (h // group)], kv[first:stop, 2 * (h // group) + 1]
                s = opt["sm_scale"] * (k @ q[token, h]) * (1 if opt["k_scale"] is None else opt["k_scale"])
                if opt["soft_cap"] is not None:
                    s = opt["soft_cap"] * np.tanh(s / opt["soft_cap"])
                sink = -np.inf if opt["sinks"] is None else opt["sinks"][h]
                if (largest := np.max(s, initial=sink)) > -np.inf:
                    weights = np.exp(s - largest)
                    denominator = weights.sum() + np.exp(sink - largest)
                    lse[token, h] = largest + np.log(denominator)
                    out[token, h] = weights @ v / denominator * (1 if opt["v_scale"] is None else opt["v_scale"])
    return out, lse


def tolerance(dtype: Any) -> float:
    """The largest error allowed, as a share of the reference's norm, with q of this dtype."""
    return {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}[jnp.dtype(dtype).name]


def assert_matches_reference(out: ArrayLike, ref: ArrayLike, dtype: Any) -> None:
    """Checks the norm of the error against that of the reference, and that its zeros and -inf are met exactly."""
    got, want = (np.asarray(x, np.float64) for x in (out, ref))
    assert got.shape == want.shape
    exact = (want == 0) | np.isneginf(want)
    np.testing.assert_array_equal(got[exact], want[exact])
    assert np.isfinite(got[~exact]).all()
    error, size = np.linalg.norm(got[~exact] - want[~exact]), np.linalg.norm(want[~exact])
    assert error <= tolerance(dtype) * size, f"error {error / size:.2e} of the norm, {tolerance(dtype):.0e} allowed"


def assert_state_matches_reference(state: tuple[ArrayLike, ArrayLike], batch: Batch) -> None:
    """Checks an output and its LSE, this to float32's tolerance whatever the inputs' dtype: it is never rounded."""
    want_out, want_lse = reference(batch)
    assert_matches_reference(state[0], want_out, batch.q.dtype)
    assert_matches_reference(state[1], want_lse, "float32")


def _tables(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Page tables of shuffled ids, out of range where there is no page, and the pool's size in pages."""
    num_pages, pages_per_seq = (math.ceil(n / case.page_size) for n in (case.pool_tokens, case.max_kv_len))
    ids = iter(rng.permutation(num_pages).tolist())
    out_of_range = [num_pages, num_pages + 7, -1, 2**31 - 1]
    tables = rng.choice(out_of_range, (case.max_seqs, pages_per_seq))
    for row, kv_len in enumerate(case.kv_lens):
        needed = math.ceil(kv_len / case.page_size)
        tables[row, :needed] = [next(ids) for _ in range(needed)]
        shared = min(case.shared_pages, needed)
        tables[row, :shared] = tables[0, :shared]
    return tables, num_pages


def _readable(case: Case, tables: np.ndarray, num_pages: int) -> np.ndarray:
    """bool[num_pages, page_size]: slots some query may read. A page that a window cuts counts as a whole."""
    readable = np.zeros((num_pages, case.page_size), bool)
    for row, (m, n) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
        if n == 0:
            continue
        first = 0 if case.sliding_window is None else max(m - n - case.sliding_window + 1, 0)
        pos = np.arange(first // case.page_size * case.page_size, m)
        readable[tables[row, pos // case.page_size], pos % case.page_size] = True
    return readable


def _normal_pool(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, case: Case) -> np.ndarray:
    """Stored values whose real ones, times the scales, are about standard normal where the dtype is narrow."""
    pool = rng.standard_normal(shape)
    if dtype.itemsize > 1:
        return pool
    pool[:, :, 0::2] /= case.k_scale or 1.0
    pool[:, :, 1::2] /= case.v_scale or 1.0
    return np.clip(np.round(pool), -126, 126) if dtype == jnp.int8 else pool


def _options(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "sm_scale": case.head_dim**-0.5,
        "causal": case.causal,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        "sinks": jnp.asarray(rng.standard_normal(case.num_q_heads), jnp.float32) if case.sinks else None,
    }
