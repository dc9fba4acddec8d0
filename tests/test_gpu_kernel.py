"""The GPU kernel: in interpret mode, watched for races, against the reference; its plans; and the real compiler."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BY_NAME,
    CASES,
    Batch,
    Case,
    assert_matches_reference,
    assert_state_matches_reference,
    make_batch,
    quick_attention,
    reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged import cli, kernels
from jax_paged.kernels import api
from jax_paged.kernels.gpu import _compat, aot, attention, sass, supports, tiles, why_not_on
from jax_paged.kernels.gpu.launch import kernels_of
from jax_paged.kernels.gpu.work import Item, KvBlocks, Work, merge_parts, plan_decode, plan_prefill

# One case for each thing the kernel does differently; the other named cases run with --long. Cases that differ in
# lengths alone share a compilation, which is most of the time.
QUICK = (
    ("mixed", "bfloat16"),
    ("empty_rows", "bfloat16"),
    ("fewer_keys_than_queries", "bfloat16"),
    ("chunked", "bfloat16"),
    ("everything", "float16"),
    ("int8_kv", "bfloat16"),
)
# What is refused by name, and tested as such.
REFUSED = {"group_1_dim_80", "page_size_1", "bfloat16_kv", "float32_kv"}


@pytest.fixture(autouse=True)
def fresh_interpreter(numpy_callbacks: None) -> None:
    _compat.reset_interpreter()


def interpreter() -> Any:
    # A race raises, and memory starts as NaN.
    return plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def check(case: Case, dtype: str, seed: int = 0) -> None:
    batch = make_batch(case, seed, jnp.dtype(dtype))
    state = quick_attention()(
        *batch.arrays, **batch.options, return_lse=True, implementation="pallas_gpu", interpret=interpreter()
    )
    assert_state_matches_reference(state, batch)


@pytest.mark.parametrize(("name", "dtype"), QUICK)
def test_named_case_matches_the_reference_without_races(name: str, dtype: str) -> None:
    check(BY_NAME[name], dtype)


def test_large_logits_match_the_reference_without_races() -> None:
    check(replace(BY_NAME["mixed"], q_size=BY_NAME["large_logits"].q_size), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in REFUSED], ids=str)
def test_every_named_case_matches_the_reference_without_races(
    case: Case, dtype: str, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    check(case, dtype)


def test_a_long_sequence_is_split_and_merged_without_races() -> None:
    case = Case(
        name="split", kv_lens=(300, 3, 0), q_lens=(1,) * 3, num_kv_heads=1, max_seqs=3, max_tokens=3, sinks=True
    )
    batch = make_batch(case, 1, jnp.bfloat16)
    call = replace(aot.Spec(shape="llama3-8b", mode="decode", page_size=16).call(), max_seqs=3, num_kv_heads=1)
    assert kernels_of(call, num_sms=4)["paged_decode"].partial_output
    state = kernels.paged_attention(
        batch.q, batch.kv_pages, batch.page_indices, batch.kv_lens, **batch.options, return_lse=True,
        implementation="pallas_gpu", interpret=interpreter(),
    )  # fmt: skip
    assert_state_matches_reference(state, batch)


def large_batch() -> Batch:
    """Unnormalised sums of 40 values of about 6e4 are far beyond float16, whose largest number is 65504; so are the
    logits of queries and keys of some hundreds.
    """
    batch = make_batch(BY_NAME["decode_one_row"], 0, jnp.float16)
    pages = np.array(batch.kv_pages, np.float32)
    pages[:, :, 1::2] = 6e4 + 100 * pages[:, :, 1::2]
    pages[:, :, 0::2] *= 500
    return replace(batch, q=500 * batch.q, kv_pages=jnp.asarray(pages, jnp.float16))


def test_float16_does_not_overflow_where_the_result_fits() -> None:
    batch = large_batch()
    state = quick_attention()(
        *batch.arrays, **batch.options, return_lse=True, implementation="pallas_gpu", interpret=interpreter()
    )
    assert np.abs(np.asarray(state[1])).min() > 65504
    assert_state_matches_reference(state, batch)


def test_scaled_8_bit_values_that_fit_do_not_overflow_on_the_way() -> None:
    # Stored values of up to 57,344 would overflow float16 if they were summed, or scaled by 40 before the sum.
    case = replace(BY_NAME["decode_one_row"], kv_dtype="float8_e5m2", k_scale=0.5, v_scale=40.0)
    batch = make_batch(case, 0, jnp.float16)
    pages = np.array(batch.kv_pages, np.float32)
    sign = np.where(np.arange(case.page_size) % 2, 1, -1)[:, None, None]
    pages[:, :, 1::2] = np.where(np.isnan(pages[:, :, 1::2]), np.nan, 49152 * sign)
    batch = replace(batch, q=0 * batch.q, kv_pages=jnp.asarray(pages, jnp.float8_e5m2))
    out = quick_attention()(*batch.arrays, **batch.options, implementation="pallas_gpu", interpret=interpreter())
    want, _ = reference(batch)  # 37 keys: one more of one sign than of the other
    np.testing.assert_allclose(np.abs(want), 49152 * 40 / 37, rtol=1e-5)
    assert_matches_reference(out, want, "float16")


def all_values(kv_dtype: str) -> tuple[jax.Array, np.ndarray]:
    """A pool of one token, whose values are all of a dtype of 8 bits, and these as the output of four heads.

    Head i of 4 has bits 64 i .. 64 i + 63. NaN and infinity of float8 are left out.
    """
    bits = np.arange(256, dtype=np.uint8).reshape(1, 1, 4, 64)
    values = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(kv_dtype))
    values = jnp.where(jnp.isfinite(values.astype(jnp.float32)), values, jnp.zeros_like(values))
    keys = jnp.ones_like(values)
    kv_pages = jnp.pad(jnp.stack([keys, values], axis=3).reshape(1, 1, 8, 64), ((0, 0), (0, 15), (0, 0), (0, 0)))
    return kv_pages, np.asarray(values, np.float32).reshape(1, 4, 64)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_of_8_bits_is_converted_exactly(kv_dtype: str) -> None:
    kv_pages, values = all_values(kv_dtype)
    out = kernels.paged_attention(
        jnp.ones((1, 4, 64), jnp.bfloat16), kv_pages, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32),
        implementation="pallas_gpu", interpret=interpreter(),
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(out, np.float32), values)


def test_an_8_bit_sequence_through_a_full_ring_matches_the_reference_without_races() -> None:
    # 10 blocks of 64 keys, through 8 entries of the ring in memory's bits and 2 of the converted one.
    case = Case(
        name="int8", kv_lens=(600,) * 4, q_lens=(1,) * 4, max_seqs=4, max_tokens=4, num_kv_heads=1, max_kv_len=608,
        pool_tokens=4 * 608, kv_dtype="int8", k_scale=0.02, v_scale=0.03,
    )  # fmt: skip
    batch = make_batch(case, 0, jnp.bfloat16)
    out = kernels.paged_attention(
        batch.q, batch.kv_pages, batch.page_indices, batch.kv_lens, **batch.options, implementation="pallas_gpu",
        interpret=interpreter(),
    )  # fmt: skip
    assert_matches_reference(out, reference(batch)[0], "bfloat16")


PAGE = 16
lengths = st.one_of(st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 6 * PAGE, 6 * PAGE + 1]), st.integers(0, 7 * PAGE))


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kv_lens, q_lens, room = [], [], 24
    for _ in range(draw(st.integers(0, 4))):
        kv_lens.append(draw(lengths))
        q_lens.append(min(room, draw(st.one_of(st.sampled_from([0, 1, 1, 2]), st.integers(0, 20)))))
        room -= q_lens[-1]
    return tuple(kv_lens), tuple(q_lens)


RANDOM = Case(name="random", kv_lens=(), q_lens=(), max_seqs=4, max_tokens=24, max_kv_len=112, pool_tokens=448)


@settings(max_examples=400 if settings.default.max_examples > 100 else 40)
@given(rows=ragged_rows(), seed=st.integers(0, 3))
def test_random_ragged_batches_match_the_reference_without_races(
    rows: tuple[tuple[int, ...], tuple[int, ...]], seed: int
) -> None:
    check(replace(RANDOM, kv_lens=rows[0], q_lens=rows[1], num_kv_heads=1), "bfloat16", seed)


@pytest.mark.parametrize("barrier", ["k_ready", "v_ready", "k_free", "v_free"])
def test_a_missing_wait_is_seen_by_the_race_detector(
    barrier: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if barrier != "k_ready" and not request.config.getoption("--long"):
        pytest.skip("runs with --long")
    wait = attention._wait

    def forgetful(refs: Any, name: str, index: Any) -> None:
        if name != barrier:
            wait(refs, name, index)

    monkeypatch.setattr(attention, "_wait", forgetful)
    case = Case(name="race", kv_lens=(640,), q_lens=(1,), max_seqs=1, max_tokens=1, num_kv_heads=1, max_kv_len=640)
    batch = make_batch(case, 0, jnp.bfloat16)
    with pytest.raises(Exception, match="RACE DETECTED"):
        jax.block_until_ready(
            kernels.paged_attention(
                batch.q, batch.kv_pages, batch.page_indices, batch.kv_lens,
                sm_scale=0.123, implementation="pallas_gpu", interpret=interpreter(),
            )
        )  # fmt: skip


# --- plans ---

jitted_plan_decode = jax.jit(plan_decode, static_argnames=("max_parts", "kv_blocks"))
jitted_plan_prefill = jax.jit(plan_prefill, static_argnames=("max_tokens", "tokens_per_item", "kv_blocks"))
BLOCK = 64
# Few sizes, since each is compiled anew; rows of length 0 are among them.
seq_lens = st.lists(st.integers(0, 2000), min_size=9, max_size=9)
windows = st.sampled_from([None, 1, 63, 64, 65, 500])  # compiled anew, too


@given(kv_lens=seq_lens, max_parts=st.sampled_from([0, 1, 9, 40]), window=windows)
def test_parts_of_a_sequence_cover_its_keys_once(kv_lens: list[int], max_parts: int, window: int | None) -> None:
    rows = len(kv_lens)
    blocks = KvBlocks(BLOCK, PAGE, True, window)
    tokens = jnp.arange(rows)
    plan = jitted_plan_decode(jnp.array(kv_lens), tokens, tokens >= 0, max_parts=max_parts, kv_blocks=blocks)
    items = np.asarray(plan.items)[: int(plan.num_items[0])]
    assert len(items) <= rows + max_parts
    assert (np.diff(items[:, Item.ROW]) >= 0).all()
    for row, kv_len in enumerate(kv_lens):
        parts = items[items[:, Item.ROW] == row]
        seen = [pos for part in parts for pos in range(part[Item.KV_START], part[Item.KV_START] + part[6] * BLOCK)]
        first = 0 if window is None else max(kv_len - window, 0) // PAGE * PAGE
        assert seen == list(range(first, first + len(seen)))
        assert first + len(seen) >= kv_len > first + len(seen) - BLOCK or (kv_len == 0 and not seen)


@given(q_lens=st.lists(st.integers(0, 90), min_size=7, max_size=7), tokens_per_item=st.sampled_from([4, 16, 32]))
def test_items_of_a_prefill_cover_its_tokens_once(q_lens: list[int], tokens_per_item: int) -> None:
    num_tokens = sum(q_lens)
    first_tokens = np.cumsum([0, *q_lens[:-1]])
    plan = jitted_plan_prefill(
        jnp.array(q_lens) + 5, jnp.array(q_lens), jnp.array(first_tokens),
        max_tokens=640, tokens_per_item=tokens_per_item, kv_blocks=KvBlocks(BLOCK, PAGE, True, None),
    )  # fmt: skip
    items = np.asarray(plan.items)
    used = items[: int(plan.num_items[0])]
    covered = [t for item in used for t in range(item[Item.TOKEN], item[Item.TOKEN] + item[Item.NUM_TOKENS])]
    assert covered == list(range(num_tokens))
    assert (items[len(used) :, Item.NUM_TOKENS] == 0).all()
    assert (used[:, Item.NUM_BLOCKS] * BLOCK >= used[:, Item.POSITION] + used[:, Item.NUM_TOKENS]).all()


def test_merging_parts_is_merging_states() -> None:
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((4, 3, 8)), rng.standard_normal((4, 3))
    out[3] = lse[3] = np.nan  # an unused item
    items = np.zeros((4, len(Item)), np.int32)
    items[:, Item.ROW] = [0, 0, 2, 2]
    lse[2] = -np.inf  # sees nothing
    work = Work(jnp.asarray(items), jnp.array([3]))
    merge = jax.jit(merge_parts, static_argnums=3)
    got_out, got_lse = merge(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32), work, 3)
    want_out, want_lse = kernels.merge_states(*(jnp.asarray(x, jnp.float32) for x in (out[0], lse[0], out[1], lse[1])))
    np.testing.assert_allclose(got_out[0], want_out, rtol=1e-6)
    np.testing.assert_allclose(got_lse[0], want_lse, rtol=1e-6)
    np.testing.assert_array_equal(got_out[1:], 0)
    np.testing.assert_array_equal(got_lse[1:], -np.inf)


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "q_dtype='float32'"),
        ({"kv_dtype": "float16"}, "kv_dtype='float16'"),
        ({"kv_dtype": "float32"}, "kv_dtype='float32'"),
        ({"head_dim": 80}, "head_dim=80"),
        ({"page_size": 1}, "page_size=1"),
        ({"num_q_heads": 128, "num_kv_heads": 1}, "num_q_heads=128"),
        ({"interpret": "yes"}, "interpret='yes'"),
    ],
)
def test_what_the_kernel_cannot_do_it_refuses_by_name(change: dict[str, Any], message: str) -> None:
    call = aot.Spec(shape="llama3-8b", mode="mixed", page_size=16).call()
    assert supports(call) is None
    reason = supports(replace(call, **change))
    assert reason is not None
    assert message in reason


def test_a_gpu_that_is_not_a_hopper_is_refused_by_its_capability() -> None:
    assert why_not_on("9.0") is None
    assert "'10.0'" in str(why_not_on("10.0"))
    assert "'8.0'" in str(why_not_on("8.0"))


# --- block sizes ---


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kv_itemsize", [1, 2])
@pytest.mark.parametrize("decode", [True, False])
def test_block_sizes_fit_an_sm_and_keep_its_memory_busy(decode: bool, kv_itemsize: int, head_dim: int) -> None:
    chosen = tiles.choose(decode=decode, head_dim=head_dim, itemsize=2, kv_itemsize=kv_itemsize, num_blocks=132)
    assert chosen.smem_bytes(head_dim, 2, kv_itemsize) <= 227 * 1024
    assert chosen.bytes_in_flight(head_dim, kv_itemsize) >= 32 * 1024
    assert chosen.stages >= 2
    assert bool(chosen.converted) == (kv_itemsize == 1)


# --- counts in machine code ---


def test_the_usual_way_through_the_consumers_loop_is_counted() -> None:
    def listing(*instructions: str) -> str:
        return "\n".join(f"   -:-:-:Y:{x[:2]}        /*0{i:03x}*/ {x[2:]}" for i, x in enumerate(instructions))

    text = "\n".join(
        [
            listing("09                   MOV R1, R2"),
            ".L_x_1:",
            listing(
                "02              @!P1 BRA `(.L_x_9) ",  # a wait that spins elsewhere
                "12                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR52], RZ",
                "05               @P1 BRA `(.L_x_2) ",  # masks nothing
                *["03                   FADD R1, R2, R3"] * 70,
            ),
            ".L_x_2:",
            listing(
                "04                   MUFU.EX2 R1, R1",
                "12                   HGMMA.64x128x16.F32.BF16 R24, R36, gdesc[UR12], R24",
                "06               @P2 BRA `(.L_x_1) ",
                "05                   EXIT",
            ),
            ".L_x_9:",
            listing("01                   BRA `(.L_x_1) "),
        ]
    )
    assert sass.consumer_loop(text) == sass.Loop(instructions=6, issue_cycles=2 + 12 + 5 + 4 + 12 + 6)
    assert sass.consumer_loop("") is None


# --- what is chosen on a GPU ---


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """As where jax's default platform is a GPU of the compute capability that the test names."""
    monkeypatch.setattr(api, "_default_platform", lambda: "gpu")
    return lambda capability: monkeypatch.setattr(_compat, "local_capability", lambda: capability)


def test_env_names_the_kernel_that_runs_on_a_hopper(
    on_a_gpu: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu("9.0")
    assert cli.main(["env"]) == 0
    assert "attention pallas_gpu: the kernel for platform 'gpu' supports the call" in capsys.readouterr().out


def test_env_says_why_another_gpu_falls_back(
    on_a_gpu: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_gpu("8.0")
    cli.main(["env"])
    assert "attention xla: pallas_gpu cannot run the call (compute capability='8.0'" in capsys.readouterr().out


def program_of(dtype: str) -> str:
    """What is compiled for CUDA of a decode whose implementation is not named."""

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    arrays = array(4, 4, 64, dtype=dtype), array(8, 16, 4, 64, dtype=dtype), array(4, 4), array(4)
    anew = jax.jit(lambda *arrays: kernels.paged_attention(*arrays))  # what is traced is kept by function
    return anew.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_a_call_without_a_name_is_the_kernel_on_a_hopper_and_xla_for_what_it_refuses(
    on_a_gpu: Callable[[str], None],
) -> None:
    on_a_gpu("9.0")
    assert "mosaic_gpu" in program_of("bfloat16")
    assert "mosaic_gpu" not in program_of("float32")


def test_a_call_without_a_name_is_xla_on_a_gpu_that_is_no_hopper(on_a_gpu: Callable[[str], None]) -> None:
    on_a_gpu("12.0")
    assert "mosaic_gpu" not in program_of("bfloat16")


# --- the compiler ---


def test_the_kernel_compiles_for_an_h200_without_spills(plain_env: dict[str, str]) -> None:
    if missing := aot.missing_toolchain():
        pytest.skip(missing)
    command = [sys.executable, "-m", "jax_paged.kernels.gpu.aot", "--gpus", "h200", "--shapes", "gemma3-4b"]
    result = subprocess.run(
        [*command, "--modes", "mixed", "--page-sizes", "16"], env=plain_env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "paged_prefill" in result.stdout
