"""What is read out of the compiler's listings, and what is concluded from it."""

import argparse
import importlib.util
import json
from dataclasses import asdict
from typing import Any

import pytest

from jax_paged import kernels_report
from jax_paged.kernels import aot, bounds, tuning
from jax_paged.kernels.aot import Loop

LISTING = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s0 = smov 0 }
   0x1   :  { %1 = dma.hbm_to_smem %s0 }
   0x2 LB: > { %s2 = smov 1 }
   0x3   : > { %2 = dma.hbm_to_vmem %s2  ;;  %3 = dma.hbm_to_vmem %s2 }
   0x4 LB: >> { %v4 = vmatmul %v3 }
   0x5   :  { }
   0x6   : > { %s5 = smov 2 }
   0x7   :  { %s6 = smov 3 }
"""
UTILIZATION = """\
== CAPACITY:
MXU, VALU
    2     4
== UTILIZATION:
0 0
0 1
0 2
0 3
2 4
1 0
0 1
0 1
"""


def test_bundles_are_counted_for_the_innermost_loop_they_are_in() -> None:
    loops, capacity = aot.count_loops(LISTING.splitlines(), UTILIZATION.splitlines())
    assert capacity == {"MXU": 2, "VALU": 4}
    assert [(loop.depth, loop.bundles, loop.dmas) for loop in loops] == [(0, 3, 1), (1, 3, 2), (2, 2, 0)]
    assert loops[2].slots == {"MXU": 3, "VALU": 4}  # an empty bundle belongs where the one before it did
    assert loops[2].busy("MXU", capacity) == 3 / 4


def test_used_memory_is_where_the_furthest_allocation_ends() -> None:
    listing = [
        "  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'core index']",
        "  #allocation2 [shape = 'f32[8,128]', space=vmem, size = 0x1000, offset = 0x2000, scoped, tag = 'scratch']",
        "  #allocation9_spill [shape = 'f32[8]', space=vmem, size = 0x1000, offset = 0x1000, scoped, tag = 'spill']",
        "  %1 = vld [vmem:[#allocation2]]",
    ]
    assert aot.used_bytes(listing) == {"smem": 8, "vmem": 0x3000}


def test_a_causal_prefill_turns_the_loops_as_often_as_its_tiles_need() -> None:
    blocks = {"q_tokens": 64, "kv_tokens": 256, "compute_tokens": 128}
    turns = bounds.prefill_turns(256, blocks)
    # Tile 0 sees keys 0..63: one cut chunk. Tile 3 starts at 192: chunk 0 is whole, chunk 1 cut.
    assert turns == [(0, 1, 1), (0, 1, 1), (1, 1, 1), (1, 1, 1)]


def found(mode: str, whole_bundles: int) -> dict[str, Any]:
    mxu = {"MXU": 100}
    loops = [
        Loop(depth=0, bundles=100),
        Loop(depth=1, bundles=200),
        Loop(depth=2, bundles=100),
        Loop(depth=3, bundles=40, dmas=8),
        Loop(depth=3, bundles=9, dmas=1),
        Loop(depth=3, bundles=whole_bundles, slots=mxu),
    ]
    if mode != "decode":
        loops.append(Loop(depth=3, bundles=300, slots=mxu))
    blocks = {"q_tokens": 64, "kv_tokens": 512, "compute_tokens": 512, "decode_tokens": 256}
    spec = aot.Spec(chip="v6e", shape="llama3-8b", mode=mode, page_size=16)
    return asdict(spec) | {"blocks": blocks, "loops": [asdict(loop) for loop in loops]}


def test_a_decode_is_bound_by_memory_until_its_loop_is_longer_than_the_transfer() -> None:
    # 512 tokens of 8 KV heads of 128 in bfloat16 are 2 MiB, which v6e's 1,640 GB/s bring in 1.28 us: 2,238 cycles.
    fast, slow = bounds.bound(found("decode", 200)), bounds.bound(found("decode", 1500))
    assert fast.block_hbm_us == slow.block_hbm_us == pytest.approx(2**21 / 1640e9 * 1e6)
    assert (fast.bound_by, slow.bound_by) == ("HBM", "compute")
    assert fast.hbm_share == 1.0
    # A row of 8 blocks: its own 200 bundles, and for each block 100, 4 turns of 40 for 32 pages, and 3 of the loop,
    # 2 for 512 tokens and 1 to start.
    assert slow.other_bundles == 100 + 200 + 100 + 40 + 9
    assert slow.row_bundles == 200 + 8 * (100 + 4 * 40)
    assert slow.hbm_share == pytest.approx(8 * slow.block_hbm_us / ((slow.row_bundles + 8 * 3 * 1500) / 1750))


def test_a_prefill_is_set_against_the_peak() -> None:
    bound = bounds.bound(found("prefill", 4000))
    assert bound.hbm_share is None
    assert bound.mxu_share is not None
    assert 0 < bound.mxu_share < 1
    assert bounds.bound(found("prefill", 2000)).mxu_share > bound.mxu_share


def test_a_program_of_another_structure_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="structure"):
        bounds.tile_loops([Loop(depth=0, bundles=5), *(Loop(depth=1, bundles=5, slots={"MXU": 1}) for _ in range(3))])


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels_report.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_report_prints_a_row_a_shape_and_its_assumptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = found("decode", 200) | {
        "status": "compiled",
        "vmem_bytes": 2**20,
        "smem_bytes": 2**10,
        "capacity": dict.fromkeys(("MXU", "XLU", "VALU", "VLOAD", "VSTORE"), 2),
    }
    refused = found("decode", 200) | {"status": "refused", "reason": "too large"}
    del refused["loops"]
    monkeypatch.setattr(aot, "compile_specs", lambda specs, **_: iter([compiled, refused]))
    kernels_report.main(arguments("--chips", "v6e"))
    printed = capsys.readouterr().out
    assert "100% of HBM" in printed
    assert "refused: too large" in printed
    assert "400 bundles per 512 tokens, RPA v3 1050; the rest of the program 449, RPA v3 1840: met" in printed
    assert all(assumption in printed for assumption in bounds.ASSUMPTIONS)
    kernels_report.main(arguments("--json"))
    report = json.loads(capsys.readouterr().out)
    assert report["rows"][0]["bound"]["bound_by"] == "HBM"
    assert "bound" not in report["rows"][1]


def test_without_libtpu_the_error_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"jax-paged\[tpu\].*uv run --isolated --group tpu-compiler"):
        aot.compile_specs([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-dtypes", "foo"], "argument --kv-dtypes: invalid choice: 'foo' (choose from"),
        (["--page-sizes", "0"], "'0' must be a whole number of tokens, at least 1"),
        (["--blocks", "{"], "'{' is no JSON object"),
        (
            ["--blocks", '{"kv_tokens": 1}'],
            "compute_tokens is missing from it; give kv_tokens, compute_tokens, decode_tokens, q_tokens",
        ),
        (
            ["--blocks", '{"kv_tokens": 512, "compute_tokens": 256, "decode_tokens": 100, "q_tokens": 16}'],
            "decode_tokens=100 must be a multiple of 128",
        ),
        (["--blocks", '{"kv_tokens": true}'], "kv_tokens=True must be a whole number of at least 1"),
        (["--blocks", "[]"], "'[]' must be a JSON object with kv_tokens"),
        (["--no-count", "--keep", "x"], "--keep: not allowed with argument --no-count"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(*options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"kv_tokens": 1000}, "kv_tokens=1000 must be a multiple of page_size=16"),
        ({"q_tokens": 24}, "q_tokens=24 must be a power of two"),
        ({"kv_tokens": 0}, "kv_tokens=0 must be a whole number of at least 1"),
        ({"compute_tokens": 100}, "compute_tokens=100 must be a multiple of 128"),
        ({"decode_tokens": 0}, "decode_tokens=0 must be a multiple of 128"),
        ({"kv_tokens": 2**20}, r"bytes of vector memory, of 133,693,440 on v6e; make them smaller"),
    ],
)
def test_block_sizes_of_ones_own_that_cannot_be_are_refused(blocks: dict[str, int], message: str) -> None:
    sizes = {"kv_tokens": 512, "compute_tokens": 512, "decode_tokens": 256, "q_tokens": 64} | blocks

    def checked() -> None:
        spec = aot.Spec(chip="v6e", shape="llama3-8b", mode="prefill", page_size=16, blocks=sizes)
        tuning.checked_blocks(spec.call(), tuning.Blocks(**sizes), "v6e")

    with pytest.raises(ValueError, match=message):
        checked()


def test_a_row_that_fails_in_the_compiler_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = found("decode", 200) | {"status": "failed", "reason": "out of memory"}
    del row["loops"]
    monkeypatch.setattr(aot, "compile_specs", lambda specs, **_: iter([row]))
    for options in ([], ["--json"]):
        assert kernels_report.main(arguments(*options)) == 1
        assert "out of memory" in capsys.readouterr().out
