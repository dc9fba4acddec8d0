"""The TPU kernel: in interpret mode, watched for races, against the reference; and through the real compiler."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BY_NAME,
    CASES,
    Case,
    assert_state_matches_reference,
    make_batch,
    quick_attention,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jax_paged import kernels
from jax_paged.kernels import aot, bounds
from jax_paged.kernels.tpu import _copies, attention, write
from jax_paged.kernels.tuning import Blocks

# Compiling is most of a test's time, so by default run the cases that differ in lengths alone, and one for each thing
# that the kernel does differently; the other named cases run with --long.
LENGTHS = ("mixed", "empty_rows", "fewer_keys_than_queries", "nothing_but_padding")
QUICK = ("everything", "group_3_dim_64", "large_logits", "int8_kv", "not_causal_group_8")


@pytest.fixture(autouse=True)
def fresh_interpreter(numpy_callbacks: None, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    pltpu.reset_tpu_interpret_mode_state()
    assert LEFT_OVER not in capsys.readouterr().out


# The interpreter prints this, and raises nothing, where a kernel ends with copies nobody has waited for.
LEFT_OVER = "has non-zero count"


def interpreter(mode: Any = "on_wait") -> Any:
    # A race raises. Memory starts as NaN, and copies happen as late as their waits allow. Each copy needs an entry of
    # its own in the vector clocks: where copies share one, a wait for the later hides that none was for the earlier.
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan", vector_clock_size=512
    )


def check(case: Case, dtype: str, seed: int = 0) -> None:
    batch = make_batch(case, seed, jnp.dtype(dtype))
    state = quick_attention()(
        *batch.arrays, **batch.options, return_lse=True, implementation="pallas_tpu", interpret=interpreter()
    )
    assert_state_matches_reference(state, batch)


@pytest.mark.parametrize("name", QUICK)
def test_named_case_matches_the_reference_without_races(name: str) -> None:
    check(BY_NAME[name], "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_named_case_matches_the_reference_without_races(
    case: Case, dtype: str, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    check(case, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_decode_matches_the_reference_without_races(dtype: str) -> None:
    case = BY_NAME["sinks"]
    case = replace(case, kv_lens=(20, 0, 17, 100, 16), q_lens=(1,) * 5, max_seqs=5, max_tokens=5)
    batch = make_batch(case, 1, jnp.dtype(dtype))
    state = kernels.paged_attention(
        batch.q, batch.kv_pages, batch.page_indices, batch.kv_lens, **batch.options, return_lse=True,
        implementation="pallas_tpu", interpret=interpreter(),
    )  # fmt: skip
    assert_state_matches_reference(state, batch)


SMALL = Blocks(kv_tokens=32, compute_tokens=128, decode_tokens=128, q_tokens=8)


def attend(batch: Any, mode: str = "on_wait", *, run: Any = None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """The kernel with blocks so small that a row has several, and tiles too."""
    options = {"blocks": SMALL, "return_lse": True, "interpret": interpreter(mode), **batch.options, **options}
    return jax.block_until_ready((run or shared_run())(*batch.arrays, **options))


def fresh_run() -> Any:
    """The kernel as it is now: compiled anew, whatever has been patched in it."""
    static = ("sm_scale", "causal", "sliding_window", "soft_cap", "return_lse", "interpret", "decode_only", "blocks")
    return jax.jit(
        lambda *arrays, **options: attention.ragged_paged_attention(*arrays, **options),
        static_argnames=static,
        compiler_options={"xla_backend_optimization_level": 0},
    )


shared_run = cache(fresh_run)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_named_case_in_several_blocks_a_row_matches_the_reference_without_races(
    case: Case, request: pytest.FixtureRequest
) -> None:
    if case.name not in LENGTHS and not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    batch = make_batch(case, 0, jnp.float32)
    blocks = replace(SMALL, kv_tokens=max(SMALL.kv_tokens, case.page_size))
    assert_state_matches_reference(attend(batch, blocks=blocks), batch)


@pytest.mark.parametrize("window", [None, 1000])
def test_positions_past_16_bits_and_tables_of_many_pages_are_right(
    window: int | None, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    case = Case(
        name="long", kv_lens=(40_000, 7, 33_000), q_lens=(1,) * 3, max_seqs=3, max_tokens=3, num_kv_heads=1,
        page_size=32, max_kv_len=40_960, pool_tokens=81_920, sliding_window=window,
    )  # fmt: skip
    batch = make_batch(case, 0, jnp.float32)
    blocks = Blocks(kv_tokens=1024, compute_tokens=1024, decode_tokens=128, q_tokens=1)
    assert_state_matches_reference(attend(batch, decode_only=True, blocks=blocks), batch)


PAGE = 16
lengths = st.one_of(st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 6 * PAGE, 6 * PAGE + 1]), st.integers(0, 7 * PAGE))


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kv_lens, q_lens, room = [], [], 24
    for _ in range(draw(st.integers(0, 5))):
        kv_lens.append(draw(lengths))
        q_lens.append(min(room, draw(st.one_of(st.sampled_from([0, 1, 1, 2]), st.integers(0, 20)))))
        room -= q_lens[-1]
    return tuple(kv_lens), tuple(q_lens)


# In the shapes of the named cases, to share their compilation.
RANDOM = Case(name="random", kv_lens=(), q_lens=())


# max_examples is of each profile: see conftest.
@settings(max_examples=40 if settings.default.max_examples <= 100 else 400)
@given(rows=ragged_rows(), seed=st.integers(0, 3))
def test_random_ragged_batches_match_the_reference_without_races(
    rows: tuple[tuple[int, ...], tuple[int, ...]], seed: int
) -> None:
    batch = make_batch(replace(RANDOM, kv_lens=rows[0], q_lens=rows[1]), seed, jnp.float32)
    assert_state_matches_reference(attend(batch), batch)


def decode_batch() -> Any:
    case = Case(
        name="decode", kv_lens=(40, 100, 20, 60, 5), q_lens=(1,) * 5, max_seqs=5, max_tokens=5,
        num_q_heads=2, num_kv_heads=1,
    )  # fmt: skip
    return make_batch(case, 0, jnp.float32)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_decode_of_several_blocks_a_row_matches_the_reference_without_races(mode: str) -> None:
    batch = decode_batch()
    assert_state_matches_reference(attend(batch, mode, decode_only=True), batch)


@pytest.mark.parametrize("wait", ["wait_ids", "wait_q", "wait_kv", "wait_out"])
def test_a_missing_wait_is_seen_by_the_race_detector(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copies, wait, lambda *_: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend(decode_batch(), "eager", run=fresh_run(), decode_only=True)


def test_a_wait_moved_behind_its_reader_is_seen_by_the_race_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_q, start_out = _copies.wait_q, _copies.start_out
    monkeypatch.setattr(_copies, "wait_q", lambda *_: None)
    monkeypatch.setattr(_copies, "start_out", lambda *args: (wait_q(*args), start_out(*args)))
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend(decode_batch(), "eager", run=fresh_run(), decode_only=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_dtype": "float16"}, "q_dtype='float16'"),
        ({"kv_dtype": "int8", "num_kv_heads": 3, "num_q_heads": 9}, "num_kv_heads=3 with kv_dtype='int8'"),
        ({"head_dim": 192}, "head_dim=192"),
        ({"pages_per_seq": 2**17}, "pages_per_seq=131072"),
        ({"page_size": 2**14}, "the smallest blocks need"),
    ],
)
def test_what_the_kernel_cannot_do_it_refuses_by_name(change: dict[str, Any], message: str) -> None:
    call = aot.Spec(chip="v6e", shape="llama3-8b", mode="mixed", page_size=16).call()
    assert attention.supports(call) is None
    reason = attention.supports(replace(call, **change))
    assert reason is not None
    assert message in reason


def write_arguments(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((4, 8, 4, 16)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((6, 2, 16)), dtype) for _ in range(2))
    return pool, k, v, jnp.array([31, 0, 9, -1, 32, 10])  # two of them outside the pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_written_pool_equals_the_scattered_one(dtype: str) -> None:
    pool, k, v, slots = write_arguments("float32")
    pool = pool.astype(dtype)
    got = kernels.write_kv(pool, k, v, slots, k_scale=0.02, implementation="pallas_tpu", interpret=interpreter())
    want = kernels.write_kv(pool, k, v, slots, k_scale=0.02, implementation="xla")
    assert got.dtype == want.dtype == pool.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_a_missing_wait_for_a_write_is_seen_by_the_race_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_wait", lambda copy: None)
    pool, k, v, slots = write_arguments("float32")
    run = jax.jit(partial(kernels.write_kv, implementation="pallas_tpu", interpret=interpreter("eager")))
    with pytest.raises(Exception, match="RACE DETECTED"):
        jax.block_until_ready(run(pool, k, v, slots))


def copy_arguments(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    pool = np.random.default_rng(0).integers(-100, 100, (6, 4, 6, 64)).astype(np.float32)
    return jnp.asarray(pool, dtype), jnp.array([2, 0, 5, 6, 1]), jnp.array([3, -1, 4, 2**31 - 1, 6])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pages_are_copied_where_there_is_one_to_copy_to_without_races(dtype: str) -> None:
    pool, src, dst = copy_arguments(dtype)
    got = kernels.copy_pages(pool, src, dst, implementation="pallas_tpu", interpret=interpreter())
    want = np.asarray(pool, np.float32)[[0, 1, 2, 2, 5, 5]]
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    np.testing.assert_array_equal(np.asarray(kernels.copy_pages(pool, src, dst), np.float32), want)


def test_nothing_to_write_or_to_copy_changes_nothing() -> None:
    pool, k, v, slots = write_arguments("bfloat16")
    wrote = kernels.write_kv(pool, k[:0], v[:0], slots[:0], implementation="pallas_tpu", interpret=interpreter())
    copied = kernels.copy_pages(pool, slots[:0], slots[:0], implementation="pallas_tpu", interpret=interpreter())
    for got in (wrote, copied, kernels.write_kv(pool, k[:0], v[:0], slots[:0])):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(pool, np.float32))


def test_a_missing_wait_for_a_page_is_seen_by_the_race_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_wait", lambda copy: None)
    run = jax.jit(partial(kernels.copy_pages, implementation="pallas_tpu", interpret=interpreter("eager")))
    with pytest.raises(Exception, match="RACE DETECTED"):
        jax.block_until_ready(run(*copy_arguments("float32")))


def test_what_the_write_cannot_do_it_refuses_by_name() -> None:
    pool, k, v, slots = write_arguments("float32")
    with pytest.raises(NotImplementedError, match="kv_pages has 1 KV heads of int8"):
        kernels.write_kv(pool[:, :, :2].astype("int8"), k[:, :1], v[:, :1], slots, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="implementation='pallas_gpu'"):
        kernels.write_kv(pool, k, v, slots, implementation="pallas_gpu")
    half = pool.astype("float16")
    with pytest.raises(
        NotImplementedError, match=r"cannot write this: kv_pages.dtype is float16, which TPUs do not have"
    ):
        kernels.write_kv(half, k, v, slots, implementation="pallas_tpu")
    with pytest.raises(
        NotImplementedError, match=r"cannot copy this: kv_pages.dtype is float16, which TPUs do not have"
    ):
        kernels.copy_pages(half, slots, slots, implementation="pallas_tpu")
    many = jnp.zeros(70_000, jnp.int32)
    with pytest.raises(NotImplementedError, match=r"70000 pages: .* copy in parts"):
        kernels.copy_pages(pool, many, many, implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"must be True, False or pallas\.tpu\.InterpretParams"):
        kernels.copy_pages(pool, slots, slots, implementation="pallas_tpu", interpret=plgpu.InterpretGPUParams())


def test_the_kernel_under_shard_map_over_kv_heads_matches_the_reference(plain_env: dict[str, str]) -> None:
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = plain_env | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    script = Path(__file__).with_name("sharded_attention.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 devices agree with the reference" in done.stdout


# --- the real compiler ---

# By "chip shape mode page": bundles of the inner loop, and of the rest of the program, each counted once.
COUNTS = json.loads((Path(__file__).parent / "data" / "tpu_bundles.json").read_text())


@pytest.mark.parametrize("name", COUNTS)
def test_the_kernel_compiles_and_its_loops_stay_as_short_as_they_were(
    name: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("libtpu")
    committed = COUNTS[name]
    if not committed["quick"] and not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    chip, shape, mode, page_size = name.split()
    (found,) = aot.compile_specs([aot.Spec(chip=chip, shape=shape, mode=mode, page_size=int(page_size))])
    assert found["status"] == "compiled", found["reason"]
    assert bounds.inner_loop(found).bundles == pytest.approx(committed["inner"], rel=0.1)
    assert bounds.bound(found).other_bundles == pytest.approx(committed["others"], rel=0.1)


def test_what_fills_the_smallest_memory_compiles() -> None:
    pytest.importorskip("libtpu")
    specs = [
        aot.Spec(chip="v4", shape=shape, mode=mode, page_size=16, kv_dtype="float32")
        for shape, mode in (("smollm2-135m", "decode"), ("llama3-8b", "prefill"))
    ]
    for found in aot.compile_specs(specs, count=False):
        assert found["status"] == "compiled", found["reason"]


def test_the_kernel_compiles_under_shard_map_for_16_chips() -> None:
    pytest.importorskip("libtpu")
    (found,) = aot.compile_specs(
        [aot.Spec(chip="v5e", shape="llama3-70b-tp8", mode="decode", page_size=16, shards=8)], count=False
    )
    assert found["status"] == "compiled", found["reason"]


def test_the_write_compiles_to_one_in_place(plain_env: dict[str, str]) -> None:
    pytest.importorskip("libtpu")
    script = Path(__file__).with_name("compiled_write.py")
    environment = plain_env | aot.COMPILER_ENVIRONMENT
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(aot.CHIPS)} chips write in place" in done.stdout


def test_the_engines_step_compiles_to_one_with_one_pool(plain_env: dict[str, str]) -> None:
    pytest.importorskip("libtpu")
    script = Path(__file__).with_name("compiled_step.py")
    environment = plain_env | aot.COMPILER_ENVIRONMENT
    command = [sys.executable, script, "v5e"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 steps change their pools in place on v5e" in done.stdout
