"""Tokenizers: the demo model's against the reference, small vocabularies of each kind, streams, templates, errors."""

import json
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from jax_paged.errors import ModelError
from jax_paged.models.gguf_file import GgufFile, read_config, read_tokenizer
from jax_paged.models.load import find
from jax_paged.tokenizer import Detokenizer, Tokenizer

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())["cases"]
CHATS = [case for case in REFERENCE if case["kind"] == "chat"]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    file = GgufFile(find("smollm2-135m"))
    return read_tokenizer(file, read_config(file))


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


# ---------------------------------------------------------------- the demo model


@pytest.mark.parametrize("case", REFERENCE, ids=range(len(REFERENCE)))
def test_the_demo_tokenizer_reads_and_writes_the_reference(demo, case):
    prompt = case["prompt"] if case["kind"] == "text" else case["rendered"]
    assert demo.encode(prompt) == case["prompt_ids"]
    assert demo.decode(case["token_ids"]) == case["text"]
    assert "".join(stream(demo, case["token_ids"])) == case["text"]


@pytest.mark.parametrize("case", CHATS, ids=range(len(CHATS)))
def test_the_demo_chat_template_renders_the_reference(demo, case):
    assert demo.apply_chat_template(case["messages"]) == case["rendered"]


def test_the_demo_vocabulary(demo):
    assert (demo.vocab_size, demo.bos_token_id, demo.adds_bos, demo.eos_token_ids) == (49152, 1, False, (2, 0))


@pytest.fixture(scope="module")
def demo_bytes(demo) -> set[int]:
    """Bytes that have a token of their own: not those that UTF-8 never uses, nor 0x04, 0xF1 and a few others."""
    return {spelt[0] for i in range(demo.vocab_size) if len(spelt := demo.token_bytes(i)) == 1}


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example("  two  spaces\n\n\ttabs\r\n 1234567890 naïve 日本語 😀👩‍👩‍👧 \0")
@example("lost: \x04 \U00040000")
def test_any_text_survives_encoding_but_for_bytes_without_a_token(demo, demo_bytes, text):
    known = bytes(byte for byte in text.encode() if byte in demo_bytes)
    assert demo.decode(demo.encode(text)) == known.decode(errors="replace")


@given(ids=st.lists(st.integers(0, 49151)))
@example([2, 0, 1])
@example([49151, 50000, 10**6])  # ids that an embedding may have and the vocabulary does not
def test_any_tokens_decode_as_by_the_tokenizers_package_at_once_and_streamed(demo, ids):
    expected = demo._backend.decode(ids, skip_special_tokens=True)
    assert demo.decode(ids) == expected
    assert "".join(stream(demo, ids)) == expected


@given(ids=st.lists(st.integers(17, 17 + 255)))  # one byte each: mostly broken characters
def test_any_bytes_decode_as_by_the_tokenizers_package_at_once_and_streamed(demo, ids):
    expected = demo._backend.decode(ids, skip_special_tokens=True)
    assert demo.decode(ids) == expected
    assert "".join(stream(demo, ids)) == expected


def test_a_character_of_several_tokens_comes_with_its_last_one(demo):
    ids = demo.encode("🦩")
    assert len(ids) > 1
    assert stream(demo, ids) == [""] * (len(ids) - 1) + ["🦩", ""]


def test_a_character_cut_off_by_the_end_is_replaced_when_flushed(demo):
    ids = demo.encode("ok 🦩")[:-1]
    pieces = stream(demo, ids)
    assert "�" not in "".join(pieces[:-1])
    assert pieces[-1] == "�"
    assert "".join(pieces) == demo.decode(ids)


# ---------------------------------------------------------------- byte-level vocabularies

BYTE_TOKENS = tokenizers.pre_tokenizers.ByteLevel.alphabet()


def byte_level(words=(), merges=(), control=(), user=(), **metadata) -> dict:
    """GGUF metadata: control tokens first, then the 256 bytes, then `words`, then user-defined tokens."""
    tokens = [*control, *sorted(BYTE_TOKENS), *words, *user]
    types = [3] * len(control) + [1] * (256 + len(words)) + [4] * len(user)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
    } | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll pay  1234!?\n\nOK", ["I", "'ll", " pay", " ", " 1234", "!?", "\n", "\n", "OK"]),
        ("smollm", "a 1234!", ["a", " ", "1", "2", "3", "4", "!"]),
        ("llama-bpe", "I'LL pay 12345!?\n\n OK", ["I", "'LL", " pay", " ", "123", "45", "!?\n\n", " OK"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("default", "x<=y, 12345", ["x", "<=", "y", ",", " ", "123", "45"]),
    ],
)
def test_each_pre_tokenizer_cuts_text_where_its_models_do(pre, text, pieces):
    backend = Tokenizer.from_gguf(byte_level(pre=pre, bos_token_id=0))._backend
    cut = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces


def test_merges_apply_in_the_order_of_the_file():
    words = ["ab", "bc", "abc"]
    first_ab = Tokenizer.from_gguf(byte_level(words, ["a b", "b c", "ab c"]))
    first_bc = Tokenizer.from_gguf(byte_level(words, ["b c", "a b"]))
    assert first_ab.encode("abc") == [258]
    assert first_bc.encode("abc") == [*first_bc.encode("a"), 257]


def test_llama3_takes_a_known_word_whole_where_no_merges_lead_to_it():
    words = ["hello"]
    assert Tokenizer.from_gguf(byte_level(words, pre="llama-bpe", bos_token_id=0)).encode("hello", add_bos=False) == [
        256
    ]
    assert len(Tokenizer.from_gguf(byte_level(words, pre="gpt-2")).encode("hello")) == 5


def test_qwen2_composes_characters_first():
    tokenizer = Tokenizer.from_gguf(byte_level(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_bos_comes_once_and_only_where_the_metadata_or_the_models_custom_asks_for_it():
    def ids(text, add_bos=True, **metadata):
        return Tokenizer.from_gguf(byte_level(control=["<s>"], bos_token_id=0, **metadata)).encode(
            text, add_bos=add_bos
        )

    assert ids("", pre="gpt-2") == []
    assert ids("", pre="gpt-2", add_bos_token=True) == [0]
    assert ids("", pre="llama-bpe") == [0]
    assert ids("", pre="llama-bpe", add_bos_token=False) == []
    assert ids("<s>", pre="llama-bpe") == [0]
    assert ids("<s><s>", pre="llama-bpe") == [0, 0]
    assert ids("", pre="llama-bpe", add_bos=False) == []


def test_control_tokens_are_read_in_text_and_not_written_and_user_defined_ones_are_both():
    tokenizer = Tokenizer.from_gguf(byte_level(control=["<|end|>"], user=["<think>", "日 本"]))
    a = tokenizer.encode("a")
    assert tokenizer.encode("a<|end|>a<think>日 本") == [*a, 0, *a, 257, 258]
    assert tokenizer.decode([*a, 0, 257, 258]) == "a<think>日 本"


BROKEN = {
    "another model": ({"model": "t5"}, "'t5' is not supported.*'gpt2'.*'llama'"),
    "another pre-tokenizer": ({"pre": "tekken"}, "'tekken' is not supported.*'smollm'"),
    "no tokens": ({"tokens": [], "token_type": []}, "tokens is missing or empty"),
    "tokens no list": ({"tokens": 5}, "tokens must be an array of str"),
    "tokens no strings": ({"tokens": [1, 2]}, "tokens must be an array of str"),
    "a token twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "1 of the 2 tokens appear twice"),
    "types too few": ({"token_type": [1]}, "token_type has 1 entries for 256 tokens"),
    "merge of one": ({"merges": ["ab"]}, "merges is not two tokens"),
    "merge unknown": ({"merges": ["a zz"]}, "do not fit together"),
    "bos outside": ({"bos_token_id": 256}, "bos_token_id=256 is outside the vocabulary of 256"),
    "bos no number": ({"bos_token_id": "<s>"}, "bos_token_id='<s>'"),
    "bos asked for, not named": ({"add_bos_token": True}, "asks for a BOS token.*names none"),
    "no scores": ({"model": "llama"}, r"needs tokenizer\.ggml\.scores"),
    "scores too few": ({"model": "llama", "scores": [0.0]}, "scores has 1 entries for 256 tokens"),
}


@pytest.mark.parametrize(("metadata", "message"), BROKEN.values(), ids=BROKEN)
def test_a_vocabulary_that_cannot_be_used_is_refused_by_name(metadata, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(byte_level(**metadata))


# ---------------------------------------------------------------- SentencePiece vocabularies

PIECES = ["▁", "a", "b", "c", "aa", "ab", "abc", "bc", "▁a", "▁ab", "ca", "cab", "aab", "▁c", "▁▁"]


def sentencepiece(**metadata) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        # Single characters come last in real vocabularies too: nothing merges into them.
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) if len(p) > 1 else -1e6 for i, p in enumerate(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def best_pair_first(text: str, metadata: dict) -> list[int]:
    """SentencePiece BPE, literally: join the best-scored union of neighbours, leftmost first, while any is a piece."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]))
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    symbols = list(text.replace(" ", "▁"))
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not unions:
            break
        _, i = min(unions)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [n for s in symbols for n in ([ids[s]] if s in ids else [3 + byte for byte in s.encode()])]


@given(text=st.text("abc é😀\n", max_size=40))
@example("aabcabc  cab")
def test_sentencepiece_text_is_cut_as_by_its_own_algorithm(text):
    metadata = sentencepiece()
    tokenizer = Tokenizer.from_gguf(metadata)
    expected = best_pair_first(" " + text, metadata) if text else []
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(stream(tokenizer, expected)) == text


def test_sentencepiece_text_keeps_its_first_character_where_no_space_is_put_in_front():
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    for text in ("a", " a", "  a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a") == [260]


@given(ids=st.lists(st.integers(0, 258 + len(PIECES)), max_size=12))
def test_sentencepiece_tokens_stream_to_what_they_decode_to(ids):
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    at_once = tokenizer._backend.decode(ids, skip_special_tokens=True)
    # For bytes that are not UTF-8 the package writes one U+FFFD per byte of the whole run, we one per broken character.
    assert tokenizer.decode(ids) == at_once or "�" in at_once


# ---------------------------------------------------------------- continuations in SentencePiece vocabularies


def legacy(backend) -> None:
    """As made, and as Llama 2's file has it: a normalizer puts the space in front."""


def metaspace(scheme: str):
    """As newer files have it: the pre-tokenizer puts it there."""

    def change(backend) -> None:
        backend.normalizer = None
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        backend.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme=scheme, split=False)]
        )

    return change


@pytest.fixture(
    params=[legacy, metaspace("always"), metaspace("first"), metaspace("never")],
    ids=["legacy", "metaspace always", "metaspace first", "metaspace never"],
)
def spaced(request, tmp_path) -> Tokenizer:
    backend = Tokenizer.from_gguf(sentencepiece())._backend
    request.param(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_file(tmp_path / "tokenizer.json", {"bos_token": "<s>", "add_bos_token": True})


@pytest.mark.parametrize("text", [" blue", "y", "", " ", "  a", "é", " 😀", "abc  cab", "\n", "\U0010ffffa"])
def test_a_continuation_is_cut_with_no_space_put_in_front(spaced, text):
    prompt = spaced.encode("The sk")
    ids = spaced.encode(text, after=prompt)
    assert ids == best_pair_first(text, sentencepiece())
    assert spaced.decode(ids, after=prompt) == text
    assert spaced.decode(prompt + ids) == "The sk" + text


def test_a_continuation_with_special_tokens_is_cut_as_behind_its_prompt(spaced):
    for text in ("</s>", "</s>ab", "ab</s> ab"):
        prompt = spaced.encode("The sk")
        assert prompt + spaced.encode(text, after=prompt) == spaced.encode("The sk" + text)


@given(ids=st.lists(st.integers(0, 258 + len(PIECES)), max_size=8), prompt=st.text("ab é", max_size=4))
@example(ids=[267], prompt="")  # "▁a" after BOS alone begins the text
@example(ids=[267], prompt="a")
@example(ids=[259, 267], prompt=" ")
def test_a_prompt_and_what_is_generated_after_it_join_to_what_both_decode_to(ids, prompt):
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    prompt_ids = tokenizer.encode(prompt)
    detokenizer = Detokenizer(tokenizer, after=prompt_ids)
    pieces = [*map(detokenizer.add, ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, after=prompt_ids)
    assert prompt + "".join(pieces) == tokenizer.decode(prompt_ids + ids)


@pytest.mark.parametrize("header", ["<s>ab [/INST]", "<s>ab</s>\n"])
def test_an_answer_after_a_templates_header_keeps_its_space(header):
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    prompt = tokenizer.encode(header, add_bos=False)
    assert tokenizer.decode(tokenizer.encode("a"), after=prompt) == " a"


def test_text_after_nothing_but_special_tokens_is_a_whole_one():
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert tokenizer.encode("") == [1]
    assert [1, *tokenizer.encode(" ab", after=[1])] == tokenizer.encode(" ab")
    assert tokenizer.decode(tokenizer.encode("ab"), after=[1]) == "ab"


def test_continuations_of_byte_level_text_are_like_any_text(demo):
    prompt = demo.encode("The sk")
    for text in ("y", " blue", "  é"):
        assert demo.encode(text, after=prompt) == demo.encode(text)
        assert demo.decode(demo.encode(text), after=prompt) == text


# ---------------------------------------------------------------- tokenizer.json


def save(tmp_path: Path, change=lambda backend: None, **metadata) -> Path:
    backend = Tokenizer.from_gguf(byte_level(control=["<s>", "</s>"], pre="gpt-2", **metadata))._backend
    change(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def add_bos(backend) -> None:
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


def test_a_tokenizer_file_gives_back_the_tokenizer_saved(tmp_path):
    tokenizer = Tokenizer.from_file(save(tmp_path), {"bos_token": "<s>"}, "{{ bos_token }}", None, (1,))
    assert (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids) == (0, False, (1,))
    assert tokenizer.decode(tokenizer.encode("naïve <s>😀")) == "naïve 😀"
    assert tokenizer.apply_chat_template([]) == "<s>"


def test_bos_is_added_as_the_tokenizer_file_or_its_settings_say(tmp_path):
    path = save(tmp_path, add_bos)
    named = {"bos_token": {"content": "<s>", "lstrip": False}}
    assert Tokenizer.from_file(path, named).encode("") == [0]
    assert Tokenizer.from_file(path, {}, bos_token_id=0).encode("") == [0]
    assert Tokenizer.from_file(path, named | {"add_bos_token": False}).encode("") == []
    assert Tokenizer.from_file(save(tmp_path), named | {"add_bos_token": True}).encode("") == [0]


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: backend.enable_truncation(max_length=4),
        lambda backend: backend.enable_padding(pad_id=1, pad_token="</s>", length=40),
    ],
    ids=["truncation", "padding"],
)
def test_prompts_are_neither_cut_nor_padded_where_the_tokenizer_file_says_so(tmp_path, change):
    tokenizer = Tokenizer.from_file(save(tmp_path, change), {"bos_token": "<s>", "add_bos_token": True})
    assert len(tokenizer.encode("more than four characters")) == 1 + len("more than four characters")


def test_a_file_that_pads_still_says_that_texts_begin_with_bos(tmp_path):
    path = save(tmp_path, lambda backend: (add_bos(backend), backend.enable_padding(length=8)))
    assert Tokenizer.from_file(path, {"bos_token": "<s>"}).encode("") == [0]


def test_a_tokenizer_file_that_wraps_texts_otherwise_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"wraps every text in the tokens \[0\].*BOS \(1\)"):
        Tokenizer.from_file(save(tmp_path, add_bos), {"bos_token": "</s>"})


@pytest.mark.parametrize(
    ("decoder", "kind"), [(tokenizers.decoders.WordPiece(), "WordPiece"), (tokenizers.decoders.CTC(), "CTC")]
)
def test_a_tokenizer_file_with_another_decoder_is_refused(tmp_path, decoder, kind):
    with pytest.raises(ModelError, match=f"decodes by {kind}.*not supported"):
        Tokenizer.from_file(save(tmp_path, lambda backend: setattr(backend, "decoder", decoder)), {})


@pytest.mark.parametrize("content", ["", "{}", '{"model": 1}'])
def test_a_damaged_tokenizer_file_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_file(path, {})


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_metaspace_tokenizer_file_decodes_as_by_the_tokenizers_package(tmp_path, scheme):
    def change(backend):
        backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)

    backend = Tokenizer.from_gguf(sentencepiece())._backend
    change(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", {"bos_token": "<s>"})
    ids = backend.encode("ab  cab", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == backend.decode(ids)


# ---------------------------------------------------------------- chat templates

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def with_template(source: str | None) -> Tokenizer:
    metadata = byte_level(control=["<s>", "</s>"], bos_token_id=0, eos_token_id=1)
    return Tokenizer.from_gguf(metadata | ({} if source is None else {"tokenizer.chat_template": source}))


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        (
            "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
            "hi\n",
        ),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ tools is defined and tools }}", "False"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)
def test_templates_find_the_settings_and_functions_they_are_written_for(source, rendered):
    assert with_template(source).apply_chat_template(MESSAGES, now=datetime(2024, 7, 26)) == rendered


def test_the_generation_prompt_is_left_out_on_request():
    assert with_template("{{ add_generation_prompt }}").apply_chat_template(MESSAGES, False) == "False"
    assert with_template("{{ tools[0].name }}").apply_chat_template(MESSAGES, tools=[{"name": "search"}]) == "search"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these 2 messages: roles must alternate"),
        ("{{ messages[0].name.first }}", "refuses these 2 messages.*has no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", "refuses these 2 messages"),
        ("{{ messages.append(1) }}", "refuses these 2 messages.*unsafe"),
        ("{% for %}", "chat template cannot be read"),
    ],
)
def test_a_template_that_fails_is_an_error_that_says_why(source, message):
    with pytest.raises(ModelError, match=message):
        with_template(source).apply_chat_template(MESSAGES)


def test_a_model_without_a_template_is_not_for_chat():
    with pytest.raises(ModelError, match=r"no chat template.*generate from plain text"):
        with_template(None).apply_chat_template(MESSAGES)


def test_missing_jinja2_is_named_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModelError, match=r"'jinja2'.*pip install 'jax-paged\[models\]'"):
        with_template("").apply_chat_template(MESSAGES)
