"""A model small enough to run thousands of steps, the same model written out in numpy, and engines for it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import tokenizers

import jax_paged as jp
from jax_paged.models.config import ModelConfig
from jax_paged.models.llama import Llama, random_weights
from jax_paged.tokenizer import Tokenizer

# Two layers: in the first, keys and values depend on the token alone, in the second on all before it.
CONFIG = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    sliding_windows=(None, None),
)

# Few sizes, since each is compiled anew: the engines of one size share their programs.
SIZES: dict[str, Any] = {"page_size": 4, "num_pages": 24, "max_seqs": 4, "max_batch_tokens": 16, "max_model_len": 96}
PAGES_OF_1: dict[str, Any] = {
    "page_size": 1,
    "num_pages": 64,
    "max_seqs": 4,
    "max_batch_tokens": 8,
    "max_model_len": 64,
}
PAGES_OF_16: dict[str, Any] = {
    "page_size": 16,
    "num_pages": 6,
    "max_seqs": 4,
    "max_batch_tokens": 8,
    "max_model_len": 64,
}
# Where nobody waits and nothing is evicted.
ROOMY: dict[str, Any] = {"num_pages": 160, "max_seqs": 8}


@cache
def weights() -> dict[str, np.ndarray]:
    return random_weights(CONFIG, seed=1)


@cache
def model() -> Llama:
    return Llama(CONFIG, weights())


_model = model  # where an argument has that name


def engine(*, prefill: bool = True, plain: bool = False, model: Llama | None = None, **options: Any) -> jp.LLM:
    """An engine that checks its books and poisons its pool after every step.

    It uses the programs for prefill from the start; with `prefill` off it puts short prompts through decode's, as
    engines do that have not compiled the others. And those with all sampling options for every request, half as many
    to compile; with `plain` the ones without for requests that have none, as engines do.
    """
    llm = jp.LLM(model or _model(), **(SIZES | {"dtype": "float32", "debug_checks": True} | options))
    llm._buckets.has_prefilled = prefill
    if not plain:
        llm._buckets._used.update(llm._buckets.sizes)
    return llm


def set_end_tokens(llm: jp.LLM, *ids: int) -> None:
    """Gives an engine's model end tokens. Not by its config, with which all programs would be compiled anew."""
    llm.config = llm._intake._config = replace(llm.config, eos_token_ids=ids)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num_tokens).tolist()


def greedy(max_tokens: int = 8, **options: Any) -> jp.SamplingParams:
    return jp.SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def alone(prompt: Sequence[int], params: jp.SamplingParams, **sizes: Any) -> list[int]:
    """The tokens of a request that runs alone on a fresh engine without a prefix cache, a token a row."""
    key = repr((prompt, params, sizes))
    if key not in _ran_alone:
        llm = engine(prefix_cache=False, prefill=False, **sizes)
        _ran_alone[key] = llm.generate(prompt, params)[0].outputs[0].token_ids
    return _ran_alone[key]


_ran_alone: dict[str, list[int]] = {}


def logits(tokens: Sequence[int]) -> np.ndarray:
    """f64[num_tokens, vocab_size]: the model without cache, pages or batches, in numpy."""
    c, w = CONFIG, weights()
    num_tokens, half = len(tokens), c.head_dim // 2
    angles = np.arange(num_tokens)[:, None, None] * c.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def heads(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return (x @ weight.T).reshape(num_tokens, -1, c.head_dim)

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["embed"][list(tokens)].astype(np.float64)
    for i in range(c.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): weight.astype(np.float64) for name, weight in w.items()}
        h = norm(x, layer["attn_norm"])
        group = c.num_q_heads // c.num_kv_heads
        q = rotate(heads(h, layer["q"]))
        k, v = (np.repeat(y, group, axis=1) for y in (rotate(heads(h, layer["k"])), heads(h, layer["v"])))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        x = x + out.reshape(num_tokens, -1) @ layer["o"].T
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"].T)) @ layer["down"].T
    return norm(x, w["norm"]) @ w["lm_head"].T


def logprobs(tokens: Sequence[int]) -> np.ndarray:
    """f64[num_tokens, vocab_size]: the log-probabilities of what follows each of the tokens, by `logits`."""
    scores = logits(tokens)
    scores -= scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def likeliest(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation, by `logits`."""
    longer = list(tokens)
    for _ in range(num_tokens):
        longer.append(int(logits(longer)[-1].argmax()))
    return longer[len(tokens) :]


def beams(
    tokens: Sequence[int], width: int, max_tokens: int, length_penalty: float = 1.0, ends: Sequence[int] = ()
) -> list[tuple[list[int], float]]:
    """Beam search over whole sequences, each computed from its first token: (continuation, score), best first."""
    going: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        longer = []
        for beam, score in going:
            following = logprobs([*tokens, *beam])[-1]
            longer += [([*beam, token], score + float(following[token])) for token in range(CONFIG.vocab_size)]
        longer.sort(key=lambda candidate: -candidate[1])
        going = []
        for candidate in longer:
            if len(going) == width:
                break
            (finished if candidate[0][-1] in ends else going).append(candidate)
    both = [(beam, score, score / len(beam) ** length_penalty) for beam, score in finished + going]
    return [(beam, score) for beam, score, _ in sorted(both, key=lambda each: -each[2])[:width]]


def drive(llm: jp.LLM) -> dict[int, list[jp.RequestOutput]]:
    """Steps until nothing is left to do or tell: the outputs of each request."""
    outputs: dict[int, list[jp.RequestOutput]] = {}
    while llm.has_unfinished():
        for output in llm.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def assert_baseline(llm: jp.LLM) -> None:
    """That nothing is left once the cached prefixes are forgotten: every page is free."""
    llm.check()
    assert llm.reset_prefix_cache()
    llm.check()
    stats = llm.stats()
    assert stats["free_pages"] == stats["num_pages"]
    assert (stats["tree_pages"], stats["private_pages"]) == (0, 0)
    assert not llm._requests
    assert not llm._texts


# A token a character, or several, or a byte of some that have no token: as in real byte-level vocabularies.
_PIECES = [
    *"abcdefghijklmnopqrstuvwxyz .,",
    *["ab", "abc", "bc", "cab", "th", "the", "er", "in", "ing", "on", "an", "st", "and", "ou"],
    " the",
    " a",
    " of",
]
_BYTES = [bytes([byte]) for byte in sorted({*"é😀ñ".encode()})]


@cache
def tokenizer() -> Tokenizer:
    """A byte-level vocabulary of the tiny model's size; the last tokens add nothing to a text."""
    alphabet = byte_level_alphabet()
    spelt = [piece.encode() for piece in _PIECES] + _BYTES
    vocabulary = {"".join(alphabet[byte] for byte in piece): i for i, piece in enumerate(spelt)}
    num_special = CONFIG.vocab_size - len(vocabulary)
    merges = [(piece[:-1], piece[-1]) for piece in ("ab", "abc", "bc", "th", "the", "in", "on", "an", "er")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([f"<{i}>" for i in range(num_special)])
    return Tokenizer(backend)


def byte_level_alphabet() -> dict[int, str]:
    """The character by which byte-level BPE writes each byte (Radford et al. 2019, section 2.2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
