"""Paged attention for JAX: one call, the best implementation of it on CPU, GPU and TPU.

Depends on jax and numpy alone. `reference.py` is the specification; everything else is held against it.
"""

from .api import (
    IMPLEMENTATIONS,
    AttentionCall,
    choose_implementation,
    copy_pages,
    merge_states,
    paged_attention,
    ragged_paged_attention,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionCall",
    "choose_implementation",
    "copy_pages",
    "merge_states",
    "paged_attention",
    "ragged_paged_attention",
    "write_kv",
]
