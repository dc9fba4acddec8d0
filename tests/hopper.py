"""A thread block of a Hopper GPU, for `ptx.py` to run programs on: memories, barriers, copies and matrix products.

Written from NVIDIA's PTX ISA 9.0 (sections "mbarrier", "cp.async.bulk.tensor", "Tensors", "Asynchronous warpgroup level
matrix instructions" and "Proxies"), not from what makes the programs. What is asynchronous happens at a random time
before what waits for it, warps take turns at random, and what is not there yet is NaN: the target of a copy, the
accumulator of a product. Shared memory is kept twice, as ordinary instructions see it and as copies and products do
(the "async proxy"); what the former write reaches the latter by `fence.proxy.async`.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LANES = 32
WARPS = 4  # of a warpgroup
BLOCKED, EXIT = -1, -2  # what an instruction may say instead of where to go on
SHARED_START = 1024  # of dynamic shared memory: the first KiB is the system's on compute capability 9.0
_GLOBAL_START = 0x7F00_0000_0000
_GAP = 4096  # of bytes that are no buffer's, between any two
_POISON = 0xFF  # in all bytes: NaN in each float dtype


class PtxError(Exception):
    """The program does what it must not, or nothing more."""


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """What a TMA descriptor says. Dimensions from the outermost in, strides in elements."""

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int  # bytes of a row of the pattern; 16: none

    def __post_init__(self) -> None:
        """The limits of CUDA's cuTensorMapEncodeTiled."""
        bytes_ = [stride * self.itemsize for stride in self.strides]
        inner = self.box[-1] * self.itemsize
        fits = (
            1 <= len(self.sizes) <= 5
            and self.address % 16 == 0
            and bytes_[-1] == self.itemsize
            and all(stride % 16 == 0 and stride < 2**40 for stride in bytes_[:-1])
            and all(0 < size <= 2**32 for size in self.sizes)
            and all(0 < box <= 256 for box in self.box)
            and inner % 16 == 0
            and (self.swizzle == 16 or inner == self.swizzle)
        )
        if not fits:
            raise PtxError(f"no such tensor map, or none of those that are understood here: {self}")

    def elements(self, origin: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of the box there: the addresses of its elements, and which of them are in the tensor."""
        index = np.indices(self.box).reshape(len(self.box), -1) + np.array(origin)[:, None]
        inside = np.all((index >= 0) & (index < np.array(self.sizes)[:, None]), axis=0)
        return self.address + (index * np.array(self.strides)[:, None]).sum(axis=0) * self.itemsize, inside


class GlobalMemory:
    """Buffers that programs address. What lies between them may not be touched."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.zeros(num_bytes, np.uint8)
        self._is_buffer = np.zeros(num_bytes, bool)
        self._top = _GAP

    def put(self, array: np.ndarray) -> int:
        """Makes a buffer with these contents, and says its address."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start, end = self._top, self._top + data.size
        self.bytes[start:end], self._is_buffer[start:end] = data, True
        self._top = -(-(end + _GAP) // 256) * 256
        return _GLOBAL_START + start

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        start = address - _GLOBAL_START
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[start : start + size].view(dtype).reshape(shape).copy()

    def offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Where in `bytes` these addresses are, of `size` bytes each."""
        offsets = (addresses - np.uint64(_GLOBAL_START)).astype(np.int64)
        in_arena = (offsets >= 0) & (offsets < self.bytes.size)
        if (offsets % size).any() or not in_arena.all() or not self._is_buffer[offsets].all():
            raise PtxError(f"{size} bytes at {offsets}: not aligned, or in no buffer")
        return offsets


@dataclass
class Mbarrier:
    count: int
    pending: int
    bytes_due: int = 0
    phase: int = 0

    def arrive(self, times: int, bytes_due: int = 0) -> None:
        self.bytes_due += bytes_due
        self.pending -= times
        if self.pending < 0:
            raise PtxError(f"more arrivals at an mbarrier than its {self.count}")
        self._end_phase()

    def receive(self, num_bytes: int) -> None:
        self.bytes_due -= num_bytes
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes_due == 0:
            self.phase, self.pending = 1 - self.phase, self.count


@dataclass
class Copy:
    """A copy under way. It happens when `run` is called."""

    run: Callable[[], None]
    is_late: bool = False  # happens when nothing else can
    done: bool = False


@dataclass(eq=False)
class Product:
    """A warp's part of a wgmma: 16 rows of D [64, n] = A [64, k] B [k, n], or D += A B."""

    warp: "Warp"
    n: int
    k: int
    dtype: Any
    d: tuple[int, ...]  # registers
    a: Any  # registers, or a descriptor
    b: int
    accumulates: bool
    a_transposed: bool
    b_transposed: bool
    is_late: bool = False
    done: bool = False

    def run(self) -> None:
        """PTX ISA, "wgmma.mma_async", figures of the fragments of A and D."""
        lane, first_row = np.arange(LANES), 16 * (self.warp.index % WARPS)
        if isinstance(self.a, tuple):
            a = np.empty((16, self.k), np.float32)
            for i, register in enumerate(self.a):
                pair = self.warp.r[register].view(self.dtype).reshape(LANES, 2)
                for j in range(2):
                    a[lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2) + j] = pair[:, j]
        else:
            a = self._from_shared(self.a, 64, self.a_transposed)[first_row : first_row + 16]
        product = a @ self._from_shared(self.b, self.n, self.b_transposed).T
        for i, register in enumerate(self.d):
            value = product[lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2]
            held = self.warp.accumulators[register]
            held.value = (held.value + value if self.accumulates else value).astype(np.float32)

    def _from_shared(self, descriptor: int, rows: int, transposed: bool) -> np.ndarray:
        block = self.warp.block
        offsets = block.shared_offsets(operand_addresses(descriptor, rows, self.k, 2, transposed), 2)
        return block.async_shared.view(np.uint16)[offsets // 2].view(self.dtype).astype(np.float32)


def operand_addresses(descriptor: int, rows: int, k: int, itemsize: int, transposed: bool) -> np.ndarray:
    """[rows, k] addresses in shared memory of what a wgmma descriptor describes: A, or B transposed.

    The layouts are those that CUTLASS names for its GMMA descriptors (include/cute/arch/mma_sm90_desc.hpp).
    """
    start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = (16, 128, 64, 32)[descriptor >> 62]
    row, column = np.meshgrid(np.arange(rows), np.arange(k), indexing="ij")
    if (descriptor >> 49) & 7 or swizzle == 16 or (not transposed and k * itemsize > swizzle):
        raise PtxError(f"operand {descriptor:#x} is not understood here")
    if transposed:  # rows are side by side, as many as fill the swizzle; below one another, 8 of k
        side = swizzle // itemsize
        addresses = (row // side) * leading + (row % side) * itemsize + (column // 8) * stride + (column % 8) * swizzle
    else:  # 8 rows below one another
        addresses = (row // 8) * stride + (row % 8) * swizzle + column * itemsize
    return swizzled(start + addresses, swizzle)


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """PTX ISA, "Swizzling modes": the number of a 16-byte piece, xor that of the 128 bytes that it is in."""
    mask = swizzle // 16 - 1
    return addresses ^ (((addresses >> 7) & mask) << 4)


@dataclass
class Accumulator:
    """A register that a product is being added to. What the program sees in it meanwhile is NaN."""

    value: np.ndarray
    products: int = 0


class Warp:
    """32 threads, which go through the program together."""

    def __init__(self, block: "ThreadBlock", index: int, num_registers: int) -> None:
        self.block, self.index, self.warpgroup = block, index, index // WARPS
        self.r: list[Any] = [None] * num_registers
        self.lane = np.arange(LANES, dtype=np.uint32)
        self.pc = 0
        self.instructions = 0  # so many it has executed
        self.max_registers: int | None = None  # of a thread, by setmaxnreg
        self.waits_for: int | None = None  # the generation of the bar.sync that it is at
        self.unfenced: list[np.ndarray] = []  # bytes of shared memory that it wrote and copies do not see yet
        self.accumulators: dict[int, Accumulator] = {}
        self.open_stores: list[Copy] = []
        self.stores: deque[list[Copy]] = deque()  # groups
        self.open_products: list[Product] = []
        self.products: deque[list[Product]] = deque()  # groups
        self.num_products = 0

    def mark_written(self, offsets: np.ndarray, size: int) -> None:
        self.unfenced.append((offsets[:, None] + np.arange(size)).reshape(-1))

    def fence(self) -> None:
        for index in self.unfenced:
            self.block.async_shared[index] = self.block.shared[index]
        self.unfenced = []

    def issue(self, product: Product, operands: Any) -> None:
        """Starts a product, which has to be that of the other warps of the warpgroup."""
        issued = self.block.issued.setdefault(self.warpgroup, [])
        if self.num_products == len(issued):
            issued.append(operands)
        if issued[self.num_products] != operands:
            raise PtxError("warps of a warpgroup multiply different operands")
        self.num_products += 1
        self.open_products.append(product)
        for register in product.d:
            if register not in self.accumulators:
                value = self.r[register]
                nan = np.full(LANES, np.nan, np.float32)
                self.accumulators[register] = Accumulator(nan if value is None else value.view(np.float32))
                self.r[register] = nan
            self.accumulators[register].products += 1
        self.block.start(product)

    def retire_products(self, most: int) -> bool:
        """Whether at most so many groups are left; what the others computed is in the registers then."""
        while len(self.products) > most:
            if not all(product.done for product in self.products[0]):
                return False
            for product in self.products.popleft():
                for register in product.d:
                    accumulator = self.accumulators[register]
                    accumulator.products -= 1
                    if not accumulator.products:
                        self.r[register] = self.accumulators.pop(register).value
        return True

    def retire_stores(self, most: int) -> bool:
        while self.stores and all(copy.done for copy in self.stores[0]):
            self.stores.popleft()
        return len(self.stores) <= most


class ThreadBlock:
    """Its shared memory, its barriers, its warps, and what they have started."""

    def __init__(
        self,
        program: Any,
        *,
        index: int,
        threads: int,
        shared_bytes: int,
        params: dict[str, int],
        tensor_maps: dict[int, TensorMap],
        memory: GlobalMemory,
        seed: int,
    ) -> None:
        self.program, self.index, self.params, self.tensor_maps, self.memory = (
            program, index, params, tensor_maps, memory,
        )  # fmt: skip
        self._shared_end = SHARED_START + shared_bytes
        self.shared = np.full(-(-self._shared_end // 16) * 16, _POISON, np.uint8)
        self.async_shared = self.shared.copy()
        self.mbarriers: dict[int, Mbarrier] = {}
        self.bars: dict[int, list[int]] = {}  # by number: the generation, and how many warps have arrived
        self.warps = [Warp(self, w, program.num_registers) for w in range(threads // LANES)]
        self.copies: list[Copy] = []
        self.products: list[deque[Product]] = [deque() for _ in self.warps]
        self.issued: dict[int, list[Any]] = {}  # by warpgroup
        self._random = random.Random(f"{seed} {index}")

    def mbarrier(self, address: Any) -> Mbarrier:
        if int(address) not in self.mbarriers:
            raise PtxError(f"no mbarrier at {address}")
        return self.mbarriers[int(address)]

    def shared_offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        offsets = addresses.astype(np.int64)
        if (offsets % size).any() or offsets.min() < SHARED_START or offsets.max() + size > self._shared_end:
            raise PtxError(f"{size} bytes of shared memory at {offsets}: not aligned, or outside of it")
        return offsets

    def load(self, tensor: TensorMap, origin: list[int], address: int, mbarrier: Mbarrier) -> None:
        """Starts a copy into shared memory; what lies outside of the tensor is zero."""
        elements, inside = tensor.elements(origin)
        source = self.memory.offsets(elements[inside].astype(np.uint64), tensor.itemsize)
        target = self._box(tensor, address)
        self.shared[target] = self.async_shared[target] = _POISON

        def run() -> None:
            data = np.zeros((inside.size, tensor.itemsize), np.uint8)
            data[inside] = self.memory.bytes[source[:, None] + np.arange(tensor.itemsize)]
            self.shared[target] = self.async_shared[target] = data
            mbarrier.receive(data.size)

        self.start(Copy(run))

    def store(self, tensor: TensorMap, origin: list[int], address: int) -> Copy:
        """Starts a copy out of shared memory; what lies outside of the tensor is not written."""
        elements, inside = tensor.elements(origin)
        target = self.memory.offsets(elements[inside].astype(np.uint64), tensor.itemsize)
        source = self._box(tensor, address)[inside]
        return self.store_bytes(target[:, None] + np.arange(tensor.itemsize), source)

    def store_bytes(self, target: np.ndarray, source: np.ndarray) -> Copy:
        def run() -> None:
            self.memory.bytes[target] = self.async_shared[source]

        copy = Copy(run)
        self.start(copy)
        return copy

    def _box(self, tensor: TensorMap, address: int) -> np.ndarray:
        """[elements, itemsize]: where the bytes of a box at `address` lie in shared memory."""
        if address % max(128, 8 * tensor.swizzle if tensor.swizzle > 16 else 0):
            raise PtxError(f"a box of {tensor} at {address} of shared memory: not aligned")
        first = swizzled(address + np.arange(int(np.prod(tensor.box))) * tensor.itemsize, tensor.swizzle)
        return self.shared_offsets(first, tensor.itemsize)[:, None] + np.arange(tensor.itemsize)

    def start(self, thing: Copy | Product) -> None:
        """Begins something asynchronous, which may happen at once, or when nothing else can."""
        when = self._random.random()
        thing.is_late = when > 0.7
        if isinstance(thing, Copy):
            self.copies.append(thing)
        else:
            self.products[thing.warp.index].append(thing)
        if when < 0.3:
            self._finish(thing)

    def _finish(self, thing: Copy | Product) -> None:
        if isinstance(thing, Copy):
            self.copies.remove(thing)
            thing.run()
            thing.done = True
            return
        queue = self.products[thing.warp.index]
        while not thing.done:  # in their order
            queue[0].run()
            queue.popleft().done = True

    def run(self) -> None:
        """Runs the program to its end, in all warps."""
        running, turn, idle = list(self.warps), 0, 0
        while running:
            if turn % 128 == 0:  # warps or warpgroups run far ahead of others, and then others do
                speed = [self._random.choice((1, 1, 40)) for _ in self.warps]
                together = self._random.choice((1, WARPS))
                eagerness = self._random.choice((0.0, 0.05, 0.5))
            turn += 1
            weights = [speed[w.index // together] for w in running]
            progress = self._take_turn(self._random.choices(running, weights)[0], running)
            if self._random.random() < eagerness:
                progress |= self._finish_something(even_if_late=False)
            idle = 0 if progress else idle + 1
            if idle > 10:
                idle = 0
                can_go_on = [self._take_turn(w, running) for w in list(running)]
                if not any(can_go_on) and not self._finish_something():
                    where = "; ".join(f"warp {w.index} at {self.program.text[w.pc]}" for w in running)
                    raise PtxError(f"all wait for ever: {where}")
        while self._finish_something():
            pass
        if any(b.bytes_due or b.pending != b.count for b in self.mbarriers.values()):
            raise PtxError("the program ended in the middle of a phase of an mbarrier")

    def _take_turn(self, warp: Warp, running: list[Warp]) -> bool:
        """Executes some of a warp's instructions; whether there was one that it could."""
        code, start = self.program.code, warp.instructions
        for _ in range(self._random.choice((1, 5, 30, 200))):
            result = code[warp.pc](warp)
            if result == BLOCKED:
                break
            warp.instructions += 1
            if result == EXIT:
                if warp.open_stores or not warp.retire_stores(most=0):
                    raise PtxError("a warp ends while copies read its shared memory")
                running.remove(warp)
                break
            warp.pc = warp.pc + 1 if result is None else result
        return warp.instructions > start

    def _finish_something(self, even_if_late: bool = True) -> bool:
        """Does one thing that is under way, if any is: copies in any order, the products of a warp in theirs."""
        under_way: list[Any] = list(self.copies)
        under_way += [queue[0] for queue in self.products if queue]
        ready = [x for x in under_way if not x.is_late]
        if not ready and even_if_late:
            ready = under_way[-1:] if self._random.random() < 0.5 else under_way
        if not ready:
            return False
        self._finish(self._random.choice(ready))
        return True
