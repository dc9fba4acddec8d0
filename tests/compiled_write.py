"""Run by a test in a process of its own, with libtpu: the KV write compiled for each chip, its pool donated."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from jax_paged.kernels import aot
from jax_paged.kernels.tpu import write_tokens


def main() -> None:
    for chip, topology in aot.CHIPS.items():
        device = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        row_major = Format(Layout(major_to_minor=(0, 1, 2, 3)), sharding)
        check(chip, (4096, 16, 16, 128), sharding, sharding)  # Llama-3-8B's, in the layout XLA prefers
        check(chip, (4096, 16, 6, 64), sharding, row_major)  # SmolLM2's
    print(f"{len(aot.CHIPS)} chips write in place")


def check(chip: str, shape: tuple[int, ...], sharding: Any, pool_format: Any) -> None:
    pool = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=pool_format)
    kv = jax.ShapeDtypeStruct((64, *shape[2:]), jnp.bfloat16, sharding=sharding)
    slots = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=sharding)
    write = jax.jit(
        write_tokens, donate_argnums=0, in_shardings=(pool_format, sharding, sharding), out_shardings=pool_format
    )
    memory = write.trace(pool, kv, slots).lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    assert memory is not None
    pool_bytes = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    assert memory.alias_size_in_bytes >= pool_bytes, (chip, shape, memory)
    assert memory.temp_size_in_bytes < pool_bytes / 100, (chip, shape, memory)


if __name__ == "__main__":
    main()
