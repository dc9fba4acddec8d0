"""Block sizes of the kernels, per chip and shape."""

from dataclasses import dataclass

from ._compat import round_up
from .api import AttentionCall


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tile sizes of the TPU kernel, in tokens."""

    kv_tokens: int  # fetched together; a multiple of the page size
    compute_tokens: int  # of one turn of the inner loop; a multiple of 128
    softmax_tokens: int  # of one step of the softmax in a decode; divides compute_tokens
    q_tokens: int  # of a tile, all of one row; a power of two
    vmem_bytes: int = 64 * 2**20


def choose_blocks(call: AttentionCall, chip: str | None = None) -> Blocks:
    """Block sizes for a call, by rule.

    About 4 MiB of KV per block: enough on its way at once to cover the latency of HBM at any chip's bandwidth, and
    inner loops long enough to work on one step's softmax while the matrix units have another's. Never more than the
    longest sequence needs.
    """
    bytes_per_token = 2 * call.num_kv_heads * max(call.head_dim, 128) * (4 if call.kv_dtype == "float32" else 2)
    wanted = 1024 if call.decode_only else 512
    while wanted > 128 and wanted * bytes_per_token > 4 * 2**20:
        wanted //= 2
    wanted = min(wanted, max(128, 1 << (call.pages_per_seq * call.page_size - 1).bit_length()))
    kv_tokens = max(wanted // call.page_size, 1) * call.page_size
    compute_tokens = wanted if kv_tokens % wanted == 0 else round_up(kv_tokens, 128)
    if call.decode_only:
        return Blocks(kv_tokens=kv_tokens, compute_tokens=compute_tokens, softmax_tokens=128, q_tokens=1)
    q_tokens = 16
    while q_tokens < 64 and q_tokens < call.max_tokens:
        q_tokens *= 2
    return Blocks(kv_tokens=kv_tokens, compute_tokens=compute_tokens, softmax_tokens=128, q_tokens=q_tokens)
