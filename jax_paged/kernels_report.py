"""`jax-paged kernels`: compiles the TPU kernel for chips that are not here, and prints what it costs there."""

import argparse
import dataclasses
import json
from typing import Any

from jax_paged.kernels import aot, bounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` the options that `main` reads."""
    for name, choices in (("chip", aot.CHIPS), ("shape", aot.SHAPES), ("mode", aot.MODES)):
        parser.add_argument(
            f"--{name}s", nargs="+", default=list(choices), choices=list(choices), metavar=name.upper(),
            help=f"of {', '.join(choices)}; all by default, which together take hours",
        )  # fmt: skip
    aot.add_pool_arguments(parser, page_sizes=[16, 128])
    parser.add_argument(
        "--blocks", type=_blocks,
        help="block sizes to try instead of the tuned ones, a JSON object with " + ", ".join(_BLOCK_NAMES),
    )  # fmt: skip
    listings = parser.add_mutually_exclusive_group()
    listings.add_argument("--no-count", action="store_true", help="only say what compiles")
    listings.add_argument(
        "--keep", metavar="FOLDER",
        help="leave the compiler's listings there; bundles are in *ragged_paged_attention*final_bundles.txt",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything found, as JSON")


_BLOCK_NAMES = ("kv_tokens", "compute_tokens", "decode_tokens", "q_tokens")


def _blocks(text: str) -> dict[str, int]:
    try:
        blocks = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object ({error})") from None
    if not isinstance(blocks, dict) or set(blocks) != set(_BLOCK_NAMES):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object with {', '.join(_BLOCK_NAMES)}, no more")
    for name, value in blocks.items():
        if not isinstance(value, int) or value < 1 or (name in ("compute_tokens", "decode_tokens") and value % 128):
            raise argparse.ArgumentTypeError(
                f"{name}={value!r} must be at least 1, compute and decode_tokens multiples of 128"
            )
    return blocks


def main(args: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        ModuleNotFoundError: libtpu, which holds the compiler, is not installed.
        RuntimeError: the compiler's process died.
    """
    specs = [
        aot.Spec(chip=chip, shape=shape, mode=mode, page_size=page_size, kv_dtype=kv_dtype, blocks=args.blocks)
        for chip in args.chips
        for shape in args.shapes
        for mode in args.modes
        for page_size in args.page_sizes
        for kv_dtype in args.kv_dtypes
    ]
    found = aot.compile_specs(specs, count=not args.no_count, keep=args.keep)
    rows = (row | _bound(row) for row in found)
    if args.json:
        print(json.dumps({"assumptions": bounds.ASSUMPTIONS, "rows": list(rows)}))
        return
    print(_HEADER)
    targets = []
    for row in rows:
        print(_line(row), flush=True)
        targets += [target] if (target := _target(row)) else []
    if targets:
        print("\nTargets:", *targets, sep="\n  ")
    if not args.no_count:
        print("\nAssumed:", *bounds.ASSUMPTIONS, sep="\n  ")


def _bound(row: dict[str, Any]) -> dict[str, Any]:
    if "loops" not in row:
        return {}
    bound = bounds.bound(row)
    return {"bound": dataclasses.asdict(bound) | {"bound_by": bound.bound_by}}


def _target(row: dict[str, Any]) -> str | None:
    """What there is to reach for the row, beside what it does."""
    if "loops" not in row or row["shape"] != "llama3-8b" or row["kv_dtype"] != "bfloat16":
        return None
    name, bound = f"{row['chip']} {row['shape']} {row['mode']}, page {row['page_size']}", row["bound"]
    if row["mode"] == "prefill":
        busy = bounds.inner_loop(row).busy("MXU", row["capacity"])
        return f"{name}: matrix slots busy {100 * busy:.0f}%, of {100 * bounds.PREFILL_MXU_BUSY:.0f}% wanted"
    if row["mode"] != "decode" or row["chip"] not in bounds.RPA_V3_BUNDLES:
        return None
    inner, others = bounds.RPA_V3_BUNDLES[row["chip"]]
    if row["page_size"] not in others:
        return None
    return (
        f"{name}: {bound['bundles_per_512_tokens']:.0f} bundles per 512 tokens, RPA v3 {inner}; "
        f"the rest of the program {bound['other_bundles']}, RPA v3 {others[row['page_size']]}"
    )


_HEADER = (
    f"{'chip':6} {'shape':14} {'mode':8} {'page':>4} {'kv':13}  {'VMEM MiB':>8} {'SMEM KiB':>8}  {'bundles/512':>11} "
    f"{'others':>6}  {'MXU':>4} {'XLU':>4} {'VALU':>4} {'load':>4} {'store':>5}  {'HBM us':>7} {'comp us':>7} "
    f"{'bound by':8} predicted"
)


def _line(row: dict[str, Any]) -> str:
    name = f"{row['chip']:6} {row['shape']:14} {row['mode']:8} {row['page_size']:>4} {row['kv_dtype']:13}"
    if row["status"] != "compiled":
        return f"{name}  {row['status']}: {row['reason']}"
    if "loops" not in row:
        return f"{name}  compiled"
    inner, bound = bounds.inner_loop(row), row["bound"]
    units = ("MXU", "XLU", "VALU", "VLOAD", "VSTORE")
    busy = " ".join(f"{100 * inner.busy(unit, row['capacity']):>{5 if unit == 'VSTORE' else 4}.0f}" for unit in units)
    predicted = ""
    if bound["hbm_share"] is not None:
        predicted = f"{100 * bound['hbm_share']:.0f}% of HBM"
    if bound["mxu_share"] is not None:
        predicted = f"{100 * bound['mxu_share']:.0f}% of peak"
    return (
        f"{name}  {row['vmem_bytes'] / 2**20:8.1f} {row['smem_bytes'] / 2**10:8.1f}  "
        f"{bound['bundles_per_512_tokens']:11.0f} {bound['other_bundles']:6}  {busy}  {bound['block_hbm_us']:7.2f} "
        f"{bound['block_compute_us']:7.2f} {bound['bound_by']:8} {predicted}"
    )


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    main(_parser.parse_args())
