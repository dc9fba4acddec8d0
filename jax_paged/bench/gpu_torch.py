"""Torch's attention on the batches that `gpu.py` times, for comparison. Torch is imported only when it is run."""

import statistics
from collections.abc import Callable
from importlib import import_module
from typing import Any

_FLEX = "torch.nn.attention.flex_attention"

# "gathered": K and V are already contiguous, which a paged pool would first have to be made.
RUNS = ("torch SDPA, gathered", "torch Flex, gathered", "torch Flex, paged")


def seconds_per_call(
    name: str, shape: tuple[int, int, int], num_rows: int, kv_len: int, q_len: int, copies: int
) -> float:
    """The median time of one call of a run named in `RUNS`, causal, in bfloat16, over `copies` of the KV in turn.

    Raises:
        ImportError: there is no torch, or not this part of it.
        NotImplementedError: torch sees no GPU.
    """
    torch = import_module("torch")
    if not torch.cuda.is_available():
        raise NotImplementedError("torch sees no GPU")
    num_q_heads, num_kv_heads, head_dim = shape

    def normal(num_heads: int, length: int) -> Any:
        return torch.randn(num_rows, num_heads, length, head_dim, dtype=torch.bfloat16, device="cuda")

    q = normal(num_q_heads, q_len)
    kv = [(normal(num_kv_heads, kv_len), normal(num_kv_heads, kv_len)) for _ in range(copies)]
    make = {RUNS[0]: _sdpa, RUNS[1]: _flex, RUNS[2]: _paged_flex}[name]
    return _time(make(torch, q, kv), torch)


# Each of these gives a call that attends to a copy of the KV, by number.


def _sdpa(torch: Any, q: Any, kv: list[Any]) -> Callable[[int], Any]:
    attend = torch.nn.functional.scaled_dot_product_attention
    q_len, kv_len = q.shape[2], kv[0][0].shape[2]
    mask = None
    if 1 < q_len < kv_len:  # `is_causal` would align the first query, not the last, with the keys
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda").tril(kv_len - q_len)
    return lambda i: attend(q, *kv[i % len(kv)], attn_mask=mask, is_causal=q_len == kv_len, enable_gqa=True)


def _flex(torch: Any, q: Any, kv: list[Any]) -> Callable[[int], Any]:
    compiled = torch.compile(import_module(_FLEX).flex_attention)
    mask = _causal_mask(q, kv[0][0])
    return lambda i: compiled(q, *kv[i % len(kv)], block_mask=mask, enable_gqa=True)


def _paged_flex(torch: Any, q: Any, kv: list[Any]) -> Callable[[int], Any]:
    paged_attention = import_module("torch.nn.attention.experimental._paged_attention")
    num_rows, num_kv_heads, kv_len, head_dim = kv[0][0].shape
    page_size = 128  # whatever the pool's: its pages are the blocks of its mask
    pages_per_row = -(-kv_len // page_size)
    paged = paged_attention.PagedAttention(num_rows * pages_per_row, page_size, num_rows, device="cuda")
    for row in range(num_rows):
        paged.reserve(torch.tensor(row, device="cuda"), torch.tensor(kv_len, device="cuda"))
    rows = torch.arange(num_rows, device="cuda")
    positions = torch.arange(kv_len, device="cuda").expand(num_rows, -1)
    pool = (1, num_kv_heads, num_rows * pages_per_row * page_size, head_dim)
    pools = []
    for k, v in kv:
        pools.append(tuple(torch.zeros(pool, dtype=k.dtype, device="cuda") for _ in range(2)))
        paged.assign(rows, positions, k, v, *pools[-1])
    mask = paged.convert_logical_block_mask(_causal_mask(q, kv[0][0]), rows)
    compiled = torch.compile(import_module(_FLEX).flex_attention)
    return lambda i: compiled(q, *pools[i % len(pools)], block_mask=mask, enable_gqa=True)


def _causal_mask(q: Any, k: Any) -> Any:
    q_len, kv_len = q.shape[2], k.shape[2]

    def sees(b: Any, h: Any, q_index: Any, kv_index: Any) -> Any:
        return kv_index <= q_index + (kv_len - q_len)

    return import_module(_FLEX).create_block_mask(sees, q.shape[0], None, q_len, kv_len, device="cuda")


def _time(call: Callable[[int], Any], torch: Any, repeats: int = 5, calls: int = 10) -> float:
    for i in range(3):
        call(i)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(calls):
            call(i)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)
