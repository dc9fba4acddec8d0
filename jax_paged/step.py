"""One engine step on the device: page commands, room for the new tokens, the model, sampling. All in one jitted call.

What goes in is a handful of padded arrays, what comes out is the cache and one array of integers.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from jax_paged import cache as pages
from jax_paged.cache import PagedCache
from jax_paged.nn import make_batch
from jax_paged.sampling import SamplingRows, sample
from jax_paged.scheduler import Commands, StepPlan

__all__ = [
    "Bucket",
    "PageCommands",
    "StepInputs",
    "StepResult",
    "apply_commands",
    "num_programs",
    "pack_commands",
    "pack_inputs",
    "run_step",
]


type Array = Any  # numpy's outside jit, jax's inside


class Bucket(NamedTuple):
    """The static sizes of a step: one compiled program each."""

    num_tokens: int
    num_rows: int
    max_new_pages: int
    one_token_rows: bool  # see `nn.Batch`


class PageCommands(struct.PyTreeNode, kw_only=True):
    """`scheduler.Commands` as arrays; `capacity` entries each, padded with indices past the end."""

    retain: Array  # i32[capacity], page ids
    release: Array  # i32[capacity], page ids
    free_slots: Array  # bool[max_seqs]
    points: Array  # i32[3, capacity]: slots, table indices, page ids
    lengths: Array  # i32[max_seqs], tokens; -1: as it is
    any: Array  # bool[], whether there is anything to do


class StepInputs(struct.PyTreeNode, kw_only=True):
    """What a step is told."""

    commands: PageCommands
    tokens: Array  # i32[num_tokens], the rows back to back
    slots: Array  # i32[num_rows], ascending; max_seqs for padding
    q_lens: Array  # i32[num_rows]
    temperature: Array  # f32[num_rows]
    seed: Array  # u32[num_rows]
    sample_index: Array  # i32[num_rows]
    logprobs: Array  # bool[], whether any row wants them


class StepResult(NamedTuple):
    """What a step tells."""

    tokens: np.ndarray  # i32[num_rows]
    logprobs: np.ndarray  # f32[num_rows]
    taken: np.ndarray  # i32[max_new_pages], page ids in the order of the rows
    num_free: int
    oom: bool

    @classmethod
    def unpack(cls, packed: np.ndarray, bucket: Bucket) -> "StepResult":
        rows = bucket.num_rows
        return cls(
            packed[:rows],
            packed[rows : 2 * rows].view(np.float32),
            packed[2 * rows : -2],
            int(packed[-2]),
            bool(packed[-1]),
        )


def _apply_commands(cache: PagedCache, commands: PageCommands) -> PagedCache:
    """Does to the pages what the host wants done. The pool itself is not touched."""

    def apply(books: PagedCache) -> PagedCache:
        books = pages._retain(books, commands.retain)
        books = pages._release(books, commands.release)
        books = pages._free_slots(books, commands.free_slots)
        books = pages._point(books, *commands.points)
        return books.replace(seq_lens=jnp.where(commands.lengths >= 0, commands.lengths, books.seq_lens))

    # Without the pool, which a conditional might copy.
    books = jax.lax.cond(commands.any, apply, lambda books: books, cache.replace(kv_pages=()))
    return books.replace(kv_pages=cache.kv_pages)


def _run_step(
    graphdef: Any, state: Any, cache: PagedCache, inputs: StepInputs, bucket: Bucket
) -> tuple[PagedCache, jax.Array]:
    """The step.

    Args:
      graphdef, state: the model, split by `nnx.split`.
      cache: to be donated.
      inputs: what to do.
      bucket: static; the sizes of `inputs`.

    Returns:
      The cache, and a `StepResult` packed into i32[2 * num_rows + max_new_pages + 2], so that one transfer brings
      all of it.
    """
    model = nnx.merge(graphdef, state)
    cache = _apply_commands(cache, inputs.commands)
    num_new = jnp.zeros_like(cache.seq_lens).at[inputs.slots].add(inputs.q_lens, mode="drop")
    cache, taken = pages.extend(cache, num_new, bucket.max_new_pages)
    batch = make_batch(cache, inputs.slots, inputs.q_lens, bucket.num_tokens, one_token_rows=bucket.one_token_rows)
    hidden, cache = model(inputs.tokens, cache, batch)
    rows = SamplingRows(
        temperature=inputs.temperature,
        seed=inputs.seed,
        sample_index=inputs.sample_index,
        position=cache.seq_lens.at[inputs.slots].get(mode="fill", fill_value=0),
        logprobs=inputs.logprobs,
    )
    tokens, logprobs = sample(model.logits(hidden[batch.last_tokens]), rows)
    flags = jnp.stack([cache.num_free, cache.oom.astype(jnp.int32)])
    packed = jnp.concatenate([tokens, jax.lax.bitcast_convert_type(logprobs, jnp.int32), taken, flags])
    return cache, packed


# Engines of the same model and sizes share their programs.
run_step = jax.jit(_run_step, static_argnames=("graphdef", "bucket"), donate_argnames="cache")
apply_commands = jax.jit(_apply_commands, donate_argnames="cache")


def num_programs() -> int:
    """How many step programs have been compiled so far."""
    return int(cast(Any, run_step)._cache_size())


def _padded(values: Any, size: int, fill: int | float, dtype: Any = np.int32) -> np.ndarray:
    array = np.full(size, fill, dtype)
    array[: len(values)] = values
    return array


def pack_commands(commands: Commands, capacity: int, num_pages: int, max_seqs: int) -> PageCommands:
    """The arrays for one piece of `Commands.split(capacity)`."""
    points = np.full((3, capacity), num_pages, np.int32)
    points[0] = max_seqs
    if commands.points:
        count = len(commands.points)
        points[:2, :count] = np.array(list(commands.points), np.int32).T
        points[2, :count] = list(commands.points.values())
    free_slots = np.zeros(max_seqs, bool)
    free_slots[list(commands.free_slots)] = True
    lengths = np.full(max_seqs, -1, np.int32)
    lengths[list(commands.lengths)] = list(commands.lengths.values())
    return PageCommands(
        retain=_padded(commands.retain, capacity, num_pages),
        release=_padded(commands.release, capacity, num_pages),
        free_slots=free_slots,
        points=points,
        lengths=lengths,
        any=np.bool_(bool(commands)),
    )


def pack_inputs(plan: StepPlan, commands: PageCommands, bucket: Bucket, max_seqs: int) -> StepInputs:
    """The arrays for a plan, padded to a bucket that holds it."""
    rows, num_rows = plan.rows, bucket.num_rows
    tokens = np.zeros(bucket.num_tokens, np.int32)
    at = 0
    for row in rows:
        tokens[at : at + row.num_tokens] = row.seq.tokens[row.start : row.start + row.num_tokens]
        at += row.num_tokens
    requests = [row.seq.request for row in rows]
    return StepInputs(
        commands=commands,
        tokens=tokens,
        slots=_padded([row.seq.slot for row in rows], num_rows, max_seqs),
        q_lens=_padded([row.num_tokens for row in rows], num_rows, 0),
        temperature=_padded([request.params.temperature for request in requests], num_rows, 0, np.float32),
        seed=_padded([request.seed for request in requests], num_rows, 0, np.uint32),
        sample_index=_padded([row.seq.sample_index for row in rows], num_rows, 0),
        logprobs=np.bool_(any(request.params.logprobs is not None for request in requests)),
    )
