"""Paged attention for JAX: one call, the best implementation of it on CPU, GPU and TPU.

Depends on jax and numpy alone, and brings them when a name here is first used. `reference.py` is the specification;
everything else is held against it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    value = getattr(api, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
