"""A whole generation inside one `jit`: a `lax.while_loop` that takes pages on demand and gives them back.

Four sequences of different lengths share a pool too small to hold them all at full length. Each takes a page when its
last one is full; when it ends, its pages return to the free list and serve the others. The host hears of it when all is
over. The tokens are compared with those of the engine, which runs the same model one step at a time.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_paged as jp
from jax_paged.models.config import ModelConfig
from jax_paged.models.llama import Llama, random_weights

config = ModelConfig(
    family="llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_layers=2, num_q_heads=4, num_kv_heads=2,
    head_dim=16, max_model_len=64, rope_theta=10_000.0, rms_norm_eps=1e-5, tie_embeddings=True,
    sliding_windows=(None, None),
)  # fmt: skip
model = Llama(config, random_weights(config))
graphdef, weights = nnx.split(model)

prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]
num_new = np.array([4, 9, 17, 30], np.int32)  # tokens to generate for each
prompt_lens = np.array([len(p) for p in prompts], np.int32)
num_seqs, page_size, num_pages, most_new = len(prompts), 4, 12, int(num_new.max())
none = num_seqs  # a slot past the end is padding everywhere


@jax.jit(donate_argnames="cache")
def generate(weights, cache, prompt_tokens):
    """Returns the tokens, i32[num_seqs, most_new], the free pages after each step, i32[most_new], and the cache."""
    model = nnx.merge(graphdef, weights)

    def next_tokens(cache, tokens, slots, q_lens):
        batch = jp.make_batch(cache, slots, q_lens, len(tokens))
        hidden, cache = model(tokens, cache, batch)
        return cache, jnp.argmax(model.logits(hidden[batch.last_tokens]), axis=1).astype(jnp.int32)

    def for_each_slot(change, cache):
        return jax.lax.fori_loop(0, num_seqs, change, cache)

    def free_finished(cache, num_done):
        is_done = num_done >= jnp.array(num_new)  # an empty slot stays empty
        return for_each_slot(lambda slot, c: jp.free(c, jnp.where(is_done[slot], slot, none)), cache)

    def decode(state):
        cache, last, out, num_free, step = state
        running = num_new > step
        cache = jp.append(cache, running)
        order = jnp.argsort(~running)  # a batch has its padding last
        slots = jnp.where(running[order], order, none)
        cache, sampled = next_tokens(cache, last[order], slots, running[order].astype(jnp.int32))
        last = last.at[slots].set(sampled, mode="drop")
        cache = free_finished(cache, step + 1)
        out = out.at[:, step].set(jnp.where(running, last, -1))
        return cache, last, out, num_free.at[step].set(cache.num_free), step + 1

    cache = for_each_slot(lambda slot, c: jp.allocate(c, slot, jnp.array(prompt_lens)[slot]), cache)
    cache, first = next_tokens(cache, prompt_tokens, jnp.arange(num_seqs), prompt_lens)
    out = jnp.full((num_seqs, most_new), -1).at[:, 0].set(first)
    num_free = jnp.zeros(most_new, jnp.int32).at[0].set(cache.num_free)
    state = (cache, first, out, num_free, jnp.int32(1))
    cache, _, out, num_free, _ = jax.lax.while_loop(lambda state: jnp.any(num_new > state[-1]), decode, state)
    return out, num_free, cache


cache = jp.init_cache(
    jp.CacheSpec(
        num_layers=2, num_kv_heads=2, head_dim=16, num_pages=num_pages, page_size=page_size, max_seqs=num_seqs,
        max_pages_per_seq=10, dtype="float32",
    )
)  # fmt: skip
out, num_free, cache = generate(weights, cache, np.concatenate(prompts).astype(np.int32))

taken = num_pages - np.array(num_free)
at_full_length = int(np.sum(-(-(prompt_lens + num_new - 1) // page_size)))  # the last token sampled is never stored
print(f"pages taken after each of {most_new} steps: {taken.tolist()}")
print(f"most at once: {taken.max()} of {num_pages}; all at full length would take {at_full_length}")
print(f"at the end: {cache.num_free} pages free, out of pages: {bool(cache.oom)}")
jp.check(cache)
assert not cache.oom
assert cache.num_free == num_pages
assert taken.max() <= num_pages < at_full_length

llm = jp.LLM(model, dtype="float32", page_size=page_size, num_pages=32, max_seqs=8, max_batch_tokens=16)
params = [jp.SamplingParams(temperature=0, max_tokens=int(n)) for n in num_new]
step_by_step = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
assert [row[row >= 0].tolist() for row in np.array(out)] == step_by_step
print(f"{num_new.sum()} tokens in one call, the same as step by step: {step_by_step[0]} ...")
