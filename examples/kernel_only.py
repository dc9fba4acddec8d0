"""The attention kernels alone, on made-up arrays: no cache object, no model, no engine.

Shows a ragged batch (a prompt, a chunk of a prompt and a decode in one call) over pages scattered in a pool, and
attention in two parts, joined by their log-sum-exp (LSE). Both are compared with plain softmax attention.
"""

import numpy as np

import jax_paged as jp

PAGE_SIZE, NUM_PAGES, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 16, 8, 2, 32
SCALE = HEAD_DIM**-0.5

rng = np.random.default_rng(0)
kv_lens = np.array([11, 20, 7], np.int32)  # tokens of each sequence that are in the pool
q_lens = np.array([11, 6, 1], np.int32)  # of these, the last so many are queries: a prompt, a chunk, a decode
cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
block_tables = np.full((3, 5), NUM_PAGES, np.int32)  # NUM_PAGES means none
unused = iter(rng.permutation(NUM_PAGES))
for row, num_tokens in enumerate(kv_lens):
    for i in range(-(-num_tokens // PAGE_SIZE)):
        block_tables[row, i] = next(unused)
kv_pages = rng.standard_normal((NUM_PAGES, PAGE_SIZE, 2 * NUM_KV_HEADS, HEAD_DIM), np.float32)  # K0 V0 K1 V1
q = rng.standard_normal((q_lens.sum(), NUM_Q_HEADS, HEAD_DIM), np.float32)


def plain_attention(row: int) -> np.ndarray:
    """Causal softmax attention of one sequence, its keys and values copied out of the pages: f32[q_len, heads, dim]."""
    pages = block_tables[row][block_tables[row] < NUM_PAGES]
    kv = kv_pages[pages].reshape(-1, 2 * NUM_KV_HEADS, HEAD_DIM)[: kv_lens[row]]
    k, v = (np.repeat(kv[:, i::2], NUM_Q_HEADS // NUM_KV_HEADS, axis=1) for i in (0, 1))  # a KV head serves 4
    queries = q[cu_q_lens[row] : cu_q_lens[row + 1]]
    positions = np.arange(kv_lens[row])
    is_visible = positions[None, :] <= positions[-len(queries) :, None]
    weights = np.exp(np.where(is_visible, np.einsum("qhd,khd->hqk", queries, k) * SCALE, -np.inf))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


expected = np.concatenate([plain_attention(row) for row in range(3)])

# All at once. The lengths are data: one compiled program serves every mix of prefill and decode of these shapes.
out = jp.kernels.ragged_paged_attention(
    q, kv_pages, kv_lens, block_tables, cu_q_lens, np.array([3], np.int32), sm_scale=SCALE
)
ragged_error = np.max(np.abs(out - expected))
print(f"ragged batch of {q_lens.tolist()} queries over {kv_lens.tolist()} tokens: largest error {ragged_error:.1e}")

# In two parts, as when many sequences share a prefix, or a sequence is spread over devices: the last query of the
# longest sequence over its first two pages, the same query over the other pages, then both joined.
query, table, split = q[cu_q_lens[2] - 1][None], block_tables[1:2], 2
part = {"sm_scale": SCALE, "return_lse": True}
first = jp.kernels.paged_attention(query, kv_pages, table[:, :split], np.array([split * PAGE_SIZE], np.int32), **part)
rest = jp.kernels.paged_attention(query, kv_pages, table[:, split:], kv_lens[1:2] - split * PAGE_SIZE, **part)
merged, lse = jp.kernels.merge_states(*first, *rest)
merge_error = np.max(np.abs(merged[0] - expected[cu_q_lens[2] - 1]))
num_first = split * PAGE_SIZE
print(f"two parts of {num_first} and {kv_lens[1] - num_first} tokens, merged: largest error {merge_error:.1e}")

assert ragged_error < 1e-5
assert merge_error < 1e-5
print("both agree with plain softmax attention")
