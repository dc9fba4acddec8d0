"""The pages as the scheduler sees them: who holds how many, what is to be done to them, what a step will take."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jax_paged.request import Sequence

__all__ = ["Commands", "Growth", "PageLedger", "Row", "StepPlan", "StepResult", "TokenScores"]


class PageLedger:
    """The host's copy of the pool's reference counts."""

    def __init__(self, num_pages: int) -> None:
        self.ref_counts = np.zeros(num_pages, np.int32)
        self.num_free = num_pages

    def reserve(self, num_pages: int) -> None:
        """A planned step will take these; `take` tells which they were."""
        assert num_pages <= self.num_free, f"{num_pages} pages planned, {self.num_free} free"
        self.num_free -= num_pages

    def give_back(self, num_pages: int) -> None:
        """These were reserved, and not taken."""
        self.num_free += num_pages

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
    """What is to be done to pages on the device, part after part.

    First come all new references, last those given up: so a page that goes from one holder to another is never free
    between the two.
    """

    retain: list[int] = field(default_factory=list)  # page ids: one more reference each
    free_slots: set[int] = field(default_factory=set)
    points: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, table index) -> the page id it shall name
    release: list[int] = field(default_factory=list)  # page ids: one reference less each
    lengths: dict[int, int] = field(default_factory=dict)  # slot -> tokens

    def __bool__(self) -> bool:
        return bool(self.retain or self.release or self.free_slots or self.points or self.lengths)

    def point(self, slot: int, index: int, page: int) -> None:
        """Makes a table entry name a page, as one more holder, and give up the one it names."""
        if (slot, index) in self.points:
            self.release.append(self.points[slot, index])
        self.retain.append(page)
        self.points[slot, index] = page

    def free_slot(self, slot: int) -> None:
        """Empties a slot. Orders for it that are still here would come after that, so they go."""
        self.free_slots.add(slot)
        self.release += [page for place, page in self.points.items() if place[0] == slot]
        self.points = {place: page for place, page in self.points.items() if place[0] != slot}
        self.lengths.pop(slot, None)

    def split(self, capacity: int) -> Iterator["Commands"]:
        """The same in pieces whose lists fit arrays of `capacity` entries: mostly a single one."""
        if max(len(self.retain), len(self.release), len(self.points)) <= capacity:
            yield self
            return
        for start in range(0, len(self.retain), capacity):
            yield Commands(retain=self.retain[start : start + capacity])
        yield Commands(free_slots=self.free_slots)
        points = list(self.points.items())
        for start in range(0, len(points), capacity):
            yield Commands(points=dict(points[start : start + capacity]))
        for start in range(0, len(self.release), capacity):
            yield Commands(release=self.release[start : start + capacity])
        yield Commands(lengths=self.lengths)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: its tokens [start, start + num_tokens).

    A row without tokens, and with a `twin`, samples after the last token of that one: another sample of its prompt,
    which then goes on from its pages.
    """

    seq: Sequence
    start: int
    num_tokens: int
    twin: Sequence | None = None

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
    growths: list[Growth]  # of the first step
    commands: Commands
    num_steps: int = 1  # so many tokens a row, if it is not done before; more than one only where all rows decode
    num_reserved: int = 0  # pages set apart, for all steps

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class TokenScores(NamedTuple):
    """Log-probabilities of tokens, and the likeliest tokens in their places; empty where nobody asked."""

    logprobs: np.ndarray  # f32[n]
    top_tokens: np.ndarray | None  # i32[n, MAX_LOGPROBS], the likeliest first; None where only `logprobs` are known
    top_logprobs: np.ndarray | None  # f32[n, MAX_LOGPROBS]

    def top(self, i: int, count: int) -> dict[int, float]:
        """The `count` likeliest in place i."""
        if count == 0:
            return {}
        assert self.top_tokens is not None
        assert self.top_logprobs is not None
        return dict(zip(self.top_tokens[i, :count].tolist(), self.top_logprobs[i, :count].tolist()))


class StepResult(NamedTuple):
    """What a step tells, of one or several tokens a row."""

    tokens: np.ndarray  # i32[steps, >= rows], sampled; only those of rows that sample count
    taken: np.ndarray  # i32[steps, >= pages], the ids the device handed out, row after row
    sampled: list[TokenScores] | None = None  # a step each, of the sampled tokens
    prompt: TokenScores | None = None  # of the token after each of the step's tokens
    num_free: int | None = None
    oom: bool = False
