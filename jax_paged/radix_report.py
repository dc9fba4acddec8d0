"""What a radix tree tells of itself: events, why nothing was reused, whether its books are right, and how it looks.

The functions read the insides of a `RadixTree` and change nothing.
"""

import io
import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jax_paged.errors import InvariantError
from jax_paged.radix_node import TOKEN_BYTES, Ints, Node, closest_key, ranges, repeated, token_bytes

if TYPE_CHECKING:
    from rich.tree import Tree

    from jax_paged.radix import RadixTree

_log = logging.getLogger(__name__)

_MAX_NAMESPACES = 1024  # looked through for the same tokens
_MAX_EVICTED = 4096  # evicted prefixes remembered


type EventKind = Literal["stored", "evicted", "reused", "reset"]


@dataclass(frozen=True, slots=True, eq=False)
class CacheEvent:
    """What happened to a prefix: enough to keep a copy of the tree elsewhere, and route requests to their prefix.

    `pages` are the last pages of `tokens`, in order: pages[-1] holds the last page_size of them.

        stored    these pages are in the tree from now on; those before them already were
        evicted   these pages have left it; those before them are still there
        reused    a sequence starts on these pages: all those of its prefix
        reset     all pages have left it: `tokens` is empty, `namespace` is None, `pages` are ascending
    """

    kind: EventKind
    namespace: Hashable
    tokens: np.ndarray[Any, np.dtype[np.int32]]  # i32[n], read-only; from the root to the end of `pages`
    pages: list[int]


class Listener:
    """A callback for events, or None. What it raises is logged once, and goes no further."""

    def __init__(self, on_event: Callable[[CacheEvent], object] | None) -> None:
        self._on_event = on_event
        self._has_failed = False

    def __bool__(self) -> bool:
        return self._on_event is not None

    def tell(self, kind: EventKind, namespace: Hashable, tokens: bytes, pages: list[int]) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(CacheEvent(kind, namespace, np.frombuffer(tokens, np.int32), list(pages)))
        except Exception:
            if not self._has_failed:
                _log.exception("on_event failed for a %r event; it is called again, but no more is logged", kind)
            self._has_failed = True


# --- Why nothing was reused ---


class EvictedPrefixes:
    """The prefixes that left a tree last, each as a hash of its namespace and first page: 32 KiB, whatever leaves."""

    def __init__(self) -> None:
        self._ring = np.zeros(_MAX_EVICTED, np.int64)
        self._count = 0

    def add(self, namespace: Hashable, page: bytes) -> None:
        self._ring[self._count % _MAX_EVICTED] = hash((namespace, page))
        self._count += 1

    def num_since(self, namespace: Hashable, page: bytes) -> int | None:
        """How many prefixes were evicted after this one; None if it is not among those remembered."""
        (places,) = np.nonzero(self._ring[: self._count] == hash((namespace, page)))
        return int(((self._count - 1 - places) % _MAX_EVICTED).min()) if places.size else None


def why_missed(tree: "RadixTree", tokens: Ints, namespace: Hashable, partial_hits: bool) -> str | None:
    """See `RadixTree.why_missed`."""
    if len(tokens) < (1 if partial_hits else tree.page_size):
        return f"too short: {len(tokens)} tokens looked up, a page holds {tree.page_size}"
    page = token_bytes(tokens[: tree.page_size])
    top = tree._tops.get(namespace)
    common, nearest = closest_key(top.sorted_keys if top is not None else [], page)
    num_common = common // TOKEN_BYTES
    if num_common == tree.page_size or (partial_hits and num_common > 0):
        return None
    if (num_since := tree._evicted.num_since(namespace, page)) is not None:
        return f"evicted (prefixes evicted since: {num_since})"
    if any(page in other.children for other in islice(tree._tops.values(), _MAX_NAMESPACES)):
        return "cached under another namespace"
    if top is None:
        return "no full page is cached in its namespace" if tree._tops else "no full page is cached yet"
    here, there = (np.frombuffer(data, np.int32)[num_common] for data in (page, nearest))
    return f"differs at position {num_common}: token {here}, the nearest cached sequence has {there}"


# --- The integrity check ---


def check(tree: "RadixTree") -> None:
    """See `RadixTree.check`."""
    seen: list[int] = []
    evictable = candidates = num_nodes = 0
    if tree.root.locks != tree.root.own_locks + sum(top.locks for top in tree._tops.values()):
        raise InvariantError(f"the root counts {tree.root.locks} locks, its namespaces have others")
    for node in tree.nodes():
        if problem := _problem(tree, node):
            raise InvariantError(f"{node}: {problem}")
        seen += node.pages
        num_nodes += bool(node.pages)
        evictable += 0 if node.locks else len(node.pages)
        candidates += node.ticket > 0
    if again := repeated(seen):
        raise InvariantError(f"pages {again} are in the tree more than once")
    if set(seen) != tree._held:
        raise InvariantError(f"pages {sorted(tree._held.symmetric_difference(seen))} are not where they should be")
    live = sum(node.ticket == ticket for _, ticket, node in tree._queue.heap)
    for name, counted, found in (
        ("evictable_pages", tree._evictable, evictable),
        ("num_nodes", tree._num_nodes, num_nodes),
        ("candidates for eviction", tree._queue.num_leaves, candidates),
        ("candidates for eviction in the heap", live, candidates),
    ):
        if counted != found:
            raise InvariantError(f"{name} says {counted}, the tree has {found}")


def _problem(tree: "RadixTree", node: Node) -> str | None:
    """What is wrong with one node, or None."""
    is_top = node.parent is tree.root
    if is_top != (tree._tops.get(node.namespace) is node):
        return f"is not the top of its namespace {node.namespace!r}, or that is somewhere else"
    if is_top and (node.pages or not node.children or node.own_locks):
        return "the top of a namespace must have children, and neither pages nor locks of its own"
    if not is_top and not node.pages:
        return "has no pages"
    if node.num_tokens != len(node.pages) * tree.page_size:
        return f"has {node.num_tokens} tokens for {len(node.pages)} pages of {tree.page_size}"
    if node.sorted_keys != sorted(node.children):
        return "has children that are not in its sorted keys, or the reverse"
    if node.locks != node.own_locks + sum(child.locks for child in node.children.values()):
        return f"counts {node.locks} locks, has {node.own_locks} itself, and its children have others"
    if bool(node.ticket) != (not node.children and not node.locks):
        return "is up for eviction but no unlocked leaf, or the reverse"
    for key, child in node.children.items():
        if child.parent is not node or child.namespace != node.namespace:
            return f"its child {child} has another parent or namespace"
        if key != tree._first_page(child):
            return f"its child {child} is not filed under its first page"
        if child.last_used > node.last_used and not is_top:
            return f"its child {child} was used later than itself"
    return None


# --- For people ---


def render(tree: "RadixTree", limit: int, decode: Callable[[list[int]], str] | None) -> str:
    """See `RadixTree.render`."""
    from rich.console import Console

    out = io.StringIO()
    # Lines are short by themselves; a narrow console would break the deep ones.
    Console(file=out, width=200 + 4 * limit, color_system=None).print(rich_tree(tree, limit, decode))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def rich_tree(tree: "RadixTree", limit: int, decode: Callable[[list[int]], str] | None) -> "Tree":
    """See `RadixTree.rich_tree`."""
    from rich.text import Text  # a str would be read as markup, where "[1, 2]" vanishes
    from rich.tree import Tree

    head = f"{tree.num_pages} pages of {tree.page_size} tokens in {tree.num_nodes} nodes"
    shown = Tree(Text(f"{head}, {tree.protected_pages} protected, {tree.evictable_pages} evictable"))
    queue = deque[tuple[Tree, Node]]()
    for top in islice(tree._tops.values(), limit):
        queue.append((shown.add(Text(f"namespace {top.namespace!r}")), top))
    if len(tree._tops) > limit:
        shown.add(Text(f"... {len(tree._tops) - limit} more namespaces"))
    while queue:
        branch, node = queue.popleft()
        for child in islice(node.children.values(), limit):
            queue.append((branch.add(Text(_label(child, tree._clock, decode))), child))
        if len(node.children) > limit:
            branch.add(Text(f"... {len(node.children) - limit} more, and what follows them"))
        limit -= min(limit, len(node.children))
    return shown


def _label(node: Node, now: int, decode: Callable[[list[int]], str] | None) -> str:
    first = node.tokens[:8].tolist()
    text = repr(decode(first)) if decode else " ".join(map(str, first))
    more = " ..." if node.num_tokens > len(first) else ""
    locks = f", {node.locks} locks" if node.locks else ""
    return f"{node.num_tokens} tokens, {ranges(node.pages)}{locks}, age {now - node.last_used}: {text}{more}"
