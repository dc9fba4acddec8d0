"""How far an engine step is from its floor.

The floor of a step is what no engine can spare: the model's matrix products on the same rows, and one read of the
KV that the rows attend to (timed as a copy). A step is everything from the scheduler's plan to the sampled tokens.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.engine import LLM
from jax_paged.models.llama import Llama, linear
from jax_paged.request import SamplingParams

if TYPE_CHECKING:
    from jax_paged.models.load import LoadedModel

__all__ = ["CASES", "Case", "Result", "main", "measure"]


@dataclass(frozen=True)
class Case:
    """A step: `num_rows` sequences of `context` tokens decode, or one prefills `chunk`."""

    name: str
    num_rows: int
    context: int = 0
    chunk: int = 0


CASES = (
    Case("decode, 32 rows of 200 tokens", 32, context=200),
    Case("decode, 8 rows of 200 tokens", 8, context=200),
    Case("decode, 1 row of 200 tokens", 1, context=200),
    Case("prefill, a chunk of 512 tokens", 1, chunk=512),
)


@dataclass(frozen=True)
class Result:
    """Medians, in seconds."""

    case: Case
    step_s: float
    dots_s: float
    copy_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / (self.dots_s + self.copy_s)


def measure(model: Llama, case: Case, *, repeats: int = 15, **options: Any) -> Result:
    """Times a case: steps, dots and copies in turn, so that what else the machine does hits all three alike."""
    llm = LLM(model, prefix_cache=False, max_batch_tokens=512, max_model_len=1024, **options)
    step = _prefill_step(llm, case) if case.chunk else _decode_step(llm, case, repeats)
    dots, copy = _dots(model, case), _copy(llm, case)
    for action in (step, dots, copy):
        action()
    times = [[_time(action) for action in (step, dots, copy)] for _ in range(repeats)]
    llm.close()
    return Result(case, *(statistics.median(column) for column in zip(*times)))


def _time(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _prompt(rng: np.random.Generator, llm: LLM, length: int) -> list[int]:
    return rng.integers(10, llm.config.vocab_size, length).tolist()


def _decode_step(llm: LLM, case: Case, repeats: int) -> Callable[[], Any]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=4 * repeats + case.num_rows, ignore_eos=True)
    start = case.context - repeats // 2
    prefilling = {llm.add_request(_prompt(rng, llm, start), params) for _ in range(case.num_rows)}
    while prefilling:
        prefilling -= {output.request_id for output in llm.step()}
    return llm.step


def _prefill_step(llm: LLM, case: Case) -> Callable[[], Any]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=1)

    def step() -> None:
        llm.add_request(_prompt(rng, llm, case.chunk), params)
        (output,) = llm.step()
        assert output.finished

    return step


def _dots(model: Llama, case: Case) -> Callable[[], Any]:
    """The model's products, each fed with the last one's result so that none is left out."""

    def fit(x: jax.Array, width: int, dtype: Any) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, max(0, width - x.shape[1]))))[:, :width].astype(dtype)

    @jax.jit
    def run(weights: list[list[Any]], head: Any, x: jax.Array) -> jax.Array:
        for layer in weights:
            for weight in layer:
                x = linear(fit(x, weight.shape[1], weight.dtype), weight)
        return linear(fit(x[:num_sampled], head.shape[1], head.dtype), head)

    # One row is padded to eight in a step, and products of fewer are slower, not faster.
    num_sampled = max(8, case.num_rows)
    num_tokens = case.chunk or num_sampled
    weights = [[block.qkv, block.o, block.gate_up, block.down] for block in model.blocks]
    head = model.embed if model.lm_head is None else model.lm_head
    x = jnp.ones((num_tokens, model.config.hidden_size), head.dtype)
    return lambda: run(weights, head, x).block_until_ready()


def _copy(llm: LLM, case: Case) -> Callable[[], Any]:
    spec = llm.spec
    layer_bytes = case.num_rows * (case.context or case.chunk) * spec.page_bytes // spec.num_layers // spec.page_size
    sources = [np.ones(layer_bytes, np.uint8) for _ in range(spec.num_layers)]
    scratch = np.empty(layer_bytes, np.uint8)

    def copy() -> None:
        for source in sources:
            np.copyto(scratch, source)

    return copy


def main(loaded: "LoadedModel", as_json: bool = False) -> None:
    """Prints all cases."""
    model = Llama(loaded.config, loaded.weights)
    results = []
    if not as_json:
        print(f"{'':<34}{'step':>10}{'dots':>10}{'KV copy':>10}{'step / floor':>14}")
    for case in CASES:
        result = measure(model, case, num_pages=1024, dtype=loaded.weights["embed"].dtype.name)
        results.append(result)
        if not as_json:
            ms = [f"{seconds * 1e3:>7.1f} ms" for seconds in (result.step_s, result.dots_s, result.copy_s)]
            print(f"{case.name:<34}{''.join(ms)}{result.ratio:>14.2f}", flush=True)
    if as_json:
        print(json.dumps([{**asdict(result), "ratio": result.ratio} for result in results]))
