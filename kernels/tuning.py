"""Block sizes of the kernels, per chip and shape."""

from dataclasses import dataclass

from ._compat import cdiv, round_up
from .api import AttentionCall


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tile sizes of the TPU kernel, in tokens."""

    kv_tokens: int  # fetched together; a multiple of the page size
    compute_tokens: int  # of one turn of the inner loop; a multiple of 128
    softmax_tokens: int  # of one step of the softmax in a decode; divides compute_tokens
    q_tokens: int  # of one row; a power of two
    vmem_bytes: int = 64 * 2**20


def choose_blocks(call: AttentionCall) -> Blocks:
    """Block sizes for a call by rule."""
    longest = round_up(call.pages_per_seq * call.page_size, 128)
    kv_tokens = max(min(512, longest) // call.page_size, 1) * call.page_size
    compute_tokens = min(round_up(kv_tokens, 128), 512)
    q_tokens = 1 if call.decode_only else 16
    while q_tokens < 64 and q_tokens < call.max_tokens and not call.decode_only:
        q_tokens *= 2
    return Blocks(kv_tokens=kv_tokens, compute_tokens=compute_tokens, softmax_tokens=128, q_tokens=q_tokens)
