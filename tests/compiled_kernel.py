"""The GPU kernel as its compiler makes it, on a CPU: each launch is compiled to PTX, and `ptx.py` runs that.

`Compiled` is `ragged_paged_attention` of `kernels.gpu` with its kernels run so. It needs the packages that
`kernels.gpu.aot` names. What the host's part of a launch does (which operand is which parameter, the descriptors) is
read from Mosaic GPU's dump of it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hopper import GlobalMemory, TensorMap, ThreadBlock
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding, use_abstract_mesh
from ptx import Program

from jax_paged.kernels import gpu
from jax_paged.kernels.gpu import _compat, aot, attention
from jax_paged.kernels.gpu.work import Work

_TENSOR_MAPS = 0x7E00_0000_0000  # where the descriptors are
_GPU = aot.GPUS["h200"]


@dataclass
class Launch:
    """What the host's part does."""

    grid: int = 0
    threads: int = 0
    shared_bytes: int = 0
    arguments: list[int | None] = field(default_factory=list)  # operands of the kernel, or None: the descriptors
    tensor_maps: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # of which operand


@dataclass
class Run:
    """What the emulator did."""

    kernel: attention.Kernel
    ptxas_registers: int
    blocks: list[ThreadBlock]


class Compiled:
    """The GPU's `ragged_paged_attention`, for a GPU of so many SMs. `change` may alter the PTX before it runs."""

    def __init__(self, num_sms: int = 3, change: Callable[[str], str] | None = None) -> None:
        self.num_sms, self.change, self.seed = num_sms, change, 0
        self.runs: list[Run] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `kernels.gpu.ragged_paged_attention`. Each call takes its random turns from the next seed."""
        self.seed += 1
        with (
            mock.patch.object(_compat, "num_sms", return_value=self.num_sms),
            mock.patch.object(attention.Kernel, "__call__", lambda kernel, *operands: self._launch(kernel, *operands)),
            jax.default_device(jax.devices("cpu")[0]),
        ):
            return gpu.ragged_paged_attention(*args, **kwargs)

    def _launch(
        self, kernel: attention.Kernel, work: Work, page_indices: Any, scales: Any, q: Any, kv_pages: Any
    ) -> tuple[jax.Array, jax.Array]:
        operands = [np.asarray(x) for x in (*work, page_indices, kernel.in_powers_of_two(scales), q, kv_pages)]
        results = [np.full(s.shape, np.nan, s.dtype) for s in kernel.results(work.items.shape[0])]
        ptx, launch, registers = _compile(kernel, tuple((x.shape, x.dtype) for x in operands))
        program = Program(self.change(ptx) if self.change else ptx)
        memory = GlobalMemory(sum(x.nbytes for x in (*operands, *results)) + (1 << 17))
        addresses = [memory.put(x) for x in (*operands, *results)]
        itemsizes = [x.dtype.itemsize for x in (*operands, *results)]
        maps = {
            _TENSOR_MAPS + 128 * i: TensorMap(address=addresses[operand], itemsize=itemsizes[operand], **what)
            for i, (operand, what) in enumerate(launch.tensor_maps)
        }
        given = [_TENSOR_MAPS if operand is None else addresses[operand] for operand in launch.arguments]
        blocks = [
            ThreadBlock(
                program, index=i, threads=launch.threads, shared_bytes=launch.shared_bytes, memory=memory,
                params=dict(zip(program.params, given, strict=True)), tensor_maps=maps, seed=self.seed,
            )
            for i in range(launch.grid)
        ]  # fmt: skip
        with np.errstate(all="ignore"):
            for block in blocks:
                block.run()
        self.runs.append(Run(kernel, registers, blocks))
        out, lse = (memory.get(a, x.shape, x.dtype) for a, x in zip(addresses[-2:], results))
        return jnp.asarray(out), jnp.asarray(lse)


@cache
def _compile(kernel: attention.Kernel, shapes: tuple[Any, ...]) -> tuple[str, Launch, int]:
    """PTX, launch and ptxas's count of registers to a thread, of a kernel with such operands."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=aot._target(_GPU), topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]

    def call(items: Any, num_items: Any, *rest: Any) -> Any:
        return _KERNEL_CALL(kernel, Work(items, num_items), *rest)

    with aot._dumped() as dump:
        with use_abstract_mesh(aot._mesh(_GPU)):
            jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).compile()
        (ptx,), (ptxas,), (passes,) = (dump.glob(f"*.{x}") for x in ("ptx", "ptxas", "mlir-passes.log"))
        with passes.open() as lines:
            launch = _read_launch(lines)
        registers = re.search(r"Used (\d+) registers", ptxas.read_text())
        assert registers is not None
        return ptx.read_text(), launch, int(registers[1])


_KERNEL_CALL = attention.Kernel.__call__  # before it is patched


def _read_launch(lines: Iterator[str]) -> Launch:
    """From the first of the modules in the compiler's log of passes whose kernel is a function of its own."""
    function: list[str] = []
    for line in lines:
        if "func.func" in line:
            function = []
        function.append(line)
        if "gpu.launch_func" in line:
            break
    launch = Launch()
    position: dict[str, int] = {}  # of the operand whose pointer this value is, or points to
    arrays: dict[str, list[int]] = {}  # what was stored in this small array
    elements: dict[str, str] = {}  # pointers into such arrays
    of_operand: dict[str, int] = {}  # memrefs
    last = -1  # the operand of the memref last named
    for line in function:
        if m := re.search(r"(%\w+) = llvm.getelementptr %\w+\[(\d+)\] : \(!llvm.ptr\) -> !llvm.ptr, !llvm.ptr", line):
            position[m[1]] = int(m[2])
        elif m := re.search(r"(%\w+) = llvm.load (%\w+) : !llvm.ptr -> !llvm.ptr", line):
            position[m[1]] = position.get(m[2], 0)
        elif m := re.search(r"(%\w+) = builtin.unrealized_conversion_cast .*from_kernel_arg_idx = (\d+)", line):
            of_operand[m[1]] = int(m[2])
        elif m := re.search(r"(%\w+) = memref.\w+ (%\w+)", line):
            last = of_operand[m[1]] = of_operand[m[2]]
        elif m := re.search(r"(%\w+) = (?:memref.alloca\(\) : memref<\d+xi64>|llvm.alloca .*array<\d+ x i64>)", line):
            arrays[m[1]] = []  # jax 0.12 has the former, 0.11 the latter
        elif (m := re.search(r"(%\w+) = llvm.getelementptr (%\w+)\[\d+\] : .*, i64", line)) and m[2] in arrays:
            elements[m[1]] = m[2]
        elif m := re.search(r"(?:memref|llvm).store %c(\d+)_i64\w*, (%\w+)", line):
            arrays[elements.get(m[2], m[2])].append(int(m[1]))
        elif "call @mosaic_gpu_init_tma_desc" in line:
            sizes, strides, box = (tuple(a) for a in list(arrays.values())[-3:])
            swizzle = int(re.findall(r"%c(\d+)_i64", line)[-1])
            launch.tensor_maps.append((last, {"sizes": sizes, "strides": strides, "box": box, "swizzle": swizzle}))
        elif m := re.search(r"gpu.launch_func .* blocks in \(%c(\d+)\D.* threads in \(%c(\d+)\D", line):
            launch.grid, launch.threads = int(m[1]), int(m[2])
            launch.shared_bytes = int(re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", line)[0])
            launch.arguments = [position.get(x) for x in re.findall(r"(%\w+) : !llvm", line)]
            return launch
    raise ValueError("no launch in the dump")
