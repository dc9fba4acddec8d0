"""Who runs next, on which pages. Plain Python and numpy: plans are made and tested without a device.

The scheduler plans a step (`plan`), the engine runs it, and `commit` takes the sampled tokens in. What it wants done to
pages on the device gathers in `Commands` and rides in the next step. The device hands out the page ids; the scheduler's
`PageLedger` mirrors the reference counts, so that it knows beforehand how many pages there will be.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_paged.ledger import Commands, Growth, PageLedger, Row, StepPlan, StepResult
from jax_paged.radix import RadixTree
from jax_paged.request import Request, Sequence

__all__ = ["MAX_STOP_IDS", "SCHEDULES", "Scheduler"]

SCHEDULES = ("lpm", "fcfs", "dfs")

# Stop tokens that the device looks for by itself in several steps at once.
MAX_STOP_IDS = 16

# How many waiting sequences, from the first in line, a step looks at besides one for each free slot: at what of them is
# cached or being computed, and whether others overtake them. The rest are too far back to matter, and may be many.
_WINDOW = 128
# A sequence that this many later ones have overtaken, once it was that far to the front, goes next.
_MAX_OVERTAKEN = 32


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
    tree go, then the pages that are held for later; then, of the sequences behind the needy one, the one that loses
    least is set aside. The first in line is never set aside, and fits the pool alone, so it always moves on and
    nothing can deadlock.

    Args:
      num_pages, page_size, max_seqs: the pool's.
      max_batch_tokens: tokens a step; at least `max_seqs`.
      tree: the prefix tree; None turns reuse off.
      schedule: who of the waiting goes first: "fcfs", the first come; "lpm", the longest cached prefix (Zheng et al.
        2023, arXiv 2312.07104, section 3); "dfs", in the order of their tokens, which walks the tree depth first so
        that those that share a prefix run together. The last two unless many later ones have overtaken someone.
      partial_hits: reuse a page of which only the first tokens agree, by copying it.
      wait_for_prefix: let a sequence wait while a running one computes a prefix that the two share.
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
        wait_for_prefix: bool = True,
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
        self.wait_for_prefix = wait_for_prefix
        self.ledger = PageLedger(num_pages)
        self.commands = Commands()
        self.waiting: list[Sequence] = []  # by their place in line
        self.running: list[Sequence] = []
        # Sequences that keep their pages without a slot, the least recently used first. They may wait, too.
        self.held: dict[Sequence, None] = {}
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
        """Queues a request; one with nothing to compute is finished at once."""
        for seq in request.sequences:
            if seq.num_uncomputed > 0:
                insort(self.waiting, seq, key=_line)
                continue
            seq.finish_reason = "length"
            if request.held:
                self.held[seq] = self.held.pop(seq, None)
            elif seq in self.held:
                self.drop(seq)

    def abort(self, request: Request) -> None:
        """Ends what still runs of a request. What it has computed stays in the tree."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self._finish(seq, "abort")

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def reset_tree(self) -> bool:
        """Empties the tree, unless sequences run on its pages or hold them."""
        if self.running or any(seq.pages for seq in self.held):
            return False
        if self.tree is not None:
            pages = self.tree.reset()
            assert pages is not None, "pages are locked, and nothing runs"
            self._drop_tree_pages(pages)
        return True

    def start_over(self, requests: list[Request]) -> None:
        """Books an empty pool and tree, after a step that broke off, wherever. What is not done waits again, and has
        lost none of its tokens.

        Args:
          requests: all that the engine knows. The lists here may have been caught half changed.
        """
        seqs = [seq for request in requests for seq in request.sequences]
        for seq in {*seqs, *self.running, *self.held}:
            seq.was_set_aside |= seq.num_computed > 0
            seq.node = seq.partial_node = None
            seq.slot, seq.pages, seq.num_computed = None, [], 0
        self.waiting = sorted((seq for seq in seqs if seq.finish_reason is None), key=_line)
        self.running = []
        self.held = {}
        self.free_slots = list(range(self.max_seqs - 1, -1, -1))
        self.ledger = PageLedger(len(self.ledger.ref_counts))
        self.commands = Commands()
        if self.tree is not None:
            self.tree.reset(force=True)

    # --- Pages held without a slot ---

    def adopt(self, seq: Sequence, other: Sequence) -> None:
        """Gives a sequence, before it is added, all that one held computed, which keeps nothing.

        What comes before a token to be sampled or scored is left out: it will be computed once more.
        """
        seq.pages, seq.num_computed = other.pages, other.num_computed
        seq.node, seq.partial_node = other.node, other.partial_node
        other.pages, other.num_computed, other.node, other.partial_node = [], 0, None, None
        self.held.pop(other, None)
        needed = seq.num_tokens - seq.request.samples
        needed = min(needed, seq.next_score - 1) if seq.next_score < seq.num_prompt else needed
        if seq.num_computed > needed:
            seq.num_computed = needed
            cut = seq.pages[self._num_pages(needed) :]
            del seq.pages[self._num_pages(needed) :]
            self.ledger.release(cut)
            self.commands.release += cut
        if seq.pages:
            self.held[seq] = None
        else:
            self._unlock(seq.node, seq.partial_node)
            seq.node = seq.partial_node = None

    def share(self, seq: Sequence, other: Sequence) -> None:
        """Makes a sequence, before it is added, a second holder of all that one held computed."""
        self.ledger.retain(other.pages)
        self.commands.retain += other.pages
        self._lock(other.node, other.partial_node)
        twin = Sequence(seq.request, 0)
        twin.pages, twin.num_computed = list(other.pages), other.num_computed
        twin.node, twin.partial_node = other.node, other.partial_node
        self.adopt(seq, twin)

    def drop(self, seq: Sequence) -> None:
        """Gives up what pages a sequence holds without a slot. Its tokens can be computed again."""
        if seq not in self.held:
            return
        del self.held[seq]
        self._unlock(seq.node, seq.partial_node)
        self.ledger.release(seq.pages)
        self.commands.release += seq.pages
        seq.pages, seq.num_computed, seq.node, seq.partial_node = [], 0, None, None

    def _drop_oldest(self, but: Sequence | None = None) -> bool:
        """Drops the pages that have been held unused for longest; False if there are none."""
        seq = next((seq for seq in self.held if seq.pages and seq is not but), None)
        if seq is not None:
            self.drop(seq)
        return seq is not None

    # --- Planning a step ---

    def num_pending(self) -> int:
        """Tokens of prompts, or of what was set aside, that are still to be computed."""
        return sum(seq.num_uncomputed for seq in (*self.waiting, *self.running) if seq.is_prefilling)

    def plan(self, max_tokens: int | None = None, max_steps: int = 1) -> StepPlan | None:
        """The next step, or None with nothing to do. Page commands so far are in it, and `self.commands` is empty
        after.

        Args:
          max_tokens: of all rows together; None: `max_batch_tokens`.
          max_steps: tokens that each row may get, where all decode and nobody waits.
        """
        if not self.has_work():
            return None
        max_tokens = max_tokens or self.max_batch_tokens
        rows = self._continue_running(max_tokens)
        rows += self._admit(rows, max_tokens)
        assert rows, "sequences wait, and none can run"
        rows += self._twins(rows)
        rows.sort(key=lambda row: row.seq.slot or 0)
        growths = self._growths(rows)
        num_steps, num_pages = self._num_steps(rows, sum(growth.num_pages for growth in growths), max_steps)
        self.ledger.reserve(num_pages)
        self.ledger.release(g.shared_page for g in growths if g.shared_page is not None)
        commands, self.commands = self.commands, Commands()
        self.counts["steps"] += num_steps
        return StepPlan(rows, growths, commands, num_steps, num_pages)

    def _num_steps(self, rows: list[Row], num_pages: int, max_steps: int) -> tuple[int, int]:
        """How many steps can go in one call, and the pages for all of them; `num_pages` are for the first."""
        if self.waiting or not all(self._runs_by_itself(row) for row in rows):
            return 1, num_pages
        num_steps = min(max_steps, max(row.seq.num_left for row in rows))
        while num_steps > 1:
            ends = [(row.start + 1, row.start + min(num_steps, row.seq.num_left)) for row in rows]
            needed = num_pages + sum(self._num_pages(end) - self._num_pages(first) for first, end in ends)
            if needed <= self._num_obtainable():
                self._evict(needed - self.ledger.num_free)
                return num_steps, needed
            num_steps //= 2
        return 1, num_pages

    def _runs_by_itself(self, row: Row) -> bool:
        """Whether the device can tell alone what the row's next tokens are, and whether they are the last."""
        request = row.seq.request
        return (
            row.samples
            and row.num_tokens == 1
            and row.seq.next_score >= row.seq.num_prompt
            and not request.params.stop
            and row.seq.num_outputs >= request.params.min_tokens
            and len(request.stop_token_ids) <= MAX_STOP_IDS
        )

    def _continue_running(self, max_tokens: int) -> list[Row]:
        """Rows for the sequences that are on their way, the first in line first."""
        self.running.sort(key=_line)
        prefill_tokens = max_tokens - sum(not seq.is_prefilling for seq in self.running)
        rows: list[Row] = []
        num_pages = 0
        for seq in list(self.running):
            num_tokens = min(seq.num_uncomputed, prefill_tokens) if seq.is_prefilling else 1
            if seq.slot is None or num_tokens == 0:  # set aside for one before it; or no tokens left for it
                continue
            needed = self._pages_to_grow(seq, num_tokens)
            if not self._make_room(num_pages + needed, behind=seq):
                continue
            num_pages += needed
            prefill_tokens -= num_tokens if seq.is_prefilling else 0
            rows.append(Row(seq, seq.num_computed, num_tokens))
        return rows

    def _admit(self, rows: list[Row], max_tokens: int) -> list[Row]:
        """Rows for waiting sequences, in order: none is passed over because a smaller one would fit.

        Those who wait for a prefix or a twin that is being computed are passed over; behind `_WINDOW` of them all wait.
        It is not for long: a prefill that leaves tokens for others ends in this step.
        """
        budget = max_tokens - sum(row.num_tokens for row in rows)
        step_pages = sum(self._pages_to_grow(row.seq, row.num_tokens) for row in rows)
        admitted: list[Row] = []
        for seq in self._in_order() if budget and self.free_slots else ():
            if not budget or not self.free_slots:
                break
            if self._waits_for_twin(seq) or self._prefix_is_being_computed(seq):
                continue
            if not self._attach(seq):
                break
            num_tokens = min(seq.num_uncomputed, budget)
            budget -= num_tokens
            step_pages += self._pages_to_grow(seq, num_tokens)
            self._evict(step_pages - self.ledger.num_free)
            admitted.append(Row(seq, seq.num_computed, num_tokens))
        return admitted

    def _twins(self, rows: list[Row]) -> list[Row]:
        """Rows for the other samples of prompts that this step completes, as far as there are slots and pages."""
        twins: list[Row] = []
        promised = self._num_promised()
        for row in rows:
            if not (row.samples and row.seq.num_outputs == 0 and row.seq.sample_index == 0):
                continue
            for seq in row.seq.request.sequences[1:]:
                # Each takes a page as soon as it writes.
                room = promised + len(twins) + 1 <= self._num_obtainable()
                if self.free_slots and room and seq.slot is None and seq.finish_reason is None:
                    self._enter(seq)
                    twins.append(Row(seq, seq.num_tokens, 0, row.seq))
        return twins

    def _enter(self, seq: Sequence) -> None:
        self._leave_line(seq)
        self.running.append(seq)
        seq.slot = self.free_slots.pop()

    def _leave_line(self, seq: Sequence) -> None:
        place = bisect_left(self.waiting, _line(seq), key=_line)
        assert self.waiting[place] is seq, "a sequence does not wait where it should"
        del self.waiting[place]

    def _attach(self, seq: Sequence) -> bool:
        """Gives a waiting sequence a slot and its cached prefix, if the pool has the pages for the rest of it.

            tokens:  [ whole cached pages: shared | k cached tokens of one: copied at the first write | to compute ]

        Returns:
          Whether it could; if not, nothing has changed.
        """
        promised = self._num_promised()
        while (hit := self._best_hit(seq, promised)) is None:
            # While others run, their pages will come back, and what is held stays.
            if self.running or not (self._drop_oldest(but=seq) or self._drop_oldest()):
                return False
        self._enter(seq)
        was_held = bool(seq.pages)
        self.held.pop(seq, None)
        if was_held:
            self.commands.release += hit.pages
        else:
            self.ledger.retain(hit.pages)
            seq.why_not_cached = None if hit.pages else self._why_missed(seq)
            if self.tree is not None and hit.node is not None:
                self.tree.note_reused(hit.node)
        seq.pages, seq.num_computed = list(hit.pages), hit.num_tokens
        seq.node, seq.partial_node = hit.node, hit.partial_node
        for i, page in enumerate(seq.pages):
            self.commands.point(seq.slot or 0, i, page)
        self.commands.lengths[seq.slot or 0] = seq.num_computed
        self._count_admission(seq, was_held)
        return True

    def _best_hit(self, seq: Sequence, promised: int) -> _Hit | None:
        """The longest start of a sequence with which the rest of it fits, its nodes locked; None if none does."""
        if seq.pages:  # held since before
            hit = _Hit(seq.num_computed, seq.pages, seq.node, seq.partial_node)
            needed = self._pages_to_grow(seq, seq.num_tokens - seq.num_computed)
            return hit if promised + needed <= self._num_obtainable() else None
        for hit in self._hits(seq):
            self._lock(hit.node, hit.partial_node)
            needed = self._num_pages(seq.num_tokens) - len(hit.pages) + (hit.partial_node is not None)
            if promised + needed <= self._num_obtainable():
                return hit
            self._unlock(hit.node, hit.partial_node)
        return None

    def _hits(self, seq: Sequence) -> list[_Hit]:
        """The ways to start a sequence, best first. Its last token is left out, which must be computed to be sampled
        after, and any before a token that is to be scored.

        Copying a page that agrees in part takes one page more than the sequence, which the pool may not have.
        """
        if self.tree is None:
            return [_NO_HIT]
        tokens = seq.tokens[: min(seq.num_tokens, max(seq.next_score, 1)) - 1]
        # Not a use yet: the sequence may have to wait, and look again.
        match = self.tree.match(tokens, namespace=seq.request.namespace, touch=False)
        whole = _Hit(match.num_tokens, match.pages, match.node, None)
        if match.partial is None or not self.partial_hits:
            return [whole]
        num_tokens = match.num_tokens + match.partial.num_tokens
        return [_Hit(num_tokens, [*match.pages, match.partial.page_id], match.node, match.partial.node), whole]

    def _why_missed(self, seq: Sequence) -> str:
        if self.tree is None:
            return "the prefix cache is off"
        if seq.next_score < seq.num_prompt:
            return "the log-probabilities of its first tokens are wanted, for which they must be computed"
        reason = self.tree.why_missed(seq.tokens[:-1], seq.request.namespace, partial_hits=self.partial_hits)
        return reason or "a page agreed in part, but there was no page free to copy it to"

    def _count_admission(self, seq: Sequence, was_held: bool) -> None:
        if seq.was_set_aside:
            self.counts["resumed_hit_tokens"] += seq.num_computed
            return
        if not was_held:
            self.counts["query_tokens"] += seq.num_tokens
            self.counts["hit_tokens"] += seq.num_computed
        seq.num_cached_tokens = seq.num_computed
        for other in self.waiting[:_WINDOW]:
            other.num_overtaken += other.arrival < seq.arrival

    def _in_order(self) -> list[Sequence]:
        """The waiting sequences that this step may get to, the next first: those set aside, those overtaken too often,
        then by the schedule.
        """
        line = self.waiting[: _WINDOW + len(self.free_slots)]
        if self.schedule == "fcfs" or (self.schedule == "lpm" and self.tree is None):
            return line

        def key(seq: Sequence) -> tuple[Any, ...]:
            first = seq.was_set_aside or seq.num_overtaken >= _MAX_OVERTAKEN
            wish = 0 if first else self._wish(seq)
            return (seq.request.priority, not seq.was_set_aside, not first, wish, seq.arrival)

        return sorted(line[:_WINDOW], key=key) + line[_WINDOW:]

    def _wish(self, seq: Sequence) -> Any:
        """What "lpm" or "dfs" sort by, the smallest first."""
        if self.schedule == "dfs":
            return seq.tokens.astype(">u4").tobytes()
        assert self.tree is not None
        return -self.tree.peek(seq.tokens[:-1], namespace=seq.request.namespace)

    def _waits_for_twin(self, seq: Sequence) -> bool:
        """Whether another sample of the same prompt, which computes it for all of them, is not done with it yet."""
        first = seq.request.sequences[0]
        return seq is not first and first.num_outputs == 0 and first.finish_reason is None

    def _prefix_is_being_computed(self, seq: Sequence) -> bool:
        """Whether a running prefill is about to fill a page that this sequence could then share instead of
        computing it.
        """
        if self.tree is None or not self.wait_for_prefix or seq.pages or seq.next_score < seq.num_prompt:
            return False
        prefills = [r for r in self.running if r.num_uncomputed > 1 and r.request.namespace == seq.request.namespace]
        if not prefills:
            return False
        tokens = seq.tokens[:-1]
        end = self.tree.peek(tokens, namespace=seq.request.namespace) + self.page_size  # of its next page
        wanted = tokens[:end].tobytes()
        return end <= len(tokens) and any(r.tokens[:end].tobytes() == wanted for r in prefills)

    # --- Pages ---

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _num_promised(self) -> int:
        """Pages that the running sequences will take before each samples its next token."""
        return sum(self._pages_to_grow(seq, seq.num_uncomputed) for seq in self.running)

    def _num_obtainable(self) -> int:
        """Pages that are free, or could be without anybody losing any that are in use."""
        return self.ledger.num_free + (self.tree.evictable_pages if self.tree is not None else 0)

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
            if row.num_tokens and row.start % self.page_size:
                writers[row.seq.pages[-1]] = writers.get(row.seq.pages[-1], 0) + 1
        kept: set[int] = set()
        growths = []
        for row in rows:
            if not row.num_tokens:
                growths.append(Growth(0, 0, None))
                continue
            shared = row.seq.pages[-1] if row.start % self.page_size else None
            if shared is not None and shared not in kept and writers[shared] == self.ledger.ref_counts[shared]:
                kept.add(shared)
                shared = None
            first = len(row.seq.pages) - (shared is not None)
            growths.append(Growth(first, self._num_pages(row.start + row.num_tokens) - first, shared))
        return growths

    def _make_room(self, num_pages: int, behind: Sequence) -> bool:
        """Frees pages until `num_pages` are free: by eviction, then of what is held, then by setting aside sequences
        behind the given one.
        """
        while self.ledger.num_free < num_pages:
            if self._evict(num_pages - self.ledger.num_free) or self._drop_oldest():
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
        """Of the sequences given, the one with the fewest tokens to compute again; the last in line of several.

        Not one that shares all it has with others than these, since nothing would be free without it.
        """
        refs, holders = self.ledger.ref_counts, Counter(page for seq in seqs for page in seq.pages)
        losing = [
            seq
            for seq in reversed(seqs)
            if seq.node is not None or any(holders[page] == refs[page] for page in seq.pages)
        ]
        return min(losing, key=lambda seq: sum(int(refs[page] == 1) for page in seq.pages), default=None)

    def _set_aside(self, seq: Sequence) -> None:
        """Takes a running sequence's pages away. What it had computed goes to the tree and may still be there later."""
        self._detach(seq)
        seq.was_set_aside = True
        insort(self.waiting, seq, key=_line)
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

    def _hold(self, seq: Sequence) -> None:
        """Takes a sequence's slot away, but leaves it its pages."""
        assert seq.slot is not None
        self._insert(seq)
        self.commands.retain += seq.pages
        self.commands.free_slot(seq.slot)
        self.free_slots.append(seq.slot)
        self.running.remove(seq)
        seq.slot = None
        self.held[seq] = None

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
            self.commands.point(seq.slot, index, page)
        self._lock(inserted.node)
        self._unlock(seq.node)
        seq.node = inserted.node

    # --- Taking a step's results in ---

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Books what a step did. Returns the sequences that have more tokens, or are done."""
        changed: dict[Sequence, None] = {}
        num_taken = 0
        rows, growths = dict(enumerate(plan.rows)), plan.growths
        for step in range(plan.num_steps):
            if step > 0:
                going = {i: row.seq for i, row in rows.items() if row.seq.finish_reason is None}
                rows = {i: Row(seq, seq.num_computed, 1) for i, seq in going.items()}
                growths = self._growths(list(rows.values()))
            num_taken += self._book_pages(list(rows.values()), growths, result.taken[step])
            for row in rows.values():
                self._book_row(row)
            if step == 0 and result.prompt is not None:
                self._book_scores(plan.rows, result)
            for row in rows.values():
                if row.twin is not None:
                    self._follow(row.seq, row.twin)
            for i, row in rows.items():
                if row.samples:
                    self._book_token(row.seq, i, step, result)
                elif row.seq.num_uncomputed == 0:  # only computes
                    self._finish(row.seq, "length")
                else:
                    continue
                changed[row.seq] = None
        self.ledger.give_back(plan.num_reserved - num_taken)
        return list(changed)

    def _book_pages(self, rows: list[Row], growths: list[Growth], taken: np.ndarray) -> int:
        used = 0
        for row, growth in zip(rows, growths):
            pages = taken[used : used + growth.num_pages].tolist()
            used += growth.num_pages
            self.ledger.take(pages)
            if pages:
                row.seq.pages[growth.first :] = pages
        return used

    def _book_row(self, row: Row) -> None:
        seq = row.seq
        seq.num_computed += row.num_tokens
        if row.num_tokens:  # so the page has been copied
            self._unlock(seq.partial_node)
            seq.partial_node = None
        if row.num_tokens and not row.is_decode:
            self.counts["computed_prefill_tokens"] += row.num_tokens
            self._insert(seq)

    def _book_scores(self, rows: list[Row], result: StepResult) -> None:
        """Takes in the log-probabilities of prompt tokens: computing token i tells that of token i + 1."""
        assert result.prompt is not None
        offset = 0
        for row in rows:
            seq, wanted = row.seq, row.seq.request.params.prompt_logprobs or 0
            while row.start < seq.next_score < min(row.start + row.num_tokens + 1, seq.num_prompt):
                at = offset + seq.next_score - 1 - row.start
                seq.scores.append(float(result.prompt.logprobs[at]))
                seq.top_scores.append(result.prompt.top(at, wanted))
            offset += row.num_tokens

    def _follow(self, seq: Sequence, twin: Sequence) -> None:
        """Gives a sample of a prompt the pages of the one that has computed it."""
        assert seq.slot is not None
        seq.pages, seq.num_computed, seq.node = list(twin.pages), twin.num_computed, twin.node
        self._lock(seq.node)
        self.ledger.retain(seq.pages)
        for i, page in enumerate(seq.pages):
            self.commands.point(seq.slot, i, page)
        self.commands.lengths[seq.slot] = seq.num_computed

    def _book_token(self, seq: Sequence, row: int, step: int, result: StepResult) -> None:
        token = int(result.tokens[step, row])
        if token < 0:
            self._finish(seq, "error:the model's logits are not numbers (NaN)")
            return
        seq.append(token)
        wanted = seq.request.params.logprobs
        if wanted is not None and result.sampled is not None:
            logprob = float(result.sampled[step].logprobs[row])
            seq.logprobs.append(logprob)
            seq.cumulative_logprob += logprob
            seq.top_logprobs.append(result.sampled[step].top(row, wanted))
        self.counts["generated_tokens"] += 1
        if reason := seq.why_finished():
            self._finish(seq, reason)

    def _finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        if seq.slot is None:
            self._leave_line(seq)
            if seq in self.held and not seq.request.held:
                self.drop(seq)
        elif seq.request.held:
            self._hold(seq)
        else:
            self._detach(seq)


def _line(seq: Sequence) -> tuple[int, int, int]:
    """Where a sequence stands in line, it alone: by priority (lower first), then arrival, then its number among the
    samples of its request.
    """
    return seq.request.priority, seq.arrival, seq.sample_index
