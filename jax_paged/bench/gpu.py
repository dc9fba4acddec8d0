"""The GPU kernel on a GPU: is it right, and how fast is it.

    python -m jax_paged.bench.gpu --json gpu.json

First every named shape against the reference, with NaN wherever nothing may be read. Then decode and prefill, timed
against JAX's own paged attention, the XLA path and, where torch is installed, its SDPA and FlexAttention. Rates are
given as shares of a copy and of a matrix product timed on the same GPU. Takes under three minutes on an H200.

`--dry-run` runs the same code at toy sizes in interpret mode, on a machine without a GPU. Its times mean nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import kernels
from jax_paged.bench import gpu_torch
from jax_paged.kernels.gpu.aot import SHAPES
from jax_paged.kernels.reference import ragged_paged_attention as reference

__all__ = ["Batch", "Case", "Result", "main", "make_batch"]

TOLERANCE = 1e-2  # of the norm, in bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed: `num_rows` sequences of `kv_len` tokens, of which the last `q_len` are queries."""

    name: str
    num_rows: int
    kv_len: int
    q_len: int
    page_size: int
    shape: str = "llama3-8b"
    target: str = ""

    @property
    def kv_bytes(self) -> int:
        """What must be read of K and V at least, in bfloat16."""
        _, num_kv_heads, head_dim = SHAPES[self.shape]
        return self.num_rows * self.kv_len * 2 * num_kv_heads * head_dim * 2

    @property
    def flops(self) -> int:
        """Of both products, causal."""
        num_q_heads, _, head_dim = SHAPES[self.shape]
        seen = self.q_len * (self.kv_len - self.q_len) + self.q_len * (self.q_len + 1) // 2
        return self.num_rows * 4 * seen * num_q_heads * head_dim


CASES = (
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=16, target="3.7 TB/s"),
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=64, target="3.7 TB/s"),
    Case(name="decode", num_rows=128, kv_len=1024, q_len=1, page_size=16),
    Case(name="decode", num_rows=1, kv_len=32768, q_len=1, page_size=16, target="2.2 TB/s"),
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=16, shape="llama3-70b-tp8"),
    Case(name="prefill", num_rows=1, kv_len=8192, q_len=8192, page_size=16, target="500 TFLOP/s"),
    Case(name="prefill", num_rows=1, kv_len=8192, q_len=8192, page_size=64, target="500 TFLOP/s"),
    Case(name="prefill", num_rows=4, kv_len=8192, q_len=1024, page_size=16),
)
TOY_CASES = (
    Case(name="decode", num_rows=2, kv_len=40, q_len=1, page_size=16, shape="smollm2-135m"),
    Case(name="prefill", num_rows=1, kv_len=24, q_len=24, page_size=16, shape="smollm2-135m"),
)


@dataclass(frozen=True)
class Result:
    case: Case
    implementation: str
    seconds: float | None
    note: str = ""  # why there is no time

    def rate(self, peak: dict[str, float]) -> dict[str, float]:
        """Bytes/s and FLOP/s, each also as a share of what was measured."""
        if self.seconds is None:
            return {}
        bytes_per_s, flop_per_s = self.case.kv_bytes / self.seconds, self.case.flops / self.seconds
        return {
            "bytes_per_s": bytes_per_s,
            "share_of_copy": bytes_per_s / peak["copy_bytes_per_s"],
            "flop_per_s": flop_per_s,
            "share_of_matmul": flop_per_s / peak["matmul_flop_per_s"],
        }


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of `kernels.ragged_paged_attention`."""

    arrays: tuple[jax.Array, ...]
    sm_scale: float
    decode_only: bool
    options: dict[str, Any] = field(default_factory=dict)

    def attend(self, q: jax.Array, *rest: jax.Array, implementation: str, interpret: Any) -> jax.Array:
        options = self.options | {"implementation": implementation, "sm_scale": self.sm_scale}
        if implementation.startswith("pallas"):
            options |= {"interpret": interpret}
        if self.decode_only:
            kv_pages, kv_lens, page_indices, *_ = rest
            return kernels.paged_attention(q, kv_pages, page_indices, kv_lens, **options)
        return kernels.ragged_paged_attention(q, *rest, **options)


def make_batch(
    shape: tuple[int, int, int], kv_lens: list[int], q_lens: list[int], page_size: int, *, poison: bool, seed: int = 0
) -> Batch:
    """Normal q and KV in bfloat16 over shuffled pages; with `poison`, NaN in every slot that holds no token."""
    num_q_heads, num_kv_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    pages = [-(-n // page_size) for n in kv_lens]
    num_pages = sum(pages) + 1
    tables = np.full((len(kv_lens), max(pages)), num_pages, np.int32)
    free = iter(rng.permutation(num_pages))
    readable = np.zeros((num_pages, page_size), bool)
    for row, kv_len in enumerate(kv_lens):
        tables[row, : pages[row]] = [next(free) for _ in range(pages[row])]
        pos = np.arange(kv_len)
        readable[tables[row, pos // page_size], pos % page_size] = True
    q_key, kv_key = jax.random.split(jax.random.key(seed))
    kv_pages = jax.random.normal(kv_key, (num_pages, page_size, 2 * num_kv_heads, head_dim), jnp.bfloat16)
    if poison:
        kv_pages = jnp.where(jnp.asarray(readable)[..., None, None], kv_pages, jnp.nan)
    arrays = (
        jax.random.normal(q_key, (sum(q_lens), num_q_heads, head_dim), jnp.bfloat16),
        kv_pages,
        jnp.asarray(kv_lens, jnp.int32),
        jnp.asarray(tables),
        jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        jnp.asarray([len(kv_lens)], jnp.int32),
    )
    return Batch(arrays=arrays, sm_scale=head_dim**-0.5, decode_only=all(n == 1 for n in q_lens))


# --- is it right ---

NUMERICS = {
    "decode": ([1, 15, 16, 17, 1000, 2047, 64, 129], [1] * 8),
    "mixed": ([700, 1, 513, 333, 90, 1024], [1, 1, 200, 33, 90, 128]),
}
TOY_NUMERICS = {"decode": ([1, 20], [1, 1]), "mixed": ([20, 5], [1, 5])}


def check_numerics(shape: str, mode: str, page_size: int, lens: tuple[list[int], list[int]], interpret: Any) -> float:
    """The kernel's error as a share of the reference's norm; NaN if it read what it must not."""
    options: dict[str, Any] = {"soft_cap": 30.0, "sliding_window": 100} if shape.startswith("gemma") else {}
    batch = make_batch(SHAPES[shape], *lens, page_size, poison=True)
    batch = Batch(**{**vars(batch), "options": options})
    got = np.asarray(batch.attend(*batch.arrays, implementation="pallas_gpu", interpret=interpret), np.float64)
    q, kv_pages, *rest = batch.arrays
    arrays = (q.astype(jnp.float32), kv_pages.astype(jnp.float32), *rest)
    want = np.asarray(jax.jit(partial(reference, sm_scale=batch.sm_scale, **options))(*arrays), np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# --- how fast is it ---


def seconds_per_call(call: Callable[..., jax.Array], q: jax.Array, *rest: jax.Array, chain: int, repeats: int) -> float:
    """Of `call(q, *rest)`, whose result has q's shape: `chain` calls in one program, each on the result before."""

    @jax.jit
    def program(q: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(chain):
            q = call(q, *rest).astype(q.dtype)
        return q

    jax.block_until_ready(program(q, *rest))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([program(q, *rest) for _ in range(3)])
        times.append((time.perf_counter() - start) / (3 * chain))
    return statistics.median(times)


def measure_peaks(*, toy: bool) -> dict[str, float]:
    """Bytes/s of a copy, read and written counted, and FLOP/s of a bfloat16 matrix product."""
    x = jnp.ones((2**10 if toy else 2**30,), jnp.bfloat16)
    n = 64 if toy else 8192
    a = jnp.full((n, n), 0.01, jnp.bfloat16)
    copy_s = seconds_per_call(lambda x: -x, x, chain=1, repeats=5)
    matmul_s = seconds_per_call(lambda a, b: a @ b, a, a, chain=8, repeats=5)
    return {"copy_bytes_per_s": 2 * x.nbytes / copy_s, "matmul_flop_per_s": 2 * n**3 / matmul_s}


def jax_triton(batch: Batch) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """JAX's own paged attention, with its own layout: K and V apart, heads first. Decode only."""
    from jax.experimental.pallas.ops.gpu import paged_attention as op

    if not batch.decode_only:
        raise NotImplementedError("decodes only")
    q, kv_pages, kv_lens, page_indices, *_ = batch.arrays
    k_pages, v_pages = (jnp.asarray(kv_pages[:, :, i::2].transpose(2, 0, 1, 3)) for i in (0, 1))
    tables = jnp.minimum(page_indices, kv_pages.shape[0] - 1)

    def call(q: jax.Array, *args: jax.Array) -> jax.Array:
        return op.paged_attention(q * batch.sm_scale, *args)  # it scales nothing itself

    return call, (q, k_pages, v_pages, tables, kv_lens)


def time_case(case: Case, interpret: Any) -> Iterator[Result]:
    batch = make_batch(
        SHAPES[case.shape], [case.kv_len] * case.num_rows, [case.q_len] * case.num_rows, case.page_size, poison=False
    )
    timed = partial(seconds_per_call, chain=1 if interpret else 8, repeats=1 if interpret else 5)

    def ours(implementation: str) -> float:
        return timed(partial(batch.attend, implementation=implementation, interpret=interpret), *batch.arrays)

    def triton() -> float:
        call, arrays = jax_triton(batch)
        return timed(call, *arrays)

    runs: dict[str, Callable[[], float]] = {
        "pallas_gpu": partial(ours, "pallas_gpu"),
        "xla": partial(ours, "xla"),
        "jax triton": triton,
    }
    shape = SHAPES[case.shape]
    for name in gpu_torch.RUNS:
        runs[name] = partial(gpu_torch.seconds_per_call, name, shape, case.num_rows, case.kv_len, case.q_len)
    for name, run in runs.items():
        try:
            yield Result(case, name, run())
        # One competitor that cannot run, for whatever reason of its own, must not end the comparison.
        except Exception as error:
            if name == "pallas_gpu":
                raise
            first_line = (str(error).splitlines() or [""])[0]
            yield Result(case, name, None, f"{type(error).__name__}: {first_line[:90]}")


def format_result(result: Result, peak: dict[str, float]) -> str:
    case = result.case
    start = (
        f"{case.name:<8} {case.shape:<15} {case.num_rows:>4} {case.kv_len:>6} {case.q_len:>5} {case.page_size:>4}  "
        f"{result.implementation:<22}"
    )
    if result.seconds is None:
        return f"{start} not run: {result.note}"
    rate = result.rate(peak)
    target = f"  (target {case.target})" if case.target and result.implementation == "pallas_gpu" else ""
    return (
        f"{start} {result.seconds * 1e6:>9.1f} {rate['bytes_per_s'] / 1e12:>6.2f} {rate['share_of_copy']:>6.0%}"
        f" {rate['flop_per_s'] / 1e12:>8.1f} {rate['share_of_matmul']:>6.0%}{target}"
    )


HEADER = (
    f"{'':<8} {'shape':<15} {'rows':>4} {'kv_len':>6} {'q_len':>5} {'page':>4}  {'':<22}"
    f" {'us':>9} {'TB/s':>6} {'copy':>6} {'TFLOP/s':>8} {'matmul':>6}"
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there too")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, interpreted")
    args = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory
    if jax.default_backend() != "gpu" and not args.dry_run:
        print(f"{jax.default_backend()=} is no GPU; --dry-run tries the script without one", file=sys.stderr)
        return 2

    numerics, failed = {}, False
    for shape in ["smollm2-135m"] if args.dry_run else SHAPES:
        for mode, lens in (TOY_NUMERICS if args.dry_run else NUMERICS).items():
            for page_size in (16, 64) if shape == "llama3-8b" else (16,):
                error = check_numerics(shape, mode, page_size, lens, args.dry_run)
                ok = error <= TOLERANCE  # false for NaN
                failed |= not ok
                numerics[f"{shape} {mode} page {page_size}"] = error
                print(
                    f"{shape:<15} {mode:<7} page {page_size:>3}: error {error:.1e} {'ok' if ok else 'WRONG'}",
                    flush=True,
                )

    device = jax.devices()[0].device_kind
    peak = measure_peaks(toy=args.dry_run)
    print(f"\n{device}, jax {jax.__version__}: copy {peak['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
          f"matmul {peak['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s\n{HEADER}", flush=True)  # fmt: skip
    results = []
    for case in TOY_CASES if args.dry_run else CASES:
        for result in time_case(case, args.dry_run):
            print(format_result(result, peak), flush=True)
            results.append(asdict(result) | result.rate(peak))
    if args.json:
        found = {"device": device, "jax": jax.__version__, **peak, "errors": numerics, "results": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
