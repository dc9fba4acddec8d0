"""One engine step on the device: page commands, room for the new tokens, the model, sampling. All in one jitted call.

What goes in is a handful of padded arrays, what comes out is the cache and one array of integers; log-probabilities
stay on the device unless someone wants them. Where all rows decode, one call may go through several steps: the tokens
it samples are fed back in, pages are taken as they are needed, and rows that have ended stand still.
"""

import functools
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.experimental.layout import Format

from jax_paged import cache as pages
from jax_paged.cache import PagedCache
from jax_paged.kernels.sums import running_sums
from jax_paged.ledger import Commands, StepPlan, StepResult, TokenScores
from jax_paged.nn import Batch, make_batch
from jax_paged.request import MAX_LOGPROBS, Sequence
from jax_paged.sampling import MAX_BIASES, Sampled, SamplingRows, sample, sample_plainly, token_logprobs
from jax_paged.scheduler import MAX_STOP_IDS

__all__ = [
    "Bucket",
    "ModelShape",
    "PageCommands",
    "StepInputs",
    "StepOutputs",
    "apply_commands",
    "is_plain",
    "jit_step",
    "num_programs",
    "pack_commands",
    "pack_inputs",
    "programs_for",
    "run_step",
    "split_model",
    "unpack",
]


type Array = Any  # numpy's outside jit, jax's inside

# Prompt tokens whose logits are looked at together, when all of a prompt's are.
_SCORED_TOGETHER = 64


class Bucket(NamedTuple):
    """The static sizes of a step: one compiled program each."""

    num_tokens: int
    num_rows: int
    max_new_pages: int  # in one step
    one_token_rows: bool  # see `nn.Batch`
    max_steps: int  # 1 unless one_token_rows
    exact: bool = False  # see `nn.make_batch`
    plain: bool = False  # see `is_plain`: much less to compile


class ModelShape:
    """All of a model but the numbers in its weights, as a static argument. Hashed once: `nnx.GraphDef` itself is
    hashed anew in every call, which took 1.5 ms at 30 layers.
    """

    def __init__(self, graphdef: Any, treedef: Any) -> None:
        self._parts = (graphdef, treedef)
        self._hash = hash(self._parts)

    def merge(self, weights: tuple[jax.Array, ...]) -> Any:
        """The model with these weights."""
        graphdef, treedef = self._parts
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ModelShape) and self._parts == other._parts)


def split_model(model: nnx.Module) -> tuple[ModelShape, tuple[jax.Array, ...]]:
    """A model as `run_step` takes it. The weights are a flat tuple, since a call goes through them one by one."""
    graphdef, state = nnx.split(model)
    weights, treedef = jax.tree.flatten(state)
    return ModelShape(graphdef, treedef), tuple(weights)


class PageCommands(struct.PyTreeNode, kw_only=True):
    """`ledger.Commands` as arrays; `capacity` entries each, padded with indices past the end."""

    retain: Array  # i32[capacity], page ids
    free_slots: Array  # bool[max_seqs]
    points: Array  # i32[3, capacity]: slots, table indices, page ids
    release: Array  # i32[capacity], page ids
    lengths: Array  # i32[max_seqs], tokens; -1: as it is
    any: Array  # bool[], whether there is anything to do


class StepInputs(struct.PyTreeNode, kw_only=True):
    """What a step is told."""

    commands: PageCommands
    tokens: Array  # i32[num_tokens], the rows back to back
    slots: Array  # i32[num_rows], ascending; max_seqs for padding
    q_lens: Array  # i32[num_rows]
    sample_from: Array  # i32[num_rows], the token after which each row samples
    sample_slots: Array  # i32[num_rows], the slot which that token belongs to
    sampling: SamplingRows
    stop_ids: Array  # i32[num_rows, MAX_STOP_IDS], tokens that end a row; -1: none
    num_left: Array  # i32[num_rows], tokens it may still sample
    num_steps: Array  # i32[], up to max_steps; more than one only where each row has one token
    next_tokens: Array  # i32[num_tokens], whose log-probabilities are wanted after each of `tokens`; -1: none
    num_prompt_logprobs: Array  # i32[], alternatives to those; -1: nobody wants any


class StepOutputs(NamedTuple):
    """What a step tells, as it comes from the device."""

    packed: jax.Array  # i32[max_steps * (num_rows + max_new_pages) + 2]: tokens, pages taken, num_free, oom
    sampled: Sampled  # [max_steps, num_rows, ...]
    prompt: tuple[jax.Array, jax.Array | None, jax.Array | None] | None  # as `token_logprobs`, for `next_tokens`


def _apply_commands(cache: PagedCache, commands: PageCommands) -> PagedCache:
    """Does to the pages what the host wants done. The pool itself is not touched."""

    def apply(books: PagedCache) -> PagedCache:
        books = pages._retain(books, commands.retain)
        books, held = pages._empty_slots(books, commands.free_slots)
        books, pointed_to = pages._point(books, *commands.points)
        books = pages._release(books, held, pointed_to, commands.release)
        return books.replace(seq_lens=jnp.where(commands.lengths >= 0, commands.lengths, books.seq_lens))

    # Without the pool, which a conditional might copy.
    books = jax.lax.cond(commands.any, apply, lambda books: books, cache.replace(kv_pages=()))
    return books.replace(kv_pages=cache.kv_pages)


def _compute(
    model: Any, cache: PagedCache, tokens: jax.Array, slots: jax.Array, q_lens: jax.Array, bucket: Bucket
) -> tuple[PagedCache, jax.Array, jax.Array, Batch]:
    """Makes room for tokens and runs the model. Returns the cache, the pages taken, the hidden states, the batch."""
    num_new = jnp.zeros_like(cache.seq_lens).at[slots].add(q_lens, **pages.DROP)
    cache, taken = pages.extend(cache, num_new, bucket.max_new_pages)
    kind = {"one_token_rows": bucket.one_token_rows, "exact": bucket.exact}
    batch = make_batch(cache, slots, q_lens, bucket.num_tokens, **kind)
    cache = pages.record_tokens(cache, batch.slot_mapping, tokens)
    hidden, cache = model(tokens, cache, batch)
    return cache, taken, hidden, batch


def _choose(
    model: Any, cache: PagedCache, hidden: jax.Array, inputs: StepInputs, bucket: Bucket, step: jax.Array | int
) -> Sampled:
    """Samples after the hidden states of each row."""

    def history() -> tuple[jax.Array, jax.Array]:
        slots = jnp.where(step == 0, inputs.sample_slots, inputs.slots)
        return pages.token_history(cache, slots), cache.seq_lens.at[slots].get(fill_value=0, **pages.FILL)

    rows = inputs.sampling.replace(position=inputs.sampling.position + step)
    logits = model.logits(hidden)
    return sample_plainly(logits, rows) if bucket.plain else sample(logits, rows, history)


def _run_steps(model: Any, cache: PagedCache, inputs: StepInputs, bucket: Bucket) -> tuple[PagedCache, StepOutputs]:
    """Up to `max_steps` steps, as long as some row goes on."""

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, cache, tokens, q_lens, taken, sampled = state
        cache, new_pages, hidden, batch = _compute(model, cache, tokens, inputs.slots, q_lens, bucket)
        last = jnp.where(i == 0, inputs.sample_from, batch.last_tokens)
        new = _choose(model, cache, hidden[last], inputs, bucket, i)
        taken, sampled = jax.tree.map(
            lambda all_steps, one: jax.lax.dynamic_update_index_in_dim(all_steps, one, i, 0),
            (taken, sampled),
            (new_pages, new),
        )
        # The rows that go on, back to back.
        stops = jnp.any(inputs.stop_ids == new.tokens[:, None], axis=1) | (new.tokens < 0)
        q_lens = jnp.where((q_lens > 0) & ~stops & (inputs.num_left > i + 1), 1, 0)
        place = jnp.where(q_lens > 0, running_sums(q_lens) - 1, bucket.num_tokens)
        tokens = jnp.zeros_like(tokens).at[place].set(new.tokens, **pages.DROP)
        return i + 1, cache, tokens, q_lens, taken, sampled

    def goes_on(state: tuple[Any, ...]) -> jax.Array:
        i, q_lens = state[0], state[3]
        return (i == 0) | ((i < inputs.num_steps) & jnp.any(q_lens > 0))

    chosen = jnp.zeros((bucket.max_steps, bucket.num_rows), jnp.int32)
    top = None if bucket.plain else jnp.zeros((*chosen.shape, MAX_LOGPROBS), jnp.int32)
    sampled = Sampled(chosen, chosen.astype(jnp.float32), top, None if top is None else top.astype(jnp.float32))
    taken = jnp.full((bucket.max_steps, bucket.max_new_pages), cache.num_pages, jnp.int32)
    state = (jnp.int32(0), cache, inputs.tokens, inputs.q_lens, taken, sampled)
    # A loop of one round would only be in the compiler's way.
    state = jax.lax.while_loop(goes_on, step, state) if bucket.max_steps > 1 else step(state)
    _, cache, _, _, taken, sampled = state
    return cache, StepOutputs(_pack(cache, sampled.tokens, taken), sampled, None)


def _run_mixed(model: Any, cache: PagedCache, inputs: StepInputs, bucket: Bucket) -> tuple[PagedCache, StepOutputs]:
    """One step of rows with any number of tokens."""
    cache, taken, hidden, _ = _compute(model, cache, inputs.tokens, inputs.slots, inputs.q_lens, bucket)
    sampled = _choose(model, cache, hidden[inputs.sample_from], inputs, bucket, 0)
    prompt = _score(model, hidden, inputs, bucket)
    return cache, StepOutputs(_pack(cache, sampled.tokens, taken), jax.tree.map(lambda x: x[None], sampled), prompt)


def _score(
    model: Any, hidden: jax.Array, inputs: StepInputs, bucket: Bucket
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Log-probabilities of `next_tokens`, some tokens at a time: all their logits would be large."""
    num_tokens, together = hidden.shape[0], min(_SCORED_TOGETHER, hidden.shape[0])
    with_top = None if bucket.plain else inputs.num_prompt_logprobs > 0

    def score_some(some: tuple[jax.Array, jax.Array]) -> Any:
        return token_logprobs(model.logits(some[0]), jnp.maximum(some[1], 0), with_top)

    def score() -> Any:
        parts = (hidden.reshape(-1, together, hidden.shape[1]), inputs.next_tokens.reshape(-1, together))
        return jax.tree.map(lambda x: x.reshape(num_tokens, *x.shape[2:]), jax.lax.map(score_some, parts))

    def nothing() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score))

    scores: tuple[jax.Array, jax.Array | None, jax.Array | None]
    scores = jax.lax.cond(inputs.num_prompt_logprobs >= 0, score, nothing)
    return scores


def _pack(cache: PagedCache, tokens: jax.Array, taken: jax.Array) -> jax.Array:
    flags = jnp.stack([cache.num_free, cache.oom.astype(jnp.int32)])
    return jnp.concatenate([tokens.ravel(), taken.ravel(), flags])


def _run_step(
    shape: ModelShape, weights: tuple[jax.Array, ...], cache: PagedCache, inputs: StepInputs, bucket: Bucket
) -> tuple[PagedCache, StepOutputs]:
    """The step.

    Args:
      shape, weights: the model, from `split_model`; the first is static.
      cache: to be donated.
      inputs: what to do.
      bucket: static; the sizes of `inputs`.

    Returns:
      The cache and the outputs.
    """
    model = shape.merge(weights)
    cache = _apply_commands(cache, inputs.commands)
    return (_run_steps if bucket.one_token_rows else _run_mixed)(model, cache, inputs, bucket)


def jit_step(**options: Any) -> Any:
    """The step as a jitted function.

    Args:
      options: of `jax.jit`, such as compiler_options.
    """
    return jax.jit(_run_step, static_argnames=("shape", "bucket"), donate_argnames="cache", **options)


# Engines of the same model and sizes share their programs.
run_step = jit_step()
apply_commands = jax.jit(_apply_commands, donate_argnames="cache")


@functools.cache
def programs_for(pool_format: Format) -> tuple[Any, Any]:
    """`run_step` and `apply_commands` that leave the pool in this format. It must come in it, too, to be donated."""
    formats: dict[str, Any] = dict.fromkeys(field.name for field in fields(PagedCache)) | {"kv_pages": pool_format}
    cache_format = PagedCache(**formats)  # None: as XLA has it
    return (
        jit_step(out_shardings=(cache_format, None)),
        jax.jit(_apply_commands, donate_argnames="cache", out_shardings=cache_format),
    )


def num_programs(run_step: Any) -> int:
    """How many step programs have been compiled so far."""
    return int(run_step._cache_size())


# --- Between the host's lists and the device's arrays ---


def unpack(outputs: StepOutputs, plan: StepPlan, bucket: Bucket) -> StepResult:
    """Brings to the host what of a step's outputs someone wants."""
    packed = np.asarray(outputs.packed)
    num_tokens = bucket.max_steps * bucket.num_rows
    sampled = prompt = None
    if any(row.seq.request.params.logprobs is not None for row in plan.rows):
        scores = jax.device_get(outputs.sampled[1:])
        sampled = [TokenScores(*jax.tree.map(lambda x, i=i: x[i], scores)) for i in range(plan.num_steps)]
    if outputs.prompt is not None and any(row.seq.next_score < row.seq.num_prompt for row in plan.rows):
        prompt = TokenScores(*jax.device_get(outputs.prompt))
    return StepResult(
        tokens=packed[:num_tokens].reshape(bucket.max_steps, -1),
        taken=packed[num_tokens:-2].reshape(bucket.max_steps, -1),
        sampled=sampled,
        prompt=prompt,
        num_free=int(packed[-2]),
        oom=bool(packed[-1]),
    )


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
        free_slots=free_slots,
        points=points,
        release=_padded(commands.release, capacity, num_pages),
        lengths=lengths,
        any=np.bool_(bool(commands)),
    )


def pack_inputs(plan: StepPlan, commands: PageCommands, bucket: Bucket, max_seqs: int) -> StepInputs:
    """The arrays for a plan, padded to a bucket that holds it."""
    rows, num_rows = plan.rows, bucket.num_rows
    tokens = np.zeros(bucket.num_tokens, np.int32)
    next_tokens = np.full(bucket.num_tokens, -1, np.int32)
    num_prompt_logprobs = -1
    ends: dict[Sequence, int] = {}
    at = 0
    for row in rows:
        seq, end = row.seq, row.start + row.num_tokens
        tokens[at : at + row.num_tokens] = seq.tokens[row.start : end]
        if row.start < seq.next_score <= min(end, seq.num_prompt - 1):
            targets = seq.tokens[row.start + 1 : min(end + 1, seq.num_prompt)]
            next_tokens[at : at + len(targets)] = targets
            num_prompt_logprobs = max(num_prompt_logprobs, seq.request.params.prompt_logprobs or 0)
        at += row.num_tokens
        ends[seq] = at - 1
    return StepInputs(
        commands=commands,
        tokens=tokens,
        slots=_padded([row.seq.slot for row in rows], num_rows, max_seqs),
        q_lens=_padded([row.num_tokens for row in rows], num_rows, 0),
        sample_from=_padded([max(ends[row.twin or row.seq], 0) for row in rows], num_rows, 0),
        sample_slots=_padded([(row.twin or row.seq).slot for row in rows], num_rows, max_seqs),
        sampling=_pack_sampling([row.seq for row in rows], num_rows, bucket.plain),
        stop_ids=_pack_stop_ids([row.seq for row in rows], num_rows),
        num_left=_padded([row.seq.num_left for row in rows], num_rows, 0),
        num_steps=np.int32(plan.num_steps),
        next_tokens=next_tokens,
        num_prompt_logprobs=np.int32(num_prompt_logprobs),
    )


def is_plain(seq: Sequence) -> bool:
    """Whether a sequence has no sampling option but its temperature, and reports no other log-probabilities than those
    of its own tokens.
    """
    p = seq.request.params
    return (
        (p.top_k, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0, 1, 0, 0, 0, 1)
        and not p.logit_bias
        and seq.num_outputs >= p.min_tokens
        and not p.logprobs
        and not (p.prompt_logprobs and seq.next_score < seq.num_prompt)
    )


def _pack_sampling(seqs: list[Sequence], num_rows: int, plain: bool) -> SamplingRows:
    params = [seq.request.params for seq in seqs]

    def column(values: list[Any], fill: float, dtype: Any) -> np.ndarray:
        return _padded(values, num_rows, fill, dtype)

    columns: dict[str, Any] = {
        # Higher ones than float32's largest change nothing more.
        "temperature": column([min(p.temperature, 3e38) for p in params], 0, np.float32),
        "seed": column([seq.request.seed for seq in seqs], 0, np.uint32),
        "sample_index": column([seq.sample_index for seq in seqs], 0, np.int32),
        "position": column([seq.num_tokens for seq in seqs], 0, np.int32),
        "num_logprobs": column([-1 if p.logprobs is None else p.logprobs for p in params], -1, np.int32),
    }
    if plain:
        return SamplingRows(**dict.fromkeys(field.name for field in fields(SamplingRows)) | columns)
    columns |= {
        "top_k": column([min(p.top_k, 2**31 - 1) for p in params], 0, np.int32),
        "top_p": column([p.top_p for p in params], 1, np.float32),
        "min_p": column([p.min_p for p in params], 0, np.float32),
        "presence_penalty": column([p.presence_penalty for p in params], 0, np.float32),
        "frequency_penalty": column([p.frequency_penalty for p in params], 0, np.float32),
        "repetition_penalty": column([p.repetition_penalty for p in params], 1, np.float32),
        "num_prompt": column([seq.num_prompt for seq in seqs], 0, np.int32),
    }
    biases = [_biases(seq) for seq in seqs]
    return SamplingRows(**columns, **(_pack_biases(biases, num_rows) if any(biases) else _no_biases(num_rows)))


def _biases(seq: Sequence) -> dict[int, float]:
    """What is added to logits, -inf for what must not end the text yet."""
    params = seq.request.params
    biases = dict(params.logit_bias)
    if seq.num_outputs < params.min_tokens:
        biases |= dict.fromkeys(seq.request.stop_token_ids, -np.inf)
    return biases


def _pack_biases(biases: list[dict[int, float]], num_rows: int) -> dict[str, Any]:
    arrays = {key: np.array(array) for key, array in _no_biases(num_rows).items()}
    for i, bias in enumerate(biases):
        arrays["bias_ids"][i, : len(bias)] = list(bias)
        arrays["bias_values"][i, : len(bias)] = list(bias.values())
    return jax.device_put(arrays)  # as those without are: jit would count arrays of another kind as another program


@functools.cache
def _no_biases(num_rows: int) -> dict[str, Any]:
    """On the device, so that it need not travel with each step."""
    shape = (num_rows, MAX_BIASES)
    return {
        "bias_ids": jax.device_put(np.full(shape, np.iinfo(np.int32).max, np.int32)),
        "bias_values": jax.device_put(np.zeros(shape, np.float32)),
    }


def _pack_stop_ids(seqs: list[Sequence], num_rows: int) -> np.ndarray:
    stop_ids = np.full((num_rows, MAX_STOP_IDS), -1, np.int32)
    for i, seq in enumerate(seqs):
        ids = list(seq.request.stop_token_ids)[:MAX_STOP_IDS]
        stop_ids[i, : len(ids)] = ids
    return stop_ids
