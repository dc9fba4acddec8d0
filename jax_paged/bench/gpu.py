"""The GPU kernel on a GPU: is it right, and how fast is it.

    python -m jax_paged.bench.gpu --json-file gpu.json

First every named shape against the reference, with NaN wherever nothing may be read. Then decode and prefill, timed
against JAX's own paged attention, the XLA path and, where torch is installed, its SDPA and FlexAttention. Rates are
given as shares of a copy and of a matrix product timed on the same GPU.

Each check and each timing is a call in another process, so that one that hangs, crashes or is not available is a line
of the report and no more. It stops by itself before `--time-limit`, and what was not reached is listed as such.

`--dry-run` runs the same code at toy sizes in interpret mode, on a machine without a GPU. Its times mean nothing.
"""

import argparse
import json
import math
import os
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jax_paged.bench import gpu_runs
from jax_paged.bench.gpu_runs import RUNS, Case, Check
from jax_paged.bench.gpu_worker import CallError, Worker
from jax_paged.kernels.aot import SHAPES

__all__ = ["Report", "main"]

TOLERANCE = 1e-2  # of the norm, in bfloat16
_CHECKING_PROCESSES = 4  # compiling takes most of a check

_DECODES = ((1, 15, 16, 17, 1000, 2047, 64, 129), (1,) * 8)
_MIXED = ((700, 1, 513, 333, 90, 1024), (1, 1, 200, 33, 90, 128))
_MODES = {"decode": _DECODES, "mixed": _MIXED}
CHECKS = (
    *(
        Check(shape=shape, mode=mode, kv_lens=kv_lens, q_lens=q_lens)
        for shape in SHAPES
        for mode, (kv_lens, q_lens) in _MODES.items()
    ),
    *(
        Check(shape="llama3-8b", mode=mode, kv_lens=_MODES[mode][0], q_lens=_MODES[mode][1], **other)
        for mode, other in (
            ("decode", {"page_size": 64}),
            ("mixed", {"page_size": 128}),
            ("decode", {"kv_dtype": "int8"}),
            ("mixed", {"kv_dtype": "float8_e4m3fn"}),
        )
    ),
)
CASES = (
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=16, target="3.7 TB/s", with_flex=True),
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=64, target="3.7 TB/s"),
    Case(name="decode", num_rows=128, kv_len=1024, q_len=1, page_size=16),
    Case(name="decode", num_rows=1, kv_len=32768, q_len=1, page_size=16, target="2.2 TB/s"),
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=16, shape="llama3-70b-tp8"),
    Case(name="decode", num_rows=32, kv_len=4096, q_len=1, page_size=16, kv_dtype="float8_e4m3fn"),
    Case(name="prefill", num_rows=1, kv_len=8192, q_len=8192, page_size=16, target="500 TFLOP/s", with_flex=True),
    Case(name="prefill", num_rows=1, kv_len=8192, q_len=8192, page_size=64, target="500 TFLOP/s"),
    Case(name="prefill", num_rows=4, kv_len=8192, q_len=1024, page_size=16),
)

TOY_CHECKS = (Check(shape="smollm2-135m", mode="mixed", kv_lens=(20, 5), q_lens=(1, 5)),)
TOY_CASES = (
    # JAX's own kernel wants a multiple of 16 pages.
    Case(name="decode", num_rows=1, kv_len=256, q_len=1, page_size=16, shape="smollm2-135m"),
    Case(name="prefill", num_rows=1, kv_len=24, q_len=24, page_size=16, shape="smollm2-135m"),
)


@dataclass(kw_only=True)
class Report:
    """All that was found so far; written to `path` whenever there is more, since the next call may be the last."""

    path: Path | None
    deadline: float  # of time.monotonic()
    call_limit_s: float = 60.0  # longer is taken for a hang
    machine: dict[str, Any] = field(default_factory=dict)
    peaks: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        if self.path is not None:
            found = {"machine": self.machine, "peaks": self.peaks, "checks": self.checks, "results": self.results}
            # Whole or not at all, whenever somebody ends this.
            draft = self.path.with_name(self.path.name + ".part")
            draft.write_text(json.dumps(found, indent=1) + "\n")
            draft.replace(self.path)

    def attempt(self, worker: Worker, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
        """What the call returns, or None, and why there is nothing."""
        left = self.deadline - time.monotonic()
        if left < 5:
            return None, "the time limit was reached"
        try:
            return worker.call(function, *args, timeout_s=min(left, self.call_limit_s)), ""
        except CallError as error:
            return None, str(error)

    @property
    def failed(self) -> bool:
        """Whether the kernel was wrong or did not run; that something else did not run is no failure."""
        ours = [r for r in self.results if r["run"] == "pallas_gpu"]
        return not all(c["ok"] for c in self.checks) or any(r["seconds"] is None for r in ours)


def check_all(report: Report, checks: tuple[Check, ...], *, interpret: bool) -> None:
    """Several checks at a time."""
    workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(min(len(checks), _CHECKING_PROCESSES, max((os.cpu_count() or 1) // 2, 1))):
        workers.put(Worker())
    num_workers = workers.qsize()

    def run(check: Check) -> tuple[float | None, str]:
        worker = workers.get()
        try:
            return report.attempt(worker, gpu_runs.check, check, interpret)
        finally:
            workers.put(worker)

    with ThreadPoolExecutor(num_workers) as pool:
        for check, (error, note) in zip(checks, pool.map(run, checks)):
            if error is not None and not math.isfinite(error):
                error, note = None, "the output is not finite: it read what it must not"
            ok = error is not None and error <= TOLERANCE
            report.checks.append(asdict(check) | {"error": error, "ok": ok, "note": note})
            report.save()
            found = note if error is None else f"error {error:.1e}"
            print(f"{check!s:<44} {found} {'ok' if ok else 'WRONG'}", flush=True)
    while not workers.empty():
        workers.get().close()


def time_all(report: Report, cases: tuple[Case, ...], *, interpret: bool) -> None:
    """Ours on every case first, then the others, those that take longest to compile last."""
    worker, torch_worker = Worker(), Worker()
    with worker, torch_worker:
        for run in RUNS:
            if run.startswith("torch"):
                worker.close()  # torch has the GPU's memory for itself
            for case in cases:
                if "Flex" in run and not case.with_flex:
                    continue
                chosen = torch_worker if run.startswith("torch") else worker
                seconds, note = report.attempt(chosen, gpu_runs.time_run, case, run, interpret)
                result = asdict(case) | {"run": run, "seconds": seconds, "note": note}
                report.results.append(result | rates(case, seconds, report.peaks))
                report.save()
                print(f"timed {len(report.results)}: {run}, {case.name}  ", end="\r", file=sys.stderr, flush=True)


def rates(case: Case, seconds: float | None, peaks: dict[str, float]) -> dict[str, float]:
    """Bytes/s and FLOP/s, and as shares of those that were measured."""
    if seconds is None:
        return {}
    found = {"bytes_per_s": case.kv_bytes / seconds, "flop_per_s": case.flops / seconds}
    if peaks:
        found["share_of_copy"] = found["bytes_per_s"] / peaks["copy_bytes_per_s"]
        found["share_of_matmul"] = found["flop_per_s"] / peaks["matmul_flop_per_s"]
    return found


def format_table(report: Report, cases: tuple[Case, ...]) -> str:
    lines = [
        f"{'':<8} {'shape':<15} {'rows':>4} {'kv_len':>6} {'q_len':>5} {'page':>4} {'kv':<13}  {'':<22}"
        f" {'us':>9} {'TB/s':>6} {'copy':>6} {'TFLOP/s':>8} {'matmul':>6}"
    ]
    for case in cases:
        what = asdict(case)
        lines += [_format_result(r) for r in report.results if what.items() <= r.items()]
    return "\n".join(lines)


def _format_result(r: dict[str, Any]) -> str:
    start = (
        f"{r['name']:<8} {r['shape']:<15} {r['num_rows']:>4} {r['kv_len']:>6} {r['q_len']:>5} {r['page_size']:>4}"
        f" {r['kv_dtype']:<13}  {r['run']:<22}"
    )
    if r["seconds"] is None:
        return f"{start} not run: {r['note']}"
    copy, matmul = (f"{r[share]:>6.0%}" if share in r else f"{'':>6}" for share in ("share_of_copy", "share_of_matmul"))
    target = f"  (target {r['target']})" if r["target"] and r["run"] == "pallas_gpu" else ""
    return (
        f"{start} {r['seconds'] * 1e6:>9.1f} {r['bytes_per_s'] / 1e12:>6.2f} {copy}"
        f" {r['flop_per_s'] / 1e12:>8.1f} {matmul}{target}"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 1 if the kernel was wrong or did not run, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json-file", type=Path, metavar="FILE", help="write what is found there, too, as it is found")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, interpreted")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="175; with --dry-run, 900")
    args = parser.parse_args(argv)
    # Inherited by the processes, several of which share the GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

    limit_s = args.time_limit or (900 if args.dry_run else 175)
    report = Report(path=args.json_file, deadline=time.monotonic() + limit_s)
    if args.dry_run:
        report.call_limit_s = limit_s  # what is interpreted does not hang, but it may be slow
    with Worker() as worker:
        machine, note = report.attempt(worker, gpu_runs.machine)
        if machine is None or (machine["platform"] != "gpu" and not args.dry_run):
            print(f"no GPU here ({machine or note}); --dry-run tries the script without one", file=sys.stderr)
            return 2
        report.machine = machine
        peaks, note = report.attempt(worker, gpu_runs.measure_peaks, args.dry_run)
        report.peaks = peaks or {}
    print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    if peaks:
        copy, matmul = peaks["copy_bytes_per_s"] / 1e12, peaks["matmul_flop_per_s"] / 1e12
        print(f"copy: {copy:.2f} TB/s\nmatmul: {matmul:.0f} TFLOP/s")
    else:
        print(f"no copy and matmul to compare with: {note}")

    check_all(report, TOY_CHECKS if args.dry_run else CHECKS, interpret=args.dry_run)
    cases = TOY_CASES if args.dry_run else CASES
    time_all(report, cases, interpret=args.dry_run)
    print(format_table(report, cases))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
