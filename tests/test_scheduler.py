"""The scheduler without a device: a few lines of Python play the pages, and say what a model would have read from them."""

import copy
from collections import Counter
from collections.abc import Hashable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jax_paged.radix import RadixTree
from jax_paged.request import Request, SamplingParams, Sequence
from jax_paged.scheduler import SCHEDULES, Commands, PageLedger, Row, Scheduler, StepPlan

VOCAB = 3  # few tokens, so that random prompts share prefixes


def model(namespace: Hashable, tokens: tuple[int, ...]) -> int:
    """The token that follows: any function of all that went before."""
    return hash((namespace, tokens)) % VOCAB


def continuation(request: Request) -> list[int]:
    """What a request must give, computed from the prompt alone."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_new_tokens):
        tokens.append(model(request.namespace, tuple(tokens)))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


class Device:
    """The pages of `jax_paged.cache`, naively. A token's KV is the whole prefix that it was computed from."""

    def __init__(self, num_pages: int, page_size: int, max_seqs: int) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.ref_counts = [0] * num_pages
        self.kv: list[list[Any]] = [[None] * page_size for _ in range(num_pages)]
        self.tables: list[dict[int, int]] = [{} for _ in range(max_seqs)]
        self.lengths = [0] * max_seqs

    def _release(self, page: int) -> None:
        assert self.ref_counts[page] > 0, f"page {page} is free already"
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            self.free.append(page)
            self.kv[page] = [None] * self.page_size

    def apply(self, commands: Commands, capacity: int = 3) -> None:
        for piece in commands.split(capacity):
            assert max(len(piece.retain), len(piece.release), len(piece.points)) <= capacity
            for page in piece.retain:
                assert self.ref_counts[page] > 0, f"page {page} is free and cannot be retained"
                self.ref_counts[page] += 1
            for page in piece.release:
                self._release(page)
            for slot in piece.free_slots:
                for page in self.tables[slot].values():
                    self._release(page)
                self.tables[slot], self.lengths[slot] = {}, 0
            old = [self.tables[slot][i] for slot, i in piece.points if i in self.tables[slot]]
            for (slot, i), page in piece.points.items():
                assert self.ref_counts[page] > 0, f"page {page} is free and cannot be shared"
                self.ref_counts[page] += 1
                self.tables[slot][i] = page
            for page in old:
                self._release(page)
            for slot, length in piece.lengths.items():
                self.lengths[slot] = length

    def run(self, plan: StepPlan, tree_pages: set[int]) -> tuple[list[int], list[int]]:
        """A step: the token of each row, and the pages taken."""
        self.apply(plan.commands)
        slots = [row.seq.slot for row in plan.rows]
        assert slots == sorted(set(slots)), "rows must come in the order of their slots"
        taken = self._extend({row.seq.slot: row.num_tokens for row in plan.rows})
        for row in plan.rows:
            self._write(row, tree_pages)
        return [self._read(row) for row in plan.rows], taken

    def _extend(self, num_new: dict[int, int]) -> list[int]:
        """Pages for new tokens, slot after slot. Of a page's holders who write at once, the first keeps it if no one else holds it."""
        last = {slot: self.tables[slot][self.lengths[slot] // self.page_size] for slot in num_new
                if self.lengths[slot] % self.page_size}  # fmt: skip
        writers, ref_counts = Counter(last.values()), list(self.ref_counts)
        keepers: set[int] = set()
        taken = []
        for slot, count in sorted(num_new.items()):
            table, length = self.tables[slot], self.lengths[slot]
            page = last.get(slot)
            if page is not None and writers[page] == ref_counts[page] and page not in keepers:
                keepers.add(page)
            elif page is not None:
                taken.append(self._take())
                table[length // self.page_size] = taken[-1]
                self.kv[taken[-1]] = list(self.kv[page])
                self._release(page)
            while len(table) * self.page_size < length + count:
                taken.append(self._take())
                table[len(table)] = taken[-1]
            self.lengths[slot] = length + count
        return taken

    def _take(self) -> int:
        page = self.free.pop(len(self.free) // 2)  # any order will do
        assert self.ref_counts[page] == 0
        self.ref_counts[page] = 1
        return page

    def _write(self, row: Row, tree_pages: set[int]) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            page = self.tables[row.seq.slot][position // self.page_size]
            assert self.ref_counts[page] == 1, f"page {page} is shared and must not be written"
            assert page not in tree_pages, f"page {page} is in the tree and must not be written"
            self.kv[page][position % self.page_size] = prefix(row.seq, position)

    def _read(self, row: Row) -> int:
        """Attends to all of the sequence, which must be its own prefixes; gives the next token."""
        end = row.start + row.num_tokens
        assert self.lengths[row.seq.slot] == end
        assert len(self.tables[row.seq.slot]) == -(-end // self.page_size)
        for position in range(end):
            page = self.tables[row.seq.slot][position // self.page_size]
            assert self.kv[page][position % self.page_size] == prefix(row.seq, position)
        return model(*prefix(row.seq, end - 1)) if row.samples else -1


def prefix(seq: Sequence, position: int) -> tuple[Hashable, tuple[int, ...]]:
    return seq.request.namespace, tuple(seq.tokens[: position + 1].tolist())


class Rig:
    """A scheduler on a naive device. Every step checks the books."""

    def __init__(self, num_pages: int = 16, page_size: int = 4, max_seqs: int = 4, max_batch_tokens: int = 16,
                 prefix_cache: bool = True, schedule: str = "lpm", partial_hits: bool = True) -> None:  # fmt: skip
        self.max_len = num_pages * page_size
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_seqs=max_seqs,
            max_batch_tokens=max_batch_tokens,
            tree=RadixTree(page_size) if prefix_cache else None,
            schedule=schedule,
            partial_hits=partial_hits,
        )
        self.device = Device(num_pages, page_size, max_seqs)
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []

    def add(self, tokens: list[int], max_new_tokens: int = 1, namespace: Hashable = None, priority: int = 0,
            stop: frozenset[int] = frozenset()) -> Request:  # fmt: skip
        request = Request(
            len(self.requests),
            tokens,
            SamplingParams(),
            seed=0,
            max_new_tokens=min(max_new_tokens, self.max_len - len(tokens)),
            stop_token_ids=stop,
            namespace=namespace,
            priority=priority,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Sequence]:
        plan = self.scheduler.plan()
        if plan is None:
            return []
        assert not self.scheduler.commands
        assert 0 < plan.num_tokens <= self.scheduler.max_batch_tokens
        self.plans.append(plan)
        tree = self.scheduler.tree
        tokens, taken = self.device.run(plan, tree.pages() if tree else set())
        changed = self.scheduler.commit(plan, np.array(tokens), None, np.array(taken, np.int32))
        self.check()
        return changed

    def drain(self) -> None:
        """Runs to the end, within a bound that no schedule without a livelock reaches."""
        pending = [seq for request in self.requests for seq in request.sequences if not seq.finish_reason]
        bound = 100 + 20 * sum(seq.num_tokens + seq.request.max_new_tokens for seq in pending)
        for _ in range(bound):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), f"not done after {bound} steps"

    def check(self) -> None:
        scheduler, ledger, device = self.scheduler, self.scheduler.ledger, copy.deepcopy(self.device)
        device.apply(scheduler.commands)
        assert ledger.ref_counts.tolist() == device.ref_counts
        assert ledger.num_free == len(device.free)
        for seq in scheduler.running:
            assert list(device.tables[seq.slot].values()) == seq.pages
            assert device.lengths[seq.slot] == seq.num_computed <= seq.num_tokens
        running = {seq.slot for seq in scheduler.running}
        assert all(not table for slot, table in enumerate(device.tables) if slot not in running)
        assert sorted([*running, *scheduler.free_slots]) == list(range(len(device.tables)))
        holders = Counter(page for table in device.tables for page in table.values())
        tree = scheduler.tree
        if tree is not None:
            tree.check()
            holders.update(tree.pages())
            assert ledger.num_free + tree.evictable_pages <= len(device.ref_counts)
            assert all(None not in device.kv[page] for page in tree.pages()), "the tree holds an unwritten slot"
        assert [holders[page] for page in range(len(device.ref_counts))] == device.ref_counts

    def check_end(self) -> None:
        """Every request has ended with the tokens it would have alone, and every page is free."""
        for request in self.requests:
            (seq,) = request.sequences
            expected = continuation(request)
            if seq.finish_reason == "abort":
                assert seq.output_token_ids == expected[: seq.num_outputs]
            else:
                assert seq.output_token_ids == expected
                assert seq.finish_reason == ("stop" if expected[-1] in request.stop_token_ids else "length")
        assert self.scheduler.reset_tree()
        self.check()
        assert self.scheduler.ledger.num_free == len(self.device.ref_counts)
        assert not self.scheduler.running and not self.scheduler.waiting


# --- Any sequence of events ---


class AnySchedule(RuleBasedStateMachine):
    """Requests of all kinds come and go, in any order, on pools hardly larger than one of them."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(1, 8),
        max_seqs=st.integers(1, 4),
        more_tokens=st.integers(0, 20),
        prefix_cache=st.booleans() | st.just(True),
        partial_hits=st.booleans(),
        schedule=st.sampled_from(SCHEDULES),
    )
    def start(self, page_size: int, num_pages: int, max_seqs: int, more_tokens: int, **options: Any) -> None:
        hypothesis.assume(num_pages * page_size >= 2)
        self.rig = Rig(num_pages, page_size, max_seqs, max_seqs + more_tokens, **options)

    @rule(
        data=st.data(),
        max_new_tokens=st.integers(1, 12),
        namespace=st.sampled_from([None, None, "other"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        stop=st.sampled_from([frozenset(), frozenset(), frozenset({0})]),
    )
    def add(self, data: st.DataObject, **options: Any) -> None:
        longest = min(self.rig.max_len - 1, 40)
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4))
        if self.rig.requests and data.draw(st.booleans()):  # a later turn of an earlier conversation
            seq = data.draw(st.sampled_from(self.rig.requests)).sequences[0]
            tokens = seq.tokens[: data.draw(st.integers(1, seq.num_tokens))].tolist() + tokens
        else:
            tokens = [0] * data.draw(st.integers(1, longest)) + tokens
        self.rig.add(tokens[:longest], **options)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.rig.step()

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.rig.requests))
        reason = request.sequences[0].finish_reason
        self.rig.scheduler.abort(request)
        assert request.sequences[0].finish_reason == (reason or "abort")

    @rule()
    def reset(self) -> None:
        running, counts = bool(self.rig.scheduler.running), self.rig.scheduler.ledger.ref_counts.tolist()
        assert self.rig.scheduler.reset_tree() == (not running)
        if running:
            assert self.rig.scheduler.ledger.ref_counts.tolist() == counts

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()
            self.rig.check_end()


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = hypothesis.settings(stateful_step_count=60)
