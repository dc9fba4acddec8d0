"""Compiles the TPU kernel for chips that are not here, and counts what its loops cost.

libtpu compiles for any TPU on any x86-64 Linux machine. A TPU core issues one bundle of instructions a cycle, in the
order the compiler chose, so the number of bundles in a loop's body is the cycles of one turn of it, waiting for
copies aside. Of each bundle the compiler also says which units it keeps busy. What follows from the counts is in
`bounds.py`, and `jax-paged kernels` prints both.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import AttentionCall

# The topology to compile for.
CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}

# 16 chips, for heads split over 8 of them and all of it twice.
SHARDED_TOPOLOGIES = {"v5e": "v5e:4x4", "v6e": "v6e:4x4"}

# num_q_heads, num_kv_heads, head_dim
SHAPES = {
    "llama3-8b": (32, 8, 128),
    "llama3-70b-tp8": (8, 1, 128),
    "qwen3-0.6b": (16, 8, 128),
    "qwen3-8b": (32, 8, 128),
    "gemma3-4b": (8, 4, 256),
    "smollm2-135m": (9, 3, 64),
}
# max_seqs, max_tokens
MODES = {"decode": (64, 64), "prefill": (1, 2048), "mixed": (64, 512)}
CONTEXT_TOKENS = 4096
# Of pools that the accelerators' kernels read under queries in bfloat16; float32 is the TPU's alone.
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")


def add_pool_arguments(parser: argparse.ArgumentParser, page_sizes: list[int]) -> None:
    """Gives `parser` the options on pools that the reports on both accelerators share."""
    parser.add_argument(
        "--page-sizes", nargs="+", default=page_sizes, type=_tokens, metavar="TOKENS",
        help=f"{', '.join(map(str, page_sizes))} by default",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtypes", nargs="+", default=["bfloat16"], choices=KV_DTYPES, metavar="DTYPE",
        help=f"of the pool, of {', '.join(KV_DTYPES)}; bfloat16, which queries are, by default",
    )  # fmt: skip


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of tokens, at least 1")
    return int(text)


# Of `tuning.Blocks`, and what each must be a multiple of.
BLOCK_UNITS = {"kv_tokens": 1, "compute_tokens": 128, "decode_tokens": 128, "q_tokens": 1}


def check_block_sizes(blocks: dict[str, int]) -> None:
    """Raises ValueError for what is not all four block sizes, and no more."""
    for name in (*BLOCK_UNITS, *blocks):
        if name not in blocks or name not in BLOCK_UNITS:
            what = "is missing from it" if name not in blocks else "is no block size"
            raise ValueError(f"{blocks!r}: {name} {what}; give {', '.join(BLOCK_UNITS)}")
        value, unit = blocks[name], BLOCK_UNITS[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < unit or value % unit:
            wanted = "a whole number of at least 1" if unit == 1 else f"a multiple of {unit}"
            raise ValueError(f"{name}={value!r} must be {wanted}")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One compilation: a chip, a named shape, a mode and a page size, in bfloat16 unless it says otherwise."""

    chip: str
    shape: str
    mode: str
    page_size: int
    kv_dtype: str = "bfloat16"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the attention call
    blocks: dict[str, int] | None = None  # None: those of `tuning.py`
    shards: int = 1  # more: under shard_map, each device with the shape's heads, on the chip's `SHARDED_TOPOLOGIES`

    def __post_init__(self) -> None:
        if self.blocks is not None:
            check_block_sizes(self.blocks)

    def call(self) -> "AttentionCall":
        from .api import AttentionCall

        heads, kv_heads, head_dim = SHAPES[self.shape]
        max_seqs, max_tokens = MODES[self.mode]
        pages_per_seq = CONTEXT_TOKENS // self.page_size
        return AttentionCall(
            max_tokens=max_tokens,
            num_q_heads=heads,
            num_kv_heads=kv_heads,
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


@dataclass(kw_only=True)
class Loop:
    """A loop's own bundles, those of loops inside it left out, and the instructions they hold per unit."""

    depth: int
    bundles: int = 0
    dmas: int = 0
    slots: dict[str, int] = dataclasses.field(default_factory=dict)
    line: int = 0  # of its first bundle, in the compiler's listing

    def busy(self, unit: str, capacity: dict[str, int]) -> float:
        """The share of a unit's slots that are used."""
        return self.slots.get(unit, 0) / (self.bundles * capacity[unit])


_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*((?:> ?)*)\{(.*)")


def count_loops(bundles: Iterable[str], utilization: Iterable[str]) -> tuple[list[Loop], dict[str, int]]:
    """Reads the compiler's final listing and its table of used units: the program itself comes first, at depth 0.

    Returns the loops in program order, and the slots per bundle of each unit.
    """
    units: list[str] = []
    capacity: dict[str, int] = {}
    rows: list[list[int]] = []
    for line in utilization:
        if "," in line and not units:
            units = [name.strip() for name in line.split(",")]
        elif units and re.fullmatch(r"[\s\d]+", line) and line.strip():
            numbers = [int(n) for n in line.split()]
            if not capacity:
                capacity = dict(zip(units, numbers))
            else:
                rows.append(numbers)
    loops = [Loop(depth=0)]
    newest = {0: loops[0]}  # by depth
    loop = loops[0]
    index = 0
    for number, line in enumerate(bundles):
        match = _BUNDLE.match(line)
        if not match:
            continue
        label, depth, text = match.group(1), match.group(2).count(">"), match.group(3)
        if label == "LB":
            newest[depth] = Loop(depth=depth, line=number)
            loops.append(newest[depth])
        # An empty bundle is printed without its depth.
        if text.strip(" }") or label == "LB":
            loop = newest[depth]
        loop.bundles += 1
        loop.dmas += text.count(" dma.")
        if index < len(rows):
            for unit, used in zip(units, rows[index]):
                loop.slots[unit] = loop.slots.get(unit, 0) + used
        index += 1
    return loops, capacity


_ALLOCATION = re.compile(r"\s*#allocation\d+\S* \[.*space=(\w+), size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+)")


def used_bytes(listing: Iterable[str]) -> dict[str, int]:
    """How far the program's allocations reach in each on-chip memory, registers spilled to it included."""
    reach: dict[str, int] = {}
    for line in listing:
        if match := _ALLOCATION.match(line):
            space, size, offset = match.groups()
            reach[space] = max(reach.get(space, 0), int(size, 16) + int(offset, 16))
    return reach


# --- the compiler, in a process of its own: it reads where to write its listings when it is loaded ---

# What lets libtpu compile where there is no TPU; to be set before jax is imported.
COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Other processes may have loaded it, merely by asking jax for its devices.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compile_specs(specs: Sequence[Spec], *, count: bool = True, keep: str | None = None) -> Iterator[dict[str, Any]]:
    """Compiles each spec; gives a dictionary of findings for each, in order, as they come.

    Args:
        specs: what to compile.
        count: read the compiler's listings, too; without, it writes none and is done sooner.
        keep: a folder for the listings, which are deleted otherwise.

    Returns:
        For each spec its fields, and `status`: "compiled"; "refused", by `supports`; or "failed", by the compiler; the
        last two with a `reason`. If compiled, the `blocks` used. If counted, too, `loops` and `capacity` as
        `count_loops` returns them, and `vmem_bytes` and `smem_bytes`, how far it reaches in both memories.

    Raises:
        ModuleNotFoundError: libtpu is not installed; the message names the extra that brings it.
        RuntimeError: the compiling process died; with the end of what it said.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "compiling for TPU needs libtpu, which pip install 'jax-paged[tpu]' brings; in a checkout, "
            "pip install -e '.[tpu]', or uv run --isolated --group tpu-compiler jax-paged kernels"
        )
    return _compile_elsewhere(specs, count, keep)


def _compile_elsewhere(specs: Sequence[Spec], count: bool, keep: str | None) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as said:
        dump = str(Path(keep or scratch).absolute())
        Path(dump).mkdir(parents=True, exist_ok=True)
        environment = os.environ | COMPILER_ENVIRONMENT
        if count:
            environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        job = {"dump": dump if count else None, "specs": [dataclasses.asdict(spec) for spec in specs]}
        command = [sys.executable, "-m", f"{__package__}.aot"]
        found = 0
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            # Open until this process ends, however it does: then the worker ends, too, in the middle of a compilation.
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            for line in worker.stdout:
                if line.startswith('{"chip"'):
                    found += 1
                    yield json.loads(line)
                if found == len(specs):
                    break
            worker.stdin.close()
        if found != len(specs):
            said.seek(0)
            raise RuntimeError(f"the compiling process ended with code {worker.returncode}: {said.read()[-2000:]}")


def _worker() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: os._exit(sys.stdin.read() != ""), daemon=True).start()
    for fields in job["specs"]:
        dump = None if job["dump"] is None else Path(job["dump"])
        print(json.dumps(_compile(Spec(**fields), dump)), flush=True)


def _compile(spec: Spec, dump: Path | None) -> dict[str, Any]:
    from .tpu import supports
    from .tuning import Blocks, checked_blocks, choose_blocks

    found: dict[str, Any] = dataclasses.asdict(spec)
    call = spec.call()
    if reason := supports(call):
        return found | {"status": "refused", "reason": reason}
    try:
        blocks = choose_blocks(call, spec.chip)
        if spec.blocks is not None:
            blocks = checked_blocks(call, Blocks(**spec.blocks), spec.chip)
    except ValueError as error:
        return found | {"status": "refused", "reason": str(error)}
    before = set() if dump is None else set(dump.iterdir())
    try:
        _compile_attention(spec, call, blocks)
    except Exception as error:  # the compiler's refusals have many types
        return found | {"status": "failed", "reason": " ".join(str(error).split())[:600]}
    found |= {"status": "compiled", "blocks": dataclasses.asdict(blocks)}
    if dump is None:
        return found
    listings = {p.name.split("-", 3)[-1]: p for p in set(dump.iterdir()) - before if "ragged_paged_attention" in p.name}
    with (
        listings["final_bundles.txt"].open() as bundles,
        listings["final_hlo-static-per-bundle-utilization.txt"].open() as utilization,
    ):
        loops, capacity = count_loops(bundles, utilization)
    with listings["post-delay-converter.txt"].open() as text:
        memory = used_bytes(text)
    return found | {
        "vmem_bytes": memory.get("vmem", 0),
        "smem_bytes": memory.get("smem", 0),
        "capacity": capacity,
        "loops": [dataclasses.asdict(loop) for loop in loops],
    }


def _compile_attention(spec: Spec, call: "AttentionCall", blocks: Any) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, PartitionSpec

    from .tpu import attention

    topology = CHIPS[spec.chip] if spec.shards == 1 else SHARDED_TOPOLOGIES[spec.chip]
    devices: Any = np.array(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)
    devices = devices[:1].reshape(1, 1) if spec.shards == 1 else devices.reshape(-1, spec.shards)
    kind = devices[0, 0].device_kind
    one_device = jax.sharding.SingleDeviceSharding(devices[0, 0])
    mesh = jax.sharding.Mesh(devices, ("copies", "heads"), axis_types=(AxisType.Auto,) * 2)
    abstract = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        (AxisType.Explicit,),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=kind, num_cores=devices[0, 0].num_cores, platform="tpu"
        ),
    )
    head_axes = {"q": 1, "kv_pages": 2, "sinks": 0}
    shapes = {
        "q": ((call.max_tokens, call.num_q_heads, call.head_dim), call.q_dtype),
        "kv_pages": ((call.num_pages, call.page_size, 2 * call.num_kv_heads, call.head_dim), call.kv_dtype),
        "kv_lens": ((call.max_seqs,), "int32"),
        "page_indices": ((call.max_seqs, call.pages_per_seq), "int32"),
        "cu_q_lens": ((call.max_seqs + 1,), "int32"),
        "num_seqs": ((1,), "int32"),
        "k_scale": ((), "float32"),
        "v_scale": ((), "float32"),
        "sinks": ((call.num_q_heads,), "float32"),
    }
    for name in ("k_scale", "v_scale", "sinks"):
        if not getattr(call, name):
            del shapes[name]
    specs = {name: PartitionSpec(*[None] * head_axes[name], "heads") for name in shapes if name in head_axes}
    specs |= {name: PartitionSpec() for name in shapes if name not in head_axes}
    arrays = {
        name: jax.ShapeDtypeStruct(
            tuple(n * spec.shards if head_axes.get(name) == axis else n for axis, n in enumerate(shape)),
            jax.numpy.dtype(dtype),
            sharding=one_device if spec.shards == 1 else jax.sharding.NamedSharding(mesh, specs[name]),
        )
        for name, (shape, dtype) in shapes.items()
    }

    def attend(arrays: dict[str, Any]) -> Any:
        return attention.ragged_paged_attention(
            **arrays,
            sm_scale=call.sm_scale,
            causal=call.causal,
            sliding_window=call.sliding_window,
            soft_cap=call.soft_cap,
            return_lse=call.return_lse,
            decode_only=call.decode_only,
            blocks=blocks,
        )

    if spec.shards == 1:
        with jax.sharding.use_abstract_mesh(abstract):
            jax.jit(attend).trace(arrays).lower(lowering_platforms=("tpu",)).compile()
        return
    by_head = PartitionSpec(None, "heads")
    out_specs = (by_head, by_head) if call.return_lse else by_head
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    jax.jit(sharded).trace(arrays).lower(lowering_platforms=("tpu",)).compile()


if __name__ == "__main__":
    _worker()
