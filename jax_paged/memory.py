"""How large the pool may be, and how it lies in a device's memory."""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from jax_paged.cache import CacheSpec
from jax_paged.kernels.tuning import token_bytes

__all__ = ["available_bytes", "page_bytes", "plan_pool", "pool_format"]

# A device keeps some memory for the step's temporaries; a computer has other work to do than this.
_DEVICE_SHARE, _HOST_SHARE = 0.9, 0.25
_MAX_HOST_POOL_BYTES = 2**30
_GIB = 2**30


def pool_format(device: Any) -> Format | None:
    """How the pool is to lie in the memory of a device: row-major on a TPU, elsewhere as XLA has it, None.

    For heads shorter than a tile XLA would lay pages or tokens along the tile instead. The kernels do not read that, so
    that XLA would lay out the whole pool anew before each of them, and after it.
    """
    if device.platform != "tpu":
        return None
    return Format(Layout(major_to_minor=(0, 1, 2, 3)), jax.sharding.SingleDeviceSharding(device))


def page_bytes(spec: CacheSpec, platform: str) -> int:
    """Bytes that a page takes in memory, over all layers: `spec.page_bytes`, and on a TPU what fills up its tiles."""
    if platform != "tpu":
        return spec.page_bytes
    bytes_of_a_token = token_bytes(spec.num_kv_heads, spec.head_dim, np.dtype(spec.dtype).itemsize)
    return spec.num_layers * spec.page_size * bytes_of_a_token


def available_bytes() -> int:
    """Bytes that the default device could still give: of its own memory, or on CPU of the computer's."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def plan_pool(
    config: Any,
    *,
    page_size: int,
    num_pages: int | None,
    max_seqs: int,
    max_model_len: int | None,
    dtype: np.dtype,
) -> tuple[CacheSpec, int]:
    """The sizes of the pool for a model, and the longest sequence it holds.

    Args:
      config: the model's, with num_layers, num_kv_heads, head_dim and max_model_len.
      num_pages: None takes what `max_seqs` of the longest sequences could use, within 90% of an accelerator's free
        memory, or on CPU a quarter of what is free and 1 GiB.
      max_model_len: tokens; None is the model's, or what the pool holds if that is less.
      page_size, max_seqs, dtype: as in `CacheSpec`.

    Raises:
      ValueError: a pool larger than the memory, or a sequence longer than the model or the pool.
    """
    if max_model_len is not None and not 1 < max_model_len <= config.max_model_len:
        raise ValueError(f"{max_model_len=} must be from 2 to the model's {config.max_model_len} tokens")
    longest = max_model_len or config.max_model_len
    sizes = {
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "page_size": page_size,
        "max_seqs": max_seqs,
        "dtype": dtype,
    }
    bytes_a_page = page_bytes(CacheSpec(num_pages=1, max_pages_per_seq=1, **sizes), jax.default_backend())
    free = available_bytes()
    if num_pages is None:
        on_host = jax.default_backend() == "cpu"
        budget = min(free * _HOST_SHARE, _MAX_HOST_POOL_BYTES) if on_host else free * _DEVICE_SHARE
        num_pages = max(1, min(int(budget) // bytes_a_page, max_seqs * -(-longest // page_size)))
    if num_pages < 1:
        raise ValueError(f"{num_pages=} must be at least 1, or None to size the pool from the memory there is")
    if bytes_a_page > free:
        raise ValueError(
            f"not even one page of {page_size:,} tokens, {bytes_a_page / _GIB:.1f} GiB, fits into the "
            f"{free / _GIB:.1f} GiB that are free; lower page_size"
        )
    if num_pages * bytes_a_page > free:
        raise ValueError(
            f"a pool of {num_pages:,} pages takes {num_pages * bytes_a_page / _GIB:.1f} GiB, {free / _GIB:.1f} GiB are "
            f"free; at most num_pages={free // bytes_a_page:,} fit, or None to size it from the memory there is"
        )
    capacity = num_pages * page_size
    if max_model_len is not None and capacity < max_model_len:
        raise ValueError(
            f"a pool of {num_pages} pages of {page_size} holds {capacity} tokens, less than {max_model_len=}; raise "
            f"num_pages to {-(-max_model_len // page_size)} or lower max_model_len"
        )
    longest = min(longest, capacity)
    if longest < 2:
        raise ValueError(f"a pool of {num_pages} pages of {page_size} holds {capacity} token; it must hold at least 2")
    return CacheSpec(num_pages=num_pages, max_pages_per_seq=-(-longest // page_size), **sizes), longest
