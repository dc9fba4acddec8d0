"""Compiles the kernel for GPUs that are not here, and reports what it takes of them.

XLA and ptxas compile for any GPU on any x86-64 Linux machine. They need three packages, in an environment of their
own since the CUDA plugin complains at each start where there is no driver:

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc
    python -m jax_paged.kernels.gpu.aot --gpus h100 h200 --shapes llama3-8b --modes decode --page-sizes 16 64

Exits with 1 if anything spills registers or does not compile; what the kernel refuses is no failure. With nvdisasm
(pip install nvidia-cuda-nvdisasm) it says what a block of keys costs a consumer, too: see `sass.py`.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..aot import CONTEXT_TOKENS, SHAPES, add_pool_arguments
from ..api import AttentionCall
from . import ragged_paged_attention, supports, why_not_on
from .attention import Kernel
from .launch import kernels_of
from .sass import consumer_loop
from .tiles import ROWS

SMEM_PER_SM = 228 * 1024
SMEM_RESERVED = 1024  # per block (CUDA Programming Guide, section on compute capability 9.x)
REGISTERS_PER_SM = 65536
FMAS_PER_CYCLE = 2048  # of an SM's tensor cores, in bfloat16: 989 TFLOP/s at 1.83 GHz (H100's data sheet)


@dataclass(frozen=True)
class Gpu:
    """What the compiler is told. Sources: NVIDIA's data sheets of the three."""

    name: str
    capability: str
    num_sms: int
    memory_bytes: int
    bytes_per_s: float
    l2_bytes: int
    clock_ghz: float


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 80 * 10**9, 3.35e12, 50 * 2**20, 1.98),
    "h200": Gpu("NVIDIA H200", "9.0", 132, 141 * 10**9, 4.8e12, 50 * 2**20, 1.98),
    "b200": Gpu("NVIDIA B200", "10.0", 148, 180 * 10**9, 8.0e12, 126 * 2**20, 1.97),
}

# max_seqs, max_tokens
MODES = {"decode": (32, 32), "prefill": (1, 4096), "mixed": (64, 512)}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One call to compile, with queries in bfloat16."""

    shape: str
    mode: str
    page_size: int
    kv_dtype: str = "bfloat16"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the attention call

    def call(self) -> AttentionCall:
        num_q_heads, num_kv_heads, head_dim = SHAPES[self.shape]
        max_seqs, max_tokens = MODES[self.mode]
        pages_per_seq = CONTEXT_TOKENS // self.page_size
        return AttentionCall(
            max_tokens=max_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_dtype="bfloat16",
            kv_dtype=self.kv_dtype,
            num_pages=max_seqs * pages_per_seq,
            page_size=self.page_size,
            max_seqs=max_seqs,
            pages_per_seq=pages_per_seq,
            sm_scale=head_dim**-0.5,
            decode_only=self.mode == "decode",
            **self.options,
        )


def compile_spec(gpu: Gpu, spec: Spec) -> list[dict[str, Any]]:
    """Compiles a call; one entry per kernel in it, or one that has `refused`, why it was not compiled."""
    call = spec.call()
    what = {"gpu": gpu.name, **dataclasses.asdict(spec)}
    if reason := why_not_on(gpu.capability) or supports(call):
        return [what | {"refused": reason}]
    start = time.perf_counter()
    with _dumped() as dump, jax.sharding.use_abstract_mesh(_mesh(gpu)):
        _lower(gpu, call).compile()
        found = _read_ptxas(dump)
        for file in dump.glob("*.sass_ctrl"):
            if loop := consumer_loop(file.read_text()):
                found[file.stem.rpartition("_")[0]] |= dataclasses.asdict(loop)
    seconds = round(time.perf_counter() - start, 1)
    kernels = kernels_of(call, gpu.num_sms)
    # A kernel that was compiled in this process is not compiled again: an H100's is an H200's.
    keys = {name: (gpu.capability, gpu.num_sms, name, call) for name in kernels}
    _REPORTED.update({keys[name]: entry for name, entry in found.items()})
    if missing := [name for name in kernels if keys[name] not in _REPORTED]:
        raise RuntimeError(f"ptxas said nothing of {', '.join(missing)}")
    return [
        what | {"compile_s": seconds, **_resources(gpu, kernel, _REPORTED[keys[name]])}
        for name, kernel in kernels.items()
    ]


_REPORTED: dict[tuple[str, int, str, AttentionCall], dict[str, int]] = {}


def _resources(gpu: Gpu, kernel: Kernel, ptxas: dict[str, int]) -> dict[str, Any]:
    threads = 128 * kernel.warpgroups
    smem = kernel.smem_bytes
    blocks = min(
        SMEM_PER_SM // (smem + SMEM_RESERVED), REGISTERS_PER_SM // (ptxas["registers"] * threads), 2048 // threads
    )
    return {
        "kernel": kernel.name,
        **ptxas,
        "smem_bytes": smem,
        "threads": threads,
        "blocks_per_sm": blocks,
        "bytes_in_flight_per_sm": blocks * kernel.bytes_in_flight,
        "block_kv": kernel.tiles.block_kv,
        "stages": kernel.tiles.stages,
        # A consumer's two products of 64 rows with a block, and the block's K and V from memory to one SM.
        "tensor_cycles": 2 * ROWS * kernel.tiles.block_kv * kernel.head_dim // FMAS_PER_CYCLE,
        "memory_cycles": round(
            kernel.bytes_in_flight / kernel.tiles.stages / gpu.bytes_per_s * gpu.num_sms * gpu.clock_ghz * 1e9
        ),
    }


_PTXAS = re.compile(
    r"entry function '(?P<kernel>\w+)_mosaic_gpu_kernel'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes"
    r" spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def _read_ptxas(dump: Path) -> dict[str, dict[str, int]]:
    text = "".join(file.read_text() for file in dump.glob("*.ptxas"))
    return {
        match["kernel"]: {
            "registers": int(match["registers"]),
            "spill_bytes": int(match["stores"]) + int(match["loads"]),
        }
        for match in _PTXAS.finditer(text)
    }


def _lower(gpu: Gpu, call: AttentionCall) -> Any:
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="cuda", target_config=_target(gpu), topology="1x1x1").devices[0]
    on_device = jax.sharding.SingleDeviceSharding(device)

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on_device)

    arrays = (
        array((call.max_tokens, call.num_q_heads, call.head_dim), call.q_dtype),
        array((call.num_pages, call.page_size, 2 * call.num_kv_heads, call.head_dim), call.kv_dtype),
        array((call.max_seqs,)),
        array((call.max_seqs, call.pages_per_seq)),
        array((call.max_seqs + 1,)),
        array((1,)),
    )
    options = {"sm_scale", "causal", "sliding_window", "soft_cap", "return_lse", "decode_only"}
    static = {name: getattr(call, name) for name in options}
    return jax.jit(lambda *xs: ragged_paged_attention(*xs, **static)).trace(*arrays).lower(lowering_platforms=("cuda",))


def _mesh(gpu: Gpu) -> Any:
    device = jax.sharding.AbstractDevice(device_kind=gpu.name, num_cores=gpu.num_sms, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Explicit,), abstract_device=device)


def _target(gpu: Gpu) -> str:
    """XLA's GpuTargetConfigProto, as text."""
    major, minor = gpu.capability.split(".")
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
          shared_memory_per_block: 49152  shared_memory_per_core: {SMEM_PER_SM}
          shared_memory_per_block_optin: {SMEM_PER_SM - SMEM_RESERVED}
          core_count: {gpu.num_sms}  fpus_per_core: 128  clock_rate_ghz: {gpu.clock_ghz}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          memory_bandwidth: {int(gpu.bytes_per_s)}  l2_cache_size: {gpu.l2_bytes}
          device_memory_size: {gpu.memory_bytes}
          cuda_compute_capability {{ major: {major}  minor: {minor} }}
          registers_per_core_limit: {REGISTERS_PER_SM}  registers_per_block_limit: {REGISTERS_PER_SM}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9  minor: 10 }}
        runtime_version {{ major: 13  minor: 0  patch: 0 }}
        device_description_str: "{gpu.name}"
    """


@contextlib.contextmanager
def _dumped() -> Iterator[Path]:
    """A folder for all that Mosaic GPU makes of the kernels that are compiled while inside."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]


def missing_toolchain() -> str | None:
    """Which of the packages are missing, in words, or None if none is."""
    needed = {"jax_cuda13_plugin": "jax-cuda13-plugin", "jax_plugins.xla_cuda13": "jax-cuda13-pjrt"}
    missing = [package for module, package in needed.items() if _is_missing(module)]
    missing += ["nvidia-cuda-nvcc"] if _is_missing("nvidia") else []
    return f"compiling for NVIDIA GPUs needs {', '.join(missing)}; pip install {' '.join(missing)}" if missing else None


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def start_toolchain() -> None:
    """Settings that must precede the first use of a device."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # or the plugin refuses to start without a driver
    jax.config.update("jax_platforms", "cuda,cpu")


def format_table(results: list[dict[str, Any]]) -> str:
    head = f"{'gpu':<21} {'shape':<14} {'kernel':<22} {'page':>4} {'kv':<13}  {'regs':>4} {'spills':>6} {'smem KiB':>8}"
    head += f" {'blocks/SM':>9} {'KiB in flight/SM':>16} {'block':>5} {'stages':>6} {'compile s':>9}"
    lines = [f"{head}  cycles a block: issue tensor memory"]
    for r in results:
        kernel = f"{r['mode']}: {r['kernel']}" if "kernel" in r else r["mode"]
        start = f"{r['gpu']:<21} {r['shape']:<14} {kernel:<22} {r['page_size']:>4} {r['kv_dtype']:<13} "
        if "refused" in r:
            lines.append(f"{start} refused: {r['refused']}")
            continue
        lines.append(
            f"{start} {r['registers']:>4}"
            f" {r['spill_bytes']:>6} {r['smem_bytes'] / 1024:>8.1f} {r['blocks_per_sm']:>9}"
            f" {r['bytes_in_flight_per_sm'] / 1024:>16.0f} {r['block_kv']:>5} {r['stages']:>6} {r['compile_s']:>9}"
            f"  {r.get('issue_cycles', '-'):>21} {r['tensor_cycles']:>6} {r['memory_cycles']:>6}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    add_pool_arguments(parser, page_sizes=[16, 64, 128])
    parser.add_argument("--none-refused", action="store_true", help="exit with 1 where the kernel refuses a call, too")
    parser.add_argument("--json", action="store_true", help="everything found, as JSON")
    args = parser.parse_args(argv)
    if missing := missing_toolchain():
        print(missing, file=sys.stderr)
        return 2
    start_toolchain()
    results: list[dict[str, Any]] = []
    for gpu, shape, mode, page_size, kv_dtype in itertools.product(
        args.gpus, args.shapes, args.modes, args.page_sizes, args.kv_dtypes
    ):
        found = compile_spec(GPUS[gpu], Spec(shape=shape, mode=mode, page_size=page_size, kv_dtype=kv_dtype))
        if not args.json:
            print(format_table(found).split("\n", int(bool(results)))[-1], flush=True)
        results += found
    if args.json:
        print(json.dumps({"jax": jax.__version__, "rows": results}))
    refused = args.none_refused and any("refused" in r for r in results)
    return int(refused or any(r.get("spill_bytes") for r in results))


if __name__ == "__main__":
    sys.exit(main())
