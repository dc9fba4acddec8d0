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

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

from jax_paged import radix_report
from jax_paged.arguments import integers
from jax_paged.radix_node import (
    TOKEN_BYTES,
    EvictionQueue,
    Inserted,
    Ints,
    Match,
    Node,
    PartialPage,
    Policy,
    closest,
    common_prefix_length,
    detach,
    page_ids,
    path_bytes,
    path_pages,
    path_to,
    token_bytes,
    walk,
)
from jax_paged.radix_report import CacheEvent

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = ["CacheEvent", "Inserted", "Match", "Node", "PartialPage", "Policy", "RadixTree", "common_prefix_length"]


class RadixTree:
    """Longest-prefix reuse of KV pages across requests, with locks and eviction.

    Args:
      page_size: tokens per page of the pool.
      policy: which unlocked leaf gives its pages up first: "lru" (least recently used), "lfu" (fewest matches,
        then least recently used), "fifo" (first inserted), or a function from a `Node` to a sortable key, lowest
        first. The key is read anew whenever the node's own fields change.
      on_event: called with a `CacheEvent` after pages were stored, evicted, reused or all dropped, so that whoever
        routes requests by prefix can keep a copy of the tree. It is called when the tree has its new state and
        before the method returns; it may query the tree, but must not change it. What it raises goes no further:
        the first exception is logged with its traceback, later ones are dropped, and the next event is
        delivered all the same. None costs nothing; else each event copies the tokens of its prefix.

    Raises:
      ValueError: a page_size that is no integer of at least 1, or a policy of another name.

    Example:
      >>> tree = RadixTree(page_size=2)
      >>> tree.insert([1, 2, 3, 4], pages=[7, 8]).kept
      [(0, 7), (1, 8)]
      >>> tree.match([1, 2, 3, 9]).pages
      [7]
    """

    def __init__(
        self, page_size: int = 16, policy: Policy = "lru", on_event: Callable[[CacheEvent], object] | None = None
    ):
        (self.page_size,) = integers(1, page_size=page_size)
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = policy
        self._listener = radix_report.Listener(on_event)
        self._clock = 0
        self.root = Node(None, None)  # above all namespaces; an empty match ends here
        self._clear()

    def _clear(self) -> None:
        self._tops: dict[Hashable, Node] = {}  # one page-less node per namespace that has pages
        self._held: set[int] = set()
        self._evictable = 0
        self._num_nodes = 0
        self._queue = EvictionQueue(self._policy)
        self._evicted = radix_report.EvictedPrefixes()

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
        path, used = walk(self._tops.get(namespace), token_bytes(tokens), self._page_bytes)
        return self.page_size * (sum(len(node.pages) for node in path[:-1]) + used)

    def match(self, tokens: Ints, namespace: Hashable = None, touch: bool = True) -> Match:
        """Finds the longest prefix of whole pages, and counts as a use of it.

        A use marks as recent what was matched and nothing else, and the node returned can be locked without
        protecting anything else. Both need a node that ends where the match does, so a match that ends inside
        an edge splits it. That changes neither what the tree holds nor what anyone finds in it. `peek` is the
        query that leaves recency and nodes alone.

        Lock the node before anything is evicted, or the pages may be gone. Whoever does not know yet whether it
        will use the match says touch=False, and calls `note_reused` with the node once it does.

        Args:
          tokens: i32[n] or a list of integers that fit int32.
          namespace: hashable; tokens of different namespaces (tenant, adapter) never match one another.
          touch: whether to count as a use: for eviction, the recency and the hits of the match go up.

        Returns:
          A `Match`; with no whole page in common, its node is the root, which is harmless to lock. Its `partial`
          is the page that agrees with most of the tokens that follow, if any agrees with the first of them.
          Only the match itself counts as used.

        Raises:
          ValueError: tokens are not a flat sequence of int32 integers.
        """
        data = token_bytes(tokens)
        path, used = walk(self._tops.get(namespace), data, self._page_bytes)
        node = self._end(path, used)
        if touch:
            self._touch(path, hits=1)
        pages = path_pages(path)
        end = len(pages) * self._page_bytes
        partial = closest(path[-1] if path else self._tops.get(namespace), data[end : end + self._page_bytes])
        return Match(len(pages) * self.page_size, pages, node, partial)

    def note_reused(self, node: Node) -> None:
        """Counts a use of the prefix that ends with a node, as `match` with touch=True does, and tells `on_event`.

        Matches and peeks alone tell it nothing: a request may have to wait, and match again.

        Args:
          node: of a `Match` with touch=False. The root, where nothing was matched, is no reuse: nothing happens.

        Raises:
          ValueError: the node has left the tree.
        """
        self._require_in_tree(node)
        path = path_to(node)
        if path:
            self._touch(path, hits=1)
            if self._listener:
                self._listener.tell("reused", node.namespace, path_bytes(path), path_pages(path))

    def why_missed(self, tokens: Ints, namespace: Hashable = None, *, partial_hits: bool = False) -> str | None:
        """Why a lookup reuses nothing, in a few words with numbers, for people. Changes nothing.

        Looks at the first page of the tokens and at its nearest neighbours alone, so it costs about as much as a
        `peek` of one page. Says the first that holds of:

            too short: 3 tokens looked up, a page holds 16
            evicted (prefixes evicted since: 12)              of the last 4,096 evicted by their first page
            cached under another namespace                    which one is not told; of 1,024 namespaces looked through
            nothing is cached yet (or: in its namespace)
            differs at position 5: token 17, the nearest cached sequence has 22

        Ask before the tokens are inserted. The third tells a caller that somebody sent the same first page: where
        that is a secret between tenants, do not pass it on.

        Args:
          tokens, namespace: as looked up.
          partial_hits: whether a page that agrees only in part (`Match.partial`) is reused as well.

        Returns:
          None if something would be reused.

        Raises:
          ValueError: wrong tokens among those of the first page.
        """
        return radix_report.why_missed(self, tokens, namespace, partial_hits)

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
        data = token_bytes(tokens)
        data = data[: len(data) // self._page_bytes * self._page_bytes]
        offered = page_ids(pages, len(data) // self._page_bytes)
        path, used = walk(self._tops.get(namespace), data, self._page_bytes)
        present = path_pages(path[:-1]) + (path[-1].pages[:used] if path else [])
        new = offered[len(present) :]
        duplicates = [(i, a, b) for i, (a, b) in enumerate(zip(offered, present)) if a != b]
        if misplaced := self._held.intersection([*new, *(a for _, a, _ in duplicates)]):
            raise ValueError(
                f"the tree already holds pages {sorted(misplaced)} for other tokens; a page in the tree must not be "
                "written again, so fork or copy it, and insert the copy"
            )
        node = self._end(path, used)
        self._touch(path, hits=0)
        if new:
            parent = path[-1] if path else self._top(namespace)
            node = self._grow(parent, data[len(present) * self._page_bytes :], new)
            self._listener.tell("stored", namespace, data, new)
        return Inserted(node, list(enumerate(new, start=len(present))), duplicates)

    def _end(self, path: list[Node], used: int) -> Node:
        """Cuts the last node of a path after `used` pages, if it has more; returns the node that ends there."""
        if not path:
            return self.root
        if used < len(path[-1].pages):
            path[-1] = self._split(path[-1], used)
        return path[-1]

    def _touch(self, path: list[Node], hits: int) -> None:
        """Marks a whole path from the top as used now."""
        self._clock += 1
        for node in path:
            node.last_used = self._clock
            node.hits += hits
        if path:
            self._queue.refresh(path[-1])

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
        self._queue.refresh(node)
        return upper

    def _grow(self, parent: Node, edge: bytes, pages: list[int]) -> Node:
        node = Node(parent, parent.namespace, edge, pages, now=self._clock)
        self._link(parent, node)
        self._queue.refresh(parent)
        self._queue.refresh(node)
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

    # -- Lock and evict --------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protects a node and its ancestors from eviction, until `unlock` has been called as often.

        Raises:
          ValueError: the node has left the tree.
        """
        self._require_in_tree(node)
        node.own_locks += 1
        at: Node | None = node
        while at is not None:
            at.locks += 1
            if at.locks == 1:
                self._evictable -= len(at.pages)
            at = at.parent
        self._queue.refresh(node)

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
        self._queue.refresh(node)

    def _require_in_tree(self, node: Node) -> None:
        if node.parent is None and node is not self.root:
            raise ValueError(f"{node} was evicted after it was matched; match again, and lock before evicting")

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
        runs: list[tuple[Hashable, bytes, int]] = []  # what to tell: a prefix, and where its pages start in `freed`
        above = None
        while len(freed) < num_pages and (node := self._queue.first()) is not None:
            if self._listener and node is not above:  # else the last run goes on towards the root
                runs.append((node.namespace, path_bytes(path_to(node)), len(freed)))
            above = node.parent
            freed += self._trim(node, num_pages - len(freed))
        self._held.difference_update(freed)
        self._evictable -= len(freed)
        stops = [start for _, _, start in runs[1:]] + [len(freed)]
        for (namespace, tokens, start), stop in zip(runs, stops):
            self._listener.tell("evicted", namespace, tokens, freed[start:stop][::-1])
        return freed

    def _trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Cuts at most so many pages off the end of a leaf, and the leaf itself off when none is left."""
        freed = leaf.pages[-num_pages:][::-1]
        if len(freed) == len(leaf.pages):
            self._remove(leaf)
        else:
            del leaf.edge[-len(freed) * self._page_bytes :], leaf.pages[-len(freed) :]
            self._queue.refresh(leaf)
        return freed

    def _remove(self, leaf: Node) -> None:
        parent, key = leaf.parent, self._first_page(leaf)
        assert parent is not None
        del parent.children[key], parent.sorted_keys[bisect_left(parent.sorted_keys, key)]
        self._num_nodes -= 1
        detach(leaf)
        self._queue.refresh(leaf)
        self._queue.refresh(parent)
        if parent.parent is self.root:
            self._evicted.add(parent.namespace, key)
            if not parent.children:  # a namespace without pages is forgotten
                del self._tops[parent.namespace]
                detach(parent)

    def reset(self, force: bool = False) -> list[int] | None:
        """Empties the tree, as it must be when the weights change, and forgets what was evicted before.

        Args:
          force: whatever is locked: for a holder that has lost its books. Nodes from before must not be used again.

        Returns:
          All page ids, ascending, the caller's from now on. None, and nothing has changed, while any lock is held:
          be it of an empty match, its holder is at work and would insert what it computed before the reset.
        """
        if self.root.locks and not force:
            return None
        freed = sorted(self._held)
        for node in list(self.nodes()):
            detach(node)
        self.root.locks = self.root.own_locks = 0
        self._clear()
        self._listener.tell("reset", None, b"", freed)
        return freed

    # -- For people ------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
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
        radix_report.check(self)

    def render(self, limit: int = 50, decode: Callable[[list[int]], str] | None = None) -> str:
        """The tree as text, one node a line; arguments as for `rich_tree`."""
        return radix_report.render(self, limit, decode)

    def rich_tree(self, limit: int = 50, decode: Callable[[list[int]], str] | None = None) -> "Tree":
        """The tree as a `rich.tree.Tree`, to print in colour or to put into a layout.

        Args:
          limit: namespaces to show, and nodes, those nearest to the root first.
          decode: turns the first token ids of a node into text to show; without it the ids are shown.
        """
        return radix_report.rich_tree(self, limit, decode)
