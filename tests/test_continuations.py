"""Text that goes on from a prompt, where whole texts get a space in front: samples, streams, branches, beams.

The same of the tokenizer alone is in test_tokenizer.py.
"""

from dataclasses import replace

import pytest
import tiny
from test_tokenizer import PIECES, sentencepiece

import jax_paged as jp
from jax_paged.models.llama import Llama, random_weights
from jax_paged.text import GrowingText
from jax_paged.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf(sentencepiece())
decode, encode = TOKENIZER.decode, TOKENIZER.encode
FIRST_PIECE = TOKENIZER.vocab_size - len(PIECES)
A, C = (FIRST_PIECE + PIECES.index(piece) for piece in ("▁a", "▁c"))
PIECES_ONLY = dict.fromkeys(range(FIRST_PIECE, TOKENIZER.vocab_size), 1000.0)
PROMPT = "The sk"


@pytest.fixture(scope="module")
def llm() -> jp.LLM:
    config = replace(tiny.CONFIG, vocab_size=TOKENIZER.vocab_size)
    weights = random_weights(config, seed=1)
    weights["lm_head"][C] = -30 * weights["lm_head"][A]
    weights["lm_head"][A] *= 30  # of the two, one is likely nearly anywhere
    sizes = tiny.SIZES | {"num_pages": 96, "dtype": "float32", "debug_checks": True}
    return jp.LLM(Llama(config, weights), **sizes, tokenizer=TOKENIZER)


def pieces(**options) -> jp.SamplingParams:
    return jp.SamplingParams(**({"n": 8, "seed": 0, "max_tokens": 6, "logit_bias": PIECES_ONLY} | options))


def test_a_prompt_and_its_samples_texts_join_to_the_text_of_their_tokens(llm):
    output = llm.generate(PROMPT, pieces())[0]
    for sample in output.outputs:
        assert PROMPT + sample.text == decode(output.prompt_token_ids + sample.token_ids)
    assert {sample.text[0] == " " for sample in output.outputs} == {True, False}


def test_streamed_pieces_add_up_to_the_text_with_its_first_space(llm):
    events = list(llm.stream(PROMPT, pieces(n=1, logit_bias={A: 1000.0})))
    assert [event.text for event in events] == [" a"] * 6
    assert events[-1].output.outputs[0].text == " a" * 6


def test_text_after_a_prompt_without_text_is_a_whole_one(llm):
    assert llm.generate("", pieces(n=1, logit_bias={A: 1000.0}))[0].outputs[0].text == "a a a a a a"


def test_a_stop_string_with_a_space_in_front_is_found_at_the_start(llm):
    (sample,) = llm.generate(PROMPT, pieces(n=1, logit_bias={A: 1000.0}, stop=" a"))[0].outputs
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [A], "stop")


def test_a_space_in_front_is_held_back_while_a_stop_string_may_begin_with_it():
    space, b, c = (FIRST_PIECE + PIECES.index(piece) for piece in ("▁", "b", "c"))
    text = GrowingText(TOKENIZER, [" b"], after=encode(PROMPT))
    assert (text.add(space), text.text(final=False)) == (False, "")
    assert (text.add(c), text.text(final=False)) == (False, " c")
    assert [text.add(token) for token in (space, b)] == [False, True]
    assert text.text(final=True) == " c"


def test_beams_texts_join_to_their_prompts(llm):
    prompts = [PROMPT, "a", "The sky is"]
    outputs = llm.beam_search(prompts, beam_width=4, max_tokens=2)
    for prompt, output in zip(prompts, outputs, strict=True):
        for beam in output.outputs:
            assert prompt + beam.text == decode(output.prompt_token_ids + beam.token_ids)
    assert {beam.text[0] == " " for output in outputs for beam in output.outputs} == {True, False}


@pytest.mark.parametrize("text", [" blue", "y", " a", "a", "  ", "é"])
def test_a_branch_goes_on_with_the_very_text_it_is_extended_by(llm, text):
    with llm.prefill(PROMPT) as branch:
        scores = branch.logprobs(text)
        branch.extend(text)
        assert branch.text == PROMPT + text
        assert len(scores) == len(branch.token_ids) - len(encode(PROMPT))
        branch.extend("")
        (sample,) = branch.generate(pieces(n=1, logit_bias={A: 1000.0})).outputs
        assert branch.text == PROMPT + text + sample.text == PROMPT + text + " a" * 6


def test_a_branch_of_nothing_but_bos_begins_a_text(llm):
    with llm.prefill("") as branch:
        branch.extend(" ab")
        assert branch.token_ids == encode(" ab")
