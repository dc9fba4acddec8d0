"""The paged KV cache: an immutable pytree, and the pure functions that change it.

Every sequence owns a *slot*: a row of the block table that lists, in order, the pages holding its keys and values.
Pages are taken from one free list on demand, so that at most `page_size - 1` token slots of a sequence stand empty,
and a page may stand in many rows (copy-on-write). The scheme is PagedAttention's (Kwon et al. 2023, arXiv 2309.06180,
sections 4.2-4.4); here free list, reference counts, tables and lengths are arrays, so whole generation loops fit in
one `jit`.

The invariant, which `check` enforces: every page is free, held by the prefix tree, or private to sequences; its
reference count is the number of block-table rows naming it, plus one if the tree holds it, plus one for each sequence
that holds it without having a row now.

Outside `jit`, an operation that does not fit raises `OutOfPages` and the cache passed in stays good. Inside, it
changes nothing but `cache.oom`, which stays set. Jit the outermost function and donate the cache: then nothing is
copied.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jax_paged.arguments import integer
from jax_paged.errors import InvariantError, OutOfPages
from jax_paged.kernels import api as kernels
from jax_paged.kernels.checks import KV_DTYPES
from jax_paged.kernels.sums import running_sums

__all__ = [
    "CacheSpec",
    "PagedCache",
    "allocate",
    "append",
    "assign",
    "check",
    "fork",
    "free",
    "gather",
    "init_cache",
    "poison",
    "release",
    "retain",
    "write_kv",
]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The static sizes of a paged cache.

    Args:
      num_layers, num_kv_heads, head_dim: the model's.
      num_pages: pages in the pool, shared by all sequences; each spans all layers.
      page_size: tokens a page.
      max_seqs: slots, that is rows of the block table.
      max_pages_per_seq: columns of the block table; the longest sequence is this times `page_size`.
      dtype: of the pool, a name or a dtype.

    Raises:
      ValueError: for a size below 1, or a dtype that cannot hold keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    max_seqs: int
    max_pages_per_seq: int
    dtype: Any = "bfloat16"

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "num_kv_heads", "head_dim", "num_pages", "page_size", "max_seqs", "max_pages_per_seq",
        ):  # fmt: skip
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        object.__setattr__(self, "dtype", np.dtype(jnp.dtype(self.dtype)))
        if self.dtype.name not in KV_DTYPES:
            raise ValueError(f"dtype={self.dtype.name!r} must be one of {', '.join(KV_DTYPES)}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all layers."""
        return self.num_layers * self.page_size * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes


class PagedCache(struct.PyTreeNode, kw_only=True):
    """The pool, who holds which page, and how long each sequence is. Made by `init_cache`, changed by the functions
    here.
    """

    kv_pages: tuple[
        jax.Array, ...
    ]  # a layer each: dtype[num_pages, page_size, 2 * num_kv_heads, head_dim]; K0 V0 K1 ...
    free_list: jax.Array  # i32[num_pages]; the first num_free are the free pages, the last of those is taken next
    num_free: jax.Array  # i32[]
    ref_counts: jax.Array  # i32[num_pages]; 0: free
    block_tables: jax.Array  # i32[max_seqs, max_pages_per_seq]; num_pages means none
    seq_lens: jax.Array  # i32[max_seqs], tokens
    tokens: jax.Array  # i32[num_pages, page_size]: the token ids beside their KV, where a writer records them
    oom: jax.Array  # bool[]; set by an operation inside jit that did not fit

    @property
    def num_pages(self) -> int:
        return self.ref_counts.shape[0]

    @property
    def page_size(self) -> int:
        return self.kv_pages[0].shape[1]

    @property
    def max_seqs(self) -> int:
        return self.block_tables.shape[0]

    @property
    def max_pages_per_seq(self) -> int:
        return self.block_tables.shape[1]


def init_cache(spec: CacheSpec, pool_format: Any = None) -> PagedCache:
    """An empty cache: every page free, every slot of length 0. Page 0 is taken first.

    Args:
      spec: its sizes.
      pool_format: a `jax.experimental.layout.Format`, how and where the pool is to lie in memory; None: as XLA does by
        default. `memory.pool_format` is what serves the kernels of a device best.
    """
    shape = (spec.num_pages, spec.page_size, 2 * spec.num_kv_heads, spec.head_dim)
    zeros: Callable[[], jax.Array] = partial(jnp.zeros, shape, spec.dtype)
    if pool_format is not None:
        zeros = jax.jit(zeros, out_shardings=pool_format)

    def placed(values: Any) -> jax.Array:
        # By way of numpy: made on the device, each would be a program of its own to compile. Where the pool is, as
        # steps leave them: moved, they would be arguments of another kind, for which the step is compiled again.
        return jax.device_put(values, None if pool_format is None else pool_format.sharding)

    return PagedCache(
        kv_pages=tuple(zeros() for _ in range(spec.num_layers)),
        free_list=placed(np.arange(spec.num_pages - 1, -1, -1, dtype=np.int32)),
        num_free=placed(np.int32(spec.num_pages)),
        ref_counts=placed(np.zeros(spec.num_pages, np.int32)),
        block_tables=placed(np.full((spec.max_seqs, spec.max_pages_per_seq), spec.num_pages, np.int32)),
        seq_lens=placed(np.zeros(spec.max_seqs, np.int32)),
        tokens=placed(np.full((spec.num_pages, spec.page_size), -1, np.int32)),
        oom=placed(np.bool_(False)),
    )


# --- The parts that run inside jit. Ids and slots out of range are padding: they change nothing. ---


# How to write and read where an index out of range, negative ones among them, is padding.
DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
FILL: dict[str, Any] = {"mode": "fill", "wrap_negative_indices": False}


def _retain(cache: PagedCache, page_ids: jax.Array) -> PagedCache:
    """One more reference for each id given. A free page has nothing worth holding and stays free."""
    more = jnp.zeros_like(cache.ref_counts).at[page_ids].add(1, **DROP)
    return cache.replace(ref_counts=jnp.where(cache.ref_counts > 0, cache.ref_counts + more, 0))


def _release(cache: PagedCache, *page_ids: jax.Array) -> PagedCache:
    """One reference less for each id given; a page that reaches 0 enters the free list, once."""
    less = jnp.zeros_like(cache.ref_counts).at[jnp.concatenate(page_ids)].add(1, **DROP)
    ref_counts = jnp.maximum(cache.ref_counts - less, 0)
    freed = (ref_counts == 0) & (cache.ref_counts > 0)
    place = jnp.where(freed, cache.num_free + jnp.cumsum(freed) - 1, cache.num_pages)
    return cache.replace(
        ref_counts=ref_counts,
        free_list=cache.free_list.at[place].set(jnp.arange(cache.num_pages, dtype=jnp.int32), **DROP),
        num_free=cache.num_free + jnp.sum(freed, dtype=jnp.int32),
    )


def _empty_slots(cache: PagedCache, slots_mask: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Empties the slots set in `slots_mask` (bool[max_seqs]). Returns the page ids they held, to be released."""
    none = jnp.int32(cache.num_pages)
    held = jnp.where(slots_mask[:, None], cache.block_tables, none)
    return cache.replace(
        block_tables=jnp.where(slots_mask[:, None], none, cache.block_tables),
        seq_lens=jnp.where(slots_mask, 0, cache.seq_lens),
    ), held.ravel()


def _point(
    cache: PagedCache, slots: jax.Array, indices: jax.Array, page_ids: jax.Array
) -> tuple[PagedCache, jax.Array]:
    """Makes entry `indices[i]` of row `slots[i]` name `page_ids[i]`, whose reference the caller has retained. Returns
    the page ids that stood there, to be released.

    No (slot, index) may come twice.
    """
    before = cache.block_tables.at[slots, indices].get(fill_value=cache.num_pages, **FILL)
    return cache.replace(block_tables=cache.block_tables.at[slots, indices].set(page_ids, **DROP)), before


def _copy_pages(cache: PagedCache, src: jax.Array, dst: jax.Array) -> PagedCache:
    """Copies pages `src` to `dst` (i32[n]) in every layer, but for those with a `dst` past the end.

    A loop of no round or one: mostly there is nothing to copy, and a conditional might copy the pool.
    """

    def copy(_: jax.Array, arrays: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        kv_pages, tokens = arrays
        copied = tokens.at[src].get(mode="clip", wrap_negative_indices=False)
        return tuple(kernels.copy_pages(layer, src, dst) for layer in kv_pages), tokens.at[dst].set(copied, **DROP)

    num_rounds = jnp.any(dst < cache.num_pages).astype(jnp.int32)
    kv_pages, tokens = jax.lax.fori_loop(0, num_rounds, copy, (cache.kv_pages, cache.tokens))
    return cache.replace(kv_pages=kv_pages, tokens=tokens)


class _Growth(struct.PyTreeNode, kw_only=True):
    """What growing sequences takes: see `_plan_growth`. All i32[max_seqs] but `copies`."""

    new_lens: jax.Array
    first: jax.Array  # first table entry that changes
    num_pages: jax.Array  # pages taken, copies included
    copies: jax.Array  # bool[max_seqs]; the page holding the last token is shared, so the row gets a copy of it
    shared_page: jax.Array  # that page; num_pages elsewhere


def _plan_growth(cache: PagedCache, num_new: jax.Array) -> _Growth:
    """For `num_new` (i32[max_seqs]) more tokens a slot: which pages to take, which to copy.

    A row about to write into a page that others hold too gets a copy. Where all the holders write at once, the
    first of them keeps the page, so k holders cost k - 1 copies.
    """
    size = cache.page_size
    held = -(-cache.seq_lens // size)
    new_lens = cache.seq_lens + num_new
    reopens = (num_new > 0) & (cache.seq_lens % size != 0)
    last = jnp.take_along_axis(cache.block_tables, jnp.maximum(held - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(reopens, last, cache.num_pages)
    same = (last[:, None] == last[None, :]) & reopens[:, None] & reopens[None, :]
    num_holders = cache.ref_counts.at[last].get(fill_value=0, **FILL)
    is_first = jnp.argmax(same, axis=1) == jnp.arange(cache.max_seqs)
    keeps = (jnp.sum(same, axis=1) == num_holders) & is_first
    copies = reopens & ~keeps
    first = held - copies
    return _Growth(
        new_lens=new_lens,
        first=first,
        num_pages=jnp.where(num_new > 0, -(-new_lens // size) - first, 0),
        copies=copies,
        shared_page=jnp.where(copies, last, cache.num_pages),
    )


def extend(cache: PagedCache, num_new: jax.Array, max_new_pages: int) -> tuple[PagedCache, jax.Array]:
    """Makes room for `num_new` more tokens in each slot: the general form of `allocate` and `append`, for use
    inside jit.

    Args:
      cache: the cache.
      num_new: i32[max_seqs], tokens.
      max_new_pages: static bound on the pages taken.

    Returns:
      The cache, and the page ids taken, i32[max_new_pages], slot by slot in the order of the table, `num_pages`
      past the end. Where they do not fit, nothing has changed but `oom`.
    """
    grow = _plan_growth(cache, num_new)
    ends = running_sums(grow.num_pages)
    total = ends[-1]
    fits = (total <= cache.num_free) & (total <= max_new_pages)
    fits &= jnp.all(-(-grow.new_lens // cache.page_size) <= cache.max_pages_per_seq)
    total = jnp.where(fits, total, 0)

    nth = jnp.arange(max_new_pages, dtype=jnp.int32)
    real = nth < total
    place = jnp.where(real, cache.num_free - 1 - nth, cache.num_pages)
    taken = cache.free_list.at[place].get(fill_value=cache.num_pages, **FILL)
    slot = jnp.searchsorted(ends, nth, side="right", method="compare_all").astype(jnp.int32)
    slot = jnp.where(real, slot, cache.max_seqs)
    start = ends - grow.num_pages
    index = (grow.first - start).at[slot].get(fill_value=0, **FILL) + nth

    copies = grow.copies & fits
    copied_to = taken.at[jnp.where(copies, start, max_new_pages)].get(fill_value=cache.num_pages, **FILL)
    cache = _copy_pages(cache, grow.shared_page, copied_to)
    # A shared page keeps at least one holder, so none of these reaches 0.
    ref_counts = cache.ref_counts.at[jnp.where(copies, grow.shared_page, cache.num_pages)].add(-1, **DROP)
    return cache.replace(
        ref_counts=ref_counts.at[taken].set(1, **DROP),
        num_free=cache.num_free - total,
        block_tables=cache.block_tables.at[slot, index].set(taken, **DROP),
        seq_lens=jnp.where(fits, grow.new_lens, cache.seq_lens),
        oom=cache.oom | ~fits,
    ), taken


def _is_slot(cache: PagedCache, slot: jax.Array) -> jax.Array:
    return (slot >= 0) & (slot < cache.max_seqs)


def _most_tokens(cache: PagedCache) -> int:
    """A number of tokens that no row has room for: more than it need not be told apart, and might overflow."""
    return cache.max_pages_per_seq * cache.page_size + 1


def _allocate(cache: PagedCache, slot: jax.Array, num_tokens: jax.Array) -> PagedCache:
    num_tokens = jnp.clip(num_tokens.astype(jnp.int32), 0, _most_tokens(cache))
    num_new = jnp.zeros_like(cache.seq_lens).at[slot].add(num_tokens, **DROP)
    return extend(cache, num_new, min(cache.num_pages, cache.max_pages_per_seq))[0]


def _append(cache: PagedCache, slots_mask: jax.Array) -> PagedCache:
    return extend(cache, slots_mask.astype(jnp.int32), min(cache.num_pages, cache.max_seqs))[0]


def _free(cache: PagedCache, slot: jax.Array) -> PagedCache:
    return _release(*_empty_slots(cache, jnp.arange(cache.max_seqs) == slot))


def _fork(cache: PagedCache, src_slot: jax.Array, dst_slot: jax.Array) -> PagedCache:
    dst_slot = jnp.where(_is_slot(cache, src_slot), dst_slot, cache.max_seqs)
    page_ids = cache.block_tables.at[src_slot].get(fill_value=cache.num_pages, **FILL)
    return _assign(cache, dst_slot, page_ids, cache.seq_lens.at[src_slot].get(fill_value=0, **FILL))


def _assign(cache: PagedCache, slot: jax.Array, page_ids: jax.Array, num_tokens: jax.Array) -> PagedCache:
    num_used = -(-num_tokens // cache.page_size)
    used = jnp.arange(page_ids.shape[0]) < num_used
    is_held = cache.ref_counts.at[page_ids].get(fill_value=0, **FILL) > 0
    fits = (num_tokens >= 0) & (num_used <= page_ids.shape[0]) & jnp.all(is_held | ~used)
    cache = cache.replace(oom=cache.oom | (_is_slot(cache, slot) & ~fits))
    slot = jnp.where(_is_slot(cache, slot) & fits, slot, cache.max_seqs)
    page_ids = jnp.where(used & _is_slot(cache, slot), page_ids, cache.num_pages)
    cache = _free(_retain(cache, page_ids), slot)  # in this order, since the slot may hold some of those pages
    return cache.replace(
        block_tables=cache.block_tables.at[slot, : page_ids.shape[0]].set(page_ids, **DROP),
        seq_lens=cache.seq_lens.at[slot].set(num_tokens, **DROP),
    )


# --- The public operations: the same, checked where the values are known. ---


def _is_traced(*values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


_jit = cast("Callable[..., Callable[..., PagedCache]]", jax.jit)
_eager = {op: _jit(op) for op in (_allocate, _append, _free, _fork, _assign, _retain, _release)}


def _run(op: Callable[..., PagedCache], cache: PagedCache, *args: Any) -> PagedCache:
    """Traced: the operation itself. Eager: its compiled form; no room is an error, and `oom` is as it was."""
    args = tuple(jnp.asarray(a) for a in args)
    if _is_traced(cache, args):
        return op(cache, *args)
    new = _eager[op](cache.replace(oom=jnp.bool_(False)), *args)
    if new.oom:
        raise OutOfPages(_explain(cache, op, *args))
    return new.replace(oom=cache.oom)


def _explain(cache: PagedCache, op: Callable[..., PagedCache], *args: Any) -> str:
    """The message for what `op` would have needed."""
    if op is _append:
        num_new = np.asarray(args[0]).astype(np.int32)
    else:
        num_new = np.zeros(cache.max_seqs, np.int64)
        num_new[int(args[0])] = int(args[1])
    grow = _plan_growth(cache, jnp.asarray(np.minimum(num_new, _most_tokens(cache)), jnp.int32))
    lens = np.asarray(cache.seq_lens) + num_new
    more = -(-lens // cache.page_size) - -(-np.asarray(grow.new_lens) // cache.page_size)
    needed, num_free = int(np.sum(np.asarray(grow.num_pages) + more)), int(cache.num_free)
    if needed > num_free:
        return (
            f"OOM: {needed} pages needed for {int(num_new.sum())} more tokens, {num_free} of {cache.num_pages} free; "
            "free or release pages, or raise CacheSpec.num_pages"
        )
    limit = cache.max_pages_per_seq * cache.page_size
    return (
        f"OOM: a sequence of {int(np.max(lens))} tokens does not fit its block-table row of "
        f"{cache.max_pages_per_seq} pages of {cache.page_size} ({limit} tokens); raise CacheSpec.max_pages_per_seq"
    )


def _whole(name: str, number: Any) -> int:
    """A number that is not traced."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise ValueError(f"{name}={number!r} must be an integer")


def _check_slot(cache: PagedCache, **slots: Any) -> None:
    for name, slot in slots.items():
        if not _is_traced(slot) and not 0 <= _whole(name, slot) < cache.max_seqs:
            raise ValueError(f"{name}={int(slot)} is not a slot of this cache: 0 <= {name} < {cache.max_seqs}")


def _check_page_ids(cache: PagedCache, page_ids: Any, verb: str) -> jax.Array:
    if not _is_traced(page_ids):
        page_ids, limits = np.asarray(page_ids), np.iinfo(np.int32)
        is_whole = page_ids.dtype.kind in "iu"
        if page_ids.size and not (is_whole and limits.min <= page_ids.min() and page_ids.max() <= limits.max):
            raise ValueError(
                f"page_ids={page_ids.ravel()[:20].tolist()} must be integers of 32 bits: pages, or padding"
            )
    page_ids = jnp.asarray(page_ids, jnp.int32).reshape(-1)
    if not _is_traced(cache, page_ids):
        counts = np.asarray(cache.ref_counts)
        for page in np.asarray(page_ids):
            if 0 <= page < cache.num_pages and counts[page] == 0:
                raise ValueError(f"page {page} is free: there is nothing to {verb}")
    return page_ids


def allocate(cache: PagedCache, slot: Any, num_tokens: Any) -> PagedCache:
    """Makes room for `num_tokens` more tokens in a slot, as prefill needs: `ceil(num_tokens / page_size)` pages if
    it was empty.

    Args:
      cache: the cache.
      slot: i32[], which sequence.
      num_tokens: i32[], tokens to add; the page that holds the last token is filled up first.

    Raises:
      OutOfPages: outside jit, if they do not fit. Inside, see the module's text.
      ValueError: for a slot out of range or a negative number.

    Example:
      >>> cache = allocate(init_cache(spec), slot=0, num_tokens=6)   # page_size 4: 2 pages
    """
    _check_slot(cache, slot=slot)
    if not _is_traced(num_tokens) and _whole("num_tokens", num_tokens) < 0:
        raise ValueError(f"num_tokens={int(num_tokens)} must be >= 0; free the slot to drop tokens")
    return _run(_allocate, cache, slot, num_tokens)


def append(cache: PagedCache, slots_mask: Any) -> PagedCache:
    """Makes room for one more token in each slot set in `slots_mask` (bool[max_seqs]), as decode needs.

    Takes a page where the last is full, and copies the last page first where it is shared (copy-on-write; Kwon et
    al. 2023, section 4.4).

    Raises:
      OutOfPages: outside jit, if they do not all fit; then none has grown.
      ValueError: for a mask of another shape.
    """
    slots_mask = jnp.asarray(slots_mask)
    if slots_mask.shape != (cache.max_seqs,) or slots_mask.dtype != jnp.bool_:
        raise ValueError(
            f"slots_mask is {slots_mask.dtype}{list(slots_mask.shape)}, must be bool[{cache.max_seqs}]: one entry "
            "a slot"
        )
    return _run(_append, cache, slots_mask)


def fork(cache: PagedCache, src_slot: Any, dst_slot: Any) -> PagedCache:
    """Makes `dst_slot` a second holder of every page of `src_slot`. Copies nothing; what `dst_slot` held is
    released.
    """
    _check_slot(cache, src_slot=src_slot, dst_slot=dst_slot)
    return _run(_fork, cache, src_slot, dst_slot)


def free(cache: PagedCache, slot: Any) -> PagedCache:
    """Empties a slot. Its pages return to the free list unless someone else holds them. An empty slot stays empty."""
    _check_slot(cache, slot=slot)
    return _run(_free, cache, slot)


def retain(cache: PagedCache, page_ids: Any) -> PagedCache:
    """Adds a reference to each page of `page_ids` (i32[n]); `num_pages` is padding. For the prefix tree.

    Raises:
      ValueError: outside jit, if one of them is free. Inside, a free page stays free.
    """
    return _run(_retain, cache, _check_page_ids(cache, page_ids, "retain"))


def release(cache: PagedCache, page_ids: Any) -> PagedCache:
    """Drops a reference to each page of `page_ids` (i32[n]); `num_pages` is padding.

    A page may come several times. One that nobody holds any more enters the free list, once, even when released
    more often than it was held.

    Raises:
      ValueError: outside jit, if one of them is already free.
    """
    return _run(_release, cache, _check_page_ids(cache, page_ids, "release"))


def assign(cache: PagedCache, slot: Any, page_ids: Any, num_tokens: Any) -> PagedCache:
    """Makes a slot hold the given pages, as one more holder: how a cached prefix enters a sequence.

    Args:
      cache: the cache.
      slot: i32[]; what it held is released.
      page_ids: i32[n], the first `ceil(num_tokens / page_size)` are used.
      num_tokens: i32[], tokens of the sequence now. If the last page is not full, the next write copies it first.

    Raises:
      ValueError: outside jit, for pages that are free or out of range, and for too few of them. Inside, those set
        `oom`, and nothing else.
    """
    _check_slot(cache, slot=slot)
    page_ids = _check_page_ids(cache, page_ids, "assign")[: cache.max_pages_per_seq]
    if not _is_traced(page_ids, num_tokens):
        needed = -(-_whole("num_tokens", num_tokens) // cache.page_size)
        if int(num_tokens) < 0 or needed > len(page_ids):
            raise ValueError(
                f"num_tokens={int(num_tokens)} needs {needed} pages of {cache.page_size}, got {len(page_ids)} "
                f"(at most max_pages_per_seq={cache.max_pages_per_seq} count)"
            )
        for page in np.asarray(page_ids)[:needed]:
            if not 0 <= page < cache.num_pages:
                raise ValueError(f"page {page} is not in the pool: 0 <= page < {cache.num_pages}")
    return _run(_assign, cache, slot, page_ids, num_tokens)


def slot_mapping(cache: PagedCache, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """Where in the pool each token lives: `page_id * page_size + offset`, and past the pool's end for padding.

    Args:
      cache: the cache.
      slots: i32[num_tokens]; a slot out of range is padding.
      positions: i32[num_tokens], places in the sequence; one not below the slot's length is padding.

    Returns:
      i32[num_tokens].
    """
    index, offset = positions // cache.page_size, positions % cache.page_size
    page = cache.block_tables.at[slots, index].get(fill_value=cache.num_pages, **FILL)
    length = cache.seq_lens.at[slots].get(fill_value=0, **FILL)
    real = (page < cache.num_pages) & (positions >= 0) & (positions < length)
    return jnp.where(real, page * cache.page_size + offset, cache.num_pages * cache.page_size)


def write_kv(
    cache: PagedCache,
    layer: int,
    k: jax.Array,
    v: jax.Array,
    slots: Any,
    positions: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> PagedCache:
    """Writes keys and values of one layer at tokens that `allocate` or `append` made room for.

    Args:
      cache: the cache.
      layer: static.
      k, v: dtype[num_tokens, num_kv_heads, head_dim].
      slots: i32[num_tokens] or i32[]; tokens of a slot out of range write nowhere.
      positions: i32[num_tokens], places in their sequences, each below the length; None, with a single slot: its last
        `num_tokens`. Never write below a length that is shared: `append` copies only the page that grows.
      k_scale, v_scale: f32[], for a quantised pool: stored = value / scale.

    Raises:
      ValueError: for a layer out of range, or shapes that do not fit the pool.
    """
    if not 0 <= layer < len(cache.kv_pages):
        raise ValueError(f"{layer=} is not a layer of this cache: 0 <= layer < {len(cache.kv_pages)}")
    num_tokens = k.shape[0]
    slots = jnp.asarray(slots, jnp.int32)
    if positions is None:
        if slots.ndim:
            raise ValueError("positions may only be left out with a single slot; give i32[num_tokens]")
        positions = cache.seq_lens[slots] - num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
    where = slot_mapping(cache, jnp.broadcast_to(slots, num_tokens), jnp.asarray(positions, jnp.int32))
    written = kernels.write_kv(cache.kv_pages[layer], k, v, where, k_scale=k_scale, v_scale=v_scale)
    return cache.replace(kv_pages=(*cache.kv_pages[:layer], written, *cache.kv_pages[layer + 1 :]))


def record_tokens(cache: PagedCache, where: jax.Array, tokens: jax.Array) -> PagedCache:
    """Writes token ids (i32[num_tokens]) beside their KV, `where` being their `slot_mapping`.

    They go where the KV goes, into forks and out of the prefix tree, so that a step can look back at all tokens of a
    sequence.
    """
    flat = cache.tokens.reshape(-1).at[where].set(tokens, **DROP)
    return cache.replace(tokens=flat.reshape(cache.tokens.shape))


def token_history(cache: PagedCache, slots: jax.Array) -> jax.Array:
    """i32[rows, max_pages_per_seq * page_size]: the tokens recorded for each slot; past its length anything."""
    tables = cache.block_tables.at[slots].get(fill_value=cache.num_pages, **FILL)
    return cache.tokens.at[tables].get(mode="clip").reshape(slots.shape[0], -1)


def gather(cache: PagedCache, layer: int, slot: Any) -> tuple[jax.Array, jax.Array]:
    """A sequence's keys and values, contiguous.

    Returns:
      k, v: dtype[length, num_kv_heads, head_dim]. Inside jit the length is data, so there they are
      `max_pages_per_seq * page_size` long and zero past it.
    """
    _check_slot(cache, slot=slot)
    table = cache.block_tables.at[slot].get(fill_value=cache.num_pages, **FILL)
    pages = cache.kv_pages[layer].at[table].get(fill_value=0, **FILL)
    rows = pages.reshape(-1, *pages.shape[2:])
    length = cache.seq_lens.at[slot].get(fill_value=0, **FILL)
    if _is_traced(cache, slot):
        rows = jnp.where((jnp.arange(rows.shape[0]) < length)[:, None, None], rows, 0)
    else:
        rows = rows[: int(length)]
    return rows[:, 0::2], rows[:, 1::2]


# --- Telling whether the books are right. ---


def check(cache: PagedCache, tree_pages: Iterable[int] = (), held_pages: Iterable[int] = ()) -> None:
    """Raises `InvariantError`, naming pages, unless the books balance (see the module's text).

    Args:
      cache: the cache.
      tree_pages: the pages a prefix tree holds.
      held_pages: pages that sequences without a slot hold, once for each of them.
    """
    tables, lens = np.asarray(cache.block_tables), np.asarray(cache.seq_lens)
    refs, num_free = np.asarray(cache.ref_counts), int(cache.num_free)
    none, tree = cache.num_pages, np.asarray(list(tree_pages), np.int64)
    in_use = np.arange(tables.shape[1]) < -(-lens // cache.page_size)[:, None]
    wrong = [
        ("slots whose table does not match their length", np.nonzero(((tables < none) != in_use).any(1))[0]),
        ("pages the tree holds twice", tree[np.bincount(tree, minlength=none + 1)[tree] > 1]),
    ]
    held = np.concatenate([tables[tables < none], tree, np.asarray(list(held_pages), np.int64)])
    counts = np.bincount(held, minlength=none)
    listed = np.bincount(np.asarray(cache.free_list)[:num_free], minlength=none)
    wrong += [
        ("pages whose reference count is not the number of their holders", np.nonzero(counts != refs)[0]),
        ("pages in the free list twice", np.nonzero(listed > 1)[0]),
        ("pages both free and held", np.nonzero((listed > 0) & (counts > 0))[0]),
        ("pages neither free nor held", np.nonzero((listed == 0) & (counts == 0))[0]),
    ]
    found = [f"{what}: {ids[:20].tolist()}" for what, ids in wrong if len(ids)]
    if found:
        raise InvariantError("; ".join(found))


@partial(jax.jit, donate_argnums=0)
def poison(cache: PagedCache, tree_mask: jax.Array, written: jax.Array | int = 0) -> PagedCache:
    """Fills every free page and every unwritten token slot with NaN (int8: 127), so that a read of one shows.
    Debugging only.

    Args:
      cache: the cache; donated.
      tree_mask: bool[num_pages], pages a prefix tree holds; those are fully written.
      written: i32[num_pages], tokens written to each page that sequences without a slot hold.
    """
    size = cache.page_size
    starts = jnp.arange(cache.max_pages_per_seq) * size
    written_in_row = jnp.clip(cache.seq_lens[:, None] - starts, 0, size)
    written = jnp.maximum(jnp.where(tree_mask, size, 0), written)
    written = written.at[cache.block_tables].max(written_in_row, **DROP)
    live = jnp.arange(size) < written[:, None]
    dtype = cache.kv_pages[0].dtype
    hidden = jnp.asarray(jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)
    return cache.replace(
        kv_pages=tuple(jnp.where(live[:, :, None, None], layer, hidden) for layer in cache.kv_pages),
        tokens=jnp.where(live, cache.tokens, -1),
    )
