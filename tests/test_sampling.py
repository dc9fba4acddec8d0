"""Sampling: against a plain float64 oracle, and against itself in other batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

import jax_paged as jp
from jax_paged import sampling as sampling
from jax_paged.sampling import MAX_BIASES, MAX_LOGPROBS, Sampled, SamplingRows

HISTORY_SIZE = 40
NO_HISTORY = (np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
DEFAULTS = {
    "temperature": np.float32(1),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "seed": np.uint32(0),
    "sample_index": np.int32(0),
    "position": np.int32(0),
    "presence_penalty": np.float32(0),
    "frequency_penalty": np.float32(0),
    "repetition_penalty": np.float32(1),
    "num_prompt": np.int32(0),
    "num_logprobs": np.int32(-1),
}


@jax.jit
def jitted(logits, rows: SamplingRows, tokens, lens) -> Sampled:
    return sampling.sample(logits, rows, lambda: (tokens, lens))


NUM_ROWS = 256  # of most batches: compiling is most of these tests' time
jitted_kept_weights = jax.jit(sampling._kept_weights)


def make_rows(num_rows: int, biases=None, **options) -> SamplingRows:
    """What is given once holds for all rows. `biases`: one mapping for all, or one a row."""
    values = {
        name: np.broadcast_to(np.asarray(options.pop(name, default), default.dtype), num_rows)
        for name, default in DEFAULTS.items()
    }
    assert not options
    ids, amounts = np.full((num_rows, MAX_BIASES), 2**31 - 1, np.int32), np.zeros((num_rows, MAX_BIASES), np.float32)
    for i, bias in enumerate(biases if isinstance(biases, list) else [biases or {}] * num_rows):
        ids[i, : len(bias)], amounts[i, : len(bias)] = list(bias), list(bias.values())
    return SamplingRows(**values, bias_ids=ids, bias_values=amounts)


def pad_rows(array: np.ndarray, num_rows: int) -> np.ndarray:
    return np.resize(array, (num_rows, *array.shape[1:]))


def draw(logits, *, rows=NUM_ROWS, history=NO_HISTORY, biases=None, **options) -> Sampled:
    """Samples in batches of `rows`, the last padded with rows that were there before."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    tokens, lens = (pad_rows(x, len(logits)) for x in history)
    tokens = np.pad(tokens, ((0, 0), (0, HISTORY_SIZE - tokens.shape[1])))
    inputs = (logits, make_rows(len(logits), biases, **options), tokens, lens)
    parts = []
    for start in range(0, len(logits), rows):
        batch = jax.tree.map(lambda x, at=start: pad_rows(x[at : at + rows], rows), inputs)
        parts.append(jitted(*batch))
    return Sampled(*(np.concatenate(part)[: len(logits)] for part in zip(*parts)))


def kept_weights(logits: np.ndarray, **options) -> np.ndarray:
    """What the draw goes by: f64[rows, vocab_size]. At most 16 rows, which are padded."""
    inputs = jax.tree.map(lambda x: pad_rows(x, 16), (logits, make_rows(len(logits), **options)))
    return np.asarray(jitted_kept_weights(*inputs), np.float64)[: len(logits)]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal((rows, vocab_size)).astype(np.float32)


def coarse_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3) -> np.ndarray:
    """Multiples of 1/8: many are equal, and penalties that are multiples of 1/8 or powers of 2 act without rounding."""
    return np.round(8 * random_logits(rows, vocab_size, seed, scale)) / 8


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def adjusted(logits, prompt=(), output=(), bias=None, presence=0.0, frequency=0.0, repetition=1.0) -> np.ndarray:
    """The logits of one row after biases and penalties, one token at a time."""
    result = logits.astype(np.float64)
    for token, amount in (bias or {}).items():
        result[token] += amount
    for token in {*prompt, *output}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * list(output).count(token) + presence
    return result


def kept(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, float]:
    """The probabilities of one row, and how near (in probability) the nearest decision was."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weight = np.exp((logits - logits.max()) / temperature)
    ranked = ranked[: top_k or None]
    total, margin, nucleus, before = weight[ranked].sum(), 1.0, [], 0.0
    for token in ranked:
        if top_p < 1:
            margin = min(margin, abs(before / total - top_p))
            if before >= top_p * total and nucleus:
                break
        nucleus.append(token)
        before += weight[token]
    if min_p > 0:
        margin = min(margin, *(abs(weight[token] - min_p) for token in nucleus if weight[token] < 1), 1.0)
    last = [token for token in nucleus if weight[token] >= min_p]
    result = np.zeros(len(logits))
    result[last] = weight[last] / weight[last].sum()
    return result, margin


def check_kept(logits: np.ndarray, options: list[dict]) -> None:
    """Compares the kept set and its probabilities with the oracle's, for one row of options each."""
    names = ("temperature", "top_k", "top_p", "min_p")
    values = {name: [option.get(name, DEFAULTS[name]) for option in options] for name in names}
    weights = kept_weights(logits, **values)
    for row, option in enumerate(options):
        single = {name: float(np.float32(x)) if name != "top_k" else x for name, x in option.items()}
        expected, margin = kept(logits[row].astype(np.float64), **single)
        if margin < 1e-6:
            continue  # a matter of rounding
        np.testing.assert_array_equal(weights[row] > 0, expected > 0, err_msg=f"{option}")
        np.testing.assert_allclose(weights[row] / weights[row].sum(), expected, rtol=1e-4, err_msg=f"{option}")


def check_distribution(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    expected = len(tokens) * probabilities
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    common = expected >= 5  # where Pearson's statistic is near its limit; of the others the number counts
    rare = expected[~common].sum()
    assert abs(counts[~common].sum() - rare) <= 6 * np.sqrt(rare) + 12
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1))[common].sum()
    freedom = max(common.sum(), 1)
    # The quantile of six standard deviations (1e-9), as many draws are looked at: Wilson and Hilferty 1931.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 6 * np.sqrt(2 / (9 * freedom))) ** 3


# Greedy


@pytest.mark.parametrize("vocab_size", [1, 7, 300])
def test_temperature_0_takes_the_likeliest_token(vocab_size: int):
    logits = random_logits(16, vocab_size)
    np.testing.assert_array_equal(draw(logits, temperature=0).tokens, logits.argmax(1))


def test_of_several_likeliest_tokens_the_first_is_taken():
    assert draw([[1.0, 5.0, 5.0, 2.0, 5.0, 0.0, -0.0]] * 2, temperature=0).tokens.tolist() == [1, 1]


def test_top_k_1_and_a_small_top_p_are_greedy_even_among_equals():
    logits = coarse_logits(300, 300, scale=0.1)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"top_k": 1, "min_p": 1.0}):
        tokens = draw(logits, **options, seed=np.arange(300)).tokens
        np.testing.assert_array_equal(tokens, logits.argmax(1))


# What is kept


@pytest.mark.parametrize("top_k", [1, 2, 5, 63, 64, 65, 100, 299, 300, 301, 2**31 - 1])
def test_top_k_keeps_exactly_k_tokens_ties_by_id(top_k: int):
    logits = coarse_logits(8, 300)
    check_kept(logits, [{"top_k": top_k}] * 8)
    num_kept = (kept_weights(logits, top_k=top_k) > 0).sum(1)
    np.testing.assert_array_equal(num_kept, min(top_k, 300))


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("vocab_size", [7, 300])
def test_top_p_keeps_the_smallest_nucleus(vocab_size: int, scale: float):
    top_ps = [0.0011, 0.1013, 0.5017, 0.9011, 0.9507, 0.9913, 0.9991, 1.0]
    check_kept(coarse_logits(8, vocab_size, scale=scale), [{"top_p": p} for p in top_ps])


def test_min_p_keeps_tokens_near_the_likeliest():
    min_ps = [0.0, 1e-6, 0.011, 0.051, 0.203, 0.507, 0.97, 1.0]
    check_kept(random_logits(8, 300), [{"min_p": p} for p in min_ps])


@pytest.mark.parametrize("top_k", [3, 50, 100, 1000, 4000])
def test_options_that_reach_far_into_a_large_vocabulary(top_k: int):
    logits = coarse_logits(6, 5000)
    options = [{"top_k": top_k}, {"top_k": top_k, "top_p": 0.9012}, {"top_p": 0.9912}]
    options += [{"top_k": top_k, "temperature": 1e30}, {"top_k": top_k, "top_p": 0.5012, "temperature": 20.0}]
    options += [{"top_p": 0.9, "min_p": 0.0107}]
    check_kept(logits, options)


def test_equal_logits_across_the_whole_vocabulary_are_kept_by_id():
    weights = kept_weights(np.zeros((3, 5000), np.float32), top_p=[0.50001, 0.99999, 1])
    assert [np.flatnonzero(row).tolist() for row in weights] == [list(range(n)) for n in (2501, 5000, 5000)]
    weights = kept_weights(np.zeros((3, 5000), np.float32), top_k=[10, 70, 4999])
    assert [np.flatnonzero(row).tolist() for row in weights] == [list(range(n)) for n in (10, 70, 4999)]


def test_searching_rows_one_by_one_and_all_at_once_agree():
    logits = coarse_logits(12, 300)
    temperature = np.linspace(0.5, 3, 12, dtype=np.float32)
    weights = jnp.exp((logits - logits.max(1, keepdims=True)) / temperature[:, None])
    top_k, top_p = np.arange(12, dtype=np.int32) * 27, np.linspace(0.2, 1, 12, dtype=np.float32)
    arrays = (logits, weights, np.where(top_k > 0, top_k, 300), top_p, temperature)
    found = np.arange(12) % 5 == 4
    border = sampling._Border(jnp.full(12, 123.0), jnp.full(12, 456))
    one_by_one = jax.jit(sampling._search_one_by_one)(found, border, arrays)
    at_once = jax.jit(sampling._search_all_at_once)(found, border, arrays)
    np.testing.assert_array_equal(np.asarray(one_by_one.logit)[found], 123)
    kept = [np.asarray(sampling._up_to(border, jnp.asarray(logits))) for border in (one_by_one, at_once)]
    np.testing.assert_array_equal(kept[0], kept[1])


# Biases and penalties


@st.composite
def mixed_rows(draw, num_rows: int = 8, vocab_size: int = 300):
    """Options for each row, off about half of the time."""

    def maybe(strategy, off):
        return st.one_of(st.just(off), strategy)

    def thousandths(low, high):
        return st.integers(low, high).map(lambda x: float(np.float32(x / 1000)))

    eighths = st.integers(-16, 16).map(lambda x: x / 8)
    token = st.integers(0, vocab_size - 1)
    row = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0, 16.0, 1e30]),
            "top_k": maybe(st.integers(1, vocab_size + 10), 0),
            "top_p": maybe(thousandths(1, 999), 1.0),
            "min_p": maybe(thousandths(1, 1000), 0.0),
            "presence_penalty": maybe(eighths, 0.0),
            "frequency_penalty": maybe(eighths, 0.0),
            "repetition_penalty": maybe(st.sampled_from([0.5, 2.0, 4.0]), 1.0),
            "prompt": st.lists(token, max_size=6),
            "output": st.lists(st.integers(0, 20), max_size=6),
            "bias": maybe(st.dictionaries(token, st.one_of(eighths, st.just(-np.inf)), max_size=8), {}),
        }
    )
    return draw(st.lists(row, min_size=num_rows, max_size=num_rows)), draw(st.integers(0, 2**32 - 1))


def expected_logits(logits: np.ndarray, row: dict) -> np.ndarray:
    names = ("presence", "frequency", "repetition")
    penalties = {name: row[f"{name}_penalty"] for name in names}
    return adjusted(logits, row["prompt"], row["output"], row["bias"], **penalties)


def check_mixed(logits: np.ndarray, rows: list[dict], seed: int, num_draws: int) -> None:
    """Draws each row `num_draws` times in one batch; every token must be of the oracle's, as often as it says."""
    history = np.full((len(rows), 12), 2**31 - 1, np.int32)
    lens = np.array([len(row["prompt"]) + len(row["output"]) for row in rows], np.int32)
    for i, row in enumerate(rows):
        history[i, : lens[i]] = row["prompt"] + row["output"]
        history[i, lens[i] :] = np.arange(12 - lens[i])  # not to be counted
    names = [name for name in rows[0] if name in DEFAULTS]
    options = {name: np.repeat([row[name] for row in rows], num_draws) for name in names}
    sampled = draw(
        np.repeat(logits, num_draws, axis=0),
        history=(np.repeat(history, num_draws, axis=0), np.repeat(lens, num_draws)),
        biases=[row["bias"] for row in rows for _ in range(num_draws)],
        num_prompt=np.repeat([len(row["prompt"]) for row in rows], num_draws),
        seed=(np.arange(len(rows) * num_draws) + seed) % 2**32,
        rows=len(rows) * num_draws,
        **options,
    )
    for i, tokens in enumerate(sampled.tokens.reshape(len(rows), num_draws)):
        expected = expected_logits(logits[i], rows[i])
        if rows[i]["temperature"] == 0:
            np.testing.assert_array_equal(tokens, expected.argmax())
        else:
            filters = {name: rows[i][name] for name in ("temperature", "top_k", "top_p", "min_p")}
            probabilities, margin = kept(expected, **filters)
            if margin > 1e-6:  # else a matter of rounding
                check_distribution(tokens, probabilities)


@given(mixed_rows(), st.integers(0, 1000), st.sampled_from([0.25, 1.0, 3.0]))
def test_any_mix_of_options_in_one_batch(rows_and_seed, logits_seed: int, scale: float):
    rows, seed = rows_and_seed
    check_mixed(coarse_logits(len(rows), 300, logits_seed, scale), rows, seed, num_draws=32)


@given(mixed_rows(), st.integers(0, 1000), st.sampled_from([0.0, 0.25, 1.0, 3.0]))
def test_any_mix_of_filters_keeps_what_the_oracle_keeps(rows_and_seed, logits_seed: int, scale: float):
    names = ("temperature", "top_k", "top_p", "min_p")
    options = [{name: row[name] or DEFAULTS[name] for name in names} for row in rows_and_seed[0]]
    logits = coarse_logits(len(options), 300, logits_seed, scale)
    check_kept(logits, options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_presence_and_frequency_count_the_output_and_repetition_counts_the_prompt_too(temperature: float):
    prompt, output = [3, 3, 4], [4, 5, 5, 5]
    logits = coarse_logits(1, 7, seed=3, scale=1)[0]
    for penalties in ({"presence": 0.5}, {"frequency": 0.25}, {"repetition": 2.0}, {"repetition": 0.5, "presence": -1}):
        expected = adjusted(logits, prompt, output, None, **penalties)
        tokens = draw(
            np.repeat(logits[None], 2048, axis=0),
            history=(np.array([prompt + output + [6, 0]]), np.array([7])),
            num_prompt=3,
            temperature=temperature,
            seed=np.arange(2048),
            **{f"{name}_penalty": x for name, x in penalties.items()},
        ).tokens
        if temperature == 0:
            np.testing.assert_array_equal(tokens, expected.argmax())
        else:
            check_distribution(tokens, softmax(expected))


def test_a_repetition_penalty_makes_tokens_less_likely_whatever_the_sign_of_their_logits():
    logits = np.array([[4.0, -4.0, 3.0, -3.0, 0.0, 1.0, 2.0]], np.float32)
    history = (np.array([[0, 1, 4]]), np.array([3]))
    sampled = draw(np.repeat(logits, 2048, 0), history=history, seed=np.arange(2048), repetition_penalty=2.0)
    check_distribution(sampled.tokens, softmax(np.array([2.0, -8.0, 3.0, -3.0, 0.0, 1.0, 2.0])))


def test_a_bias_of_minus_infinity_forbids_a_token_and_biases_of_one_token_add_up():
    logits = random_logits(1, 7)
    tokens = draw(np.repeat(logits, 2000, axis=0), biases={logits.argmax(): -np.inf}, seed=np.arange(2000)).tokens
    assert set(tokens.tolist()) == set(range(7)) - {logits.argmax()}
    rows = make_rows(NUM_ROWS, temperature=0)
    rows.bias_ids[:, :2], rows.bias_values[:, :2] = 5, 50.0
    logits = np.zeros((NUM_ROWS, 7), np.float32)
    logits[:, 2] = 99
    no_history = np.zeros((NUM_ROWS, HISTORY_SIZE), np.int32), np.zeros(NUM_ROWS, np.int32)
    np.testing.assert_array_equal(jitted(logits, rows, *no_history).tokens, 5)
    np.testing.assert_array_equal(draw(logits, temperature=0, biases={2: -np.inf, 3: 1.0}).tokens, 3)


# The draw


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 50},
        {"top_k": 150, "temperature": 5.0},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_what_is_kept_as_often_as_they_are_likely(options):
    num_draws = 16 * NUM_ROWS
    logits = random_logits(1, 300, seed=300)
    sampled = draw(np.repeat(logits, num_draws, axis=0), **options, seed=np.arange(num_draws), position=5)
    check_distribution(sampled.tokens, kept(logits[0].astype(np.float64), **options)[0])


@pytest.mark.parametrize("name", ["seed", "sample_index", "position"])
def test_the_random_number_depends_on_seed_sample_and_position(name: str):
    logits = np.zeros((200, 300))
    tokens = draw(logits, **{name: np.arange(200)}).tokens
    assert len(set(tokens.tolist())) > 120  # of 200 draws from 300, about 146 differ
    np.testing.assert_array_equal(draw(logits, **{name: np.arange(200)}).tokens, tokens)


def test_the_largest_seed_works():
    seeds = [2**32 - 1, 2**31, 2**31 - 1, 0]
    assert len(set(draw(np.zeros((4, 300)), seed=seeds).tokens.tolist())) == 4


def test_a_row_draws_the_same_token_in_any_batch():
    row = np.arange(15)
    logits = random_logits(15, 300)
    options = {
        "seed": row,
        "position": row * 7,
        "sample_index": row % 3,
        "temperature": np.where(row % 4, 1.5, 0.0),  # greedy rows among them
        "top_k": np.where(row % 3, 0, row * 4),
        "top_p": np.where(row % 5, 1.0, 0.99),
        "min_p": np.where(row % 7, 0.0, 0.01),
        "presence_penalty": np.where(row % 6, 0.0, 1.0),
        "num_logprobs": row % 5 - 1,
    }
    history = (np.random.default_rng(0).integers(0, 300, (15, 40)), row + 5)
    together = draw(logits, **options, history=history)
    backwards = draw(
        logits[::-1],
        **{name: values[::-1] for name, values in options.items()},
        history=(history[0][::-1], history[1][::-1]),
    )
    for ours, theirs in zip(together, backwards):
        np.testing.assert_array_equal(ours, theirs[::-1])
    for i in range(15):
        own = {name: values[i] for name, values in options.items()}
        alone = draw(logits[i], **own, history=(history[0][i : i + 1], history[1][i : i + 1]), rows=1)
        assert alone.tokens == together.tokens[i]
        np.testing.assert_array_equal(alone.top_tokens[0], together.top_tokens[i])
        np.testing.assert_allclose(alone.logprobs, together.logprobs[i : i + 1], rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_a_token_of_probability_0_is_never_drawn(vocab_size: int):
    rng = np.random.default_rng(0)
    logits = random_logits(2000, vocab_size)
    logits[rng.random(logits.shape) < 0.9] = -np.inf
    logits[np.arange(2000), rng.integers(0, vocab_size, 2000)] = 0  # at least one is left
    top_k = np.where(np.arange(2000) % 2, 0, 200)
    sampled = draw(logits, temperature=5.0, seed=np.arange(2000), top_k=top_k, num_logprobs=0)
    assert np.isfinite(logits[np.arange(2000), sampled.tokens]).all()
    assert np.isfinite(sampled.logprobs).all()


def test_the_first_place_above_the_target_is_of_positive_weight_whatever_the_rounding():
    weights = np.zeros((4, 5), np.float32)
    weights[:, 1:4] = [0.1, 0, 0.2]
    target = np.array([0, 0.1, 0.3, 7.0], np.float32)
    rest, place = sampling._first_above(weights, target)
    assert place.tolist() == [1, 3, 3, 3]
    np.testing.assert_allclose(rest[:2], [0, 0])


# Extremes


@pytest.mark.parametrize("temperature", [1e-45, 2e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("options", [{}, {"top_k": 100}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_very_low_temperature_takes_the_likeliest_token(temperature: float, options):
    logits = random_logits(50, 300)
    tokens = draw(logits, temperature=temperature, seed=np.arange(50), **options).tokens
    np.testing.assert_array_equal(tokens, logits.argmax(1))


@pytest.mark.parametrize("temperature", [1e10, 1e30, np.finfo(np.float32).max])
def test_a_very_high_temperature_draws_alike_from_all_that_is_kept(temperature: float):
    logits = np.repeat(random_logits(1, 300), 8 * NUM_ROWS, axis=0)
    order = np.argsort(-logits[0])
    for options, count in (({}, 300), ({"top_k": 10}, 10), ({"top_k": 100}, 100), ({"top_p": 0.4999}, 150)):
        tokens = draw(logits, temperature=temperature, seed=np.arange(len(logits)), **options).tokens
        check_distribution(tokens, np.isin(np.arange(300), order[:count]) / count)


@pytest.mark.parametrize("temperature", [1.0, 8e37, 1e38, np.finfo(np.float32).max])
def test_a_forbidden_token_is_drawn_at_no_temperature(temperature: float):
    logits = np.tile(np.array([-np.inf, 1, -np.inf, 0, 2], np.float32), (400, 1))
    options = {"temperature": temperature, "seed": np.arange(400)}
    unused = dict.fromkeys(
        {*DEFAULTS, "bias_ids", "bias_values"} - {*options, "position", "sample_index", "num_logprobs"}
    )
    plain = jax.jit(sampling.sample_plainly)(logits, make_rows(400, **options).replace(**unused))
    for tokens in (draw(logits, **options).tokens, np.asarray(plain.tokens)):
        assert sorted(set(tokens.tolist())) == [1, 3, 4]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_logits_of_any_size(scale: float):
    logits = random_logits(4, 300, scale=scale)
    check_kept(
        logits, [{"temperature": scale, "top_k": 100}, {"temperature": scale, "top_p": 0.951}, {}, {"top_k": 99}]
    )


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_bad_row_leaves_the_others_alone_and_gets_a_token_unless_it_is_nan(bad: float):
    logits = random_logits(60, 300)
    row = np.arange(60)
    options = {
        "seed": row,
        "temperature": row % 4 / 2,
        "top_k": row % 3 * 40,
        "top_p": np.where(row % 5, 1.0, 0.97),
        "repetition_penalty": np.where(row % 2, 1.0, 2.0),
        "num_logprobs": 4,
    }
    good = draw(logits, **options)
    logits[::2] = bad
    sampled = draw(logits, **options)
    for before, after in zip(good, sampled):
        np.testing.assert_array_equal(after[1::2], before[1::2])
    is_token = (sampled.tokens >= 0) & (sampled.tokens < 300)
    if np.isnan(bad):
        np.testing.assert_array_equal(sampled.tokens[::2], -1)
        is_token = is_token[1::2]
    assert is_token.all()


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_those_of_the_logits_before_any_option(temperature: float):
    logits = random_logits(20, 300)
    options = {"temperature": temperature, "seed": np.arange(20), "top_k": 5, "biases": {3: 7.0}, "presence_penalty": 1}
    sampled = draw(logits, **options, num_logprobs=[-1, 0, 1, 5, 32] * 4)
    logprobs = np.log(softmax(logits))
    for i, wanted in enumerate([-1, 0, 1, 5, 32] * 4):
        expected = logprobs[i, sampled.tokens[i]] if wanted >= 0 else 0
        np.testing.assert_allclose(sampled.logprobs[i], expected, atol=1e-5)
        wanted = max(wanted, 0)
        order = np.argsort(-logits[i], stable=True)[:wanted]
        np.testing.assert_array_equal(sampled.top_tokens[i], np.append(order, [-1] * (MAX_LOGPROBS - wanted)))
        np.testing.assert_allclose(sampled.top_logprobs[i, :wanted], logprobs[i, order], atol=1e-5)
        np.testing.assert_array_equal(sampled.top_logprobs[i, wanted:], -np.inf)
    assert (draw(logits, **options).logprobs == 0).all()


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 300, 5000])
def test_logprobs_of_given_tokens_and_the_likeliest(vocab_size: int):
    logits = coarse_logits(9, vocab_size)
    tokens = np.arange(9, dtype=np.int32) * 7 % vocab_size
    score = jax.jit(sampling.token_logprobs)
    chosen, top_tokens, top_logprobs = map(np.asarray, score(logits, tokens, True))
    expected = np.log(softmax(logits))
    np.testing.assert_allclose(chosen, expected[np.arange(9), tokens], atol=1e-5)
    num = min(vocab_size, MAX_LOGPROBS)
    order = np.argsort(-logits, axis=1, stable=True)[:, :num]
    np.testing.assert_array_equal(top_tokens[:, :num], order)
    np.testing.assert_allclose(top_logprobs[:, :num], np.take_along_axis(expected, order, axis=1), atol=1e-5)
    assert (top_tokens[:, num:] == -1).all()
    assert (top_logprobs[:, num:] == -np.inf).all()
    np.testing.assert_array_equal(score(logits, tokens, False)[0], chosen)
    assert (np.asarray(score(logits, tokens, False)[1]) == -1).all()


# The program


def test_random_words_are_those_of_threefry():
    words = np.random.default_rng(0).integers(0, 2**32, (3, 50), dtype=np.uint32)
    got = jax.jit(sampling._threefry)(*words)
    for seed, sample_index, position, word in zip(*words, np.asarray(got)):
        assert threefry_2x32((seed, sample_index), jnp.array([position, 0], jnp.uint32))[0] == word


def test_the_plain_program_draws_and_scores_as_the_one_with_all_options():
    logits = random_logits(60, 300)
    row = np.arange(60)
    options = {"seed": row, "temperature": row % 3 / 2, "position": row * 7, "num_logprobs": row % 2 - 1}
    rows = make_rows(60, **options)
    used = ("seed", "temperature", "position", "sample_index", "num_logprobs")
    unused = {name: None for name in (*DEFAULTS, "bias_ids", "bias_values") if name not in used}
    plain = jax.jit(sampling.sample_plainly)(logits, rows.replace(**unused))
    expected = draw(logits, **options)
    np.testing.assert_array_equal(plain.tokens, expected.tokens)
    np.testing.assert_array_equal(plain.logprobs, expected.logprobs)
    assert (expected.logprobs != 0).any()
    assert (plain.top_tokens, plain.top_logprobs) == (None, None)


def test_one_program_serves_every_mix_and_history_is_traced_once():
    traces = []

    @jax.jit
    def step(logits, rows, tokens, lens):
        return sampling.sample(logits, rows, lambda: traces.append(None) or (tokens, lens))

    logits = random_logits(2, 7)
    for options in ({"temperature": 0}, {"top_k": 3}, {"top_p": [0.5, 1]}, {"min_p": 0.1}, {"frequency_penalty": 1}):
        for wanted in (-1, 0, 3):
            step(logits, make_rows(2, {1: 2.0}, **options, num_logprobs=wanted), np.zeros((2, 4), np.int32), np.ones(2))
    assert step._cache_size() == 1
    assert len(traces) == 1


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


def test_none_leaves_stops_and_biases_out():
    assert jp.SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == jp.SamplingParams()
