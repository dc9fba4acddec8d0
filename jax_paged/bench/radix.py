"""What the prefix tree costs the host: matching and inserting a long prompt in a full tree. Needs no model, no jax."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jax_paged.radix import RadixTree

__all__ = ["Result", "main", "measure"]

NUM_TOKENS, TREE_TOKENS, PAGE_SIZE = 32_768, 1_048_576, 16
MATCH_TARGET_S, INSERT_TARGET_S = 2e-3, 5e-3


@dataclass(frozen=True)
class Result:
    """The median of an operation, when the prompt lies in so many nodes of the tree."""

    operation: str
    num_nodes: int
    median_s: float
    target_s: float


def measure(
    num_tokens: int = NUM_TOKENS,
    tree_tokens: int = TREE_TOKENS,
    page_size: int = PAGE_SIZE,
    pages_per_node: int | None = None,
    repeats: int = 31,
) -> list[Result]:
    """Times a prompt of `num_tokens` in a tree that always holds `tree_tokens` or a little more.

    Args:
      num_tokens, tree_tokens, page_size: whole pages.
      pages_per_node: how finely other prompts have cut the path of this one; None: not at all. One page per node
        is the most work a prompt can make.
      repeats: of which the median is taken.
    """
    rng = np.random.default_rng(0)
    num_pages = num_tokens // page_size
    tree = RadixTree(page_size)
    prompts = [_prompt(rng, num_tokens) for _ in range(max(1, tree_tokens // num_tokens))]
    for i, other in enumerate(prompts):
        tree.insert(other, range(i * num_pages, (i + 1) * num_pages))
    prompt, pages = prompts[0], np.arange(num_pages, dtype=np.int32)
    for end in range(num_pages - 1, 0, -1) if pages_per_node else ():
        if end % (pages_per_node or 1) == 0:
            tree.match(prompt[: end * page_size])
    tree.lock(tree.match(prompt).node)  # what is evicted to make room is something else
    num_nodes = -(-num_pages // (pages_per_node or num_pages))
    spare = list(range(tree.num_pages, tree.num_pages + num_pages))

    def insert_new(num_shared: int) -> float:
        nonlocal spare
        shared = num_shared * page_size
        new = np.concatenate([prompt[:shared], _prompt(rng, num_tokens - shared)])
        offered = [*pages[:num_shared].tolist(), *spare[num_shared:]]
        seconds = _time(lambda: tree.insert(new, offered))
        spare = spare[:num_shared] + tree.evict(num_pages - num_shared)
        return seconds

    operations: list[tuple[str, float, Callable[[], float]]] = [
        ("peek", MATCH_TARGET_S, lambda: _time(lambda: tree.peek(prompt))),
        ("match", MATCH_TARGET_S, lambda: _time(lambda: tree.match(prompt))),
        ("insert, all new", INSERT_TARGET_S, lambda: insert_new(0)),
        ("insert, second half new", INSERT_TARGET_S, lambda: insert_new(num_pages // 2)),
        ("insert, all there", INSERT_TARGET_S, lambda: _time(lambda: tree.insert(prompt, pages))),
        ("insert, all duplicates", INSERT_TARGET_S, lambda: _time(lambda: tree.insert(prompt, spare))),
    ]
    return [
        Result(name, num_nodes, statistics.median(run() for _ in range(repeats)), target)
        for name, target, run in operations
    ]


def _prompt(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    return rng.integers(0, 50_000, num_tokens, dtype=np.int32)


def _time(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main(as_json: bool = False) -> None:
    """Prints `measure` for a prompt in one node, and for one that other prompts have cut after every page."""
    whole, cut = measure(), measure(pages_per_node=1)
    if as_json:
        print(json.dumps([asdict(result) for result in whole + cut]))
        return
    print(f"prompts of {NUM_TOKENS:,} tokens in a tree of {TREE_TOKENS:,}, pages of {PAGE_SIZE}; medians")
    print(f"{'':<26}{'in one node':>16}{f'in {cut[0].num_nodes:,} nodes':>16}{'target':>12}")
    for a, b in zip(whole, cut):
        print(f"{a.operation:<26}{a.median_s * 1e3:>13.2f} ms{b.median_s * 1e3:>13.2f} ms{a.target_s * 1e3:>9.0f} ms")
    missed = [result for result in whole + cut if result.median_s > result.target_s]
    print(f"{len(missed)} of {len(whole + cut)} miss their target" if missed else "all within their targets")


if __name__ == "__main__":
    main()
