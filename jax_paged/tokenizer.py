"""Text to token ids and back, over the `tokenizers` package.

Two kinds of vocabulary are read, the two that Llama-family models have: byte-level BPE (Radford et al. 2019, section
2.2), where each token stands for bytes through an alphabet of 256 printable characters, and SentencePiece BPE with
byte fallback (Kudo and Richardson 2018, arXiv 1808.06226), where a space is "▁" and a token "<0x41>" is one byte. In
both, a token is a fixed run of bytes, so text is decoded as a stream of bytes, one token at a time.

Most SentencePiece vocabularies put a space in front of a whole text, and take it off when they decode one. A text that
goes on from another has neither done to it: what is generated after a prompt is what decoding adds to the prompt's own
text, so that the two can be joined.
"""

import codecs
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jax_paged.errors import ModelError

__all__ = ["Detokenizer", "Tokenizer", "import_extra"]

# Token types in GGUF metadata (llama.cpp, `llama_token_type`).
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

# How text is cut before BPE. Each pattern cuts the pieces that those before it left. From the models' own tokenizer
# files, by the names llama.cpp gives them (llama-vocab.cpp); "default" is what it does for files that predate names.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3 = _GPT4.replace("DIGITS", "{1,3}")
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_GPT4.replace("DIGITS", ""),),
}
_LLAMA3_NAMES = (
    "llama-bpe",
    "llama-v3",
    "llama3",
)  # these start with BOS, and take a whole known word before any merge


# Put before a text to take the space in front. It stands for no character, so no vocabulary joins it to what follows,
# which is cut as if it stood alone.
_MARK = "\U0010ffff"


def import_extra(module: str) -> Any:
    """Imports a package that only loading models needs.

    Raises:
      ModelError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"the package {module.partition('.')[0]!r} is needed here and cannot be imported ({error}): "
            "pip install 'jax-paged[models]'"
        ) from error


class Tokenizer:
    """A vocabulary with its rules, and a model's chat template.

    Attributes:
      vocab_size: token ids are below this.
      base_vocab_size: the same without tokens added to the vocabulary later, such as a "<pad>" for training, which the
        model may have no embedding for.
      bos_token_id: put in front of a text by `encode` if `adds_bos`; None if the vocabulary has none.
      eos_token_ids: a model says that it is done with any of these.
      chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: Any,  # tokenizers.Tokenizer
        *,
        bos_token_id: int | None = None,
        adds_bos: bool = False,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        if adds_bos and bos_token_id is None:
            raise ModelError("the tokenizer asks for a BOS token in front of every text but names none; name it there")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.base_vocab_size: int = backend.get_vocab_size(with_added_tokens=False)
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self._backend = backend
        self._named_tokens = dict(named_tokens or {})  # "bos_token": "<s>", and so on, for the template
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._byte_level, self._strips_space = _decoding(backend)
        self._template: Any = None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> "Tokenizer":
        """Builds the tokenizer that a GGUF file's metadata (`tokenizer.ggml.*`) describes.

        Raises:
          ModelError: the vocabulary is of an unsupported kind, incomplete or contradictory.
        """
        vocabulary = _GgufVocabulary(metadata)
        return cls(
            vocabulary.build(),
            bos_token_id=vocabulary.token_id("bos"),
            adds_bos=vocabulary.adds_bos(),
            eos_token_ids=eos_token_ids,
            chat_template=metadata.get("tokenizer.chat_template"),
            named_tokens=vocabulary.named_tokens(),
        )

    @classmethod
    def from_file(
        cls,
        path: Path,
        settings: Mapping[str, Any],
        chat_template: str | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> "Tokenizer":
        """Reads a `tokenizer.json`. Its settings for truncation and padding, if any, do not count.

        Args:
          path: that file.
          settings: what `tokenizer_config.json` holds.
          chat_template: Jinja source.
          bos_token_id: used if `settings` names no BOS token.
          eos_token_ids: see the class.

        Raises:
          ModelError: the file is damaged, or decodes or begins texts in a way that is not supported.
        """
        tokenizers = import_extra("tokenizers")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ModelError(f"{path} is not a readable tokenizer ({error}); download it again") from error
        # Training leaves these settings behind; they would cut or fill up every prompt without a word.
        backend.no_truncation()
        backend.no_padding()
        named = {name: _token_text(settings.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
        bos = backend.token_to_id(named["bos"]) if named["bos"] else bos_token_id
        return cls(
            backend,
            bos_token_id=bos,
            adds_bos=_adds_bos(backend, settings, bos, path),
            eos_token_ids=eos_token_ids,
            chat_template=chat_template,
            named_tokens={f"{name}_token": text for name, text in named.items() if text},
        )

    def encode(self, text: str, *, add_bos: bool = True, after: Sequence[int] = ()) -> list[int]:
        """Token ids of a text; special tokens written in it, such as "<|im_start|>", become their ids.

        Args:
          text: any string.
          add_bos: put BOS in front, if the vocabulary asks for it and the text does not begin with it already. Pass
            False for what `apply_chat_template` returned: a template writes BOS itself where the model wants it.
          after: token ids that the text goes on from: it gets no BOS, and no space in front unless they have no text.

        Raises:
          ValueError: the text has halves of characters in it, as bytes that are not UTF-8 become in Python.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the text cannot be encoded: {text[error.start : error.end]!r} at {error.start} is no character; "
                    "give text in UTF-8"
                ) from None
        mark = _MARK if not self._byte_level and self._have_text(after) else ""
        ids = self._encode(mark + text)[len(self._encode(mark)) :]
        if add_bos and self.adds_bos and not len(after) and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, after: Iterable[int] = ()) -> str:
        """The text of token ids, or what they add to the text of those that they come `after`.

        Special tokens and ids outside the vocabulary are left out; bytes that are not UTF-8 become U+FFFD.
        """
        detokenizer = Detokenizer(self, after)
        return "".join([detokenizer.add(token_id) for token_id in ids]) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text. Empty for special tokens and ids outside the vocabulary."""
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._byte_level:
            byte = _fallback_byte(token)
            return token.replace("▁", " ").encode() if byte is None else byte
        try:
            return bytes([_BYTE_OF[char] for char in token])
        except KeyError:  # a token added by hand, as plain text
            return str(token).encode()

    def _have_text(self, ids: Iterable[int]) -> bool:
        return any(map(self.token_bytes, ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        now: datetime | None = None,
        **options: Any,
    ) -> str:
        """The prompt text of a conversation, as the model's own template writes it.

        Args:
          messages: each with "role" and "content".
          add_generation_prompt: end with the opening of the assistant's turn.
          now: the time for templates that write a date; by default the clock's.
          options: what else the template reads, such as `tools`.

        Raises:
          ModelError: the model has no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ModelError(
                "this model has no chat template, so it was not trained to chat; generate from plain text instead"
            )
        jinja2 = import_extra("jinja2")
        if self._template is None:
            self._template = _compile_template(self.chat_template)
        try:
            return str(
                self._template.render(
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    strftime_now=(now or datetime.now()).strftime,
                    **(self._named_tokens | options),
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ModelError(
                f"the chat template refuses these {len(messages)} messages: {error}. Check their roles, order and "
                "contents"
            ) from error


class Detokenizer:
    """Text from token ids as they come.

    A character whose bytes are spread over several tokens is held back until its last byte is there, so the pieces
    joined are always what `Tokenizer.decode` gives for the same ids.

    Args:
      tokenizer: the vocabulary.
      after: token ids that the text goes on from, such as a prompt's. If they have any text, this one keeps its space
        in front, as in vLLM: the pieces joined to it give the text of all the ids together.
    """

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Encoding put one in front of the text, if this is where it begins.
        self._drop_space = tokenizer._strips_space and not tokenizer._have_text(after)

    def add(self, token_id: int) -> str:
        """The text that is certain once this token is there."""
        return self._trim(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for a character that was never completed."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE: itself if printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _fallback_byte(token: str) -> bytes | None:
    """The byte that a SentencePiece token such as "<0x0A>" stands for; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _decoding(backend: Any) -> tuple[bool, bool]:
    """(whether tokens are byte-level, whether one space is cut from the front of a text) by a tokenizer's decoder."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps and steps.keys() <= {"ByteLevel", "Fuse"}:
        return True, False
    if steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in steps:
        return False, steps.get("Strip", {}).get("start", 0) > 0
    if steps.keys() <= {"Metaspace", "ByteFallback", "Fuse"} and "Metaspace" in steps:
        return False, steps["Metaspace"].get("prepend_scheme") != "never"
    raise ModelError(
        f"the tokenizer decodes by {', '.join(steps)}, which is not supported; supported are byte-level BPE and "
        "SentencePiece with byte fallback, as Llama-family models have"
    )


def _adds_bos(backend: Any, settings: Mapping[str, Any], bos: int | None, path: Path) -> bool:
    """Whether texts begin with BOS: as `tokenizer_config.json` says, else as the tokenizer's post-processor does."""
    stated = settings.get("add_bos_token")
    if stated is not None:
        return bool(stated)
    added = backend.encode("").ids
    if added not in ([], [bos]):
        raise ModelError(
            f"{path} wraps every text in the tokens {added}; supported are BOS ({bos}) in front, or nothing"
        )
    return bool(added)


def _token_text(token: Any) -> str | None:
    """A token in `tokenizer_config.json`: its text, or an object with its text in it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _compile_template(source: str) -> Any:
    """Compiles a chat template with the settings and functions that templates are written for (transformers)."""
    jinja2, sandbox = import_extra("jinja2"), import_extra("jinja2.sandbox")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(
            f"the model's chat template cannot be read: {error}; generate from plain text instead"
        ) from error


class _GgufVocabulary:
    """The `tokenizer.ggml.*` part of a GGUF file's metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        self.model = self._metadata.get("model")
        self.pre = self._metadata.get("pre", "default")
        self.tokens = self._list("tokens", str)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.types = self._list("token_type", int, like_tokens=True) or [1] * len(self.tokens)
        if len(self.ids) != len(self.tokens):
            raise ModelError(
                f"{len(self.tokens) - len(self.ids)} of the {len(self.tokens)} tokens appear twice, so text has no "
                "single encoding; convert the model again"
            )

    def _list(self, key: str, kind: type, like_tokens: bool = False) -> list[Any]:
        values = self._metadata.get(key, [])
        if not (isinstance(values, list) and all(type(value) is kind for value in values)):
            raise ModelError(f"tokenizer.ggml.{key} must be an array of {kind.__name__}; convert the model again")
        if like_tokens and values and len(values) != len(self.tokens):
            raise ModelError(
                f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens; convert the model again"
            )
        return values

    def token_id(self, name: str) -> int | None:
        """The id of "bos", "eos", "unknown" or "padding"."""
        token_id = self._metadata.get(f"{name}_token_id")
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise ModelError(
                f"tokenizer.ggml.{name}_token_id={token_id!r} is outside the vocabulary of {len(self.tokens)}; convert "
                "the model again"
            )
        return token_id

    def named_tokens(self) -> dict[str, str]:
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        ids = {template_name: self.token_id(name) for name, template_name in names.items()}
        return {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def adds_bos(self) -> bool:
        default = self.model == "llama" or self.pre in _LLAMA3_NAMES  # llama.cpp's, where the file does not say
        return bool(self._metadata.get("add_bos_token", default))

    def build(self) -> Any:
        """A tokenizers.Tokenizer."""
        if self.model == "gpt2":
            backend = self._byte_level()
        elif self.model == "llama":
            backend = self._sentencepiece()
        else:
            raise ModelError(
                f"tokenizer.ggml.model={self.model!r} is not supported; supported are 'gpt2' (byte-level BPE) and "
                "'llama' (SentencePiece)"
            )
        make = import_extra("tokenizers").AddedToken
        special = [t for t, kind in zip(self.tokens, self.types) if kind in (CONTROL, UNKNOWN)]
        plain = [t for t, kind in zip(self.tokens, self.types) if kind == USER_DEFINED]
        backend.add_special_tokens([make(token, special=True, normalized=False) for token in special])
        backend.add_tokens([make(token, special=False, normalized=False) for token in plain])
        return backend

    def _byte_level(self) -> Any:
        tokenizers = import_extra("tokenizers")
        pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
        if self.pre not in _SPLITS:
            raise ModelError(
                f"tokenizer.ggml.pre={self.pre!r} is not supported; supported: {', '.join(map(repr, _SPLITS))}"
            )
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if any(len(merge) != 2 for merge in merges):
            raise ModelError("an entry of tokenizer.ggml.merges is not two tokens and a space; convert the model again")
        backend = self._bpe(merges, ignore_merges=self.pre in _LLAMA3_NAMES)
        if self.pre == "qwen2":
            backend.normalizer = tokenizers.normalizers.NFC()
        cuts = [pre.Split(tokenizers.Regex(pattern), "isolated") for pattern in _SPLITS[self.pre]]
        backend.pre_tokenizer = pre.Sequence([*cuts, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Any:
        """BPE that joins, in each step, the neighbours whose union has the best score.

        Merge ranks say the same as scores, but for a token that two pairs can make: SentencePiece then takes the
        leftmost pair, ranks the likelier one. Scores of Llama's vocabularies fall with the token id.
        """
        tokenizers = import_extra("tokenizers")
        scores = self._list("scores", float, like_tokens=True)
        if not scores:
            raise ModelError("a SentencePiece vocabulary needs tokenizer.ggml.scores; convert the model again")
        unknown = self.token_id("unknown")
        backend = self._bpe(
            _merges_by_score(self.ids, scores),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=self.tokens[0 if unknown is None else unknown],
        )
        prefix = bool(self._metadata.get("add_space_prefix", True))
        normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
        escape = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return backend

    def _bpe(self, merges: list[tuple[str, ...]], **options: Any) -> Any:
        tokenizers = import_extra("tokenizers")
        if not self.tokens:
            raise ModelError("tokenizer.ggml.tokens is missing or empty; convert the model again")
        try:
            return tokenizers.Tokenizer(tokenizers.models.BPE(vocab=self.ids, merges=merges, **options))
        except Exception as error:  # the package raises bare Exception
            raise ModelError(
                f"the vocabulary and its merges do not fit together: {error}; convert the model again"
            ) from error


def _merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, ...]]:
    """Every way to make a token of two others, best first."""
    ways = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ways.append((-scores[token_id], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ways)]
