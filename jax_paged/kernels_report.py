"""`jax-paged kernels`: compiles the TPU kernel for chips that are not here, and prints what it costs there."""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterable
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
        "--blocks", type=_blocks, metavar="JSON",
        help="block sizes to try instead of the tuned ones (which --json prints), all four, as in "
        '{"kv_tokens": 2048, "compute_tokens": 512, "decode_tokens": 256, "q_tokens": 128}: tokens of KV fetched '
        "together, of one turn of a prefill's inner loop, of one turn of a decode's, and of a tile of queries",
    )  # fmt: skip
    listings = parser.add_mutually_exclusive_group()
    listings.add_argument("--no-count", action="store_true", help="only say what compiles")
    listings.add_argument(
        "--keep", metavar="FOLDER",
        help="leave the compiler's listings there; bundles are in *ragged_paged_attention*final_bundles.txt",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="everything found, as JSON, explained in kernels/tpu/README.md"
    )


def _blocks(text: str) -> dict[str, int]:
    try:
        blocks = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object ({error})") from None
    if not isinstance(blocks, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object with {', '.join(aot.BLOCK_UNITS)}")
    try:
        aot.check_block_sizes(blocks)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return blocks


def main(args: argparse.Namespace) -> int:
    """Runs the command; 1 if the compiler failed at a row.

    Raises:
        ModuleNotFoundError: libtpu, which holds the compiler, is not installed.
        RuntimeError: the compiler's process died.
    """
    columns = (args.chips, args.shapes, args.modes, args.page_sizes, args.kv_dtypes)
    specs = [
        aot.Spec(chip=chip, shape=shape, mode=mode, page_size=page_size, kv_dtype=kv_dtype, blocks=args.blocks)
        for chip, shape, mode, page_size, kv_dtype in itertools.product(*map(dict.fromkeys, columns))
    ]
    found = aot.compile_specs(specs, count=not args.no_count, keep=args.keep)
    rows = (row | _bound(row) for row in found)
    return (_print_json if args.json else _print_table)(rows, not args.no_count)


def _print_json(rows: Iterable[dict[str, Any]], is_counted: bool) -> int:
    """A row at a time: whoever stops it has what there is."""
    num_failed = 0
    print(f'{{"assumptions": {json.dumps(bounds.ASSUMPTIONS)}, "rows": [')
    for i, row in enumerate(rows):
        num_failed += row["status"] == "failed"
        print((", " if i else "") + json.dumps(row | {"target": _target(row)}), flush=True)
    print("]}")
    return int(num_failed > 0)


def _print_table(rows: Iterable[dict[str, Any]], is_counted: bool) -> int:
    num_failed, targets = 0, []
    print(_HEADER if is_counted else _HEADER[: _HEADER.index("VMEM")].rstrip())
    for row in rows:
        num_failed += row["status"] == "failed"
        print(_line(row), flush=True)
        targets += [target] if (target := _target(row)) else []
    if targets:
        print("\nTargets:", *targets, sep="\n  ")
    if is_counted:
        print("\nAssumed:", *bounds.ASSUMPTIONS, sep="\n  ")
    return int(num_failed > 0)


def _bound(row: dict[str, Any]) -> dict[str, Any]:
    if "loops" not in row:
        return {}
    bound, inner = bounds.bound(row), bounds.inner_loop(row)
    busy = {unit: inner.busy(unit, row["capacity"]) for unit in inner.slots}
    return {
        "bound": dataclasses.asdict(bound) | {"bound_by": bound.bound_by},
        "inner_loop": dataclasses.asdict(inner) | {"busy": busy},
    }


def _target(row: dict[str, Any]) -> str | None:
    """What there is to reach for the row, beside what it does."""
    if "loops" not in row or row["shape"] != "llama3-8b" or row["kv_dtype"] != "bfloat16":
        return None
    name, bound = f"{row['chip']} {row['shape']} {row['mode']}, page {row['page_size']}", row["bound"]
    if row["mode"] == "prefill":
        busy = bounds.inner_loop(row).busy("MXU", row["capacity"])
        verdict = _verdict(busy >= bounds.PREFILL_MXU_BUSY)
        return f"{name}: matrix slots busy {100 * busy:.0f}%, of {100 * bounds.PREFILL_MXU_BUSY:.0f}% wanted: {verdict}"
    if row["mode"] != "decode" or row["chip"] not in bounds.RPA_V3_BUNDLES:
        return None
    inner, others = bounds.RPA_V3_BUNDLES[row["chip"]]
    if row["page_size"] not in others:
        return None
    loop, rest, other = bound["bundles_per_512_tokens"], bound["other_bundles"], others[row["page_size"]]
    return (
        f"{name}: {loop:.0f} bundles per 512 tokens, RPA v3 {inner}; the rest of the program {rest}, RPA v3 {other}: "
        f"{_verdict(loop <= inner and rest <= other)}"
    )


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


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
