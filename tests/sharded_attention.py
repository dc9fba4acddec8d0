"""Run by a test in a process of its own, which has 8 devices: the TPU kernel under shard_map over KV heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case, assert_matches_reference, make_batch, reference
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_paged import kernels


def main() -> None:
    case = Case(
        name="sharded", kv_lens=(20, 35, 7), q_lens=(1, 1, 1), max_seqs=3, max_tokens=3, num_q_heads=16,
        num_kv_heads=8, max_kv_len=48, pool_tokens=96, sinks=True,
    )  # fmt: skip
    batch = make_batch(case, 0, jnp.float32)
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(AxisType.Auto,))
    by_head, everywhere = P(None, "heads"), P()
    options = dict(batch.options)
    sinks = options.pop("sinks")
    attend = partial(
        kernels.paged_attention, **options, return_lse=True, implementation="pallas_tpu",
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", vector_clock_size=512),
    )  # fmt: skip
    sharded = jax.shard_map(
        lambda q, kv, tables, lens, sinks: attend(q, kv, tables, lens, sinks=sinks),
        mesh=mesh,
        in_specs=(by_head, P(None, None, "heads"), everywhere, everywhere, P("heads")),
        out_specs=(by_head, by_head),
        check_vma=False,
    )
    got = jax.jit(sharded)(batch.q, batch.kv_pages, batch.page_indices, batch.kv_lens, sinks)
    assert len(got[0].sharding.device_set) == 8
    for mine, want in zip(got, reference(batch)):
        assert_matches_reference(np.asarray(mine), want, "float32")
    print("8 devices agree with the reference")


if __name__ == "__main__":
    main()
