"""The engine's whole step compiled for an accelerator that is not here: its pool is changed in place, by our kernels.

Run in a process of its own, as `compiled_step.py v5e` (or another chip of `kernels.aot`, with libtpu) or as
`compiled_step.py h200` (or another of `kernels.gpu.aot`, with NVIDIA's compilers).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

import jax_paged as jp
from jax_paged import memory
from jax_paged.kernels import aot, api
from jax_paged.kernels.gpu import aot as gpu_aot
from jax_paged.ledger import Commands, StepPlan
from jax_paged.models.config import ModelConfig
from jax_paged.models.llama import Llama, random_weights
from jax_paged.step import pack_commands, pack_inputs, programs_for, run_step

NUM_PAGES = 8000
# Whether to decode or to mix, and the heads: Llama-3-8B's, and SmolLM2's, for which a TPU's memory fills up its tiles.
CASES = (
    (True, {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}),
    (False, {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64}),
)


def main(name: str) -> None:
    on_gpu = name in gpu_aot.GPUS
    if on_gpu:
        gpu_aot.start_toolchain()
    with jax.default_device(jax.devices("cpu")[0]):
        engines = [(decode, engine(heads)) for decode, heads in CASES]
    api._default_platform = lambda: "gpu" if on_gpu else "tpu"  # what is traced from now on is for it
    for decode, llm in engines:
        with (on_a_gpu if on_gpu else on_a_tpu)(name) as compile_for:
            check(llm, decode, *compile_for)
    print(f"{len(engines)} steps change their pools in place on {name}")


def engine(heads: dict[str, int]) -> jp.LLM:
    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=2, max_model_len=2048,
        rope_theta=1e4, rms_norm_eps=1e-5, tie_embeddings=True, sliding_windows=(None, None), **heads,
    )  # fmt: skip
    model = Llama(config, random_weights(config, dtype="bfloat16"))
    return jp.LLM(model, dtype="bfloat16", page_size=16, num_pages=128, max_seqs=8, max_batch_tokens=64)


@contextmanager
def on_a_tpu(name: str) -> Iterator[tuple[Any, str, str]]:
    device = topologies.get_topology_desc(topology_name=aot.CHIPS[name], platform="tpu").devices[0]
    described = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=described)):
        yield device, "tpu", "ragged_paged_attention"


@contextmanager
def on_a_gpu(name: str) -> Iterator[tuple[Any, str, str]]:
    gpu = gpu_aot.GPUS[name]
    target = gpu_aot._target(gpu)
    device = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices[0]
    with use_abstract_mesh(gpu_aot._mesh(gpu)):
        yield device, "cuda", "mosaic_gpu"


def check(llm: jp.LLM, decode: bool, device: Any, platform: str, kernel: str) -> None:
    here = SingleDeviceSharding(device)
    pool_format = memory.pool_format(device)

    def described(x: Any, where: Any = here) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=where)

    spec = replace(llm.spec, num_pages=NUM_PAGES)
    bucket = next(b for b in llm._buckets.all()[::-1] if b.one_token_rows == decode and b.plain)
    commands = pack_commands(Commands(), llm._capacity, spec.num_pages, spec.max_seqs)
    inputs = pack_inputs(StepPlan([], [], Commands()), commands, bucket, spec.max_seqs)
    weights, cache, inputs = jax.tree.map(
        described, (llm._weights, jax.eval_shape(lambda: jp.init_cache(spec)), inputs)
    )
    step: Any = run_step
    if pool_format is not None:
        step, _ = programs_for(pool_format)
        cache = cache.replace(kv_pages=tuple(described(layer, pool_format) for layer in cache.kv_pages))
    traced = step.trace(llm._shape, weights, cache, inputs, bucket)
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    assert kernel in compiled.as_text(), "attention is not by our kernel"
    used, pool_bytes = compiled.memory_analysis(), NUM_PAGES * memory.page_bytes(spec, platform)
    assert pool_bytes <= used.alias_size_in_bytes < 1.05 * pool_bytes, (pool_bytes, used)
    assert used.temp_size_in_bytes < pool_bytes / 20, (pool_bytes, used)


if __name__ == "__main__":
    main(sys.argv[1])
