"""Reads and writes of one head's rows in VMEM tiles whose head axis is the second-minor one.

Heads lie on sublanes and narrow types pack `packing = 4 // itemsize` neighbouring heads into each 32-bit word. A
strided load of words therefore brings one word row of many tokens at once, and shifts take it apart.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# The TPU interpreter knows refs that are indexed, not refs that are bitcast or reshaped. Under it the same words are
# read from the unchanged ref and put together as values; all that follows is shared.


def packing(dtype: Any) -> int:
    """How many elements of `dtype` share a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def load_words(ref: Any, slot: Any, start: Any, size: int, word: int, *, interpret: bool) -> jax.Array:
    """u32[size, head_dim]: word row `word` of tokens `start .. start + size` of `ref[slot]`.

    `ref` is [slots, tokens, rows, head_dim]; word row w holds rows `packing * w ..`, the first in the lowest bits.
    """
    _, num_tokens, num_rows, head_dim = ref.shape
    pack = packing(ref.dtype)
    if interpret:
        rows = ref[slot, pl.ds(start, size), pl.ds(word * pack, pack), :]
        return _as_words(rows)
    words_per_token = num_rows // pack
    words = ref.bitcast(jnp.uint32).reshape(ref.shape[0] * num_tokens * words_per_token, head_dim)
    first = pl.multiple_of((slot * num_tokens + start) * words_per_token, 8)
    return words.at[pl.ds(first, size * words_per_token)][pl.ds(word, size, stride=words_per_token), :]


def load_all(ref: Any, slot: Any, start: Any, size: int, which: int, *, interpret: bool) -> jax.Array:
    """[size * heads, head_dim]: the keys (`which` 0) or values (1) of all heads of tokens `start .. start + size`.

    `ref` is [slots, tokens, rows, head_dim], rows K0 V0 K1 V1 ... Nothing is gathered here, so this costs least;
    `token_and_head` says which row is whose.
    """
    _, num_tokens, num_rows, head_dim = ref.shape
    pack = packing(ref.dtype)
    if interpret:
        rows = ref[slot, pl.ds(start, size)].reshape(size * num_rows // pack, pack, head_dim)
        words = _as_words(rows)
        if pack == 1:
            words = words[which::2]
    else:
        words_per_token = num_rows // pack
        words = ref.bitcast(jnp.uint32).reshape(ref.shape[0] * num_tokens * words_per_token, head_dim)
        first = pl.multiple_of((slot * num_tokens + start) * words_per_token, 8)
        tile = words.at[pl.ds(first, size * words_per_token)]
        words = tile[pl.ds(which, size * words_per_token // 2, stride=2)] if pack == 1 else tile[...]
    if pack == 1:
        return jax.lax.bitcast_convert_type(words, ref.dtype)
    return jnp.concatenate([unpack(words, i, ref.dtype, interpret=interpret) for i in range(which, pack, 2)])


def token_and_head(num_tokens: int, num_rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """i32[1, num_tokens * heads] each: the token and the KV head of every row of `load_all`, laid along lanes."""
    pack = packing(dtype)
    if pack == 1:
        row = jax.lax.broadcasted_iota(jnp.int32, (1, num_tokens * num_rows // 2), 1)
        token = divide(row, num_rows // 2)
        return token, row - token * (num_rows // 2)
    words_per_token = num_rows // pack
    num_words = num_tokens * words_per_token
    word = token_of_row(jax.lax.broadcasted_iota(jnp.int32, (1, num_words), 1), num_words, dtype)
    token = divide(word, words_per_token)
    first_head = (word - token * words_per_token) * (pack // 2)
    parts = range(pack // 2)
    return jnp.concatenate([token for _ in parts], axis=1), jnp.concatenate([first_head + i for i in parts], axis=1)


def divide(x: jax.Array, by: int) -> jax.Array:
    """x // by for small x >= 0; the vector unit has no integer division, and float32 is exact here."""
    if by & (by - 1) == 0:
        return x >> (by.bit_length() - 1)
    return ((x.astype(jnp.float32) + 0.5) * (1 / by)).astype(jnp.int32)


def store_words(ref: Any, slot: Any, word: int, words: jax.Array, *, interpret: bool) -> None:
    """Writes u32[tokens, head_dim] to word row `word` of every token of `ref[slot]`: the reverse of `load_words`."""
    _, num_tokens, num_rows, head_dim = ref.shape
    pack = packing(ref.dtype)
    if interpret:
        rows = jax.lax.bitcast_convert_type(words, _uint(ref.dtype))
        rows = rows[..., None] if pack == 1 else rows
        rows = jax.lax.bitcast_convert_type(jnp.moveaxis(rows, -1, 1), ref.dtype)
        ref[slot, :, pl.ds(word * pack, pack), :] = rows
        return
    words_per_token = num_rows // pack
    target = ref.bitcast(jnp.uint32).reshape(ref.shape[0] * num_tokens * words_per_token, head_dim)
    first = pl.multiple_of(slot * num_tokens * words_per_token, 8)
    tile = target.at[pl.ds(first, num_tokens * words_per_token)]
    tile[pl.ds(word, num_tokens, stride=words_per_token), :] = words


def unpack(words: jax.Array, index: int, dtype: Any, *, interpret: bool) -> jax.Array:
    """dtype[tokens, head_dim]: element `index` of every word.

    Token order within the result: with p elements a word, row r is token `r // p + (r % p) * (tokens // p)`, since
    it costs least to fill a word from tokens that lie a p-th apart. `token_of_row` says the same.
    """
    pack = packing(dtype)
    if pack == 1:
        return jax.lax.bitcast_convert_type(words, dtype)
    parts = jnp.split(words, pack)
    bits = 32 // pack
    shifted = [part >> jnp.uint32(index * bits) if index else part for part in parts]
    if interpret:  # the interpreter has no pack_elementwise
        lanes = [(s & jnp.uint32((1 << bits) - 1)) << jnp.uint32(i * bits) for i, s in enumerate(shifted)]
        joined = functools.reduce(jnp.bitwise_or, lanes)
    else:
        joined = pltpu.pack_elementwise([s.astype(jnp.int32) for s in shifted], packed_dtype=_int(dtype))
    return pltpu.bitcast(joined, dtype)


def token_of_row(row: jax.Array, num_tokens: int, dtype: Any) -> jax.Array:
    """The token that `unpack` puts at `row`."""
    pack = packing(dtype)
    if pack == 1:
        return row
    return (row >> (pack.bit_length() - 1)) + (row & (pack - 1)) * (num_tokens // pack)


def _as_words(rows: jax.Array) -> jax.Array:
    """[tokens, packing, head_dim] to u32[tokens, head_dim]."""
    if rows.shape[1] == 1:
        return jax.lax.bitcast_convert_type(rows[:, 0], jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.moveaxis(rows, 1, -1), jnp.uint32)


def _uint(dtype: Any) -> Any:
    return {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[jnp.dtype(dtype).itemsize]


def _int(dtype: Any) -> Any:
    return {2: jnp.int16, 1: jnp.int8}[jnp.dtype(dtype).itemsize]
