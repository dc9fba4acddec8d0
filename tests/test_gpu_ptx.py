"""The GPU kernel as it is compiled, instruction by instruction, against the reference: see `compiled_kernel.py`.

In an environment of its own, since it needs NVIDIA's compiler: `uv run --isolated --group gpu-compiler pytest
tests/test_gpu_ptx.py`. Interpret mode (`test_gpu_kernel.py`) runs the kernel before it is compiled.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BY_NAME,
    CASES,
    Case,
    assert_matches_reference,
    assert_state_matches_reference,
    make_batch,
    reference,
)
from compiled_kernel import Compiled
from hopper import PtxError, TensorMap, operand_addresses, swizzled
from hypothesis import given, settings
from test_gpu_kernel import QUICK, RANDOM, REFUSED, all_values, large_batch, ragged_rows

from jax_paged.kernels.gpu import aot

if missing := aot.missing_toolchain():
    pytest.skip(missing, allow_module_level=True)
aot.start_toolchain()
jax.config.update("jax_enable_compilation_cache", False)  # there is no client to read programs back


def check(compiled: Compiled, case: Case, dtype: str = "bfloat16", seed: int = 0) -> None:
    batch = make_batch(case, seed, jnp.dtype(dtype))
    decode_only = case.decode_only and case.max_tokens == case.max_seqs == len(case.q_lens)
    state = compiled(*batch.arrays, **batch.options, return_lse=True, decode_only=decode_only)
    assert_state_matches_reference(state, batch)


@pytest.mark.parametrize(
    ("name", "dtype"), [*QUICK, ("page_size_8", "bfloat16"), ("fp8_kv", "float16"), ("one_kv_head_dim_256", "bfloat16")]
)
def test_named_case_matches_the_reference(name: str, dtype: str) -> None:
    check(Compiled(), BY_NAME[name], dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in REFUSED], ids=str)
def test_every_named_case_matches_the_reference(case: Case, dtype: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    compiled = Compiled()
    for _ in range(3):  # other turns each time
        check(compiled, case, dtype)


@settings(max_examples=200 if settings.default.max_examples > 100 else 15)
@given(rows=ragged_rows())
def test_random_ragged_batches_match_the_reference(rows: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(Compiled(), replace(RANDOM, kv_lens=rows[0], q_lens=rows[1], num_kv_heads=1))


# One thread block goes through all of it, and several times through the ring: of 5 blocks of 128 keys in a prefill, of
# 8 of 64 keys in a decode.
RING = Case(
    name="ring", kv_lens=(900, 1000), q_lens=(120, 20), num_kv_heads=1, max_seqs=2, max_tokens=140, max_kv_len=1008,
    pool_tokens=2016,
)  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e5m2"])
@pytest.mark.parametrize("q_lens", [(120, 20), (1, 1)])
def test_long_rows_go_several_times_through_the_ring(q_lens: tuple[int, int], kv_dtype: str | None) -> None:
    scales = {} if kv_dtype is None else {"kv_dtype": kv_dtype, "k_scale": 0.02, "v_scale": 0.03}
    compiled = Compiled(num_sms=1)
    check(compiled, replace(RING, q_lens=q_lens, max_tokens=sum(q_lens), **scales))
    for run in compiled.runs:
        tiles = run.kernel.tiles
        assert len(run.blocks) == 1
        assert tiles.stages * tiles.block_kv < 900


def test_a_row_that_is_split_over_all_sms_is_merged() -> None:
    compiled = Compiled(num_sms=4)
    check(compiled, Case(name="split", kv_lens=(1000, 3, 0), q_lens=(1,) * 3, num_kv_heads=1, max_seqs=3, max_tokens=3,
                         max_kv_len=1008, pool_tokens=1040, sinks=True))  # fmt: skip
    (run,) = compiled.runs
    assert run.kernel.partial_output
    assert len(run.blocks) == 4


def test_float16_does_not_overflow_where_the_result_fits() -> None:
    batch = large_batch()
    assert_state_matches_reference(Compiled()(*batch.arrays, **batch.options, return_lse=True), batch)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_of_8_bits_is_converted_exactly(kv_dtype: str) -> None:
    kv_pages, values = all_values(kv_dtype)
    for q_dtype in ("bfloat16", "float16"):
        out = Compiled()(
            jnp.ones((1, 4, 64), q_dtype), kv_pages, jnp.ones(1, jnp.int32), jnp.zeros((1, 1), jnp.int32),
            jnp.array([0, 1]), jnp.ones(1, jnp.int32), decode_only=True,
        )  # fmt: skip
        np.testing.assert_array_equal(np.asarray(out, np.float32), values)


def test_warpgroups_share_no_more_registers_than_they_were_given() -> None:
    compiled = Compiled()
    for kv_dtype in (None, "int8"):
        check(compiled, replace(BY_NAME["mixed"], kv_dtype=kv_dtype))
    assert len(compiled.runs) == 4
    for run in compiled.runs:
        given_registers = run.ptxas_registers * len(run.blocks[0].warps)
        assert sum(warp.max_registers or 0 for warp in run.blocks[0].warps) <= given_registers


# --- what the emulator sees ---

# What is left out of a prefill, and which of those in the program, in the order of its text. (Of the waits for an
# mbarrier, 0 and 1 are the producer's for its stage of queries, which other waits imply here.)
_LEFT_OUT = {
    "wait for an mbarrier": (r"\{\s*\.reg \.pred\s+P1;.*?\n\s*\}\n", [2, 3, 4, 5, 6, 7]),
    "fence of the async proxy": (r"fence\.proxy\.async\.shared::cta;", [0, 1, 2]),
    "wait for products": (r"wgmma\.wait_group\.sync\.aligned\s+0;", [0, 1]),
    "arrival": (r"mbarrier\.arrive\.release[^;]*;", [1]),
    "mbarrier": (r"@%p\d+ mbarrier\.init[^;]*;", [5]),
}


def in_prefill(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda ptx: change(ptx) if "paged_prefill" in ptx else ptx


@pytest.mark.parametrize(("what", "which"), [(what, n) for what, (_, ns) in _LEFT_OUT.items() for n in ns])
def test_it_is_seen_when_something_is_left_out(what: str, which: int) -> None:
    def leave_out(ptx: str) -> str:
        start, end = list(re.finditer(_LEFT_OUT[what][0], ptx, re.DOTALL))[which].span()
        return ptx[:start] + ptx[end:]

    compiled = Compiled(num_sms=1, change=in_prefill(leave_out))
    assert any(fails(compiled, replace(RING, q_lens=(120, 0))) for _ in range(6))


def test_it_is_seen_when_a_tensor_map_has_another_swizzle() -> None:
    with mock.patch.object(TensorMap, "__post_init__", lambda self: object.__setattr__(self, "swizzle", 16)):
        assert fails(Compiled(), BY_NAME["decode_one_row"])


def fails(compiled: Compiled, case: Case) -> bool:
    try:
        check(compiled, case)
    except (AssertionError, PtxError):
        return True
    return False


def test_operands_lie_as_the_manual_draws_them() -> None:
    """PTX ISA, "Strides" and "Swizzling modes": some addresses by hand, of bfloat16 in rows of 128 bytes."""

    def descriptor(start: int, leading: int, stride: int) -> int:
        return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 62

    k_major = operand_addresses(descriptor(2048, 16, 1024), 64, 16, 2, transposed=False)
    assert k_major[0, :2].tolist() == [2048, 2050]
    assert k_major[1, 0] == 2048 + 128 + 16  # the second row begins with its second piece of 16 bytes
    assert k_major[3, 8] == 2048 + 3 * 128 + (1 ^ 3) * 16
    assert k_major[8, 0] == 2048 + 1024
    mn_major = operand_addresses(descriptor(2048, 8192, 1024), 128, 16, 2, transposed=True)
    assert mn_major[1, 0] == 2050  # the next of N
    assert mn_major[0, 1] == 2048 + 128 + 16  # the next of K
    assert mn_major[64, 0] == 2048 + 8192
    assert mn_major[0, 8] == 2048 + 1024
    assert swizzled(np.array([0, 128, 256, 1024 + 64]), 64).tolist() == [0, 128 + 16, 256 + 32, 1024 + 64]
    assert swizzled(np.array([128, 128 + 16]), 32).tolist() == [128 + 16, 128]


def test_a_program_with_an_unknown_instruction_is_refused_by_name() -> None:
    def change(ptx: str) -> str:
        return ptx.replace("bar.sync \t0;", "redux.sync.add.s32 %r1, %r1, -1;", 1)

    with pytest.raises(NotImplementedError, match=r"redux\.sync"):
        check(Compiled(change=change), BY_NAME["decode_one_row"])


def test_an_output_of_another_program_does_not_pass() -> None:
    """The reference is not what the emulator computes with: half of the logits' scale is another result."""
    batch = make_batch(BY_NAME["decode_one_row"], 0, jnp.bfloat16)
    options: dict[str, Any] = {**batch.options, "sm_scale": batch.options["sm_scale"] / 2}
    out = Compiled()(*batch.arrays, **options)
    with pytest.raises(AssertionError):
        assert_matches_reference(out, reference(batch)[0], "bfloat16")
