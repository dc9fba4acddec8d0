"""Ragged paged attention, the write of its KV and the copy of its pages for TPU, in Pallas Mosaic."""

from .attention import ragged_paged_attention, supports
from .write import cannot_copy, cannot_write, copy_pages, write_tokens

__all__ = ["cannot_copy", "cannot_write", "copy_pages", "ragged_paged_attention", "supports", "write_tokens"]
