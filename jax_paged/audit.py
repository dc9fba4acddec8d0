"""What `LLM.check` and `debug_checks` do: device, scheduler and tree agree about every page, or it is told."""

from collections.abc import Iterator

import numpy as np

from jax_paged import cache as pages
from jax_paged.cache import PagedCache
from jax_paged.errors import InvariantError
from jax_paged.scheduler import Scheduler

__all__ = ["check_books", "poison"]


def check_books(cache: PagedCache, scheduler: Scheduler) -> None:
    """Compares the books of the device, to which all commands have gone, with those of scheduler and tree.

    Raises:
      InvariantError: they differ; it names the pages.
    """
    held_pages = [page for seq in scheduler.held for page in seq.pages]
    pages.check(cache, _tree_pages(scheduler), held_pages)
    ledger = scheduler.ledger
    wrong = np.nonzero(np.asarray(cache.ref_counts) != ledger.ref_counts)[0]
    if len(wrong) or int(cache.num_free) != ledger.num_free:
        raise InvariantError(
            f"host and device disagree: reference counts of pages {wrong[:20].tolist()}; free pages "
            f"{ledger.num_free} and {int(cache.num_free)}"
        )
    tables, lens = np.asarray(cache.block_tables), np.asarray(cache.seq_lens)
    for seq in scheduler.running:
        row = tables[seq.slot][: len(seq.pages)].tolist()
        if row != seq.pages or lens[seq.slot] != seq.num_computed:
            raise InvariantError(f"slot {seq.slot} holds pages {row}, the scheduler has {seq.pages}")
    tokens = np.asarray(cache.tokens)
    for held, expected in _holders(scheduler):
        found = tokens[held].reshape(-1)[: len(expected)]
        if (found != expected).any():
            at = int(np.argmax(found != expected)) // scheduler.page_size
            raise InvariantError(f"page {held[at]} is held for tokens that are not those it was written with")
    if scheduler.tree is not None:
        scheduler.tree.check()


def poison(cache: PagedCache, scheduler: Scheduler) -> PagedCache:
    """The cache with NaN wherever nothing may be read: in free pages, and in the unwritten slots of others."""
    is_full = np.zeros(cache.num_pages, bool)
    is_full[list(_tree_pages(scheduler))] = True
    written = np.zeros(cache.num_pages, np.int32)
    for seq in scheduler.held:
        starts = np.arange(len(seq.pages)) * scheduler.page_size
        np.maximum.at(written, seq.pages, np.minimum(seq.num_computed - starts, scheduler.page_size))
    return pages.poison(cache, is_full, written)


def _holders(scheduler: Scheduler) -> Iterator[tuple[list[int], np.ndarray]]:
    """Who holds pages: the pages, and the tokens that should be in them."""
    for seq in (*scheduler.running, *scheduler.held):
        yield seq.pages, seq.tokens[: seq.num_computed]
    for node in scheduler.tree.nodes() if scheduler.tree is not None else ():
        yield node.pages, node.tokens


def _tree_pages(scheduler: Scheduler) -> set[int]:
    return scheduler.tree.pages() if scheduler.tree is not None else set()
