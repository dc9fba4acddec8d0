"""Paged attention and prefix reuse for JAX: a paged KV pool, a radix tree of prefixes, and an engine on both.

`import jax_paged as jp` loads nothing yet; each name brings its module with it when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_paged import kernels
    from jax_paged.branch import Branch
    from jax_paged.cache import (
        CacheSpec,
        PagedCache,
        allocate,
        append,
        assign,
        check,
        fork,
        free,
        gather,
        init_cache,
        poison,
        release,
        retain,
        write_kv,
    )
    from jax_paged.engine import LLM, StreamEvent
    from jax_paged.errors import InvariantError, ModelError, OutOfPages, RequestError
    from jax_paged.models.load import LoadedModel, load
    from jax_paged.nn import Batch, PagedAttention, make_batch
    from jax_paged.radix import CacheEvent, RadixTree
    from jax_paged.request import CompletionOutput, RequestOutput, SamplingParams
    from jax_paged.tokenizer import Tokenizer

_HOMES = {
    "branch": ["Branch"],
    "cache": [
        "CacheSpec", "PagedCache", "allocate", "append", "assign", "check", "fork", "free", "gather", "init_cache",
        "poison", "release", "retain", "write_kv",
    ],
    "engine": ["LLM", "StreamEvent"],
    "errors": ["InvariantError", "ModelError", "OutOfPages", "RequestError"],
    "models.load": ["LoadedModel", "load"],
    "nn": ["Batch", "PagedAttention", "make_batch"],
    "radix": ["CacheEvent", "RadixTree"],
    "request": ["CompletionOutput", "RequestOutput", "SamplingParams"],
    "tokenizer": ["Tokenizer"],
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Batch",
    "Branch",
    "CacheEvent",
    "CacheSpec",
    "CompletionOutput",
    "InvariantError",
    "LoadedModel",
    "ModelError",
    "OutOfPages",
    "PagedAttention",
    "PagedCache",
    "RadixTree",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "Tokenizer",
    "allocate",
    "append",
    "assign",
    "check",
    "fork",
    "free",
    "gather",
    "init_cache",
    "kernels",
    "load",
    "make_batch",
    "poison",
    "release",
    "retain",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module("jax_paged.kernels")
    if name not in _HOME:
        raise AttributeError(f"module 'jax_paged' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jax_paged.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
