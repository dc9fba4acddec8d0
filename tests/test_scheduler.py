"""The scheduler without a device: some Python plays the pages, and tells what a model would have read from them."""

import copy
import zlib
from collections import Counter
from collections.abc import Hashable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jax_paged.ledger import Commands, PageLedger, Row, StepPlan, StepResult
from jax_paged.radix import RadixTree
from jax_paged.request import Request, SamplingParams, Sequence
from jax_paged.scheduler import SCHEDULES, Scheduler

VOCAB = 3  # few tokens, so that random prompts share prefixes


def model(namespace: Hashable, tokens: tuple[int, ...]) -> int:
    """The token that follows: any function of all that went before."""
    return zlib.crc32(repr((namespace, tokens)).encode()) % VOCAB


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

    def copy(self) -> "Device":
        other = copy.copy(self)
        other.free, other.ref_counts, other.lengths = list(self.free), list(self.ref_counts), list(self.lengths)
        other.kv, other.tables = [list(page) for page in self.kv], [dict(table) for table in self.tables]
        return other

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
            for slot in piece.free_slots:
                for page in self.tables[slot].values():
                    self._release(page)
                self.tables[slot], self.lengths[slot] = {}, 0
            old = [self.tables[slot][i] for slot, i in piece.points if i in self.tables[slot]]
            for (slot, i), page in piece.points.items():
                assert self.ref_counts[page] > 0, f"page {page} is free and cannot be shared"
                self.tables[slot][i] = page
            for page in [*old, *piece.release]:
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
        """Pages for new tokens, slot after slot. Where all holders of a page write at once, the first keeps it."""
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
        sampled = [row.seq for row in plan.rows if row.start + row.num_tokens == row.seq.num_tokens]
        tokens, taken = self.device.run(plan, tree.pages() if tree else set())
        changed = self.scheduler.commit(plan, StepResult(np.array([tokens]), np.array([taken], np.int32)))
        assert changed == sampled, "a token for each prefill that is complete, none for a chunk before its last"
        self.check()
        return changed

    def run(self, *args: Any, **options: Any) -> Sequence:
        """A request from its arrival to its end, together with all others."""
        request = self.add(*args, **options)
        self.drain()
        return request.sequences[0]

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
        scheduler, ledger, device = self.scheduler, self.scheduler.ledger, self.device.copy()
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
        assert not self.scheduler.has_work()


# --- Any sequence of events ---

PROMPTS = st.fixed_dictionaries(
    {
        "earlier": st.integers(0, 7),  # how many requests back is the one whose start this shares; 0: none
        "part": st.sampled_from(["all", "prompt", "half"]),
        "tail": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        "max_new_tokens": st.sampled_from([1, 5, 12, 30]),
        "namespace": st.sampled_from([None, None, "other"]),
        "priority": st.sampled_from([0, 0, 0, -1, 1]),
        "stop": st.sampled_from([frozenset(), frozenset(), frozenset({0})]),
    }
)


class AnySchedule(RuleBasedStateMachine):
    """Requests of all kinds come and go, in any order, on pools hardly larger than one of them."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(2, 20),
        max_seqs=st.integers(1, 4),
        more_tokens=st.integers(0, 20),
        prefix_cache=st.sampled_from([True, True, False]),
        partial_hits=st.booleans(),
        schedule=st.sampled_from(SCHEDULES),
        prompts=st.lists(PROMPTS, min_size=2, max_size=6),
    )
    def start(self, page_size: int, num_pages: int, max_seqs: int, more_tokens: int, prompts: list[Any],
              **options: Any) -> None:  # fmt: skip
        self.rig = Rig(num_pages, page_size, max_seqs, max_seqs + more_tokens, **options)
        for prompt in prompts:
            self.add(prompt)

    @rule(prompt=PROMPTS)
    def add(self, prompt: dict[str, Any]) -> None:
        options = dict(prompt)
        earlier, part, tail = options.pop("earlier"), options.pop("part"), options.pop("tail")
        start: list[int] = []
        if 0 < earlier <= len(self.rig.requests):
            seq = self.rig.requests[-earlier].sequences[0]
            end = {"all": seq.num_tokens, "prompt": seq.num_prompt, "half": seq.num_prompt // 2}[part]
            start = seq.tokens[:end].tolist()
        self.rig.add((start + tail)[: min(self.rig.max_len - 1, 40)], **options)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.rig.step()

    @rule(earlier=st.integers(1, 6))
    def abort(self, earlier: int) -> None:
        request = self.rig.requests[-min(earlier, len(self.rig.requests))]
        reason = request.sequences[0].finish_reason
        self.rig.scheduler.abort(request)
        assert request.sequences[0].finish_reason == (reason or "abort")

    @rule()
    def reset(self) -> None:
        running, ref_counts = bool(self.rig.scheduler.running), self.rig.scheduler.ledger.ref_counts.tolist()
        assert self.rig.scheduler.reset_tree() == (not running)
        if running:
            assert self.rig.scheduler.ledger.ref_counts.tolist() == ref_counts

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()
            self.rig.check_end()


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = hypothesis.settings(stateful_step_count=50)


def test_the_property_test_is_long_enough():
    settings = TestAnySchedule.settings
    assert settings.max_examples * settings.stateful_step_count >= 2000


# --- Page accounting ---


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens of which prompts of other seeds have none."""
    return [1000 * seed + i for i in range(num_tokens)]


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_a1_a_prompt_seen_before_still_computes_its_last_token(length: int, partial_hits: bool):
    rig = Rig(partial_hits=partial_hits)
    assert rig.run(tokens(length), 3).num_cached_tokens == 0
    again = rig.run(tokens(length), 3)
    # The first run left the tree its full pages: 7, 8 or 9 prompt tokens and the two sampled ones with KV.
    assert again.num_cached_tokens == (length - 1 if partial_hits and length > 1 else (length - 1) // 4 * 4)
    assert rig.plans[-3].num_tokens == length - again.num_cached_tokens
    rig.check_end()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a2_many_requests_through_a_tiny_pool_leave_every_page_free(page_size: int):
    rng = np.random.default_rng(page_size)
    rig = Rig(num_pages=48 // page_size, page_size=page_size)
    for _ in range(500):
        start = tokens(int(rng.integers(0, 20)), seed=int(rng.integers(1, 4)))
        rig.add(start + rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist(), int(rng.integers(1, 17)))
        for _ in range(int(rng.integers(0, 4))):
            rig.step()
    rig.drain()
    counts = rig.scheduler.counts
    assert counts["hit_tokens"] > 0
    assert counts["evicted_pages"] > 0
    assert counts["preemptions"] > 0
    rig.check_end()


def test_a3_an_evicted_page_and_the_pages_taken_after_it_are_disjoint():
    rig = Rig(num_pages=4)
    rig.run(tokens(8, seed=1), 1)  # two pages in the tree, two free
    held = rig.scheduler.tree.pages()
    (page,) = rig.scheduler.tree.evict(1)
    rig.scheduler._drop_tree_pages([page])
    seq = rig.add(tokens(9, seed=2), 2).sequences[0]
    rig.step()
    assert len(set(seq.pages)) == 3
    assert set(seq.pages) <= set(range(4)) - (held - {page})
    rig.drain()
    rig.check_end()


def test_a4_a_sequence_set_aside_gives_back_whole_pages():
    rig = Rig(num_pages=7, prefix_cache=False)
    first, second = (rig.add(tokens(12, seed), 8).sequences[0] for seed in (1, 2))
    while not rig.scheduler.counts["preemptions"]:
        rig.step()
    assert second.num_tokens == 13  # three pages and one token, which had no page yet
    assert second.pages == []
    assert rig.scheduler.ledger.num_free == 7 - len(first.pages)
    rig.drain()
    assert second.num_outputs == 8
    rig.check_end()


def test_a6_a_request_cannot_count_its_own_hit_as_room():
    rig = Rig(num_pages=16, max_batch_tokens=64)
    rig.run(tokens(20, seed=1), 1)
    other = rig.add(tokens(21, seed=2), 4).sequences[0]
    rig.step()
    tree = rig.scheduler.tree
    assert rig.scheduler.ledger.num_free + tree.evictable_pages == 10
    request = rig.add(tokens(44, seed=1), 1)  # 5 pages of 11 are cached: 6 more than the 5 that would be left
    rig.step()
    assert rig.scheduler.waiting == request.sequences
    assert (rig.scheduler.ledger.num_free, tree.evictable_pages, tree.protected_pages) == (5, 5, 5)
    assert rig.scheduler.counts["evicted_pages"] == 0
    while not other.finish_reason:
        rig.step()
    rig.drain()
    assert request.sequences[0].num_cached_tokens == 20
    rig.check_end()


def test_a7_a_prefix_whose_pages_were_evicted_and_reused_is_a_miss():
    rig = Rig(num_pages=8)
    rig.run(tokens(16, seed=1), 2)
    assert rig.scheduler.tree.num_pages == 4
    rig.run(tokens(31, seed=2), 1)
    assert rig.scheduler.tree.peek(tokens(16, seed=1)) == 0
    assert rig.run(tokens(16, seed=1), 2).num_cached_tokens == 0
    rig.check_end()


def test_a8_the_tree_gets_the_computed_tokens_and_not_the_last_sampled_one():
    rig = Rig()
    seq = rig.run(tokens(5), 4)  # 9 tokens, of which the last has no KV
    assert rig.scheduler.tree.peek(seq.tokens) == 8
    seq = rig.run(tokens(5, seed=1), 3)  # 8 tokens: the second page lacks the last
    assert rig.scheduler.tree.peek(seq.tokens) == 4
    rig.check_end()


def test_b1_a_running_sequence_keeps_its_prefix_whatever_is_evicted():
    rig = Rig(num_pages=12, max_batch_tokens=32)
    rig.run(tokens(16, seed=1), 1)
    seq = rig.add(tokens(18, seed=1), 12).sequences[0]
    rig.step()
    rig.add(tokens(24, seed=2), 6)
    for _ in range(4):
        rig.step()
    shared = seq.pages[:4]
    rig.scheduler._drop_tree_pages(rig.scheduler.tree.evict(12))
    rig.check()
    assert rig.scheduler.tree.peek(tokens(16, seed=1)) == 16
    assert seq.pages[:4] == shared
    rig.drain()
    rig.check_end()


@pytest.mark.parametrize("partial_hits", [False, True])
def test_c1_the_next_turn_of_a_conversation_finds_the_whole_last_one(partial_hits: bool):
    rig = Rig(num_pages=32, page_size=16, max_batch_tokens=64, partial_hits=partial_hits)
    first = rig.run(tokens(100), 50)
    second = rig.run(first.tokens.tolist() + tokens(50, seed=1), 1)
    assert second.num_cached_tokens == 149 // 16 * 16  # the last of the 150 has no KV, and the tree holds whole pages
    rig.check_end()


def test_c1_a_fork_inside_a_page_starts_from_a_copy_of_it():
    rig = Rig(page_size=16)
    rig.run(tokens(64), 1)
    seq = rig.run(tokens(41) + tokens(9, seed=1), 8)
    assert seq.num_cached_tokens == 41
    assert sum(growth.shared_page is not None for plan in rig.plans for growth in plan.growths) == 1
    rig.check_end()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_c2_a_long_prompt_comes_in_chunks_and_samples_after_the_last(prefix_cache: bool):
    rig = Rig(num_pages=64, page_size=16, max_batch_tokens=128, prefix_cache=prefix_cache)
    rig.run(tokens(1000), 1)
    assert [plan.num_tokens for plan in rig.plans] == [128] * 7 + [104]
    rig.check_end()


def test_c3_without_a_tree_a_finished_sequence_frees_every_page():
    rig = Rig(prefix_cache=False)
    rig.run(tokens(23), 9)
    assert rig.scheduler.ledger.num_free == 16
    rig.check_end()


# --- Preemption, abort, namespaces ---


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_d2_preempted_sequences_all_end_as_if_alone(schedule: str, prefix_cache: bool):
    rig = Rig(num_pages=15, prefix_cache=prefix_cache, schedule=schedule)
    for seed in range(4):  # of 10 pages each
        rig.add(tokens(8, seed), 32)
    rig.drain()
    counts = rig.scheduler.counts
    assert counts["preemptions"] >= 3
    assert counts["generated_tokens"] == 4 * 32
    rig.check_end()


def test_i4_hits_on_own_pages_after_preemption_are_counted_apart():
    rig = Rig(num_pages=15)
    for seed in range(4):
        rig.add(tokens(8, seed), 32)
    rig.drain()
    counts = rig.scheduler.counts
    assert counts["preemptions"] > 0
    assert counts["query_tokens"] == 4 * 8  # prompts, once each
    assert counts["hit_tokens"] == 0
    assert counts["resumed_hit_tokens"] > 0
    assert all(request.sequences[0].num_cached_tokens == 0 for request in rig.requests)


@pytest.mark.parametrize("phase", ["queued", "between chunks", "decoding", "set aside", "finished"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_e1_an_aborted_request_leaves_nothing_behind(phase: str, prefix_cache: bool):
    rig = Rig(num_pages=15, max_seqs=2, prefix_cache=prefix_cache)
    rig.add(tokens(8, seed=1), 40)
    victim = rig.add(tokens(20, seed=2), 24)
    seq = victim.sequences[0]
    is_phase = {
        "queued": lambda: seq.slot is None,
        "between chunks": lambda: 0 < seq.num_computed < seq.num_prompt,
        "decoding": lambda: seq.num_outputs > 3,
        "set aside": lambda: seq.was_set_aside and seq.slot is None,
        "finished": lambda: seq.finish_reason is not None,
    }[phase]
    while not is_phase():
        rig.step()
    for _ in range(2):
        rig.scheduler.abort(victim)
        rig.check()
        assert seq.finish_reason == ("length" if phase == "finished" else "abort")
    rig.drain()
    rig.check_end()


def test_f1_namespaces_share_nothing():
    rig = Rig()
    assert rig.run(tokens(12), 1, namespace="a").num_cached_tokens == 0
    assert rig.run(tokens(12), 1, namespace="b").num_cached_tokens == 0
    assert rig.run(tokens(12), 1).num_cached_tokens == 0
    assert rig.run(tokens(12), 1, namespace="a").num_cached_tokens == 11
    rig.check_end()


def test_f2_the_tree_cannot_be_reset_while_pages_are_in_use():
    rig = Rig()
    rig.run(tokens(12), 1)
    rig.add(tokens(12), 4)
    rig.step()
    before = rig.scheduler.ledger.ref_counts.tolist()
    assert not rig.scheduler.reset_tree()
    assert rig.scheduler.ledger.ref_counts.tolist() == before
    assert rig.scheduler.tree.num_pages == 3
    rig.drain()
    assert rig.scheduler.reset_tree()
    assert rig.run(tokens(12), 1).num_cached_tokens == 0
    rig.check_end()


# --- Who goes first ---


def order_of_admission(rig: Rig) -> list[int]:
    order: dict[int, None] = {}
    for plan in rig.plans:
        order |= dict.fromkeys(row.seq.request.request_id for row in plan.rows)
    return list(order)


@pytest.mark.parametrize(("schedule", "expected"), [("fcfs", [0, 1, 2, 3, 4]), ("lpm", [0, 1, 3, 4, 2])])
def test_lpm_admits_the_longest_cached_prefix_first(schedule: str, expected: list[int]):
    rig = Rig(schedule=schedule, max_seqs=1)
    rig.run(tokens(16, seed=1), 1)
    rig.add(tokens(4, seed=1) + tokens(9, seed=8), 1)
    rig.step()
    rig.add(tokens(12, seed=2), 1)
    rig.add(tokens(16, seed=1) + tokens(2, seed=2), 1)
    rig.add(tokens(8, seed=1) + tokens(9, seed=3), 1)
    rig.drain()
    assert order_of_admission(rig) == expected
    rig.check_end()


def test_a_lower_priority_number_goes_first():
    rig = Rig(schedule="fcfs", max_seqs=1)
    for priority in (1, 0, -1, 0):
        rig.add(tokens(4, seed=priority + 5), 1, priority=priority)
    rig.drain()
    assert order_of_admission(rig) == [2, 1, 3, 0]


def test_h2_a_cold_request_waits_a_bounded_time_among_hot_ones():
    rig = Rig(max_seqs=1)
    rig.run(tokens(16, seed=1), 1)
    cold = rig.add(tokens(16, seed=2), 1).sequences[0]
    for i in range(200):
        rig.add([*tokens(16, seed=1), i], 1)
        rig.add([*tokens(16, seed=1), i], 1)
        rig.step()
        if cold.finish_reason:
            break
    assert 10 < i <= 40  # overtaken, but not for ever
    rig.drain()
    rig.check_end()


def test_h2_a_cold_request_far_back_in_a_long_queue_waits_a_bounded_time_too():
    rig = Rig(max_seqs=1)
    rig.run(tokens(16, seed=1), 1)
    for i in range(300):
        rig.add([*tokens(16, seed=1), i], 1)
    cold = rig.add(tokens(16, seed=2), 1).sequences[0]
    for i in range(400):
        rig.add([*tokens(16, seed=1), i], 1)
        rig.step()
        if cold.finish_reason:
            break
    assert i <= 340
    rig.drain()


def test_requests_that_share_an_uncached_prefix_compute_it_once():
    rig = Rig(num_pages=32, max_seqs=4)
    for i in range(4):
        rig.add([*tokens(32), 100 + i], 2)
    rig.drain()
    assert [request.sequences[0].num_cached_tokens for request in rig.requests] == [0, 32, 32, 32]
    assert rig.scheduler.counts["computed_prefill_tokens"] == 33 + 3
    rig.check_end()


@pytest.mark.parametrize("num_shared", [0, 12])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_looks_at_few_of_many_that_wait(monkeypatch: pytest.MonkeyPatch, schedule: str, num_shared: int):
    looked_at: set[int] = set()

    class Watched(Sequence):
        def __getattribute__(self, name: str) -> Any:
            looked_at.add(id(self))
            return super().__getattribute__(name)

    monkeypatch.setattr("jax_paged.request.Sequence", Watched)
    rig = Rig(schedule=schedule, max_batch_tokens=64)
    for i in range(1000):  # all but the first wait for its prefix in the first step, if they share one
        rig.add([*tokens(num_shared), *tokens(4, seed=i + 1)], 3)
    for i in range(20):
        looked_at.clear()
        rig.step()
        # A window, one for each slot, and those that a binary search for each of four comes across.
        assert len(looked_at) <= 128 + 4 + 4 * 12
        if i == 0:
            assert len(rig.plans[0].rows) == (1 if num_shared else 4)
    for request in rig.requests[::-1]:
        looked_at.clear()
        rig.scheduler.abort(request)
        assert len(looked_at) <= 16
    rig.check_end()


def test_samples_of_one_prompt_wait_in_their_order_whichever_is_set_aside():
    rig = Rig(schedule="fcfs")
    request = Request(
        0, tokens(40), SamplingParams(n=3), seed=0, max_new_tokens=2, stop_token_ids=frozenset(), priority=1
    )
    rig.scheduler.add(request)
    rig.step()
    first = request.sequences[0]
    assert first.num_computed == 16
    rig.scheduler._set_aside(first)
    assert rig.scheduler.waiting == request.sequences
    assert [row.seq for row in rig.scheduler.plan().rows] == [first]


def test_decodes_go_on_while_a_long_prompt_comes_in():
    rig = Rig(num_pages=64, max_batch_tokens=8)
    short = rig.add(tokens(4, seed=1), 12).sequences[0]
    rig.step()
    rig.add(tokens(60, seed=2), 1)
    for done in range(2, 8):
        rig.step()
        assert short.num_outputs == done
    rig.drain()
    rig.check_end()


def test_a_stop_token_ends_the_sequence_and_is_part_of_it():
    rig = Rig()
    seq = rig.run([1, 2], 40, stop=frozenset({0}))
    assert seq.finish_reason == "stop"
    assert seq.output_token_ids.index(0) == seq.num_outputs - 1
    rig.check_end()


# --- Parts ---


def test_split_commands_come_in_pieces_that_fit_and_in_their_order():
    commands = Commands(
        retain=[1, 2, 3],
        release=[4, 5, 6, 7],
        free_slots={0, 1},
        points={(2, 0): 8, (2, 1): 9, (3, 0): 8},
        lengths={2: 7},
    )
    assert list(commands.split(4)) == [commands]
    kinds = "retain", "release", "free_slots", "points", "lengths"
    pieces = [{kind: getattr(piece, kind) for kind in kinds if getattr(piece, kind)} for piece in commands.split(2)]
    assert pieces == [
        {"retain": [1, 2]},
        {"retain": [3]},
        {"free_slots": {0, 1}},
        {"points": {(2, 0): 8, (2, 1): 9}},
        {"points": {(3, 0): 8}},
        {"release": [4, 5]},
        {"release": [6, 7]},
        {"lengths": {2: 7}},
    ]


def test_freeing_a_slot_drops_what_was_ordered_for_it():
    commands = Commands(lengths={0: 4, 1: 4})
    commands.point(0, 0, 5)
    commands.point(1, 0, 6)
    commands.free_slot(0)
    assert commands == Commands(retain=[5, 6], release=[5], free_slots={0}, points={(1, 0): 6}, lengths={1: 4})


def test_the_ledger_catches_pages_freed_twice_or_taken_while_in_use():
    ledger = PageLedger(3)
    ledger.reserve(2)
    ledger.take([0, 2])
    with pytest.raises(AssertionError, match="page 2 was handed out while in use"):
        ledger.take([2])
    with pytest.raises(AssertionError, match="page 1 is free and cannot be retained"):
        ledger.retain([1])
    ledger.release([0])
    with pytest.raises(AssertionError, match="page 0 is free already"):
        ledger.release([0])
    with pytest.raises(AssertionError, match="3 pages planned, 2 free"):
        ledger.reserve(3)


def test_sizes_and_names_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"schedule='best' is not one of lpm, fcfs, dfs"):
        Rig(schedule="best")
    with pytest.raises(ValueError, match=r"max_batch_tokens=3 must be at least max_seqs=4"):
        Rig(max_seqs=4, max_batch_tokens=3)
