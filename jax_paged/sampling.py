"""Choosing the next token of each row, inside the jitted step."""

import jax
import jax.numpy as jnp
from flax import struct

from jax_paged.request import SamplingParams

__all__ = ["SamplingParams", "SamplingRows", "sample"]

# A row of the vocabulary is searched in two stages of about its square root; see _inverse_cdf.
_LANES = 256


class SamplingRows(struct.PyTreeNode, kw_only=True):
    """What sampling needs to know of each row; padding may hold anything finite."""

    temperature: jax.Array  # f32[rows]; 0: greedy
    seed: jax.Array  # u32[rows]
    sample_index: jax.Array  # i32[rows]
    position: jax.Array  # i32[rows], of the token to be sampled in its sequence
    logprobs: jax.Array  # bool[], whether any row wants them


def sample(logits: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """Chooses a token a row.

    The random number of a row is a function of (seed, sample_index, position) alone, so a request draws the same
    tokens in whatever batch it runs.

    Args:
      logits: f32[rows, vocab_size].
      rows: how.

    Returns:
      Tokens, i32[rows], and their log-probabilities under the unscaled logits, f32[rows], 0 unless `rows.logprobs`.
    """
    best = _argmax(logits)
    tokens = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        lambda: jnp.where(rows.temperature > 0, _draw(logits, rows), best),
        lambda: best,
    )
    logprobs = jax.lax.cond(
        rows.logprobs,
        lambda: jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1),
        lambda: jnp.zeros(logits.shape[0], jnp.float32),
    )
    return tokens, logprobs


def _argmax(logits: jax.Array) -> jax.Array:
    """The first largest of each row. As two plain reductions, which XLA vectorises on CPU where it does not argmax."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits == largest, column, logits.shape[1] - 1), axis=1)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Samples each row from the softmax of its logits over temperature."""
    # The largest is taken off before the division, which could overflow at temperatures near 0.
    below = logits - jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(below / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None])
    return _inverse_cdf(weights, _uniform(rows))


def _uniform(rows: SamplingRows) -> jax.Array:
    """f32[rows] in [0, 1)."""

    def draw(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample_index), position)
        return jax.random.uniform(key)

    return jax.vmap(draw)(rows.seed, rows.sample_index, rows.position)


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index at which the running sum of the weights exceeds `uniform` of their total.

    One random number a row instead of one a token (as the Gumbel trick takes), and running sums over blocks first,
    then within the chosen block. An index of weight 0 is never chosen.
    """
    num_rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % _LANES))).reshape(num_rows, -1, _LANES)
    target, block = _first_above(jnp.sum(blocks, axis=2), uniform * jnp.sum(jnp.sum(blocks, axis=2), axis=1))
    lanes = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    _, lane = _first_above(lanes, target)
    return block * _LANES + lane


def _first_above(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first place of positive weight where the running sum exceeds the target, and what is left of that before it.

    Rounding may leave the target at or above the total; then it is the last place of positive weight. The weight is
    looked at too, since sums taken in different orders may grow by rounding where nothing was added.
    """
    ends = jnp.cumsum(weights, axis=1)
    above = (ends > target[:, None]) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=1)
    place = jnp.where(jnp.any(above, axis=1), jnp.argmax(above, axis=1), last).astype(jnp.int32)
    before = jnp.take_along_axis(ends - weights, place[:, None], axis=1)[:, 0]
    return target - before, place
