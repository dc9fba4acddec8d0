"""`python -m jax_paged.bench.tpu`: the TPU kernel checked and timed on the TPU that is here, beside JAX's own op.

With --dry-run the same steps run without a TPU, interpreted, at a small size and untimed: a rehearsal.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import kernels
from jax_paged.kernels.aot import SHAPES

__all__ = ["CASES", "Case", "Result", "main", "measure"]

# Of the error's norm to the reference's, for bfloat16.
TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: `num_rows` rows of `context` cached tokens, of which the last `q_tokens` each are queries."""

    shape: str  # of `aot.SHAPES`
    num_rows: int
    context: int
    q_tokens: int = 1
    page_size: int = 16

    def __str__(self) -> str:
        kind = "decode" if self.q_tokens == 1 else f"prefill of {self.q_tokens}"
        return f"{self.shape}, {kind}, {self.num_rows} rows of {self.context}, page {self.page_size}"


CASES = (
    *(Case(shape="llama3-8b", num_rows=64, context=4096, page_size=page) for page in (16, 128)),
    *(Case(shape=shape, num_rows=64, context=4096) for shape in SHAPES if shape not in ("llama3-8b", "qwen3-8b")),
    *(Case(shape="llama3-8b", num_rows=1, context=4096, q_tokens=4096, page_size=page) for page in (16, 128)),
)

_REHEARSAL = (
    *(Case(shape=shape, num_rows=2, context=40) for shape in SHAPES if shape != "qwen3-8b"),
    *(Case(shape=shape, num_rows=2, context=40, q_tokens=9) for shape in ("llama3-70b-tp8", "smollm2-135m")),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one case showed; None where it was not timed, or where JAX's op does not run."""

    case: Case
    error: float  # its norm over the reference's
    kernel_us: float | None = None
    jax_op_us: float | None = None
    hbm_share: float | None = None
    peak_share: float | None = None

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE  # False for NaN


def measure(case: Case, *, interpret: bool = False, repeats: int = 20) -> Result:
    """Compares a case with the XLA path, and times it unless it is interpreted."""
    arrays, options = _batch(case)
    attend = partial(kernels.ragged_paged_attention, **options)
    kernel = jax.jit(partial(attend, implementation="pallas_tpu", interpret=interpret))
    got, want = kernel(*arrays), jax.jit(partial(attend, implementation="xla"))(*arrays)
    difference = np.asarray(got, np.float32) - np.asarray(want, np.float32)
    error = float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(want, np.float32)))
    if interpret:
        return Result(case=case, error=error)
    if case.q_tokens == 1:
        q, pool, kv_lens, tables, *_ = arrays
        decode = jax.jit(partial(kernels.paged_attention, **options, implementation="pallas_tpu"))
        kernel_us = _time_us(lambda: decode(q, pool, tables, kv_lens), repeats)
    else:
        kernel_us = _time_us(lambda: kernel(*arrays), repeats)
    hbm_share, peak_share = _shares(case, kernel_us)
    return Result(
        case=case,
        error=error,
        kernel_us=kernel_us,
        jax_op_us=_time_jax_op(arrays, options, repeats),
        hbm_share=hbm_share,
        peak_share=peak_share,
    )


def _batch(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    heads, kv_heads, head_dim = SHAPES[case.shape]
    rng = np.random.default_rng(0)
    pages_per_seq = -(-case.context // case.page_size)
    num_pages = case.num_rows * pages_per_seq
    key = jax.random.key(0)
    arrays = (
        jax.random.normal(key, (case.num_rows * case.q_tokens, heads, head_dim), jnp.bfloat16),
        jax.random.normal(key, (num_pages, case.page_size, 2 * kv_heads, head_dim), jnp.bfloat16),
        jnp.full(case.num_rows, case.context, jnp.int32),
        jnp.asarray(rng.permutation(num_pages).reshape(case.num_rows, pages_per_seq), jnp.int32),
        jnp.arange(case.num_rows + 1, dtype=jnp.int32) * case.q_tokens,
        jnp.full(1, case.num_rows, jnp.int32),
    )
    return arrays, {"sm_scale": head_dim**-0.5}


def _time_us(action: Callable[[], Any], repeats: int) -> float:
    """The median time of a call. Several are in flight at once, as in a model, so that dispatch is not timed."""
    jax.block_until_ready(action())
    in_flight, times = 8, []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready([action() for _ in range(in_flight)])
        times.append((time.perf_counter() - started) / in_flight)
    return 1e6 * statistics.median(times)


def _time_jax_op(arrays: tuple[jax.Array, ...], options: dict[str, Any], repeats: int) -> float | None:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as op

    run = jax.jit(partial(op.ragged_paged_attention, **options))
    try:
        return _time_us(lambda: run(*arrays), repeats)
    except Exception as error:  # it does not fit every chip's memory, and says so in many ways
        print(f"JAX's own op does not run here: {' '.join(str(error).split())[:200]}")
        return None


def _shares(case: Case, kernel_us: float) -> tuple[float | None, float | None]:
    from jax.experimental.pallas import tpu as pltpu

    info = pltpu.get_tpu_info()
    heads, kv_heads, head_dim = SHAPES[case.shape]
    seconds = kernel_us * 1e-6
    if case.q_tokens == 1:
        kv_bytes = case.num_rows * case.context * 2 * kv_heads * head_dim * 2
        return kv_bytes / (info.mem_bw_bytes_per_second * info.num_cores) / seconds, None
    # Of causal attention: query i of n sees context - n + i + 1 keys; two products of 2 * head_dim each.
    seen = case.q_tokens * (case.context - case.q_tokens) + case.q_tokens * (case.q_tokens + 1) // 2
    flops = 4 * heads * head_dim * case.num_rows * seen
    return None, flops / (info.bf16_ops_per_second * info.num_cores) / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; 1 if the kernel was wrong, 2 if there is no TPU."""
    parser = argparse.ArgumentParser(prog="python -m jax_paged.bench.tpu", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="rehearse without a TPU: small, interpreted, untimed; a minute or two"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    args = parser.parse_args(argv)
    if not args.dry_run and jax.default_backend() != "tpu":
        print(f"no TPU here, jax runs on {jax.default_backend()!r}; --dry-run rehearses without one", file=sys.stderr)
        return 2
    results = []
    for case in _REHEARSAL if args.dry_run else CASES:
        results.append(measure(case, interpret=args.dry_run))
        if not args.json:
            print(_line(results[-1]), flush=True)
    wrong = sum(not result.is_right for result in results)
    if args.json:
        rows = [asdict(result) | {"is_right": result.is_right} for result in results]
        print(json.dumps({"tolerance": TOLERANCE, "results": rows}))
    else:
        print(f"{len(results) - wrong} of {len(results)} right: an error of at most {TOLERANCE:.0e} of the norm")
    return int(wrong > 0)


def _line(result: Result) -> str:
    line = f"{result.case}: error {result.error:.1e}" + ("" if result.is_right else ", WRONG")
    if result.kernel_us is None:
        return line
    line += f", {result.kernel_us:.0f} us"
    if result.hbm_share is not None:
        line += f", {100 * result.hbm_share:.0f}% of HBM bandwidth"
    if result.peak_share is not None:
        line += f", {100 * result.peak_share:.0f}% of peak"
    if result.jax_op_us is not None:
        line += f"; JAX's own op {result.jax_op_us:.0f} us ({result.jax_op_us / result.kernel_us:.2f} times ours)"
    return line


if __name__ == "__main__":
    sys.exit(main())
