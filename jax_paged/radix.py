"""A radix tree over token sequences: which pages of the KV pool already hold the KV of a prefix.

    tokens      system prompt . . . . . | question A . . .      page_size = 4
    tree        root -- [p0 p1 p2] --+-- [p3 p4]                an edge is a run of whole pages
                                     +-- [p7]                   siblings differ in their first page

The tree is plan, not data: it lives on the host, knows page ids and token ids, and never sees a KV value. Only
whole, fully written pages enter it. A page leaves it by `evict` or `reset` alone.

The idea is RadixAttention (Zheng et al., SGLang, arXiv 2312.07104, section 3). Here edges are cut at page
boundaries, so that a split never has to share a page between two nodes.

Cost, for a sequence of n tokens: O(n) to match and to insert, whatever the tree holds besides; O(1) for every
counter; amortised O(log nodes) for each page evicted. Nothing recurses, so depth is not limited.
"""

import io
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.errors import InvariantError

if TYPE_CHECKING:
    from rich.tree import Tree

type Ints = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

_TOKEN_BYTES = 4  # tokens are compared and stored as native int32


class Node:
    """A run of whole pages, and what may follow it.

    `edge` holds the tokens as int32 bytes: equality is one memcmp, the child's key is a slice, and a token costs
    four bytes on the host. It is a bytearray because that gives up its head (a split) or its tail (a trim)
    without copying what stays.

    A policy may read `last_used` and `created` (counts of the tree's uses, not clocks), `hits` (matches),
    `pages`, `num_tokens` and `namespace`. All pages of a node share them: whoever uses only part of a node
    splits it.
    """

    __slots__ = (
        "children",  # dict[bytes, Node]; each under the bytes of its first page
        "created",  # int; when its pages were inserted
        "edge",  # bytearray; len(pages) * page_size tokens
        "hits",  # int; how many matches went through
        "last_used",  # int; when a match or an insertion last went through. Never later than its parent's
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
        return len(self.edge) // _TOKEN_BYTES

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[num_tokens], a copy."""
        return np.frombuffer(bytes(self.edge), np.int32)

    def __repr__(self) -> str:
        return f"<Node {self.num_tokens} tokens, {_ranges(self.pages)}, {self.locks} locks>"


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

_POLICIES: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.last_used,
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: node.created,
}


class RadixTree:
    """Longest-prefix reuse of KV pages across requests, with locks and eviction.

    Args:
      page_size: tokens per page of the pool.
      policy: which unlocked leaf gives its pages up first: "lru" (least recently used), "lfu" (fewest matches,
        then least recently used), "fifo" (first inserted), or a function from a `Node` to a sortable key, lowest
        first. The key is read anew whenever the node's own fields change.

    Raises:
      ValueError: page_size < 1, or a policy of another name.

    Example:
      >>> tree = RadixTree(page_size=2)
      >>> tree.insert([1, 2, 3, 4], pages=[7, 8]).kept
      [(0, 7), (1, 8)]
      >>> tree.match([1, 2, 3, 9]).pages
      [7]
    """

    def __init__(self, page_size: int = 16, policy: Policy = "lru"):
        if page_size < 1:
            raise ValueError(f"{page_size=} must be at least 1")
        if isinstance(policy, str) and policy not in _POLICIES:
            raise ValueError(f"{policy=} is not one of {', '.join(_POLICIES)}; or give a function of a node")
        self.page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._key = _POLICIES[policy] if isinstance(policy, str) else policy
        self._clock = 0
        self._tickets = 0
        self.root = Node(None, None)  # above all namespaces; an empty match ends here
        self._clear()

    def _clear(self) -> None:
        self._tops: dict[Hashable, Node] = {}  # one page-less node per namespace that has pages
        self._held: set[int] = set()
        self._evictable = 0
        self._num_nodes = 0
        self._heap: list[tuple[Any, int, Node]] = []  # (key, ticket, node); stale unless it is the node's ticket
        self._num_candidates = 0  # heap entries that are not stale

    # -- What is in it ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return len(self._held)

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could give right now: those that no lock protects."""
        return self._evictable

    @property
    def protected_pages(self) -> int:
        """Pages on the path from the root to some locked node."""
        return len(self._held) - self._evictable

    @property
    def num_nodes(self) -> int:
        """Nodes that hold pages."""
        return self._num_nodes

    @property
    def namespaces(self) -> list[Hashable]:
        """The namespaces that hold pages."""
        return list(self._tops)

    def held(self, page_id: int) -> bool:
        """Whether the tree holds this page."""
        return page_id in self._held

    def pages(self) -> set[int]:
        """The ids of all pages held, a copy."""
        return set(self._held)

    # -- Match and insert ------------------------------------------------------------------------------------------

    def peek(self, tokens: Ints, namespace: Hashable = None) -> int:
        """How many tokens `match` would find. Changes nothing: the query to order a waiting queue by.

        Args, Raises: as for `match`.
        """
        path, used = self._walk(_token_bytes(tokens), namespace)
        return self.page_size * (sum(len(node.pages) for node in path[:-1]) + used)

    def match(self, tokens: Ints, namespace: Hashable = None) -> Match:
        """Finds the longest prefix of whole pages, and counts as a use of it.

        A use marks as recent what was matched and nothing else, and the node returned can be locked without
        protecting anything else. Both need a node that ends where the match does, so a match that ends inside
        an edge splits it. That changes neither what the tree holds nor what anyone finds in it. `peek` is the
        query that leaves recency and nodes alone.

        Lock the node before anything is evicted, or the pages may be gone.

        Args:
          tokens: i32[n] or a list of integers that fit int32.
          namespace: hashable; tokens of different namespaces (tenant, adapter) never match one another.

        Returns:
          A `Match`; with no whole page in common, its node is the root, which is harmless to lock. Its `partial`
          is the page that agrees with most of the tokens that follow, if any agrees with the first of them.
          Only the match itself counts as used.

        Raises:
          ValueError: tokens are not a flat sequence of int32 integers.
        """
        data = _token_bytes(tokens)
        path, used = self._walk(data, namespace)
        node = self._use(path, used)
        for passed in path:
            passed.hits += 1
        self._refresh(node)
        pages = [page for passed in path for page in passed.pages]
        end = len(pages) * self._page_bytes
        partial = self._closest(path[-1] if path else self._tops.get(namespace), data[end : end + self._page_bytes])
        return Match(len(pages) * self.page_size, pages, node, partial)

    def insert(self, tokens: Ints, pages: Ints, namespace: Hashable = None) -> Inserted:
        """Files the pages of a sequence under its tokens; the tree keeps those for which it had none.

        Args:
          tokens: i32[n] or a list of integers. Those after the last full page are ignored.
          pages: i32[>= n // page_size] or a list; pages[i] holds the KV of tokens [i * page_size, (i + 1) *
            page_size), fully written. Further entries are ignored, so a row of the block table will do.
          namespace: as for `match`.

        Returns:
          An `Inserted`. Pages kept are the tree's from now on. A duplicate stays the caller's: use the tree's page
          in its place and free it. A page that the tree already had at that very place is neither.

        Raises:
          ValueError: too few pages, a negative or repeated page id, a page that the tree holds for other tokens,
            or wrong tokens. Nothing has changed then.
        """
        data = _token_bytes(tokens)
        data = data[: len(data) // self._page_bytes * self._page_bytes]
        offered = _page_ids(pages, len(data) // self._page_bytes)
        path, used = self._walk(data, namespace)
        present = [page for node in path[:-1] for page in node.pages] + (path[-1].pages[:used] if path else [])
        new = offered[len(present) :]
        duplicates = [(i, a, b) for i, (a, b) in enumerate(zip(offered, present)) if a != b]
        if misplaced := self._held.intersection([*new, *(a for _, a, _ in duplicates)]):
            raise ValueError(
                f"the tree already holds pages {sorted(misplaced)} for other tokens; a page in the tree must not be "
                "written again, so fork or copy it, and insert the copy"
            )
        node = self._use(path, used)
        if new:
            parent = path[-1] if path else self._top(namespace)
            node = self._grow(parent, data[len(present) * self._page_bytes :], new)
        self._refresh(node)
        return Inserted(node, list(enumerate(new, start=len(present))), duplicates)

    def _walk(self, data: bytes, namespace: Hashable) -> tuple[list[Node], int]:
        """The nodes that the tokens go through, and how many pages of the last of them match (at least one)."""
        path: list[Node] = []
        node = self._tops.get(namespace)
        at, step = 0, self._page_bytes
        while node is not None:
            node = node.children.get(data[at : at + step])  # a short last slice equals no key
            if node is None:
                break
            path.append(node)
            size = len(node.edge)
            if size > step and not data.startswith(node.edge, at):  # the first page is already known to be equal
                return path, _common_bytes(data[at : at + size], node.edge) // step
            at += size
        return path, len(path[-1].pages) if path else 0

    def _use(self, path: list[Node], used: int) -> Node:
        """Marks a path as used now, its last node only up to `used` pages; returns the node that ends there."""
        self._clock += 1
        if not path:
            return self.root
        if used < len(path[-1].pages):
            path[-1] = self._split(path[-1], used)
        for node in path:
            node.last_used = self._clock
        return path[-1]

    def _split(self, node: Node, num_pages: int) -> Node:
        """Puts the first pages of a node into a new parent of it; whoever locked the node still has its end."""
        assert node.parent is not None
        cut = num_pages * self._page_bytes
        upper = Node(node.parent, node.namespace, node.edge[:cut], node.pages[:num_pages])
        upper.locks, upper.hits, upper.last_used, upper.created = node.locks, node.hits, node.last_used, node.created
        node.parent.children[self._first_page(node)] = upper  # the same first page, so sorted_keys stays
        del node.edge[:cut], node.pages[:num_pages]
        self._link(upper, node)
        self._num_nodes += 1
        self._refresh(node)
        return upper

    def _grow(self, parent: Node, edge: bytes, pages: list[int]) -> Node:
        node = Node(parent, parent.namespace, edge, pages, now=self._clock)
        self._link(parent, node)
        self._refresh(parent)
        self._num_nodes += 1
        self._evictable += len(pages)
        self._held.update(pages)
        return node

    def _top(self, namespace: Hashable) -> Node:
        if namespace not in self._tops:
            self._tops[namespace] = Node(self.root, namespace)
        return self._tops[namespace]

    def _link(self, parent: Node, node: Node) -> None:
        key = self._first_page(node)
        node.parent = parent
        parent.children[key] = node
        insort(parent.sorted_keys, key)

    def _first_page(self, node: Node) -> bytes:
        return bytes(node.edge[: self._page_bytes])

    def _closest(self, parent: Node | None, page: bytes) -> PartialPage | None:
        """The child whose first page agrees longest with these at most page_size tokens, if with any.

        In sorted order the longest common prefix is with a neighbour, so two comparisons do for any number of
        children.
        """
        if parent is None:
            return None
        place = bisect_left(parent.sorted_keys, page)
        near = parent.sorted_keys[max(place - 1, 0) : place + 1]
        common, key = max(((_common_bytes(page, key), key) for key in near), default=(0, b""))
        if common < _TOKEN_BYTES:
            return None
        child = parent.children[key]
        return PartialPage(child.pages[0], common // _TOKEN_BYTES, child)

    # -- Lock and evict --------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protects a node and its ancestors from eviction, until `unlock` has been called as often.

        Raises:
          ValueError: the node has left the tree.
        """
        if node.parent is None and node is not self.root:
            raise ValueError(f"{node} was evicted after it was matched; match again, and lock before evicting")
        node.own_locks += 1
        at: Node | None = node
        while at is not None:
            at.locks += 1
            if at.locks == 1:
                self._evictable -= len(at.pages)
            at = at.parent
        self._refresh(node)

    def unlock(self, node: Node) -> None:
        """Takes back one `lock` of this very node.

        Raises:
          ValueError: it is not locked. Locks of its descendants protect it, but are not its own.
        """
        if not node.own_locks:
            raise ValueError(f"{node} is not locked itself; unlock the node that was given to lock, once per lock")
        node.own_locks -= 1
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if at.locks == 0:
                self._evictable += len(at.pages)
            at = at.parent
        self._refresh(node)

    def evict(self, num_pages: int) -> list[int]:
        """Takes pages out of the tree: from unlocked leaves, lowest key first, each from its end.

        Returns:
          min(num_pages, evictable_pages) page ids, the caller's from now on.

        Raises:
          ValueError: num_pages < 0.
        """
        if num_pages < 0:
            raise ValueError(f"{num_pages=} must not be negative")
        freed: list[int] = []
        while len(freed) < num_pages and self._num_candidates:
            _, ticket, node = self._heap[0]
            if node.ticket != ticket:
                heappop(self._heap)
                continue
            freed += self._trim(node, num_pages - len(freed))
        self._held.difference_update(freed)
        self._evictable -= len(freed)
        return freed

    def _trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Cuts at most so many pages off the end of a leaf, and the leaf itself off when none is left."""
        freed = leaf.pages[-num_pages:][::-1]
        if len(freed) == len(leaf.pages):
            self._remove(leaf)
        else:
            del leaf.edge[-len(freed) * self._page_bytes :], leaf.pages[-len(freed) :]
            self._refresh(leaf)
        return freed

    def _remove(self, leaf: Node) -> None:
        parent, key = leaf.parent, self._first_page(leaf)
        assert parent is not None
        del parent.children[key], parent.sorted_keys[bisect_left(parent.sorted_keys, key)]
        self._num_nodes -= 1
        _detach(leaf)
        self._refresh(leaf)
        self._refresh(parent)
        if parent.parent is self.root and not parent.children:  # a namespace without pages is forgotten
            del self._tops[parent.namespace]
            _detach(parent)

    def _refresh(self, node: Node) -> None:
        """Files a node for eviction under its present key, or not at all if it is no unlocked leaf.

        Entries are never searched for: an entry whose ticket is no longer the node's is stale and dropped when it
        comes up. Once most are stale all of those go at once, so the heap stays within about twice the leaves.
        """
        self._num_candidates -= node.ticket > 0
        node.ticket = 0
        if node.children or node.locks or not node.pages:
            return
        self._tickets += 1
        node.ticket = self._tickets
        self._num_candidates += 1
        heappush(self._heap, (self._key(node), node.ticket, node))
        if len(self._heap) > 2 * self._num_candidates + 64:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def reset(self) -> list[int] | None:
        """Empties the tree, as it must be when the weights change.

        Returns:
          All page ids, ascending, the caller's from now on. None, and nothing has changed, while any lock is held:
          be it of an empty match, its holder is at work and would insert what it computed before the reset.
        """
        if self.root.locks:
            return None
        freed = sorted(self._held)
        for node in list(self._nodes()):
            _detach(node)
        self._clear()
        return freed

    # -- For people ------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        queue = deque(self._tops.values())
        while queue:
            node = queue.popleft()
            yield node
            queue.extend(node.children.values())

    def check(self) -> None:
        """Walks the whole tree and compares it with every rule it keeps.

        Raises:
          InvariantError: naming the node, page or counter that breaks one.
        """
        seen: list[int] = []
        evictable = candidates = num_nodes = 0
        if self.root.locks != self.root.own_locks + sum(top.locks for top in self._tops.values()):
            raise InvariantError(f"the root counts {self.root.locks} locks, its namespaces have others")
        for node in self._nodes():
            if problem := self._problem(node):
                raise InvariantError(f"{node}: {problem}")
            seen += node.pages
            num_nodes += bool(node.pages)
            evictable += 0 if node.locks else len(node.pages)
            candidates += node.ticket > 0
        if repeated := _repeated(seen):
            raise InvariantError(f"pages {repeated} are in the tree more than once")
        if set(seen) != self._held:
            raise InvariantError(f"pages {sorted(self._held.symmetric_difference(seen))} are not where they should be")
        live = sum(node.ticket == ticket for _, ticket, node in self._heap)
        for name, counted, found in (
            ("evictable_pages", self._evictable, evictable),
            ("num_nodes", self._num_nodes, num_nodes),
            ("candidates for eviction", self._num_candidates, candidates),
            ("candidates for eviction in the heap", live, candidates),
        ):
            if counted != found:
                raise InvariantError(f"{name} says {counted}, the tree has {found}")

    def _problem(self, node: Node) -> str | None:
        """What is wrong with one node, or None."""
        is_top = node.parent is self.root
        if is_top != (self._tops.get(node.namespace) is node):
            return f"is not the top of its namespace {node.namespace!r}, or that is somewhere else"
        if is_top and (node.pages or not node.children or node.own_locks):
            return "the top of a namespace must have children, and neither pages nor locks of its own"
        if not is_top and not node.pages:
            return "has no pages"
        if len(node.edge) != len(node.pages) * self._page_bytes:
            return f"has {node.num_tokens} tokens for {len(node.pages)} pages of {self.page_size}"
        if node.sorted_keys != sorted(node.children):
            return "has children that are not in its sorted keys, or the reverse"
        if node.locks != node.own_locks + sum(child.locks for child in node.children.values()):
            return f"counts {node.locks} locks, has {node.own_locks} itself, and its children have others"
        if bool(node.ticket) != (not node.children and not node.locks):
            return "is up for eviction but no unlocked leaf, or the reverse"
        for key, child in node.children.items():
            if child.parent is not node or child.namespace != node.namespace:
                return f"its child {child} has another parent or namespace"
            if key != self._first_page(child):
                return f"its child {child} is not filed under its first page"
            if child.last_used > node.last_used and not is_top:
                return f"its child {child} was used later than itself"
        return None

    def render(self, limit: int = 50, decode: Callable[[list[int]], str] | None = None) -> str:
        """The tree as text, one node a line; arguments as for `rich_tree`."""
        from rich.console import Console

        out = io.StringIO()
        # Lines are short by themselves; a narrow console would break the deep ones.
        Console(file=out, width=200 + 4 * limit, color_system=None).print(self.rich_tree(limit, decode))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def rich_tree(self, limit: int = 50, decode: Callable[[list[int]], str] | None = None) -> "Tree":
        """The tree as a `rich.tree.Tree`, to print in colour or to put into a layout.

        Args:
          limit: namespaces to show, and nodes, those nearest to the root first.
          decode: turns the first token ids of a node into text to show; without it the ids are shown.
        """
        from rich.text import Text  # a str would be read as markup, where "[1, 2]" vanishes
        from rich.tree import Tree

        head = f"{self.num_pages} pages of {self.page_size} tokens in {self.num_nodes} nodes"
        shown = Tree(Text(f"{head}, {self.protected_pages} protected, {self.evictable_pages} evictable"))
        queue = deque[tuple[Tree, Node]]()
        for top in islice(self._tops.values(), limit):
            queue.append((shown.add(Text(f"namespace {top.namespace!r}")), top))
        if len(self._tops) > limit:
            shown.add(Text(f"... {len(self._tops) - limit} more namespaces"))
        while queue:
            branch, node = queue.popleft()
            for child in islice(node.children.values(), limit):
                queue.append((branch.add(Text(self._label(child, decode))), child))
            if len(node.children) > limit:
                branch.add(Text(f"... {len(node.children) - limit} more, and what follows them"))
            limit -= min(limit, len(node.children))
        return shown

    def _label(self, node: Node, decode: Callable[[list[int]], str] | None) -> str:
        first = node.tokens[:8].tolist()
        text = repr(decode(first)) if decode else " ".join(map(str, first))
        more = " ..." if node.num_tokens > len(first) else ""
        age = self._clock - node.last_used
        locks = f", {node.locks} locks" if node.locks else ""
        return f"{node.num_tokens} tokens, {_ranges(node.pages)}{locks}, age {age}: {text}{more}"


def common_prefix_length(a: Ints, b: Ints) -> int:
    """How many tokens two sequences have in common at their start.

    Raises:
      ValueError: one of them is not a flat sequence of int32 integers.
    """
    return _common_bytes(_token_bytes(a), _token_bytes(b)) // _TOKEN_BYTES


def _common_bytes(a: bytes | bytearray, b: bytes | bytearray) -> int:
    size = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _token_bytes(tokens: Ints) -> bytes:
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


def _page_ids(pages: Ints, num_pages: int) -> list[int]:
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
    if repeated := _repeated(given):
        raise ValueError(f"pages {repeated} are given more than once; a page holds one place of a sequence")
    return given


def _repeated(pages: list[int]) -> list[int]:
    if len(set(pages)) == len(pages):
        return []
    return sorted(page for page, count in Counter(pages).items() if count > 1)


def _detach(node: Node) -> None:
    """Empties a node that has left the tree, so that a stale reference neither keeps memory nor can be locked."""
    node.parent = None
    node.pages, node.edge, node.children, node.sorted_keys = [], bytearray(), {}, []


def _ranges(pages: list[int], most: int = 4) -> str:
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
