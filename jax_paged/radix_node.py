"""The parts of a radix tree: its nodes, what its methods return, and tokens as bytes. See `jax_paged.radix`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

type Ints = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

TOKEN_BYTES = 4  # tokens are compared and stored as native int32


class Node:
    """A run of whole pages, and what may follow it.

    `edge` holds the tokens as int32 bytes: equality is one memcmp, the child's key is a slice, and a token costs
    four bytes on the host. It is a bytearray because that gives up its head (a split) or its tail (a trim)
    without copying what stays.

    A policy may read `last_used` and `created` (counts of the tree's uses, not clocks), `hits` (matches that
    counted as a use), `pages`, `num_tokens` and `namespace`. All pages of a node share them: whoever uses only
    part of a node splits it.
    """

    __slots__ = (
        "children",  # dict[bytes, Node]; each under the bytes of its first page
        "created",  # int; when its pages were inserted
        "edge",  # bytearray; len(pages) * page_size tokens
        "hits",  # int; how many uses went through, insertions apart
        "last_used",  # int; when a use or an insertion last went through. Never later than its parent's
        "locks",  # int; locks held here or anywhere below: a locked child protects its ancestors
        "namespace",
        "own_locks",  # int; the part of `locks` that was taken on this very node
        "pages",  # list[int]
        "parent",  # None for the root, and for a node that has left the tree
        "sorted_keys",  # list[bytes]; the keys of `children`, for the closest sibling of a page that none equals
        "ticket",  # int; which heap entry speaks for it; 0 when it is not an evictable leaf
    )

    def __init__(
        self,
        parent: "Node | None",
        namespace: Hashable,
        edge: bytes | bytearray = b"",
        pages: Sequence[int] = (),
        now: int = 0,
    ):
        self.parent = parent
        self.namespace = namespace
        self.edge = bytearray(edge)
        self.pages = list(pages)
        self.children: dict[bytes, Node] = {}
        self.sorted_keys: list[bytes] = []
        self.locks = self.own_locks = self.hits = self.ticket = 0
        self.last_used = self.created = now

    @property
    def num_tokens(self) -> int:
        return len(self.edge) // TOKEN_BYTES

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[num_tokens], a copy."""
        return np.frombuffer(bytes(self.edge), np.int32)

    def __repr__(self) -> str:
        return f"<Node {self.num_tokens} tokens, {ranges(self.pages)}, {self.locks} locks>"


@dataclass(frozen=True, slots=True)
class PartialPage:
    """The page after a match that agrees with the tokens at first, and then differs or goes on.

    A sequence may start from a copy of it (copy on write) and compute only from token `num_tokens` of the page
    on. Lock `node` until the copy is done; that protects its whole edge.
    """

    page_id: int
    num_tokens: int  # 1 <= num_tokens < page_size
    node: Node


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of whole pages in the tree. `node` ends exactly where `pages` do; lock it to keep them."""

    num_tokens: int  # len(pages) * page_size
    pages: list[int]
    node: Node
    partial: PartialPage | None


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of the pages offered to `insert`. `node` ends exactly where the inserted pages do."""

    node: Node
    kept: list[tuple[int, int]]  # (index, page id): held by the tree from now on
    duplicates: list[tuple[int, int, int]]  # (index, page id offered, page id the tree already had for it)


type Policy = str | Callable[[Node], Any]

POLICIES: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.last_used,
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: node.created,
}


class EvictionQueue:
    """The leaves that may be evicted, in the order of a policy.

    Entries are never searched for: an entry whose ticket is no longer its node's is stale, and dropped when it
    comes up. Once most are stale all of those go at once, so the heap stays within about twice the leaves.
    """

    def __init__(self, policy: Policy):
        if isinstance(policy, str) and policy not in POLICIES:
            raise ValueError(f"{policy=} is not one of {', '.join(POLICIES)}; or give a function of a node")
        self.key = POLICIES[policy] if isinstance(policy, str) else policy
        self.heap: list[tuple[Any, int, Node]] = []  # (key, ticket, node)
        self.num_leaves = 0  # entries that are not stale
        self._tickets = 0

    def refresh(self, node: Node) -> None:
        """Files a node under its present key, or not at all if it is no unlocked leaf."""
        self.num_leaves -= node.ticket > 0
        node.ticket = 0
        if node.children or node.locks or not node.pages:
            return
        self._tickets += 1
        node.ticket = self._tickets
        self.num_leaves += 1
        heappush(self.heap, (self.key(node), node.ticket, node))
        if len(self.heap) > 2 * self.num_leaves + 64:
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapify(self.heap)

    def first(self) -> Node | None:
        """The leaf to evict next."""
        while self.heap and self.heap[0][2].ticket != self.heap[0][1]:
            heappop(self.heap)
        return self.heap[0][2] if self.heap else None


def walk(top: Node | None, data: bytes, page_bytes: int) -> tuple[list[Node], int]:
    """The nodes that the tokens go through, and how many pages of the last of them match (at least one)."""
    path: list[Node] = []
    node, at = top, 0
    while node is not None:
        node = node.children.get(data[at : at + page_bytes])  # a short last slice equals no key
        if node is None:
            break
        path.append(node)
        size = len(node.edge)
        if size > page_bytes and not data.startswith(node.edge, at):  # the first page is already known to be equal
            return path, common_bytes(data[at : at + size], node.edge) // page_bytes
        at += size
    return path, len(path[-1].pages) if path else 0


def closest(parent: Node | None, page: bytes) -> PartialPage | None:
    """The child whose first page agrees longest with these at most page_size tokens, if with any."""
    if parent is None:
        return None
    common, key = closest_key(parent.sorted_keys, page)
    if common < TOKEN_BYTES:
        return None
    child = parent.children[key]
    return PartialPage(child.pages[0], common // TOKEN_BYTES, child)


def path_to(node: Node) -> list[Node]:
    """The nodes with pages from the root to this one."""
    path = []
    at: Node | None = node
    while at is not None and at.pages:
        path.append(at)
        at = at.parent
    return path[::-1]


def path_pages(path: list[Node]) -> list[int]:
    """All pages of a path."""
    pages: list[int] = []
    for node in path:
        pages += node.pages
    return pages


def path_bytes(path: list[Node]) -> bytes:
    """All tokens of a path."""
    return b"".join([node.edge for node in path])


def detach(node: Node) -> None:
    """Empties a node that has left the tree, so that a stale reference neither keeps memory nor can be locked."""
    node.parent = None
    node.pages, node.edge, node.children, node.sorted_keys = [], bytearray(), {}, []


def common_prefix_length(a: Ints, b: Ints) -> int:
    """How many tokens two sequences have in common at their start.

    Raises:
      ValueError: one of them is not a flat sequence of int32 integers.
    """
    return common_bytes(token_bytes(a), token_bytes(b)) // TOKEN_BYTES


def common_bytes(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """How many bytes two strings have in common at their start."""
    size = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def closest_key(sorted_keys: list[bytes], page: bytes) -> tuple[int, bytes]:
    """How many bytes a page has in common with the key closest to it, and that key; (0, b"") without keys.

    In sorted order the longest common prefix is with a neighbour, so two comparisons do for any number of keys.
    """
    place = bisect_left(sorted_keys, page)
    near = sorted_keys[max(place - 1, 0) : place + 1]
    return max(((common_bytes(page, key), key) for key in near), default=(0, b""))


def token_bytes(tokens: Ints) -> bytes:
    """The tokens as int32 in the machine's byte order."""
    ids = np.asarray(tokens)
    if not ids.size:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat list or array of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.dtype != np.int32:
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < -(2**31) or highest >= 2**31:
            raise ValueError(f"tokens from {lowest} to {highest} do not fit int32")
    return ids.astype(np.int32, copy=False).tobytes()


def page_ids(pages: Ints, num_pages: int) -> list[int]:
    """The first so many page ids as ints, each one valid and different from the others."""
    if len(pages) < num_pages:
        raise ValueError(f"{len(pages)} pages given for {num_pages} full pages of tokens; give one for each")
    ids = np.asarray(pages[:num_pages])
    if not ids.size:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"pages must be a flat list or array of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0:
        raise ValueError(f"page id {ids.min()} at index {ids.argmin()} is negative; page ids start at 0")
    given: list[int] = ids.tolist()
    if again := repeated(given):
        raise ValueError(f"pages {again} are given more than once; a page holds one place of a sequence")
    return given


def repeated(pages: list[int]) -> list[int]:
    """The page ids that occur more than once, ascending."""
    if len(set(pages)) == len(pages):
        return []
    return sorted(page for page, count in Counter(pages).items() if count > 1)


def ranges(pages: list[int], most: int = 4) -> str:
    """Page ids for people: [3, 4, 5, 9] becomes "pages 3-5 9"."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        elif len(runs) == most:
            return f"pages {_runs_text(runs)} ... ({len(pages)})"
        else:
            runs.append([page, page])
    return f"pages {_runs_text(runs)}" if runs else "no pages"


def _runs_text(runs: list[list[int]]) -> str:
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
