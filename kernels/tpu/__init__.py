"""Ragged paged attention for TPU, in Pallas Mosaic."""

from .attention import ragged_paged_attention, supports

__all__ = ["ragged_paged_attention", "supports"]
