"""Who runs next, on which pages. Plain Python and numpy: plans are made and tested without a device.

The scheduler plans a step (`plan`), the engine runs it, and `commit` takes the sampled tokens in. What it wants done to
pages on the device gathers in `Commands` and rides in the next step. The device hands out the page ids; the scheduler's
`PageLedger` mirrors the reference counts, so that it knows beforehand how many pages there will be.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_paged.radix import RadixTree, common_prefix_length
from jax_paged.request import Request, Sequence

__all__ = ["SCHEDULES", "Commands", "Growth", "PageLedger", "Row", "Scheduler", "StepPlan"]

SCHEDULES = ("lpm", "fcfs")

# Waiting sequences whose cached prefix is looked up before a step; the others are too far back to matter.
_LPM_WINDOW = 128
# A sequence that this many later ones have overtaken goes next.
_MAX_OVERTAKEN = 32


class PageLedger:
    """The host's copy of the pool's reference counts."""

    def __init__(self, num_pages: int) -> None:
        self.ref_counts = np.zeros(num_pages, np.int32)
        self.num_free = num_pages

    def reserve(self, num_pages: int) -> None:
        """A planned step will take these; `take` tells which they were."""
        assert num_pages <= self.num_free, f"{num_pages} pages planned, {self.num_free} free"
        self.num_free -= num_pages

    def take(self, page_ids: Iterable[int]) -> None:
        for page in page_ids:
            assert self.ref_counts[page] == 0, f"page {page} was handed out while in use"
            self.ref_counts[page] = 1

    def retain(self, page_ids: Iterable[int]) -> None:
        for page in page_ids:
            assert self.ref_counts[page] > 0, f"page {page} is free and cannot be retained"
            self.ref_counts[page] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        for page in page_ids:
            assert self.ref_counts[page] > 0, f"page {page} is free already"
            self.ref_counts[page] -= 1
            self.num_free += int(self.ref_counts[page] == 0)


@dataclass
class Commands:
    """What is to be done to pages on the device, part after part: a part may build on the ones before it."""

    retain: list[int] = field(default_factory=list)  # page ids that the tree holds from now on
    release: list[int] = field(default_factory=list)  # page ids that it holds no more
    free_slots: set[int] = field(default_factory=set)
    points: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, table index) -> the page id it shall name
    lengths: dict[int, int] = field(default_factory=dict)  # slot -> tokens

    def __bool__(self) -> bool:
        return bool(self.retain or self.release or self.free_slots or self.points or self.lengths)

    def free_slot(self, slot: int) -> None:
        """Empties a slot. Orders for it that are still here would come after that, so they go."""
        self.free_slots.add(slot)
        self.points = {place: page for place, page in self.points.items() if place[0] != slot}
        self.lengths.pop(slot, None)

    def split(self, capacity: int) -> Iterator["Commands"]:
        """The same in pieces whose lists fit arrays of `capacity` entries: mostly a single one."""
        if max(len(self.retain), len(self.release), len(self.points)) <= capacity:
            yield self
            return
        for start in range(0, len(self.retain), capacity):
            yield Commands(retain=self.retain[start : start + capacity])
        for start in range(0, len(self.release), capacity):
            yield Commands(release=self.release[start : start + capacity])
        yield Commands(free_slots=self.free_slots)
        points = list(self.points.items())
        for start in range(0, len(points), capacity):
            yield Commands(points=dict(points[start : start + capacity]))
        yield Commands(lengths=self.lengths)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: its tokens [start, start + num_tokens)."""

    seq: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether a token is sampled: not after a chunk with more of the prompt to come."""
        return self.start + self.num_tokens == self.seq.num_tokens

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and self.start >= self.seq.num_prompt


@dataclass(frozen=True, slots=True)
class Growth:
    """The pages a row takes: `num_pages`, from table entry `first` on; the first replaces `shared_page`, a copy of
    it.
    """

    first: int
    num_pages: int
    shared_page: int | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows in the order of their slots, the pages each takes, and what is done to pages before they run."""

    rows: list[Row]
    growths: list[Growth]
    commands: Commands

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Hit:
    """A cached prefix: tokens, the pages they lie in (the last perhaps only in part), and the nodes to lock."""

    num_tokens: int
    pages: list[int]
    node: Any
    partial_node: Any


_NO_HIT = _Hit(0, [], None, None)


class Scheduler:
    """Continuous batching over a paged pool and a prefix tree.

    Running sequences come first, by priority and arrival. Each decode takes one token of `max_batch_tokens`;
    prefills share what is left; then waiting sequences are admitted. When pages run out, unlocked leaves of the
    tree go; then, of the sequences behind the needy one, the one that loses least is set aside. The first in line
    is never set aside, and fits the pool alone, so it always moves on and nothing can deadlock.

    Args:
      num_pages, page_size, max_seqs: the pool's.
      max_batch_tokens: tokens a step; at least `max_seqs`.
      tree: the prefix tree; None turns reuse off.
      schedule: who of the waiting goes first: "fcfs", the first come; "lpm", the longest cached prefix, unless many
        later ones have overtaken someone (Zheng et al. 2023, arXiv 2312.07104, section 3 has lpm).
      partial_hits: reuse a page of which only the first tokens agree, by copying it.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_seqs: int,
        max_batch_tokens: int,
        tree: RadixTree | None,
        schedule: str = "lpm",
        partial_hits: bool = True,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"{schedule=} is not one of {', '.join(SCHEDULES)}")
        if max_batch_tokens < max_seqs:
            raise ValueError(
                f"{max_batch_tokens=} must be at least {max_seqs=}, so that every running sequence can decode"
            )
        self.page_size = page_size
        self.max_seqs = max_seqs
        self.max_batch_tokens = max_batch_tokens
        self.tree = tree
        self.schedule = schedule
        self.partial_hits = partial_hits
        self.ledger = PageLedger(num_pages)
        self.commands = Commands()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_slots = list(range(max_seqs - 1, -1, -1))
        self.counts = {
            "query_tokens": 0,  # of prompts at their first admission, and of these:
            "hit_tokens": 0,
            "resumed_hit_tokens": 0,  # found again after having been set aside
            "computed_prefill_tokens": 0,
            "generated_tokens": 0,
            "evicted_pages": 0,
            "preemptions": 0,
            "steps": 0,
        }

    # --- Requests in and out ---

    def add(self, request: Request) -> None:
        self.waiting.extend(request.sequences)

    def abort(self, request: Request) -> None:
        """Ends what still runs of a request. What it has computed stays in the tree."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self._finish(seq, "abort")

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def reset_tree(self) -> bool:
        """Empties the tree, unless sequences run on its pages."""
        if self.running:
            return False
        if self.tree is not None:
            pages = self.tree.reset()
            assert pages is not None, "pages are locked, and nothing runs"
            self._drop_tree_pages(pages)
        return True

    def start_over(self) -> None:
        """Books an empty pool and tree, after a step that failed. What ran waits again, and has lost none of its
        tokens.
        """
        for seq in self.running:
            self._unlock(seq.node, seq.partial_node)
            seq.node = seq.partial_node = None
            seq.slot, seq.pages, seq.num_computed = None, [], 0
            seq.was_set_aside = True
        self.waiting += self.running
        self.running = []
        self.free_slots = list(range(self.max_seqs - 1, -1, -1))
        self.ledger = PageLedger(len(self.ledger.ref_counts))
        self.commands = Commands()
        if self.tree is not None:
            self.tree.reset()

    # --- Planning a step ---

    def num_pending(self) -> int:
        """Tokens of prompts, or of what was set aside, that are still to be computed."""
        return sum(seq.num_uncomputed for seq in (*self.waiting, *self.running) if seq.num_uncomputed > 1)

    def plan(self, max_tokens: int | None = None) -> StepPlan | None:
        """The next step, or None with nothing to do. Page commands so far are in it, and `self.commands` is empty
        after.
        """
        if not self.has_work():
            return None
        max_tokens = max_tokens or self.max_batch_tokens
        rows = self._continue_running(max_tokens)
        rows += self._admit(rows, max_tokens)
        assert rows, "sequences wait, and none can run"
        rows.sort(key=lambda row: row.seq.slot or 0)
        growths = self._growths(rows)
        self.ledger.reserve(sum(growth.num_pages for growth in growths))
        self.ledger.release(g.shared_page for g in growths if g.shared_page is not None)
        commands, self.commands = self.commands, Commands()
        self.counts["steps"] += 1
        return StepPlan(rows, growths, commands)

    def _continue_running(self, max_tokens: int) -> list[Row]:
        """Rows for the sequences that are on their way, the first in line first."""
        self.running.sort(key=_line)
        prefill_tokens = max_tokens - sum(seq.num_uncomputed == 1 for seq in self.running)
        rows: list[Row] = []
        num_pages = 0
        for seq in list(self.running):
            is_prefill = seq.num_uncomputed > 1
            num_tokens = min(seq.num_uncomputed, prefill_tokens) if is_prefill else 1
            if seq.slot is None or num_tokens == 0:  # set aside for one before it; or no tokens left for it
                continue
            needed = self._pages_to_grow(seq, num_tokens)
            if not self._make_room(num_pages + needed, behind=seq):
                continue
            num_pages += needed
            prefill_tokens -= num_tokens if is_prefill else 0
            rows.append(Row(seq, seq.num_computed, num_tokens))
        return rows

    def _admit(self, rows: list[Row], max_tokens: int) -> list[Row]:
        """Rows for waiting sequences, in order: none is passed over because a smaller one would fit."""
        budget = max_tokens - sum(row.num_tokens for row in rows)
        step_pages = sum(self._pages_to_grow(row.seq, row.num_tokens) for row in rows)
        promised = sum(self._pages_to_grow(seq, seq.num_uncomputed) for seq in self.running)
        admitted: list[Row] = []
        for seq in self._in_order() if budget and self.free_slots else ():
            if not budget or not self.free_slots:
                break
            if self._prefix_is_being_computed(seq):
                continue
            if not self._attach(seq, promised):
                break
            num_tokens = min(seq.num_uncomputed, budget)
            budget -= num_tokens
            promised += self._pages_to_grow(seq, seq.num_uncomputed)
            step_pages += self._pages_to_grow(seq, num_tokens)
            self._evict(step_pages - self.ledger.num_free)
            admitted.append(Row(seq, seq.num_computed, num_tokens))
        return admitted

    def _attach(self, seq: Sequence, promised: int) -> bool:
        """Gives a waiting sequence a slot and its cached prefix, if the pool has the pages for the rest of it.

            tokens:  [ whole cached pages: shared | k cached tokens of one: copied at the first write | to compute ]

        Args:
          seq: the sequence.
          promised: pages that those before it will still take.

        Returns:
          Whether it could; if not, nothing has changed.
        """
        for hit in self._hits(seq):
            self._lock(hit.node, hit.partial_node)
            needed = self._num_pages(seq.num_tokens) - len(hit.pages) + (hit.partial_node is not None)
            evictable = self.tree.evictable_pages if self.tree is not None else 0
            if promised + needed <= self.ledger.num_free + evictable:
                break
            self._unlock(hit.node, hit.partial_node)
        else:
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.slot = self.free_slots.pop()
        seq.pages, seq.num_computed = list(hit.pages), hit.num_tokens
        seq.node, seq.partial_node = hit.node, hit.partial_node
        self.ledger.retain(seq.pages)
        self.commands.points |= {(seq.slot, i): page for i, page in enumerate(seq.pages)}
        self.commands.lengths[seq.slot] = seq.num_computed
        self._count_admission(seq)
        return True

    def _hits(self, seq: Sequence) -> list[_Hit]:
        """The ways to start a sequence, best first. Its last token is left out: it must be computed to be sampled
        after.

        Copying a page that agrees in part takes one page more than the sequence, which the pool may not have.
        """
        if self.tree is None:
            return [_NO_HIT]
        match = self.tree.match(seq.tokens[:-1], namespace=seq.request.namespace)
        whole = _Hit(match.num_tokens, match.pages, match.node, None)
        if match.partial is None or not self.partial_hits:
            return [whole]
        tokens = match.num_tokens + match.partial.num_tokens
        return [_Hit(tokens, [*match.pages, match.partial.page_id], match.node, match.partial.node), whole]

    def _count_admission(self, seq: Sequence) -> None:
        if seq.was_set_aside:
            self.counts["resumed_hit_tokens"] += seq.num_computed
            return
        self.counts["query_tokens"] += seq.num_tokens
        self.counts["hit_tokens"] += seq.num_computed
        seq.num_cached_tokens = seq.num_computed
        for other in self.waiting:
            other.num_overtaken += other.arrival < seq.arrival

    def _in_order(self) -> list[Sequence]:
        """The waiting sequences, the next first: those set aside, those overtaken too often, then by the schedule."""
        line = sorted(self.waiting, key=_line)
        if self.schedule == "fcfs" or self.tree is None:
            return line
        tree = self.tree

        def key(seq: Sequence) -> tuple[Any, ...]:
            first = seq.was_set_aside or seq.num_overtaken >= _MAX_OVERTAKEN
            cached = 0 if first else tree.peek(seq.tokens[:-1], namespace=seq.request.namespace)
            return (seq.request.priority, not seq.was_set_aside, not first, -cached, seq.arrival)

        return sorted(line[:_LPM_WINDOW], key=key) + line[_LPM_WINDOW:]

    def _prefix_is_being_computed(self, seq: Sequence) -> bool:
        """Whether a running prefill is about to fill a page that this sequence could then share instead of
        computing it.
        """
        if self.tree is None:
            return False
        prefills = [r for r in self.running if r.num_uncomputed > 1 and r.request.namespace == seq.request.namespace]
        if not prefills:
            return False
        tokens = seq.tokens[:-1]
        cached = self.tree.peek(tokens, namespace=seq.request.namespace)
        common = max(common_prefix_length(tokens, r.tokens) for r in prefills)
        return common // self.page_size * self.page_size > cached

    # --- Pages ---

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _pages_to_grow(self, seq: Sequence, num_tokens: int) -> int:
        """Pages that a sequence takes for its next tokens. At most: it may turn out that it need not copy its last
        page.
        """
        copies = seq.num_computed % self.page_size and self.ledger.ref_counts[seq.pages[-1]] > 1
        return self._num_pages(seq.num_computed + num_tokens) - len(seq.pages) + bool(copies)

    def _growths(self, rows: list[Row]) -> list[Growth]:
        """The pages each row takes, by the rule of `cache.extend`: of the holders of a page who write to it in one
        step, all copy it, but for the first if there is no other holder."""
        writers: dict[int, int] = {}
        for row in rows:
            if row.start % self.page_size:
                writers[row.seq.pages[-1]] = writers.get(row.seq.pages[-1], 0) + 1
        kept: set[int] = set()
        growths = []
        for row in rows:
            shared = row.seq.pages[-1] if row.start % self.page_size else None
            if shared is not None and shared not in kept and writers[shared] == self.ledger.ref_counts[shared]:
                kept.add(shared)
                shared = None
            first = len(row.seq.pages) - (shared is not None)
            growths.append(Growth(first, self._num_pages(row.start + row.num_tokens) - first, shared))
        return growths

    def _make_room(self, num_pages: int, behind: Sequence) -> bool:
        """Frees pages until `num_pages` are free: by eviction, then by setting aside sequences behind the given one."""
        while self.ledger.num_free < num_pages:
            if self._evict(num_pages - self.ledger.num_free):
                continue
            victim = self._cheapest(self.running[self.running.index(behind) + 1 :])
            if victim is None:
                return False
            self._set_aside(victim)
        return True

    def _evict(self, num_pages: int) -> int:
        if self.tree is None or num_pages <= 0:
            return 0
        pages = self.tree.evict(num_pages)
        self.counts["evicted_pages"] += len(pages)
        self._drop_tree_pages(pages)
        return len(pages)

    def _drop_tree_pages(self, pages: list[int]) -> None:
        self.ledger.release(pages)
        self.commands.release += pages

    def _cheapest(self, seqs: list[Sequence]) -> Sequence | None:
        """Of the sequences given, the one with the fewest tokens to compute again; the last in line of several."""
        private = {seq: sum(int(self.ledger.ref_counts[p] == 1) for p in seq.pages) for seq in seqs}
        losing = [seq for seq in reversed(seqs) if private[seq] or seq.node is not None]
        return min(losing, key=lambda seq: private[seq], default=None)

    def _set_aside(self, seq: Sequence) -> None:
        """Takes a running sequence's pages away. What it had computed goes to the tree and may still be there later."""
        self._detach(seq)
        seq.was_set_aside = True
        self.waiting.append(seq)
        self.counts["preemptions"] += 1

    def _detach(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self._insert(seq)
        self._unlock(seq.node, seq.partial_node)
        seq.node = seq.partial_node = None
        self.ledger.release(seq.pages)
        self.commands.free_slot(seq.slot)
        self.free_slots.append(seq.slot)
        self.running.remove(seq)
        seq.slot, seq.pages, seq.num_computed = None, [], 0

    def _lock(self, *nodes: Any) -> None:
        for node in nodes:
            if node is not None and self.tree is not None:
                self.tree.lock(node)

    def _unlock(self, *nodes: Any) -> None:
        for node in nodes:
            if node is not None and self.tree is not None:
                self.tree.unlock(node)

    def _insert(self, seq: Sequence) -> None:
        """Gives the tree a sequence's full pages. Where the tree has the same tokens in another page, the sequence
        changes over to that one and its own is freed."""
        num_pages = seq.num_computed // self.page_size
        if self.tree is None or num_pages == 0:
            return
        assert seq.slot is not None
        tokens = seq.tokens[: num_pages * self.page_size]
        inserted = self.tree.insert(tokens, seq.pages[:num_pages], namespace=seq.request.namespace)
        kept = [page for _, page in inserted.kept]
        self.ledger.retain(kept)
        self.commands.retain += kept
        for index, own, page in inserted.duplicates:
            self.ledger.retain([page])
            self.ledger.release([own])
            seq.pages[index] = page
            self.commands.points[seq.slot, index] = page
        self._lock(inserted.node)
        self._unlock(seq.node)
        seq.node = inserted.node

    # --- Taking a step's results in ---

    def commit(
        self, plan: StepPlan, tokens: np.ndarray, logprobs: np.ndarray | None, taken: np.ndarray
    ) -> list[Sequence]:
        """Books what a step did.

        Args:
          plan: of that step.
          tokens: i32[>= rows], sampled; only those of rows that sample count.
          logprobs: f32[>= rows], theirs.
          taken: i32[>= pages], the ids the device handed out, row after row.

        Returns:
          The sequences that have one more token.
        """
        used = 0
        for row, growth in zip(plan.rows, plan.growths):
            pages = taken[used : used + growth.num_pages].tolist()
            used += growth.num_pages
            self.ledger.take(pages)
            row.seq.pages[growth.first :] = pages
        changed = []
        for i, row in enumerate(plan.rows):
            seq = row.seq
            seq.num_computed += row.num_tokens
            self.counts["computed_prefill_tokens"] += 0 if row.is_decode else row.num_tokens
            self._unlock(seq.partial_node)  # its page has been copied
            seq.partial_node = None
            if not row.is_decode:
                self._insert(seq)
            if row.samples:
                seq.append(int(tokens[i]), None if logprobs is None else float(logprobs[i]))
                self.counts["generated_tokens"] += 1
                changed.append(seq)
                if reason := seq.why_finished():
                    self._finish(seq, reason)
        return changed

    def _finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        if seq.slot is None:
            self.waiting.remove(seq)
        else:
            self._detach(seq)


def _line(seq: Sequence) -> tuple[int, int]:
    """Where a sequence stands in line: by priority (lower first), then arrival."""
    return seq.request.priority, seq.arrival
