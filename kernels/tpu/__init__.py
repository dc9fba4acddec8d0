"""Ragged paged attention and the write of its KV for TPU, in Pallas Mosaic."""

from .attention import ragged_paged_attention, supports
from .write import cannot_write, write_tokens

__all__ = ["cannot_write", "ragged_paged_attention", "supports", "write_tokens"]
