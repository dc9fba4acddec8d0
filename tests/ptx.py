"""Runs programs in PTX, the instructions that Pallas Mosaic GPU compiles kernels to, on a `hopper.ThreadBlock`.

Instructions become functions of a warp that compute all of its 32 threads' values with NumPy. Those that our kernels
do not contain are refused by name. Branches must go one way in all threads of a warp. Which values there are of each
instruction is said in NVIDIA's PTX ISA 9.0, section "Instructions".
"""

import operator
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hopper import BLOCKED, EXIT, LANES, SHARED_START, Copy, Mbarrier, Product, PtxError, Warp

Step = Callable[..., Any]  # of a warp, and of which threads take part where these are not all
_BITS = {"pred": 1, "s8": 16} | {f"{k}{bits}": bits for bits in (16, 32, 64) for k in "busf"}
_STORED = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # registers are bits
_NUMBER = {f"{k}{bits}": _STORED[bits] for bits in (16, 32, 64) for k in "bu"} | {
    "pred": np.bool_,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "f32": np.float32,
}  # fmt: skip
_FLOATS = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


class Program:
    """The one kernel of a PTX file."""

    def __init__(self, ptx: str) -> None:
        head, body = re.split(r"\n\{\n", ptx[ptx.index(".entry") :], maxsplit=1)
        self.params = re.findall(r"\w+_param_\d+", head)
        self.labels: dict[str, int] = {}
        self.code: list[Step] = []
        self.text: list[str] = []
        self._registers: dict[str, int] = {}
        for statement, scope in _statements(body[: body.rindex("}")]):
            if statement.endswith(":"):
                self.labels[scope + statement[:-1]] = len(self.code)
            else:
                self.text.append(statement)
                self.code.append(_Instruction(self, statement, scope).compile())

    @property
    def num_registers(self) -> int:
        return len(self._registers)

    def register(self, name: str) -> int:
        return self._registers.setdefault(name, len(self._registers))


def _statements(body: str) -> list[tuple[str, str]]:
    """Instructions and labels, each with the block in braces that its own names are of."""
    body = re.sub(r"//[^\n]*|^\s*\.(loc|shared)[^\n]*", "", body, flags=re.MULTILINE)
    result, scope = [], ""
    # In a statement, braces group operands; before one they open or close a block.
    for number, match in enumerate(re.finditer(r"\s*(?:([{}])|([$\w]+):\s|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)", body)):
        brace, label, statement = match.groups()
        if brace:
            scope = f"{number}:" if brace == "{" else ""
        elif label:
            result.append((f"{label}:", scope))
        elif statement and not statement.startswith(".reg"):
            result.append((" ".join(statement.split()), scope))
    return result


def _split(operands: str) -> list[str]:
    """At the commas outside of any brackets."""
    result, depth = [""], 0
    for c in operands:
        depth += (c in "[{") - (c in "]}")
        if c == "," and not depth:
            result.append("")
        else:
            result[-1] += c
    return [operand.strip() for operand in result if operand.strip()]


class _Instruction:
    """One instruction, on its way to a function."""

    def __init__(self, program: Program, statement: str, scope: str) -> None:
        match = re.match(r"(?:@(!?)(%?\w+) )?([\w.:]+)\s*(.*)$", statement)
        if match is None:
            raise NotImplementedError(statement)
        self.program, self.statement, self.scope = program, statement, scope
        self.negated, self.predicate, self.opcode, operands = match.groups()
        self.name, *self.parts = self.opcode.split(".")
        self.kind = self.parts[-1] if self.parts else ""
        self.operands = _split(operands)

    def compile(self) -> Step:
        if (make := getattr(self, f"op_{self.name}", None)) is None:
            make = self._binary if self.name in _BINARY else None
        if make is None:
            raise NotImplementedError(f"instruction not understood here: {self.statement}")
        step: Step = make()
        if self.predicate is None:
            return step
        register, negated = self.program.register(self._scoped(self.predicate)), bool(self.negated)

        def guarded(w: Warp) -> Any:
            mask = w.r[register] ^ negated
            if self.name != "bra":
                return step(w, mask) if mask.any() else None
            if mask.any() != mask.all():
                raise PtxError(f"threads of a warp part: {self.statement}")
            return step(w) if mask[0] else None

        return guarded

    # --- operands ---

    def _scoped(self, name: str) -> str:
        return name if name.startswith("%") else self.scope + name

    def register(self, i: int) -> int:
        return self.program.register(self._scoped(self.operands[i]))

    def registers(self, i: int) -> tuple[int, ...]:
        return tuple(self.program.register(self._scoped(x)) for x in re.findall(r"[%\w]+", self.operands[i]))

    def value(self, i: int, kind: str = "") -> Step:
        """The operand's values in all threads, as numbers of `kind` (the instruction's own if none is said)."""
        kind, text = kind or self.kind, self.operands[i]
        number = _NUMBER[kind]
        if text == "%tid.x":
            return lambda w: (w.lane + np.uint32(LANES * w.index)).view(number)
        if text == "%ctaid.x":
            return lambda w: np.full(LANES, w.block.index, np.uint32).view(number)
        if text.startswith("__dynamic_shmem__"):
            return lambda w: np.full(LANES, SHARED_START, np.uint64)
        if "_param_" in text:
            return lambda w: np.full(LANES, w.block.params[text], np.uint64)
        if re.match(r"-?\d", text):
            constant = np.full(LANES, _constant(text, kind))
            return lambda w: constant
        register = self.register(i)
        return lambda w: w.r[register].view(number)

    def address(self, i: int) -> Step:
        match = re.fullmatch(r"\[\s*(%?\w+)(?:\+(-?\d+))?\s*\]", self.operands[i])
        if match is None:
            raise NotImplementedError(self.statement)
        offset = np.uint64(int(match[2] or 0))
        if match[1].startswith("__dynamic_shmem__"):
            return lambda w: np.full(LANES, SHARED_START, np.uint64) + offset
        register = self.program.register(self._scoped(match[1]))
        return lambda w: w.r[register].astype(np.uint64) + offset

    def result(self, compute: Step, kind: str = "") -> Step:
        """Writes what `compute` gives into the first operand, as bits."""
        register, bits = self.register(0), _STORED[_BITS[kind or self.kind]]

        def step(w: Warp) -> None:
            w.r[register] = compute(w).view(bits)

        return step

    # --- control ---

    def op_bra(self) -> Step:
        label = self.operands[0] if self.operands[0].startswith("$") else self.scope + self.operands[0]
        return lambda w: self.program.labels[label]

    def op_ret(self) -> Step:
        return lambda w: EXIT

    def op_bar(self) -> Step:
        number, threads = self.value(0, "u32"), int(self.operands[1]) if len(self.operands) > 1 else None

        def step(w: Warp) -> int | None:
            bar = w.block.bars.setdefault(int(number(w)[0]), [0, 0])
            if w.waits_for is None:
                w.waits_for = bar[0]
                bar[1] += 1
                if bar[1] == (threads // LANES if threads else len(w.block.warps)):
                    bar[:] = bar[0] + 1, 0
            if bar[0] == w.waits_for:
                return BLOCKED
            w.waits_for = None
            return None

        return step

    def op_setmaxnreg(self) -> Step:
        return lambda w: setattr(w, "max_registers", int(self.operands[0]))

    def op_elect(self) -> Step:
        elected, is_elected = (self.program.register(x) for x in self.operands[0].split("|"))

        def step(w: Warp) -> None:
            w.r[elected], w.r[is_elected] = np.zeros(LANES, np.uint32), w.lane == 0

        return step

    def op_prefetch(self) -> Step:
        return lambda w, mask=None: None

    def op_fence(self) -> Step:
        return (lambda w: w.fence()) if self.opcode.startswith("fence.proxy.async") else (lambda w: None)

    def op_shfl(self) -> Step:
        value, lane = self.value(1), self.value(2, "u32")
        pick = {"idx": lambda w: lane(w) % LANES, "bfly": lambda w: w.lane ^ lane(w)}[self.parts[1]]
        return self.result(lambda w: value(w)[pick(w)])

    # --- mbarriers ---

    def op_mbarrier(self) -> Step:
        if self.parts[0] == "try_wait":
            return self._wait()
        if self.parts[0] == "init":
            made, count = self.address(0), self.value(1, "u32")

            def init(w: Warp, mask: Any) -> None:
                for at, n in zip(made(w)[mask], count(w)[mask], strict=True):
                    w.block.mbarriers[int(at)] = Mbarrier(int(n), int(n))

            return init
        address, operand = self.address(1), self.value(2, "u32")

        def arrive(w: Warp, mask: Any = slice(None)) -> None:
            for at, n in zip(address(w)[mask], operand(w)[mask], strict=True):
                mbarrier, expects = w.block.mbarrier(at), "expect_tx" in self.parts
                phase = mbarrier.phase
                mbarrier.arrive(1 if expects else int(n), bytes_due=int(n) if expects else 0)
                if "noComplete" in self.parts and mbarrier.phase != phase:
                    raise PtxError(f"a phase is completed by what must not complete it: {self.statement}")

        return arrive

    def _wait(self) -> Step:
        done, address, parity = self.register(0), self.address(1), self.value(2, "u32")

        def step(w: Warp) -> int | None:
            if w.block.mbarrier(address(w)[0]).phase == int(parity(w)[0]):
                return BLOCKED  # rather than try again
            w.r[done] = np.ones(LANES, bool)
            return None

        return step

    # --- copies ---

    def op_cp(self) -> Step:
        if self.kind == "commit_group":
            return lambda w: (w.stores.append(w.open_stores), setattr(w, "open_stores", []))[1]
        if "wait_group" in self.parts:
            return lambda w: None if w.retire_stores(int(self.operands[0])) else BLOCKED
        if "tensor" in self.parts:
            return self._tensor_copy()
        target, source, size = self.address(0), self.address(1), self.value(2, "u32")

        def step(w: Warp, mask: Any) -> None:
            for to, at, n in zip(target(w)[mask], source(w)[mask], size(w)[mask], strict=True):
                offsets = np.arange(0, n, 16, dtype=np.uint64)
                where = (w.block.memory.offsets(to + offsets, 16), w.block.shared_offsets(at + offsets, 16))
                w.open_stores.append(w.block.store_bytes(*(x[:, None] + np.arange(16) for x in where)))

        return step

    def _tensor_copy(self) -> Step:
        is_shared = [part.startswith("shared") for part in self.parts]
        loads = is_shared.index(True) < self.parts.index("global")  # the target is named first
        tensor = self.operands[1 if loads else 0]
        descriptor, *coordinates = (self.program.register(name) for name in re.findall(r"%\w+", tensor))
        address, mbarrier = self.address(0 if loads else 1), self.address(2) if loads else None

        def step(w: Warp, mask: Any) -> None:
            for lane in np.flatnonzero(mask):
                origin = [int(w.r[c].view(np.int32)[lane]) for c in reversed(coordinates)]
                at, tensor_map = int(address(w)[lane]), w.block.tensor_maps[int(w.r[descriptor][lane])]
                if mbarrier is not None:
                    w.block.load(tensor_map, origin, at, w.block.mbarrier(mbarrier(w)[lane]))
                else:
                    copy: Copy = w.block.store(tensor_map, origin, at)
                    w.open_stores.append(copy)

        return step

    # --- products ---

    def op_wgmma(self) -> Step:
        if self.parts[0] == "fence":
            return lambda w: None
        if self.parts[0] == "commit_group":
            return lambda w: (w.products.append(w.open_products), setattr(w, "open_products", []))[1]
        if self.parts[0] == "wait_group":
            return lambda w: None if w.retire_products(int(self.operands[0])) else BLOCKED
        shape = re.search(r"\.m64n(\d+)k(\d+)\.f32\.(\w+)\.\3$", self.opcode)
        if shape is None or self.operands[4:6] != ["1", "1"]:  # factors of A and B
            raise NotImplementedError(self.statement)
        d, dtype, a_in_registers = self.registers(0), _FLOATS[shape[3]], self.operands[1].startswith("{")
        a, b, scale = self.registers(1) if a_in_registers else self.register(1), self.register(2), self.register(3)
        transposed = [flag == "1" for flag in self.operands[6:]]
        a_transposed, b_transposed = (False, *transposed) if a_in_registers else transposed

        def step(w: Warp) -> None:
            what = (a if a_in_registers else int(w.r[a][0]), int(w.r[b][0]), bool(w.r[scale][0]))
            product = Product(w, int(shape[1]), int(shape[2]), dtype, d, *what, a_transposed, b_transposed)
            w.issue(product, (self.statement, what))

        return step

    # --- memory ---

    def _matrix(self, four: int, address: Step, do: Callable[[Warp, int, np.ndarray], None]) -> Step:
        """Four 8 x 8 matrices of 16 bits, each of whose rows is at the address that one thread gives."""
        if self.parts[2:4] != ["m8n8", "x4"] or "trans" in self.parts:
            raise NotImplementedError(self.statement)
        registers = self.registers(four)

        def step(w: Warp) -> None:
            rows = w.block.shared_offsets(address(w), 16).reshape(4, 8)
            for matrix, register in zip(rows, registers, strict=True):
                do(w, register, matrix[w.lane // 4] + 4 * (w.lane.astype(np.int64) % 4))

        return step

    def op_ldmatrix(self) -> Step:
        def do(w: Warp, register: int, offsets: np.ndarray) -> None:
            w.r[register] = w.block.shared.view(np.uint32)[offsets // 4]

        return self._matrix(0, self.address(1), do)

    def op_stmatrix(self) -> Step:
        def do(w: Warp, register: int, offsets: np.ndarray) -> None:
            w.block.shared.view(np.uint32)[offsets // 4] = w.r[register].view(np.uint32)
            w.mark_written(offsets, 4)

        return self._matrix(1, self.address(0), do)

    def op_ld(self) -> Step:
        if self.parts[0].startswith("param"):
            name = self.operands[1].strip("[]")
            return self.result(lambda w: np.full(LANES, w.block.params[name], np.uint64))
        if self.parts[0] not in ("global", "shared") or self.parts[1:] != ["b32"]:
            raise NotImplementedError(self.statement)
        address = self.address(1)
        if self.parts[0] == "shared":
            return self.result(lambda w: w.block.shared.view(np.uint32)[w.block.shared_offsets(address(w), 4) // 4])
        return self.result(lambda w: w.block.memory.bytes.view(np.uint32)[w.block.memory.offsets(address(w), 4) // 4])

    def op_st(self) -> Step:
        if self.kind not in ("b16", "b32"):
            raise NotImplementedError(self.statement)
        address, values, is_shared = self.address(0), self.registers(1), "shared" in self.parts
        bits, itemsize = _STORED[_BITS[self.kind]], _BITS[self.kind] // 8
        size = itemsize * len(values)

        def step(w: Warp) -> None:
            if is_shared:
                offsets, memory = w.block.shared_offsets(address(w), size), w.block.shared
                w.mark_written(offsets, size)
            else:
                offsets, memory = w.block.memory.offsets(address(w), size), w.block.memory.bytes
            for i, value in enumerate(values):
                memory.view(bits)[offsets // itemsize + i] = w.r[value].view(bits)

        return step

    # --- arithmetic ---

    def _binary(self) -> Step:
        if self.kind in ("bf16x2", "f16x2"):
            dtype = _FLOATS[self.kind[:-2]]
            x, y = self.register(1), self.register(2)
            return self.result(lambda w: _BINARY[self.name](w.r[x].view(dtype), w.r[y].view(dtype)), "b32")
        if self.parts[0] == "wide" or self.parts[0] == "hi":
            wide = _NUMBER[self.kind[0] + "64"]
            product = lambda w: a(w).astype(wide) * b(w).astype(wide)  # noqa: E731
            a, b = self.value(1), self.value(2)
            if self.parts[0] == "wide":
                return self.result(product, "b64")
            return self.result(lambda w: (product(w) >> 32).astype(_NUMBER[self.kind]))
        if self.name in ("min", "max") and self.kind == "f32" and "NaN" not in self.parts:
            raise NotImplementedError(self.statement)
        a, b, compute = self.value(1), self.value(2), _BINARY[self.name]
        return self.result(lambda w: compute(a(w), b(w)))

    def op_mad(self) -> Step:
        a, b, c = self.value(1), self.value(2), self.value(3)
        return self.result(lambda w: a(w) * b(w) + c(w))

    def op_fma(self) -> Step:
        a, b, c = self.value(1), self.value(2), self.value(3)
        return self.result(lambda w: (a(w).astype(np.float64) * b(w) + c(w)).astype(np.float32))

    def op_shl(self) -> Step:
        a, b, shift = self.value(1), self.value(2, "u32"), {"shl": np.left_shift, "shr": np.right_shift}[self.name]
        return self.result(lambda w: shift(a(w), b(w).astype(_NUMBER[self.kind])))

    op_shr = op_shl

    def op_bfe(self) -> Step:
        value, start, size = self.value(1), self.value(2, "u32"), self.value(3, "u32")
        if self.parts[0][0] != "u":
            raise NotImplementedError(self.statement)
        number = _NUMBER[self.kind]
        return self.result(
            lambda w: (value(w) >> start(w).astype(number)) & ((number(1) << number(size(w)[0])) - number(1))
        )

    def op_not(self) -> Step:
        value = self.value(1)
        return self.result(lambda w: ~value(w))

    def op_ex2(self) -> Step:
        value, compute = self.value(1), {"ex2": np.exp2, "lg2": np.log2}[self.name]
        return self.result(lambda w: compute(value(w)))

    op_lg2 = op_ex2

    def op_setp(self) -> Step:
        to, a, b, compare = self.register(0), self.value(1), self.value(2), getattr(operator, self.parts[0])
        if self.parts[1:-1] not in ([], ["and"]):
            raise NotImplementedError(self.statement)
        also = self.register(3) if len(self.operands) == 4 else None

        def step(w: Warp) -> None:
            holds = compare(a(w), b(w))
            w.r[to] = holds if also is None else holds & w.r[also]

        return step

    def op_selp(self) -> Step:
        a, b, predicate = self.value(1), self.value(2), self.register(3)
        return self.result(lambda w: np.where(w.r[predicate], a(w), b(w)))

    def op_prmt(self) -> Step:
        a, b, selector = self.value(1), self.value(2), self.value(3)

        def compute(w: Warp) -> np.ndarray:
            pool = np.concatenate([x(w).copy().view(np.uint8).reshape(LANES, 4) for x in (a, b)], axis=1)
            four = np.array([int(selector(w)[0]) >> shift & 15 for shift in (0, 4, 8, 12)])
            picked = pool[:, four % 8]
            signs = np.where(picked >= 128, 255, 0).astype(np.uint8)  # of the byte, in place of it
            return np.ascontiguousarray(np.where(four > 7, signs, picked)).view(np.uint32)[:, 0]

        return self.result(compute)

    # --- moves and conversions ---

    def op_mov(self) -> Step:
        if self.operands[0].startswith("{"):
            halves, value = self.registers(0), self.value(1)

            def step(w: Warp) -> None:
                both = value(w).view(np.uint16).reshape(LANES, 2)
                for half, register in enumerate(halves):
                    w.r[register] = both[:, half].copy()

            return step
        if self.operands[1].startswith("{"):
            low, high = self.registers(1)
            return self.result(lambda w: np.stack([w.r[low], w.r[high]], axis=1).reshape(-1))
        return self.result(self.value(1))

    def op_cvta(self) -> Step:
        return self.result(self.value(1))  # the addresses here are global as they are

    def op_cvt(self) -> Step:
        to, source = self.parts[-2:]
        if to.endswith("x2"):
            dtype = _FLOATS[to[:-2]]
            if not source.endswith("x2"):  # the first of two operands is the upper half
                high, low = self.value(1, source), self.value(2, source)
                return self.result(lambda w: np.stack([low(w), high(w)], axis=1).astype(dtype).reshape(-1), "b32")
            pair, narrow = self.register(1), _FLOATS[source[:-2]]
            return self.result(lambda w: w.r[pair].view(narrow).astype(dtype), "b32")
        if to in _FLOATS or source in _FLOATS:
            register, frm, dtype = self.register(1), (_FLOATS | _NUMBER)[source], (_FLOATS | _NUMBER)[to]
            return self.result(lambda w: w.r[register].view(frm).astype(dtype), "b32" if to == "f32" else "b16")
        value, stored = self.value(1, source), _NUMBER["s16" if to == "s8" else to]
        return self.result(lambda w: value(w).astype(_NUMBER[to]).astype(stored), to)


def _constant(text: str, kind: str) -> Any:
    if text.startswith("0f"):
        return np.frombuffer(bytes.fromhex(text[2:])[::-1], np.float32)[0].view(_NUMBER[kind])
    return np.array(int(text.rstrip("U"), 0) % (1 << _BITS[kind]), _STORED[_BITS[kind]]).view(_NUMBER[kind])[()]
