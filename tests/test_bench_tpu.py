"""The TPU benchmark, where there is no TPU."""

import numpy as np
import pytest

from jax_paged.bench import tpu


def test_without_a_tpu_the_benchmark_says_how_to_rehearse_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu.main([]) == 2
    assert "no TPU here, jax runs on 'cpu'; --dry-run" in capsys.readouterr().err


def test_the_rehearsal_checks_decode_and_prefill(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    assert tpu.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "gemma3-4b, decode, 2 rows of 40, page 16: error" in printed
    assert "smollm2-135m, prefill of 9, 2 rows of 40, page 16: error" in printed
    assert "7 of 7 right: an error of at most 1e-02 of the norm" in printed


def test_a_wrong_result_is_a_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = iter([1e-3, 2e-2, np.nan])
    monkeypatch.setattr(tpu, "_REHEARSAL", tpu.CASES[:3])
    monkeypatch.setattr(tpu, "measure", lambda case, interpret: tpu.Result(case=case, error=next(errors)))
    assert tpu.main(["--dry-run"]) == 1
    right, *wrong, verdict = capsys.readouterr().out.splitlines()
    assert right.endswith("error 1.0e-03")
    assert all(line.endswith("WRONG") for line in wrong)
    assert verdict.startswith("1 of 3 right")


def test_shares_are_of_the_bytes_and_products_that_a_case_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas import tpu as pltpu

    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1))
    decode = tpu.Case(shape="llama3-8b", num_rows=64, context=4096)
    prefill = tpu.Case(shape="llama3-8b", num_rows=1, context=4096, q_tokens=4096)
    # 64 * 4096 tokens of 4 KiB are 1 GiB: 654.7 us at 1,640 GB/s.
    assert tpu._shares(decode, 654.7)[0] == pytest.approx(1.0, rel=1e-3)
    # 4 * 32 * 128 * (4096 * 4097 / 2) = 137.5 GFLOP: 149.4 us at 920 TFLOP/s.
    assert tpu._shares(prefill, 149.4)[1] == pytest.approx(1.0, rel=1e-3)
