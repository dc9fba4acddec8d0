"""Run by a test in a process of its own, with libtpu: the engine's whole step compiled for a TPU, its pool donated.

Prints, for each kind of heads, a JSON object with the bytes of the pool by `memory.page_bytes`, those that the program
gives back in place, and those of its temporary memory.
"""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

import jax_paged as jp
from jax_paged import memory
from jax_paged.kernels import aot, api
from jax_paged.ledger import Commands, StepPlan
from jax_paged.models.llama import Llama, random_weights
from jax_paged.step import pack_commands, pack_inputs, programs_for

CHIP, NUM_PAGES = "v5e", 8000
# Whether to decode; heads of whole tiles, and such as the tiles of memory have to be filled up for.
CASES = (
    (True, {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}),
    (False, {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64}),
)


def main() -> None:
    device = topologies.get_topology_desc(topology_name=aot.CHIPS[CHIP], platform="tpu").devices[0]
    described = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=described)
    engines = [(decode, engine(heads)) for decode, heads in CASES]
    api._default_platform = lambda: "tpu"  # what is traced from now on is for it
    for decode, llm in engines:
        with use_abstract_mesh(mesh):
            print(json.dumps(compile_step(llm, device, decode)), flush=True)


def engine(heads: dict[str, int]) -> jp.LLM:
    config = replace(tiny.CONFIG, max_model_len=2048, **heads)
    model = Llama(config, random_weights(config, seed=0))
    return jp.LLM(model, dtype="bfloat16", page_size=16, num_pages=128, max_seqs=8, max_batch_tokens=64)


def compile_step(llm: jp.LLM, device: Any, decode: bool) -> dict[str, int]:
    pool_format = memory.pool_format(device)
    assert pool_format is not None
    here = SingleDeviceSharding(device)

    def described(x: Any, format_: Any = here) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=format_)

    spec = replace(llm.spec, num_pages=NUM_PAGES)
    bucket = next(b for b in llm._buckets.all()[::-1] if b.one_token_rows == decode and b.plain)
    commands = pack_commands(Commands(), llm._capacity, spec.num_pages, spec.max_seqs)
    inputs = pack_inputs(StepPlan([], [], Commands()), commands, bucket, spec.max_seqs)
    weights, cache, inputs = jax.tree.map(
        described, (llm._weights, jax.eval_shape(lambda: jp.init_cache(spec)), inputs)
    )
    cache = cache.replace(kv_pages=tuple(described(layer, pool_format) for layer in cache.kv_pages))
    run_step, _ = programs_for(pool_format)
    traced = run_step.trace(llm._shape, weights, cache, inputs, bucket)
    used = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    return {
        "pool": NUM_PAGES * memory.page_bytes(spec, "tpu"),
        "in_place": used.alias_size_in_bytes,
        "temporary": used.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main()
