"""Choosing the next token of each row, inside the jitted step.

Every option is an array with one entry a row, so a batch of any mix runs the same program; what no row asks for is
skipped by a conditional.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jax_paged.kernels.sums import running_sums
from jax_paged.request import MAX_LOGPROBS, SamplingParams

__all__ = [
    "MAX_BIASES",
    "MAX_LOGPROBS",
    "Sampled",
    "SamplingParams",
    "SamplingRows",
    "sample",
    "sample_plainly",
    "token_logprobs",
]

MAX_BIASES = 304  # most entries of a row's logit_bias: 300, as in OpenAI's API, and room for stop tokens

# Sums of a row are taken over blocks, and blocks of blocks, of about the cube root of the vocabulary; see _inverse_cdf.
_LANES = 64
# Rows whose top_k or top_p keeps at most this many tokens are served from the largest logits; others search.
_NUM_CANDIDATES = 64
# The largest of a row are looked for in blocks of this many tokens; see _top.
_BLOCK = 32

type Array = Any  # numpy's outside jit, jax's inside
type History = Callable[[], tuple[jax.Array, jax.Array]]


class SamplingRows(struct.PyTreeNode, kw_only=True):
    """What sampling needs to know of each row.

    Padding rows may hold anything finite, but what they ask for is paid for: best leave them greedy with all options
    off. `bias_ids` may be of any width.
    """

    temperature: Array  # f32[rows]; 0: greedy
    top_k: Array  # i32[rows]; 0: off
    top_p: Array  # f32[rows]; 1: off
    min_p: Array  # f32[rows], in [0, 1]; 0: off
    seed: Array  # u32[rows]
    sample_index: Array  # i32[rows]
    position: Array  # i32[rows], of the token to be sampled in its sequence
    presence_penalty: Array  # f32[rows]; 0: off
    frequency_penalty: Array  # f32[rows]; 0: off
    repetition_penalty: Array  # f32[rows]; 1: off
    num_prompt: Array  # i32[rows], how many tokens of the row's history are its prompt
    bias_ids: Array  # i32[rows, biases]; vocab_size or more: padding
    bias_values: Array  # f32[rows, biases]; -inf forbids the token
    num_logprobs: Array  # i32[rows], alternatives to report; 0: only the chosen token; -1: nothing


class Sampled(NamedTuple):
    """What was chosen. What a row did not ask for is 0 in `logprobs`, -1 in `top_tokens`, -inf in `top_logprobs`."""

    tokens: jax.Array  # i32[rows]; -1 where the logits are NaN
    logprobs: jax.Array  # f32[rows], of `tokens`
    top_tokens: jax.Array | None  # i32[rows, MAX_LOGPROBS], the likeliest first; None from `sample_plainly`
    top_logprobs: jax.Array | None  # f32[rows, MAX_LOGPROBS]


class _Border(NamedTuple):
    """The last token kept, in the order of falling logits, equal ones by rising id. Scalars or one a row."""

    logit: jax.Array  # f32
    token: jax.Array  # i32


def sample(logits: jax.Array, rows: SamplingRows, history: History) -> Sampled:
    """Chooses a token a row.

    In this order, as Hugging Face's `GenerationMixin._get_logits_processor` has it for the last four:

    1. `bias_values` are added to the logits, then penalties change them (see `_penalise`). The order is vLLM's
       (`vllm/v1/sample/sampler.py`, steps 5 and 6). Rows of temperature 0 take the largest of these logits.
    2. The logits are divided by the temperature.
    3. top_k keeps the k likeliest tokens (Fan et al. 2018, arXiv 1805.04833, section 5.4).
    4. top_p keeps the fewest of the likeliest whose probability, among those that top_k kept, adds up to at least p
       (Holtzman et al. 2019, arXiv 1904.09751, section 3.1).
    5. min_p keeps tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082,
       section 3). vLLM applies it before the other two, so that its top_p is of what min_p kept.
    6. The token is drawn. The random number is a function of (seed, sample_index, position) alone, so a request draws
       the same tokens in whatever batch it runs.

    Among tokens of equal logit the lower id counts as the likelier. So top_k keeps exactly k, top_k=1 is greedy, and
    at least one token is always kept.

    Log-probabilities are the log-softmax of `logits` as they came, before any option, as vLLM's `raw_logprobs`.

    A row with NaN in it gets the token -1, one of nothing but -inf some token of the vocabulary. Other rows are left
    alone.

    Args:
      logits: f32[rows, vocab_size].
      rows: how. Temperatures may be any from 0 to float32's largest.
      history: gives the tokens so far of each row, i32[rows, any], and how many there are, i32[rows]; what is past
        those may be anything. It is traced once, and runs only where a row has a penalty.
    """
    vocab_size = logits.shape[1]
    penalised = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    adjusted = lax.cond(
        jnp.any(penalised) | jnp.any(rows.bias_ids < vocab_size),
        lambda: _adjust(logits, rows, jnp.any(penalised), history),
        lambda: logits,
    )
    best = _argmax(adjusted)
    tokens = lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _inverse_cdf(_kept_weights(adjusted, rows), _uniform(rows)), best),
        lambda: best,
    )
    tokens = jnp.where(best < vocab_size, tokens, -1)
    wanted = rows.num_logprobs[:, None]
    logprobs, top_tokens, top_logprobs = lax.cond(
        jnp.any(wanted >= 0),
        lambda: token_logprobs(logits, tokens, jnp.any(wanted > 0)),
        lambda: (jnp.zeros(len(logits), jnp.float32), *_no_top(len(logits))),
    )
    reported = jnp.arange(MAX_LOGPROBS) < wanted
    return Sampled(
        tokens,
        jnp.where(rows.num_logprobs >= 0, logprobs, 0),
        jnp.where(reported, top_tokens, -1),
        jnp.where(reported, top_logprobs, -jnp.inf),
    )


def sample_plainly(logits: jax.Array, rows: SamplingRows) -> Sampled:
    """What `sample` gives rows that have only a temperature, and want no likeliest tokens: with a fraction of its code
    to compile.

    Args:
      logits: f32[rows, vocab_size].
      rows: of which temperature, seed, sample_index, position and num_logprobs count; the others may be None.
    """

    best, sampling = _argmax(logits), rows.temperature > 0

    def draw() -> jax.Array:
        weights = _weights(logits, jnp.where(sampling, rows.temperature, 1.0))
        return jnp.where(sampling, _inverse_cdf(weights, _uniform(rows)), best)

    tokens = jnp.where(best < logits.shape[1], lax.cond(jnp.any(sampling), draw, lambda: best), -1)
    wanted = rows.num_logprobs >= 0
    logprobs = lax.cond(
        jnp.any(wanted),
        lambda: jnp.where(wanted, token_logprobs(logits, tokens)[0], 0),
        lambda: jnp.zeros(len(logits), jnp.float32),
    )
    return Sampled(tokens, logprobs, None, None)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, with_top: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The log-probabilities of given tokens, and the likeliest ones.

    Args:
      logits: f32[n, vocab_size].
      tokens: i32[n].
      with_top: bool[], whether the likeliest are wanted. None: they never are, which compiles sooner.

    Returns:
      Of `tokens`: f32[n]. The likeliest tokens, i32[n, MAX_LOGPROBS], likeliest first, equal ones by id, and their
      log-probabilities, f32[n, MAX_LOGPROBS]; -1 and -inf past the vocabulary's size or unless `with_top`; None if
      that is None.
    """
    largest = _blocks_max(logits, _LANES)
    log_total = largest + jnp.log(_total(jnp.exp(logits - largest[:, None])))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0] - log_total
    if with_top is None:
        return chosen, None, None

    def top() -> tuple[jax.Array, jax.Array]:
        values, ids = _top(logits, min(MAX_LOGPROBS, logits.shape[1]))
        missing = ((0, 0), (0, MAX_LOGPROBS - ids.shape[1]))
        logprobs = jnp.pad(values - log_total[:, None], missing, constant_values=-jnp.inf)
        return jnp.pad(ids, missing, constant_values=-1), logprobs

    return chosen, *lax.cond(with_top, top, lambda: _no_top(len(logits)))


def _no_top(num_rows: int) -> tuple[jax.Array, jax.Array]:
    shape = (num_rows, MAX_LOGPROBS)
    return jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)


def _adjust(logits: jax.Array, rows: SamplingRows, penalised: jax.Array, history: History) -> jax.Array:
    """Adds the biases, then takes the penalties off."""
    row = jnp.arange(len(logits))[:, None]
    biased = logits.at[row, rows.bias_ids].add(rows.bias_values, mode="drop")
    return lax.cond(penalised, lambda: _penalise(biased, rows, *history()), lambda: biased)


def _penalise(logits: jax.Array, rows: SamplingRows, tokens: jax.Array, lens: jax.Array) -> jax.Array:
    """Makes tokens that were seen less likely.

    The logit of a token of the prompt or the output is divided by the repetition penalty if positive, multiplied
    otherwise (Keskar et al. 2019, arXiv 1909.05858, section 4.1, as corrected for logits below 0 by Hugging Face's
    `RepetitionPenaltyLogitsProcessor`). Then each token of the output loses the frequency penalty for each time it is
    there, and the presence penalty once (OpenAI's API reference). vLLM does the same
    (`vllm/model_executor/layers/utils.py`, `apply_penalties`).
    """
    num_rows, size = logits.shape
    row, column = jnp.arange(num_rows)[:, None], jnp.arange(tokens.shape[1])
    known = column < lens[:, None]
    sampled = known & (column >= rows.num_prompt[:, None])
    seen = jnp.zeros((num_rows, size), bool).at[row, jnp.where(known, tokens, size)].set(True, mode="drop")
    counts = jnp.zeros((num_rows, size)).at[row, jnp.where(sampled, tokens, size)].add(1.0, mode="drop")
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    return logits - rows.frequency_penalty[:, None] * counts - rows.presence_penalty[:, None] * (counts > 0)


def _weights(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """exp(logits / temperature), the largest of each row 1."""
    # It is taken off before the division, which could overflow at temperatures near 0.
    weights = jnp.exp((logits - _blocks_max(logits, _LANES)[:, None]) / temperature[:, None])
    # XLA multiplies by the reciprocal, which is 0 for the largest temperatures.
    return jnp.where(logits == -jnp.inf, 0, weights)


def _kept_weights(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """f32[rows, vocab_size], in proportion to the probabilities; 0 where top_k, top_p or min_p drop the token."""
    sampling = rows.temperature > 0
    temperature = jnp.where(sampling, rows.temperature, 1.0)
    weights = _weights(logits, temperature)
    top_k = jnp.where(sampling & (rows.top_k > 0), rows.top_k, logits.shape[1])
    top_p = jnp.where(sampling, rows.top_p, 1.0)
    min_p = jnp.where(sampling, rows.min_p, 0.0)

    def keep() -> jax.Array:
        border = _find_border(logits, weights, top_k, top_p, min_p, temperature)
        return jnp.where(_up_to(border, logits) & (weights >= min_p[:, None]), weights, 0)

    filtered = (top_k < logits.shape[1]) | (top_p < 1) | (min_p > 0)
    return lax.cond(jnp.any(filtered), keep, lambda: weights)


def _up_to(border: _Border, logits: jax.Array) -> jax.Array:
    """bool as `logits`: which are kept."""
    logit, token = border.logit[..., None], border.token[..., None]
    return (logits > logit) | ((logits == logit) & (jnp.arange(logits.shape[-1]) <= token))


def _find_border(
    logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, temperature: jax.Array
) -> _Border:
    """Where top_k and top_p cut each row.

    The order is that of the logits: at a high temperature weights are equal where logits are not. Most rows keep few
    tokens, and find their border among the largest logits; the others search for it.
    """
    size = logits.shape[1]
    num = min(_NUM_CANDIDATES, size)
    values, tokens = _top(logits, num)
    ranked = jnp.take_along_axis(weights, tokens, axis=1, mode="clip")
    ends = running_sums(ranked)

    few, within_k = top_k <= num, jnp.arange(num) < top_k[:, None]
    total = jnp.where(few, jnp.sum(jnp.where(within_k, ranked, 0), axis=1), _total(weights))
    within_p = (ends - ranked < (top_p * total)[:, None]) | (top_p >= 1)[:, None]
    num_kept = jnp.maximum(jnp.sum(within_k & within_p, axis=1, dtype=jnp.float32), 1).astype(jnp.int32)
    last = num_kept[:, None] - 1
    border = _Border(*(jnp.take_along_axis(array, last, axis=1, mode="clip")[:, 0] for array in (values, tokens)))
    if num == size:
        return border
    # Where top_k keeps more than the candidates, `total` is not what top_p is a part of.
    knows_total = few | (top_k >= size) | (top_p >= 1)
    # What min_p drops need not be told apart.
    found = knows_total & (few | (num_kept < num) | (ranked[:, -1] < min_p))
    unfiltered = (top_k >= size) & (top_p >= 1)
    border = _Border(jnp.where(unfiltered, -jnp.inf, border.logit), jnp.where(unfiltered, size, border.token))
    arrays = (logits, weights, top_k, top_p, temperature)
    return lax.platform_dependent(
        found | unfiltered, border, arrays, cpu=_search_one_by_one, default=_search_all_at_once
    )


def _search_one_by_one(found: jax.Array, border: _Border, arrays: tuple[jax.Array, ...]) -> _Border:
    """Searches rows whose border is not found. On CPU a row fits the cache, and what is not searched costs nothing."""

    def search(i: jax.Array, border: _Border) -> _Border:
        new = _search(*(array[i] for array in arrays))
        return _Border(border.logit.at[i].set(new.logit), border.token.at[i].set(new.token))

    return lax.fori_loop(
        0, len(found), lambda i, border: lax.cond(found[i], lambda: border, lambda: search(i, border)), border
    )


def _search_all_at_once(found: jax.Array, border: _Border, arrays: tuple[jax.Array, ...]) -> _Border:
    """The same for accelerators."""

    def search() -> _Border:
        logits, weights, top_k, top_p, temperature = arrays
        top_k, top_p = jnp.where(found, logits.shape[1], top_k), jnp.where(found, 1.0, top_p)
        new = jax.vmap(_search)(logits, weights, top_k, top_p, temperature)
        return _Border(*(jnp.where(found, old, new) for old, new in zip(border, new)))

    return lax.cond(jnp.all(found), lambda: border, search)


def _search(
    logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array, temperature: jax.Array
) -> _Border:
    """The border of one row, in four cuts: by number for top_k, by weight for top_p, each by logit, then by id."""
    size = len(logits)
    largest = jnp.max(logits)
    ids = jnp.arange(size, dtype=jnp.float32)

    def cut(step: jax.Array, state: tuple[_Border, jax.Array]) -> tuple[_Border, jax.Array]:
        border, goal = state
        by_number, by_id = step < 2, step % 2 == 1
        eligible = _up_to(border, logits) & (logits > -jnp.inf)
        measure = jnp.where(eligible, jnp.where(by_number, 1.0, weights), 0)
        goal = jnp.where(by_id, goal, jnp.where(by_number, top_k, top_p * jnp.sum(measure)))
        keys_by_id = jnp.where(logits > border.logit, 1.0, jnp.where(logits == border.logit, -ids, -jnp.inf))

        def least(key: jax.Array) -> jax.Array:
            logit = jnp.where(by_id, border.logit, key)
            return jnp.where(by_number, 1.0, jnp.exp((logit - largest) / temperature))

        key = _bisect(jnp.where(by_id, keys_by_id, logits), measure, goal, least)
        logit = jnp.where(by_id, border.logit, key)
        return _Border(logit, jnp.where(by_id, -key, size).astype(jnp.int32)), goal

    everything = _Border(jnp.float32(-jnp.inf), jnp.int32(size))
    first, end = jnp.where(top_k < size, 0, 2), jnp.where(top_p < 1, 4, 2)
    return lax.fori_loop(first, end, cut, (everything, jnp.float32(0)))[0]


def _bisect(keys: jax.Array, measure: jax.Array, goal: jax.Array, least: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A key such that the tokens at or above it are the fewest whose measure adds up to the goal.

    Args:
      keys: f32[vocab_size].
      measure: f32[vocab_size].
      goal: f32[].
      least: the least measure of a token whose key is at least this; where the bracket holds less than two of those,
        it need not be narrowed to neighbouring floats.
    """
    largest = jnp.max(keys)
    smallest = jnp.min(jnp.where(measure > 0, keys, largest))

    def middle(bracket: jax.Array) -> jax.Array:
        low, high = bracket[:, 0]
        return jnp.where(jnp.isinf(high), largest, 0.5 * low + 0.5 * high)

    def is_wide(bracket: jax.Array) -> jax.Array:
        (low, sum_low), (high, sum_high) = bracket
        probe = middle(bracket)
        return (low < probe) & (probe < high) & (sum_low - sum_high > 1.5 * least(low))  # NaN: no

    def halve(bracket: jax.Array) -> jax.Array:
        probe = middle(bracket)
        total = jnp.sum(jnp.where(keys >= probe, measure, 0))
        return bracket.at[jnp.where(total >= goal, 0, 1)].set(jnp.stack([probe, total]))

    # Two keys, and the measure of what is at or above them: the goal is reached at the first and not at the second.
    bracket = jnp.stack([jnp.stack([smallest, jnp.sum(measure)]), jnp.array([jnp.inf, 0.0])])
    return lax.while_loop(is_wide, halve, bracket)[0, 0]


def _top(array: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The largest of each row and their indices, in falling order, equal ones by rising index.

    As `lax.top_k`, but over blocks first: the `num` largest lie in the `num` blocks of the largest maxima.
    """
    num_rows, size = array.shape
    if size <= 2 * num * _BLOCK:
        return _top_k(array, num)
    blocks = _blocks(array, _BLOCK, -jnp.inf)
    chosen = _top_k(jnp.max(blocks, axis=2), num)[1]
    # By rising index, so that equal ones are. As floats, since XLA has no fast top_k of integers on CPU.
    chosen = -lax.top_k(-chosen.astype(jnp.float32), num)[0].astype(jnp.int32)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1, mode="clip").reshape(num_rows, -1)
    values, place = _top_k(candidates, num)
    return values, jnp.take_along_axis(chosen, place // _BLOCK, axis=1, mode="clip") * _BLOCK + place % _BLOCK


def _top_k(array: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, which takes -0 for less than 0, of equals."""
    return lax.top_k(jnp.where(array == 0, 0, array), num)


def _blocks(array: jax.Array, width: int, fill: float) -> jax.Array:
    """[rows, size] as [rows, blocks, width]."""
    num_rows, size = array.shape
    return jnp.pad(array, ((0, 0), (0, -size % width)), constant_values=fill).reshape(num_rows, -1, width)


def _blocks_max(array: jax.Array, width: int) -> jax.Array:
    """The largest of each row."""
    return jnp.max(jnp.max(_blocks(array, width, -jnp.inf), axis=2), axis=1)


def _total(weights: jax.Array) -> jax.Array:
    """The sum of each row."""
    return jnp.sum(jnp.sum(_blocks(lax.optimization_barrier(weights), _LANES, 0), axis=2), axis=1)


def _argmax(logits: jax.Array) -> jax.Array:
    """The first largest of each row; the row's size if there is NaN in it, since nothing equals that.

    As two plain reductions, which XLA vectorises on CPU where it does not argmax.
    """
    largest = jnp.max(logits, axis=1, keepdims=True)
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits == largest, column, logits.shape[1]), axis=1)


def _uniform(rows: SamplingRows) -> jax.Array:
    """f32[rows] in [0, 1), multiples of 2**-24."""
    seed, sample_index, position = (jnp.asarray(x, jnp.uint32) for x in (rows.seed, rows.sample_index, rows.position))
    return (_threefry(seed, sample_index, position) >> 8).astype(jnp.float32) * 2.0**-24


def _threefry(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
    """u32: the first word of Threefry-2x32 in 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3", section 4.1), with the key (seed, sample_index) and the counter (position, 0).

    It is the generator of `jax.random`, whose function for one key a row would take sixty kernels on CPU, and half a
    second of each program's compilation; this is one.
    """
    keys = (seed, sample_index, seed ^ sample_index ^ np.uint32(0x1BD11BDA))
    a, b = position + keys[0], keys[1]
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a += b
            b = (b << rotation | b >> (32 - rotation)) ^ a
        a += keys[(block + 1) % 3]
        b += keys[(block + 2) % 3] + np.uint32(block + 1)
    return a


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index at which the running sum of the weights exceeds `uniform` of their total.

    One random number a row instead of one a token (as the Gumbel trick takes). The sum runs over blocks of blocks
    first, then within the chosen block of blocks, then within the chosen block. An index of weight 0 is never chosen.
    """
    blocks = _blocks(weights, _LANES, 0)
    groups = _blocks(jnp.sum(blocks, axis=2), _LANES, 0)
    top = jnp.sum(groups, axis=2)
    rest, place = _first_above(top, uniform * jnp.sum(top, axis=1))
    for level in (groups, blocks):
        chosen = jnp.take_along_axis(level, place[:, None, None], axis=1, mode="clip")[:, 0]
        rest, lane = _first_above(chosen, rest)
        place = place * _LANES + lane
    return jnp.minimum(place, weights.shape[1] - 1)


def _first_above(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first place where the running sum of each row exceeds the target, and what is left of that before it.

    Rounding may leave the target at or above the total; then it is the first place where the total is reached. Sums
    of the same shape, taken in the same order, do not fall from one place to the next, and grow only where something
    was added: so it is a place of positive weight.
    """
    ends = running_sums(weights)
    before = (ends <= target[:, None]) & (ends < ends[:, -1:])
    place = jnp.sum(before, axis=1, dtype=jnp.float32).astype(jnp.int32)
    return target - jnp.sum(jnp.where(before, weights, 0), axis=1), place
