"""The GPU benchmark, where there is no GPU."""

import json
import math
import os
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_matches_reference

from jax_paged import kernels
from jax_paged.bench import gpu, gpu_runs
from jax_paged.bench.gpu_worker import CallError, Worker


def test_a_call_that_raises_hangs_or_crashes_ends_neither_the_worker_nor_what_follows() -> None:
    with Worker() as worker:
        with pytest.raises(CallError, match="ValueError: invalid literal"):
            worker.call(int, "one", timeout_s=300)
        assert worker.call(math.sqrt, 4.0, timeout_s=300) == 2.0
        with pytest.raises(CallError, match="hung: no answer in 1 s"):
            worker.call(time.sleep, 600, timeout_s=1)
        with pytest.raises(CallError, match=r"crashed.*exit_code=7"):
            worker.call(os._exit, 7, timeout_s=300)
        assert worker.call(math.sqrt, 9.0, timeout_s=300) == 3.0


def test_an_error_that_may_have_cost_the_gpu_its_context_ends_the_process() -> None:
    with Worker() as worker:
        first = worker.call(os.getpid, timeout_s=300)
        with pytest.raises(CallError, match="FileNotFoundError"):
            worker.call(os.stat, "/no/such/file", timeout_s=300)
        assert worker.call(os.getpid, timeout_s=300) != first


def test_without_a_gpu_it_says_how_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--time-limit", "300"]) == 2
    assert "--dry-run tries the script without one" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jax_own_kernel_is_given_the_same_problem() -> None:
    case = gpu.TOY_CASES[0]
    batch = gpu_runs.make_batch(case.shape, (256, 250), (1, 1), 16, copies=2)
    call, arrays = gpu_runs.jax_triton(batch, interpret=True)
    for layer in (0, 3):
        # In another layer the pages are others, so the two results differ.
        q, kv_pages, kv_lens, page_indices, *_ = batch.arrays
        pages = page_indices + layer % 2 * batch.pages_per_copy
        want = kernels.paged_attention(
            q.astype(jnp.float32), kv_pages.astype(jnp.float32), pages, kv_lens, **batch.options,
            implementation="reference",
        )  # fmt: skip
        assert_matches_reference(call(layer, *arrays), want, "bfloat16")
        ours = batch.attend(*batch.arrays, layer=layer, implementation="xla", interpret=False)
        assert_matches_reference(ours, want, "bfloat16")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_what_is_read_beyond_a_sequence_shows_in_the_error(kv_dtype: str) -> None:
    batch = gpu_runs.make_batch("smollm2-135m", (20, 5), (1, 1), 16, kv_dtype, poison=True)
    _, kv_pages, _, page_indices, *_ = batch.arrays
    stored = np.asarray(kv_pages, np.float32)
    tables = np.asarray(page_indices)
    beyond = stored[tables[0, 1], 4:]
    assert (beyond == 127).all() if kv_dtype == "int8" else np.isnan(beyond).all()
    values = stored[tables[0, 0]] * np.tile(list(gpu_runs._SCALES[kv_dtype].values()) or [1.0, 1.0], 3)[:, None]
    assert 0.8 < values.std() < 1.2  # the real ones, whatever the scale they are stored in


def test_rates_are_those_of_the_bytes_and_products_that_a_case_needs() -> None:
    decode, prefill = gpu.CASES[0], gpu.CASES[6]
    peaks = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 8e14}
    # 32 * 4096 tokens of 8 heads of 128, K and V, 2 bytes: 512 MiB.
    rates = gpu.rates(decode, 2**29 / 2e12, peaks)
    assert rates["bytes_per_s"] == pytest.approx(2e12)
    assert rates["share_of_copy"] == pytest.approx(0.5)
    # 4 * 32 * 128 * (8192 * 8193 / 2) = 549.8 GFLOP.
    rates = gpu.rates(prefill, 549.8e9 / 4e14, peaks)
    assert rates["share_of_matmul"] == pytest.approx(0.5, rel=1e-3)
    assert gpu.rates(decode, None, peaks) == {}
    assert "share_of_copy" not in gpu.rates(decode, 1.0, {})


def test_each_case_reads_more_than_the_cache_holds_before_it_reads_anything_again() -> None:
    l2_bytes = 50 * 2**20
    assert all(case.copies * case.kv_bytes > 4 * l2_bytes for case in gpu.CASES)
    assert all(case.copies * case.kv_bytes < 2 * 2**30 for case in gpu.CASES)


def test_what_does_not_run_is_a_line_of_the_report(tmp_path: Path) -> None:
    report = gpu.Report(path=tmp_path / "gpu.json", deadline=time.monotonic() + 600)
    case = gpu.CASES[0]
    row = vars(case)
    report.results = [{**row, "run": "pallas_gpu", "seconds": 1e-4, "note": "", **gpu.rates(case, 1e-4, {})}]
    assert not report.failed
    report.results.append({**row, "run": "jax triton", "seconds": None, "note": "hung: no answer in 60 s"})
    assert not report.failed
    table = gpu.format_table(report, gpu.CASES)
    assert "5.37" in table  # TB/s
    assert "not run: hung" in table
    report.results.append({**row, "run": "pallas_gpu", "seconds": None, "note": "crashed"})
    assert report.failed
    report.save()
    assert json.loads((tmp_path / "gpu.json").read_text())["results"][1]["run"] == "jax triton"


def test_after_the_time_limit_nothing_more_is_started(tmp_path: Path) -> None:
    report = gpu.Report(path=None, deadline=time.monotonic())
    with Worker() as worker:
        assert report.attempt(worker, os._exit, 3) == (None, "the time limit was reached")


def test_the_rehearsal_runs_to_its_end(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    assert gpu.main(["--dry-run", "--json-file", str(tmp_path / "gpu.json")]) == 0
    printed = capsys.readouterr().out
    assert "page 16 bfloat16" in printed
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert all(check["error"] < 1e-2 for check in found["checks"])
    ran = {result["run"] for result in found["results"] if result["seconds"]}
    assert {"pallas_gpu", "xla", "jax triton"} <= ran
