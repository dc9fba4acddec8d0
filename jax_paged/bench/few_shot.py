"""What the prefix cache saves: 32 requests that share 512 tokens, with 32 of their own, 64 tokens out."""

import json
import time
from typing import TYPE_CHECKING

import numpy as np

from jax_paged.engine import LLM
from jax_paged.request import SamplingParams

if TYPE_CHECKING:
    from jax_paged.models.load import LoadedModel

__all__ = ["main", "measure"]

NUM_REQUESTS, SHARED, OWN, OUT = 32, 512, 32, 64


def measure(loaded: "LoadedModel") -> dict[str, float]:
    """Seconds for all requests with the cache and without, compilation left out, in one process."""
    rng = np.random.default_rng(0)
    vocab = loaded.config.vocab_size
    shared = rng.integers(10, vocab, SHARED).tolist()
    prompts = [shared + rng.integers(10, vocab, OWN).tolist() for _ in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)
    dtype = loaded.weights["embed"].dtype.name
    times = {}
    for prefix_cache in (True, False):
        llm = LLM(
            loaded, prefix_cache=prefix_cache, max_seqs=NUM_REQUESTS, max_model_len=1024, num_pages=2048, dtype=dtype
        )
        llm.generate(prompts, params)  # compiles all that it will need
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params)
        times["with_s" if prefix_cache else "without_s"] = time.perf_counter() - start
        times["cached_tokens" if prefix_cache else "uncached_hits"] = llm.stats()["hit_tokens"]
        llm.close()
    return {**times, "ratio": times["with_s"] / times["without_s"]}


def main(loaded: "LoadedModel", as_json: bool = False) -> None:
    """Prints `measure`."""
    result = measure(loaded)
    if as_json:
        print(json.dumps(result))
        return
    print(f"{NUM_REQUESTS} requests of {SHARED} shared and {OWN} own tokens, {OUT} out")
    seconds = f"with the prefix cache {result['with_s']:.1f} s, without {result['without_s']:.1f} s"
    print(f"{seconds}: ratio {result['ratio']:.2f}")
