"""What `gpu.py` checks and times, each a call for a process of its own (`gpu_worker.py`)."""

import math
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import kernels
from jax_paged.bench import gpu_torch
from jax_paged.kernels.aot import SHAPES
from jax_paged.kernels.reference import ragged_paged_attention as reference

__all__ = ["RUNS", "Batch", "Case", "Check", "check", "machine", "make_batch", "measure_peaks", "time_run"]

# Kernels must not find their KV in the L2 cache, where the model's other layers would not have left it: 5 times 50 MB.
_COLD_BYTES = 250 * 10**6
_SCALES = {
    "bfloat16": {},
    "int8": {"k_scale": 0.02, "v_scale": 0.03},
    "float8_e4m3fn": {"k_scale": 0.5, "v_scale": 2.0},
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison with the reference: rows of `kv_lens` tokens, of which the last `q_lens` are queries."""

    shape: str
    mode: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int = 16
    kv_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.shape} {self.mode} page {self.page_size} {self.kv_dtype}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed: `num_rows` sequences of `kv_len` tokens, of which the last `q_len` are queries, in bfloat16."""

    name: str
    num_rows: int
    kv_len: int
    q_len: int
    page_size: int
    shape: str = "llama3-8b"
    kv_dtype: str = "bfloat16"
    target: str = ""
    with_flex: bool = False  # whether FlexAttention is timed, too: compiling it takes longest of all

    @property
    def kv_bytes(self) -> int:
        """What must be read of K and V at least."""
        _, num_kv_heads, head_dim = SHAPES[self.shape]
        return self.num_rows * self.kv_len * 2 * num_kv_heads * head_dim * jnp.dtype(self.kv_dtype).itemsize

    @property
    def flops(self) -> int:
        """Of both products, causal."""
        num_q_heads, _, head_dim = SHAPES[self.shape]
        seen = self.q_len * (self.kv_len - self.q_len) + self.q_len * (self.q_len + 1) // 2
        return self.num_rows * 4 * seen * num_q_heads * head_dim

    @property
    def copies(self) -> int:
        """Pools to go through in turn so that none is found in the cache."""
        return max(1, math.ceil(_COLD_BYTES / self.kv_bytes))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of `kernels.ragged_paged_attention`, and how far the next copy of the KV is in the pool."""

    arrays: tuple[jax.Array, ...]
    options: dict[str, Any]
    decode_only: bool
    copies: int = 1
    pages_per_copy: int = field(default=0)

    def attend(self, *arrays: jax.Array, layer: int = 0, implementation: str, interpret: bool) -> jax.Array:
        q, kv_pages, kv_lens, page_indices, *rest = arrays
        page_indices = page_indices + layer % self.copies * self.pages_per_copy
        options = self.options | {"implementation": implementation}
        if implementation.startswith("pallas"):
            options["interpret"] = interpret
        if self.decode_only:
            return kernels.paged_attention(q, kv_pages, page_indices, kv_lens, **options)
        return kernels.ragged_paged_attention(q, kv_pages, kv_lens, page_indices, *rest, **options)


def make_batch(
    shape: str,
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    page_size: int,
    kv_dtype: str = "bfloat16",
    *,
    poison: bool = False,
    copies: int = 1,
) -> Batch:
    """Normal q and KV over shuffled pages; with `poison`, NaN in every slot that holds no token (in int8, 127)."""
    num_q_heads, num_kv_heads, head_dim = SHAPES[shape]
    rng = np.random.default_rng(0)
    pages = [-(-n // page_size) for n in kv_lens]
    num_pages = sum(pages)
    tables = np.zeros((len(kv_lens), max(pages)), np.int32)
    free = iter(rng.permutation(num_pages))
    readable = np.zeros((num_pages, page_size), bool)
    for row, kv_len in enumerate(kv_lens):
        tables[row, : pages[row]] = [next(free) for _ in range(pages[row])]
        pos = np.arange(kv_len)
        readable[tables[row, pos // page_size], pos % page_size] = True
    q_key, kv_key = jax.random.split(jax.random.key(0))
    pool_shape = (copies * num_pages, page_size, 2 * num_kv_heads, head_dim)
    scales = _SCALES[kv_dtype]
    kv_pages = _normal_pool(kv_key, pool_shape, kv_dtype, tuple(scales.values()))
    if poison:
        mask = jnp.asarray(np.tile(readable, (copies, 1)))[..., None, None]
        kv_pages = jnp.where(mask, kv_pages, jnp.asarray(127 if kv_dtype == "int8" else jnp.nan, kv_dtype))
    arrays = (
        jax.random.normal(q_key, (sum(q_lens), num_q_heads, head_dim), jnp.bfloat16),
        kv_pages,
        jnp.asarray(kv_lens, jnp.int32),
        jnp.asarray(tables),
        jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        jnp.asarray([len(kv_lens)], jnp.int32),
    )
    options = {"sm_scale": head_dim**-0.5, **scales}
    decode_only = all(n == 1 for n in q_lens)
    return Batch(arrays=arrays, options=options, decode_only=decode_only, copies=copies, pages_per_copy=num_pages)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal_pool(key: jax.Array, shape: tuple[int, ...], dtype: str, scales: tuple[float, ...]) -> jax.Array:
    """Stored values whose real ones are about standard normal."""
    x = jax.random.normal(key, shape, jnp.bfloat16)
    if not scales:
        return x
    x = x / jnp.tile(jnp.asarray(scales, jnp.bfloat16), shape[2] // 2)[:, None]
    return jnp.clip(jnp.round(x), -127, 127).astype(dtype) if dtype == "int8" else x.astype(dtype)


# --- the calls ---


def machine() -> dict[str, Any]:
    """What it is that the figures were measured on."""
    device = jax.devices()[0]
    found = {
        "platform": device.platform,
        "device": device.device_kind,
        "capability": str(getattr(device, "compute_capability", "")),
        "num_sms": getattr(device, "core_count", None),
        "jax": jax.__version__,
        "runtime": device.client.platform_version,
    }
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        found["nvidia-smi"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia-smi"] = f"not run: {error}"
    return found


def check(what: Check, interpret: bool) -> float:
    """The kernel's error as a share of the reference's norm; NaN if it read what it must not."""
    batch = make_batch(what.shape, what.kv_lens, what.q_lens, what.page_size, what.kv_dtype, poison=True)
    options = batch.options
    if what.shape.startswith("gemma"):
        options |= {"soft_cap": 30.0, "sliding_window": 100}
    out = batch.attend(*batch.arrays, implementation="pallas_gpu", interpret=interpret)
    q, kv_pages, *rest = batch.arrays
    arrays = (q.astype(jnp.float32), kv_pages.astype(jnp.float32), *rest)
    want = np.asarray(jax.jit(partial(reference, **options))(*arrays), np.float64)
    return float(np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want))


def measure_peaks(toy: bool) -> dict[str, float]:
    """Bytes/s of a copy, read and written counted, and FLOP/s of a bfloat16 matrix product."""
    x = jnp.ones((2**10 if toy else 2**30,), jnp.bfloat16)
    n = 64 if toy else 8192
    # Normal values, as in attention: multiplying constants takes less power, and so runs at higher clocks.
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16) / math.sqrt(n)
    copy_s = _seconds_per_call(lambda _, x: -x, x, chain=1, toy=toy)
    matmul_s = _seconds_per_call(lambda _, x, a: x @ a, a, a, chain=4, toy=toy)
    return {"copy_bytes_per_s": 2 * x.nbytes / copy_s, "matmul_flop_per_s": 2 * n**3 / matmul_s}


def time_run(case: Case, run: str, interpret: bool) -> float:
    """Seconds per call of one of `RUNS` on a case.

    Raises:
        NotImplementedError: the run cannot do the case.
    """
    if run in gpu_torch.RUNS:
        if case.kv_dtype != "bfloat16":
            raise NotImplementedError(f"{case.kv_dtype} KV is not timed in torch")
        return gpu_torch.seconds_per_call(run, SHAPES[case.shape], case.num_rows, case.kv_len, case.q_len, case.copies)
    copies = 1 if interpret else case.copies
    lens = ((case.kv_len,) * case.num_rows, (case.q_len,) * case.num_rows)
    batch = make_batch(case.shape, *lens, case.page_size, case.kv_dtype, copies=copies)
    timed = partial(_seconds_per_call, chain=1 if interpret else max(8, copies), toy=interpret)
    if run == "jax triton":
        call, arrays = jax_triton(batch, interpret)
        return timed(call, *arrays)
    return timed(
        lambda layer, *arrays: batch.attend(*arrays, layer=layer, implementation=run, interpret=interpret),
        *batch.arrays,
    )


RUNS = ("pallas_gpu", "jax triton", "xla", *gpu_torch.RUNS)


def jax_triton(batch: Batch, interpret: bool) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """JAX's own paged attention, with its own layout: K and V apart, heads first. Decode only.

    Raises:
        NotImplementedError: what it cannot do.
        ImportError: this jax no longer has it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which is why it is compared with
        from jax.experimental.pallas.ops.gpu import paged_attention as op

    q, kv_pages, kv_lens, page_indices, *_ = batch.arrays
    if not batch.decode_only or kv_pages.dtype != q.dtype:
        raise NotImplementedError("it decodes only, with KV of q's dtype")
    k_pages, v_pages = (jnp.asarray(kv_pages[:, :, i::2].transpose(2, 0, 1, 3)) for i in (0, 1))

    def call(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        tables = tables + layer % batch.copies * batch.pages_per_copy
        q = q * batch.options["sm_scale"]  # it scales nothing itself
        return op.paged_attention(q, k, v, tables, lens, interpret=interpret)

    return call, (q, k_pages, v_pages, page_indices, kv_lens)


def _seconds_per_call(call: Callable[..., jax.Array], q: jax.Array, *rest: jax.Array, chain: int, toy: bool) -> float:
    """The median time of `call(i, q, *rest)`, whose result has q's shape.

    `chain` calls make a program, each on the result of the one before, as the layers of a model do. Programs are
    queued for at least 20 ms, so that the time to start the first does not count.
    """

    @jax.jit
    def program(q: jax.Array, *rest: jax.Array) -> jax.Array:
        for i in range(chain):
            q = call(i, q, *rest).astype(q.dtype)
        return q

    def seconds(num_programs: int) -> float:
        start = time.perf_counter()
        for _ in range(num_programs):
            out = program(q, *rest)
        out.block_until_ready()  # they run in order, and none but the last need be kept
        return (time.perf_counter() - start) / num_programs

    seconds(1)  # compiles
    once = seconds(1)
    if toy:
        return once / chain
    num_programs = min(max(math.ceil(0.02 / once), 1), 50)
    return statistics.median(seconds(num_programs) for _ in range(5 if once < 0.2 else 2)) / chain
