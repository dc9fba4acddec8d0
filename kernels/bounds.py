"""What bounds the TPU kernel, from its counted loops: predicted shares of the chip's bandwidth and peak.

The model: a core issues a bundle a cycle; copies run beside it and move HBM's full bandwidth; the slower of the two
bounds each row. What it leaves out (latency of the first copy, contention, the clock under load) makes its shares
upper bounds. `ASSUMPTIONS` says it for people.
"""

from dataclasses import dataclass
from typing import Any

from ._compat import cdiv
from .aot import CONTEXT_TOKENS, MODES, SHAPES, Loop

# Clocks in GHz, from the bf16 peak: peak / (2 * matrix units * 128**2) on v4, v5e, v5p. On v6e and tpu7x that gives
# twice a plausible clock, so each of their units is taken to do two 256-wide passes a cycle.
CLOCK_GHZ = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
_CHIP_VERSIONS = {"v4": "TPU_V4", "v5e": "TPU_V5E", "v5p": "TPU_V5P", "v6e": "TPU_V6E", "tpu7x": "TPU_7X"}

# RPA v3 (Jiang et al. 2026, arXiv 2604.15464), compiled and counted in the same way for a decode of Llama-3-8B in
# bfloat16: bundles of its inner loop per 512 tokens, and of the rest of its program, by page size.
RPA_V3_BUNDLES = {
    "v5e": (1066, {16: 1920, 128: 1040}),
    "v6e": (1050, {16: 1840, 128: 1010}),
    "tpu7x": (1009, {16: 1230, 128: 410}),
}
# Of the inner loop of a prefill's bundles, the share in which the matrix units' slots should be busy.
PREFILL_MXU_BUSY = 0.6

ASSUMPTIONS = (
    f"rows of {CONTEXT_TOKENS} cached tokens; prefill: {MODES['prefill'][1]} tokens from the start of one row",
    "one bundle a cycle at " + ", ".join(f"{chip} {ghz} GHz" for chip, ghz in CLOCK_GHZ.items()),
    "bandwidth and peak are those of one core (half a chip on v4, v5p and tpu7x), as jax's own table has them",
    "copies are free but for HBM's full bandwidth, and run beside the arithmetic: the shares are upper bounds",
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Of one compiled shape; times are of a whole block of `kv_tokens`, none of its keys masked."""

    block_hbm_us: float  # to bring its KV
    block_compute_us: float  # to issue its loops' bundles
    bundles_per_512_tokens: float  # of the inner loop
    other_bundles: int  # all the program's but the inner loop's, each counted once
    row_bundles: float | None  # of a row of CONTEXT_TOKENS beside the inner loop's
    hbm_share: float | None  # decode: predicted share of the bandwidth
    mxu_share: float | None  # prefill: predicted share of the peak

    @property
    def bound_by(self) -> str:
        return "HBM" if self.block_hbm_us > self.block_compute_us else "compute"


@dataclass(frozen=True, kw_only=True)
class _TileLoops:
    """The loops of one kind of tile: of a block, its pages' copies, and the arithmetic without and with a mask.

    A decode has one loop of arithmetic, which is both.
    """

    block: Loop
    page_groups: Loop | None
    whole: Loop
    cut: Loop


def bound(found: dict[str, Any]) -> Bound:
    """Works out the bound of what `aot.compile_specs` found for a compiled spec."""
    chip, mode, blocks = found["chip"], found["mode"], found["blocks"]
    info = _chip(chip)
    hz = CLOCK_GHZ[chip] * 1e9
    heads, kv_heads, head_dim = SHAPES[found["shape"]]
    loops = _loops_of_mode(found)
    kv_tokens, chunk = blocks["kv_tokens"], blocks["decode_tokens" if mode == "decode" else "compute_tokens"]
    itemsize = 1 if "8" in found["kv_dtype"] else 4 if found["kv_dtype"] == "float32" else 2
    token_bytes = 2 * kv_heads * head_dim * itemsize
    pages = kv_tokens / found["page_size"]
    # A loop that copies one page has one start a lane tile; a group of them has several pages' worth.
    pages_a_turn = 1.0 if loops.page_groups is None else loops.page_groups.dmas / cdiv(head_dim, 128)
    page_bundles = 0.0 if loops.page_groups is None else loops.page_groups.bundles * pages / pages_a_turn
    block_bundles = loops.block.bundles + page_bundles
    # A decode starts on the keys of a step one turn before the rest of it.
    turns_per_block = kv_tokens / chunk + (1 if mode == "decode" else 0)
    inner_per_block = loops.whole.bundles * turns_per_block
    block_hbm_s = kv_tokens * token_bytes / info.mem_bw_bytes_per_second

    hbm_share = mxu_share = row_bundles = None
    visit = sum(loop.bundles for loop in (Loop(**loop) for loop in found["loops"]) if loop.depth == 1)
    if mode == "decode":
        num_blocks = CONTEXT_TOKENS / kv_tokens
        row_bundles = visit + num_blocks * block_bundles
        compute_s = (row_bundles + num_blocks * inner_per_block) / hz
        hbm_share = min(1.0, num_blocks * block_hbm_s / compute_s)
    elif mode == "prefill":
        tokens = MODES["prefill"][1]
        cycles = 0.0
        for whole, cut, tile_blocks in prefill_turns(tokens, blocks):
            cycles += visit + tile_blocks * block_bundles + whole * loops.whole.bundles + cut * loops.cut.bundles
        flops = 4 * heads * head_dim * tokens * (tokens + 1) / 2
        mxu_share = flops / info.bf16_ops_per_second / (cycles / hz)
    return Bound(
        block_hbm_us=1e6 * block_hbm_s,
        block_compute_us=1e6 * (block_bundles + inner_per_block) / hz,
        bundles_per_512_tokens=loops.whole.bundles * 512 / chunk,
        other_bundles=sum(loop["bundles"] for loop in found["loops"]) - loops.whole.bundles,
        row_bundles=row_bundles,
        hbm_share=hbm_share,
        mxu_share=mxu_share,
    )


def inner_loop(found: dict[str, Any]) -> Loop:
    """Of what `aot.compile_specs` found: the loop of arithmetic, that without a mask where there are two."""
    return _loops_of_mode(found).whole


def _loops_of_mode(found: dict[str, Any]) -> _TileLoops:
    kinds = tile_loops([Loop(**loop) for loop in found["loops"]])
    return kinds[0] if found["mode"] == "decode" else kinds[-1]


def prefill_turns(tokens: int, blocks: dict[str, int]) -> list[tuple[int, int, int]]:
    """For each query tile of a causal prefill: turns of the whole loop, of the cut loop, and blocks."""
    q_tokens, kv_tokens, chunk = blocks["q_tokens"], blocks["kv_tokens"], blocks["compute_tokens"]
    turns = []
    for first in range(0, tokens, q_tokens):
        end = min(first + q_tokens, tokens)
        whole = cut = 0
        for begin in range(0, end, kv_tokens):
            size = min(end - begin, kv_tokens)
            here = max(min(first + 1 - begin, size), 0) // chunk
            whole, cut = whole + here, cut + cdiv(size, chunk) - here
        turns.append((whole, cut, cdiv(end, kv_tokens)))
    return turns


def tile_loops(loops: list[Loop]) -> list[_TileLoops]:
    """Finds the loops of each kind of tile in the program: a decode's; in a mixed program the larger tile's after.

    A loop over blocks is the one directly around one or two loops that multiply; of two, the first needs no mask.
    """
    found = []
    for i, loop in enumerate(loops):
        children: list[Loop] = []  # those without loops of their own
        for j, later in enumerate(loops[i + 1 :], i + 2):
            if later.depth <= loop.depth:
                break
            if later.depth == loop.depth + 1 and (j == len(loops) or loops[j].depth <= later.depth):
                children.append(later)
        arithmetic = [child for child in children if child.slots.get("MXU", 0) > 0]
        copying = [child for child in children if child.dmas > 0]
        if len(arithmetic) in (1, 2):
            groups = max(copying, key=lambda child: child.dmas, default=None)
            found.append(_TileLoops(block=loop, page_groups=groups, whole=arithmetic[0], cut=arithmetic[-1]))
    if not found:
        raise ValueError(
            f"found no loop around loops that multiply, among {len(loops)}: has the kernel's structure changed?"
        )
    return found


def _chip(chip: str) -> Any:
    import jax.experimental.pallas.tpu as pltpu

    version = getattr(pltpu.ChipVersion, _CHIP_VERSIONS[chip])
    return pltpu.get_tpu_info_for_chip(version, 1)
