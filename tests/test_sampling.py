"""Sampling: against argmax, the softmax, and itself in other batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_paged as jp
from jax_paged.sampling import SamplingRows, sample

ROWS = 2048
jitted = jax.jit(sample)


def draw(logits, temperature=1.0, seed=0, sample_index=0, position=0, logprobs=True, rows=ROWS):
    """Tokens and their log-probabilities; what is given once holds for all. In batches of `rows`, the last padded."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    dtypes = {"temperature": np.float32, "seed": np.uint32, "sample_index": np.int32, "position": np.int32}
    values = (temperature, seed, sample_index, position)
    options = {name: np.broadcast_to(np.asarray(x, dtypes[name]), len(logits)) for name, x in zip(dtypes, values)}
    parts = []
    for start in range(0, len(logits), rows):
        part = {name: np.resize(x[start : start + rows], rows) for name, x in options.items()}
        batch = np.resize(logits[start : start + rows], (rows, logits.shape[1]))
        parts.append(jitted(batch, SamplingRows(**part, logprobs=jnp.bool_(logprobs))))
    return tuple(np.concatenate(part)[: len(logits)] for part in zip(*parts))


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal((rows, vocab_size)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("vocab_size", [1, 256, 300])
def test_temperature_0_takes_the_likeliest_token(vocab_size: int):
    logits = random_logits(16, vocab_size)
    np.testing.assert_array_equal(draw(logits, temperature=0)[0], logits.argmax(1))


def test_of_several_likeliest_tokens_the_first_is_taken():
    assert draw([[1.0, 5.0, 5.0, 2.0, 5.0]] * 2, temperature=0)[0].tolist() == [1, 1]


@pytest.mark.parametrize(("vocab_size", "temperature"), [(7, 1.0), (300, 0.7), (300, 2.0)])
def test_tokens_are_drawn_from_the_softmax_over_temperature(vocab_size: int, temperature: float):
    num_draws = 20_000
    logits = random_logits(1, vocab_size, seed=vocab_size)
    tokens, _ = draw(np.repeat(logits, num_draws, axis=0), temperature, seed=np.arange(num_draws), position=5)
    expected = num_draws * softmax(logits / temperature)[0]
    counts = np.bincount(tokens, minlength=vocab_size)
    common = expected >= 5  # where Pearson's statistic is near its limit; the others count as one
    observed, expected = (np.append(x[common], x[~common].sum() + 1e-9) for x in (counts, expected))
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations above its mean


@pytest.mark.parametrize("name", ["seed", "sample_index", "position"])
def test_the_random_number_depends_on_seed_sample_and_position(name: str):
    logits = np.zeros((200, 300))
    tokens, _ = draw(logits, **{name: np.arange(200)})
    assert len(set(tokens.tolist())) > 120  # of 200 draws from 300, about 146 differ
    np.testing.assert_array_equal(draw(logits, **{name: np.arange(200)})[0], tokens)


def test_the_largest_seed_works():
    seeds = [2**32 - 1, 2**31, 2**31 - 1, 0]
    assert len(set(draw(np.zeros((4, 300)), seed=seeds)[0].tolist())) == 4


def test_a_row_draws_the_same_token_in_any_batch():
    logits = random_logits(12, 300)
    options = {"seed": np.arange(12), "position": np.arange(12) * 7, "sample_index": np.arange(12) % 3}
    temperature = np.where(np.arange(12) % 4, 1.0, 0.0)  # greedy rows among them
    tokens, logprobs = draw(logits, temperature, **options, rows=12)
    for i in range(12):
        own = {name: values[i] for name, values in options.items()}
        token, logprob = draw(logits[i], temperature[i], **own, rows=1)
        assert token == tokens[i]
        np.testing.assert_allclose(logprob, logprobs[i], rtol=1e-5)
    np.testing.assert_array_equal(tokens[::4], logits[::4].argmax(1))
    options = {name: values[::-1] for name, values in options.items()}
    backwards, _ = draw(logits[::-1], temperature[::-1], **options, rows=12)
    np.testing.assert_array_equal(backwards[::-1], tokens)


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_a_token_of_probability_0_is_never_drawn(vocab_size: int):
    rng = np.random.default_rng(0)
    logits = random_logits(5000, vocab_size)
    logits[rng.random(logits.shape) < 0.9] = -np.inf
    logits[np.arange(5000), rng.integers(0, vocab_size, 5000)] = 0  # at least one is left
    tokens, logprobs = draw(logits, temperature=5.0, seed=np.arange(5000))
    assert np.isfinite(logits[np.arange(5000), tokens]).all()
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("temperature", [1e-45, 2e-38, 1e-30, 1e-6])
def test_a_very_low_temperature_takes_the_likeliest_token(temperature: float):
    logits = random_logits(50, 300)
    np.testing.assert_array_equal(draw(logits, temperature, seed=np.arange(50))[0], logits.argmax(1))


def test_a_very_high_temperature_draws_from_all_tokens():
    tokens, _ = draw(random_logits(3000, 7), 1e30, seed=np.arange(3000))
    assert set(tokens.tolist()) == set(range(7))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_those_of_the_unscaled_logits(temperature: float):
    logits = random_logits(20, 300)
    tokens, logprobs = draw(logits, temperature, seed=np.arange(20))
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[np.arange(20), tokens], atol=1e-5)
    np.testing.assert_array_equal(draw(logits, temperature, seed=np.arange(20), logprobs=False)[1], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1.0 must be >= 0; use 0 for greedy"),
        ({"temperature": float("nan")}, r"temperature=nan must be >= 0"),
        ({"temperature": float("inf")}, r"temperature=inf must be >= 0"),
        ({"max_tokens": 0}, r"max_tokens=0 must be >= 1, or None"),
        ({"seed": -1}, r"seed=-1 must be in \[0, 2\*\*32\)"),
        ({"seed": 2**32}, r"seed=4294967296 must be in \[0, 2\*\*32\)"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids=\[3, -1\] must not be negative"),
    ],
)
def test_sampling_params_out_of_range_are_refused(options, message: str):
    with pytest.raises(ValueError, match=message):
        jp.SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_tokens": 3},
        {"stop": ["x"]},
        {"logprobs": 3},
        {"prompt_logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_are_not_supported_yet_say_so(options):
    (name,) = options
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported"):
        jp.SamplingParams(**options)
