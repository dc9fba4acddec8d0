"""A Llama decoder (Touvron et al. 2023, arXiv 2302.13971, section 2.2) over the paged cache, in Flax NNX.

Matrices are stored [out, in], and those that read the same input stand in one: fewer, larger products.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_paged.cache import PagedCache
from jax_paged.kernels import api as kernels
from jax_paged.models.config import ModelConfig, rope_frequencies
from jax_paged.nn import Batch, attend_to_pages

__all__ = ["Llama", "random_weights"]


def linear(x: jax.Array, weight: nnx.Param[jax.Array], bias: nnx.Param[jax.Array] | None = None) -> jax.Array:
    """x [rows, in] times weight [out, in], accumulated in float32: f32[rows, out]."""
    out = jax.lax.dot_general(x, weight[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out if bias is None else out + bias[...].astype(jnp.float32)


def rms_norm(x: jax.Array, weight: nnx.Param[jax.Array], eps: float) -> jax.Array:
    """Root-mean-square normalisation of f32[rows, hidden], in the weight's dtype."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale * weight[...].astype(jnp.float32)).astype(weight.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns component i of each head against component i + head_dim / 2.

    Args:
      x: f32[tokens, heads, head_dim].
      cos: f32[tokens, 1, 1, head_dim / 2].
      sin: f32[tokens, 1, 2, head_dim / 2], negated for the first half.
    """
    # Not put together from halves: XLA's CPU backend compiles each concatenation by itself, 45 ms of it a time.
    halves = x.reshape(*x.shape[:-1], 2, -1)
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape)


def to_device(*arrays: np.ndarray) -> jax.Array:
    """Arrays joined along their first axis, on the device. On CPU that is one copy, or none if they lie one after the
    other in memory (`config.room_for`): JAX takes memory as it is where it begins at a multiple of 64 bytes.
    """
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    num_bytes = sum(array.nbytes for array in arrays)
    room, start = _common_room(arrays), arrays[0].ctypes.data
    if room is not None and start % 64 == 0:
        start -= room.ctypes.data
        return jax.device_put(room[start : start + num_bytes].view(arrays[0].dtype).reshape(shape))
    room = np.empty(num_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    joined = room[start : start + num_bytes].view(arrays[0].dtype).reshape(shape)
    return jax.device_put(np.concatenate(arrays, out=joined))


def _common_room(arrays: tuple[np.ndarray, ...]) -> np.ndarray | None:
    """The bytes that all of the arrays are parts of, if they lie there one after the other."""
    room, end = arrays[0].base, arrays[0].ctypes.data
    if not (isinstance(room, np.ndarray) and room.dtype == np.uint8 and room.flags.owndata):
        return None
    for array in arrays:
        if array.base is not room or array.ctypes.data != end or not array.flags.c_contiguous:
            return None
        end += array.nbytes
    return room


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, layer: int, weights: dict[str, np.ndarray]) -> None:
        def stack(*names: str) -> nnx.Param[jax.Array]:
            return nnx.Param(to_device(*(weights[f"layers.{layer}.{name}"] for name in names)))

        def bias(*names: str) -> nnx.Param[jax.Array] | None:
            return stack(*names) if f"layers.{layer}.{names[0]}" in weights else None

        self.config = config
        self.attn_norm = stack("attn_norm")
        self.qkv = stack("q", "k", "v")
        self.qkv_bias = bias("q_bias", "k_bias", "v_bias")
        self.o = stack("o")
        self.o_bias = bias("o_bias")
        self.mlp_norm = stack("mlp_norm")
        self.gate_up = stack("gate", "up")
        self.gate_up_bias = bias("gate_bias", "up_bias")
        self.down = stack("down")
        self.down_bias = bias("down_bias")
        self.sliding_window = config.sliding_windows[layer]

    def heads(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [tokens, heads, head_dim], positions encoded, of f32[tokens, hidden]."""
        c, dtype = self.config, self.qkv.dtype
        heads = linear(rms_norm(x, self.attn_norm, c.rms_norm_eps), self.qkv, self.qkv_bias)
        heads = heads.reshape(x.shape[0], -1, c.head_dim)
        qk, v = jnp.split(heads, [c.num_q_heads + c.num_kv_heads], axis=1)
        q, k = jnp.split(rotate(qk, cos, sin).astype(dtype), [c.num_q_heads], axis=1)
        return q, k, v.astype(dtype)

    def rest(self, x: jax.Array, q: jax.Array, pages: jax.Array, batch: Batch) -> jax.Array:
        """All that follows, when the keys and values have been written to the layer's pages."""
        c, dtype = self.config, self.qkv.dtype
        out = attend_to_pages(q, pages, batch, sm_scale=c.head_dim**-0.5, sliding_window=self.sliding_window)
        x = x + linear(out.reshape(x.shape[0], -1), self.o, self.o_bias)
        hidden = linear(rms_norm(x, self.mlp_norm, c.rms_norm_eps), self.gate_up, self.gate_up_bias)
        gate, up = jnp.split(hidden, 2, axis=-1)
        return x + linear((jax.nn.silu(gate) * up).astype(dtype), self.down, self.down_bias)


def _run(method: Any, graphdef: Any, state: Any, *args: Any) -> Any:
    """A block's method as a pure function."""
    return method(nnx.merge(graphdef, state), *args)


@functools.cache
def _jit_run() -> Any:
    """`_run`, by which blocks that differ only in their weights are traced and lowered once.

    On CPU they are optimised once, too: XLA keeps the calls apart, which halves the time to compile and costs nothing
    measurable. Elsewhere it inlines them, and may fetch a layer's weights while it computes the layer before.
    """
    inline = jax.Inline.XLA_LATE if jax.default_backend() == "cpu" else jax.Inline.AUTO
    return jax.jit(_run, static_argnames=("method", "graphdef"), inline=inline)


class Llama(nnx.Module):
    """The whole decoder.

    Args:
      config: its sizes.
      weights: by the names of `jax_paged.models.load`, all in one dtype, which the computation then has; norms,
        softmax and the residual stream are float32.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, np.ndarray]) -> None:
        self.config = config
        self.embed = nnx.Param(to_device(weights["embed"]))
        self.blocks = nnx.List([Block(config, i, weights) for i in range(config.num_layers)])
        self.norm = nnx.Param(to_device(weights["norm"]))
        self.lm_head = None if config.tie_embeddings else nnx.Param(to_device(weights["lm_head"]))

    def __call__(self, tokens: jax.Array, cache: PagedCache, batch: Batch) -> tuple[jax.Array, PagedCache]:
        """Runs all layers.

        Args:
          tokens: i32[num_tokens].
          cache, batch: see `jax_paged.nn.make_batch`.

        Returns:
          The normalised last hidden states, dtype[num_tokens, hidden_size], for `logits`, and the cache.
        """
        angles = batch.positions[:, None, None, None].astype(jnp.float32) * rope_frequencies(self.config)
        sin = jnp.sin(angles) * np.array([[-1], [1]], np.float32)
        # Once a step; XLA would compute them anew, in code of some length, in every layer that uses them.
        cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), sin))
        x = self.embed[...][tokens].astype(jnp.float32)
        kv_pages, run = [], _jit_run()
        for block, pages in zip(self.blocks, cache.kv_pages):
            parts = nnx.split(block)
            q, k, v = run(Block.heads, *parts, x, cos, sin)
            # Outside of the calls: XLA would copy what they change.
            pages = kernels.write_kv(pages, k, v, batch.slot_mapping)
            x = run(Block.rest, *parts, x, q, pages, batch)
            kv_pages.append(pages)
        return rms_norm(x, self.norm, self.config.rms_norm_eps), cache.replace(kv_pages=tuple(kv_pages))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[rows, vocab_size] from rows of the hidden states."""
        return linear(hidden, self.embed if self.lm_head is None else self.lm_head)


def random_weights(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Weights of a model nobody trained, for tests and examples. Normal, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    c = config

    def matrix(num_out: int, num_in: int) -> np.ndarray:
        return (rng.standard_normal((num_out, num_in)) / math.sqrt(num_in)).astype(jnp.dtype(dtype))

    weights = {"embed": matrix(c.vocab_size, c.hidden_size) * 8, "norm": np.ones(c.hidden_size, jnp.dtype(dtype))}
    if not c.tie_embeddings:
        weights["lm_head"] = matrix(c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        layer = {
            "attn_norm": np.ones(c.hidden_size, jnp.dtype(dtype)),
            "q": matrix(c.num_q_heads * c.head_dim, c.hidden_size),
            "k": matrix(c.num_kv_heads * c.head_dim, c.hidden_size),
            "v": matrix(c.num_kv_heads * c.head_dim, c.hidden_size),
            "o": matrix(c.hidden_size, c.num_q_heads * c.head_dim),
            "mlp_norm": np.ones(c.hidden_size, jnp.dtype(dtype)),
            "gate": matrix(c.intermediate_size, c.hidden_size),
            "up": matrix(c.intermediate_size, c.hidden_size),
            "down": matrix(c.hidden_size, c.intermediate_size),
        }
        weights |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return weights
