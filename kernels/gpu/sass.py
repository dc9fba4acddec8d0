"""What a block of keys costs a consumer, counted in the machine code (SASS) that it is compiled to.

Each instruction carries how many cycles its warp waits before the next one, so the sum of these over the loop is the
time that a warp needs where it has its scheduler to itself and nothing is late. (Control codes are not documented by
NVIDIA; Scott Gray's notes to maxas, "Control Codes", describe them.)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"^\s*\S+:\S+:\S+:\S+:(?P<stall>\d+)\s+/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P\d+)?\s*(?P<opcode>\S+)(?P<operands>.*)"
)
_FAR = 60  # instructions: a branch over so many goes around masking, or zeroing


@dataclass(frozen=True)
class Loop:
    """The usual way through the loop over blocks of keys, where nothing is masked."""

    instructions: int
    issue_cycles: int


def consumer_loop(text: str) -> Loop | None:
    """The loop that holds the first and the last matrix product, in a listing by nvdisasm with control codes.

    None where there is no such loop, or no usual way through it is found.
    """
    code: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction)

    def target(i: int) -> int | None:
        label = re.search(r"\.L\w+", code[i]["operands"]) if code[i]["opcode"].startswith("BRA") else None
        return labels[label[0]] if label else None

    products = [i for i, instruction in enumerate(code) if instruction["opcode"].startswith("HGMMA")]
    for end in range(products[-1], len(code)) if products else ():
        start = target(end)
        if start is not None and start <= products[0] and code[end]["guard"]:
            return _walk(code, target, start, end)
    return None


def _walk(code: list[re.Match[str]], target: Callable[[int], int | None], start: int, end: int) -> Loop | None:
    i, cycles = start, 0
    for instructions in range(1, len(code) + 1):
        cycles, to = cycles + int(code[i]["stall"]), target(i)
        if i == end:
            return Loop(instructions, cycles)
        goes = to is not None and (not code[i]["guard"] or i + _FAR < to <= end)
        i = to if goes and to is not None else i + 1
    return None
