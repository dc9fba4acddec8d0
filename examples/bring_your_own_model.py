"""A Flax NNX transformer of your own gets paged attention, continuous batching and prefix reuse.

The model is written here, as one would for training, with attention as a layer of its own. To page it, that layer
becomes `jp.PagedAttention`, and the cache and the batch are passed through; nothing else changes. The engine's tokens
and log-probabilities are compared with those of the same model with plain attention.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_paged as jp


@dataclass(frozen=True)
class Config:
    """What the engine asks of a model."""

    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 256
    max_model_len: int = 128
    eos_token_ids: tuple[int, ...] = ()


class PlainAttention(nnx.Module):
    """Causal attention over one whole sequence."""

    def __call__(self, q, k, v, cache, batch):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        logits = jnp.einsum("qhd,khd->hqk", q, k) * 16**-0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(len(q), dtype=bool), logits, -jnp.inf))
        return jnp.einsum("hqk,khd->qhd", weights, v), cache


class Layer(nnx.Module):
    def __init__(self, index: int, paged: bool, rngs: nnx.Rngs):
        self.attention = jp.PagedAttention(index, sm_scale=16**-0.5) if paged else PlainAttention()
        self.qkv = nnx.Linear(64, (4 + 2 + 2) * 16, rngs=rngs)  # 4 query heads share 2 KV heads of 16
        self.out = nnx.Linear(64, 64, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(64, 256, rngs=rngs), nnx.gelu, nnx.Linear(256, 64, rngs=rngs))
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(2)])

    def __call__(self, x, cache, batch):
        heads = self.qkv(self.norms[0](x)).reshape(len(x), 8, 16)
        out, cache = self.attention(*jnp.split(heads, [4, 6], axis=1), cache, batch)
        x = x + self.out(out.reshape(len(x), 64))
        return x + self.mlp(self.norms[1](x)), cache


class Transformer(nnx.Module):
    def __init__(self, paged: bool, rngs: nnx.Rngs):
        self.config = Config()
        self.tokens, self.positions = nnx.Embed(256, 64, rngs=rngs), nnx.Embed(128, 64, rngs=rngs)
        self.layers = nnx.List([Layer(i, paged, rngs) for i in range(2)])

    def __call__(self, tokens, cache=None, batch=None):
        positions = jnp.arange(len(tokens)) if batch is None else batch.positions
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x, cache = layer(x, cache, batch)
        return x, cache

    def logits(self, hidden):
        return self.tokens.attend(hidden)


@nnx.jit
def log_probabilities(model: Transformer, tokens: jax.Array) -> jax.Array:
    """f32[num_tokens, vocab_size], of what follows each token."""
    return jax.nn.log_softmax(model.logits(model(tokens)[0]))


# Steps of at most 32 tokens, and as many sequences: then two programs do, one for prefill and one for decode.
llm = jp.LLM(Transformer(paged=True, rngs=nnx.Rngs(0)), dtype="float32", max_seqs=32, max_batch_tokens=32, num_pages=32)
shared = list(range(40))
prompts = [[*shared, 7, 8], [*shared, 99, 3], list(range(100, 142))]
outputs = llm.generate(prompts, jp.SamplingParams(temperature=0, max_tokens=20, logprobs=0))

plain = Transformer(paged=False, rngs=nnx.Rngs(0))  # the same seed: the same weights
largest_error = 0.0
for output in outputs:
    tokens, length = np.array(output.outputs[0].token_ids), len(output.prompt_token_ids)
    expected = log_probabilities(plain, jnp.array([*output.prompt_token_ids, *tokens]))[length - 1 : -1]
    assert tokens.tolist() == jnp.argmax(expected, axis=1).tolist(), "plain attention chooses other tokens"
    errors = expected[np.arange(len(tokens)), tokens] - np.array(output.outputs[0].logprobs)
    largest_error = max(largest_error, float(jnp.max(jnp.abs(errors))))
    print(f"prompt of {length} tokens, {output.num_cached_tokens} from the cache -> {tokens[:8].tolist()} ...")

assert largest_error < 1e-4
assert outputs[1].num_cached_tokens >= 32  # the two whole pages of what it shares with the first
print(f"{20 * len(outputs)} tokens as with plain attention, log-probabilities within {largest_error:.1e}")
