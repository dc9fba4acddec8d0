"""A handle on a computed prefix: fork it, extend it, score what might follow, generate from it.

For tree of thought, Monte Carlo tree search, and agents that try several ways on. A branch keeps its pages between
calls, whether there is a prefix tree or not; if the pool runs short they are taken from the branch that has rested
longest, and computed again when it is next used.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.errors import RequestError
from jax_paged.request import Request, RequestOutput, SamplingParams
from jax_paged.request import Sequence as HeldSequence

if TYPE_CHECKING:
    from jax_paged.engine import LLM

__all__ = ["Branch"]


class Branch:
    """Made by `LLM.prefill` and `fork`. Ends with `close`, at the end of a `with`, or when nothing refers to it.

    The last token's keys and values are not computed before something follows it, as with a sampled token.
    """

    # What `prefill` or `extend` computed last: how much of it was cached, when it was done. None for a fork.
    computed: RequestOutput | None = None
    _held: HeldSequence | None = None  # its pages hold the KV of the first tokens

    def __init__(self, llm: "LLM", token_ids: Sequence[int], namespace: Hashable = None) -> None:
        self._llm = llm
        self._namespace = namespace
        self._token_ids: list[int] = []
        self._is_closed = False
        self._compute(list(token_ids))

    # --- What it is ---

    @property
    def token_ids(self) -> list[int]:
        """All its tokens, from the prompt on."""
        return list(self._token_ids)

    @property
    def text(self) -> str:
        """The same as text. RequestError without a tokenizer."""
        return self._llm._intake.need_tokenizer("text").decode(self._token_ids)

    @property
    def pages(self) -> list[int]:
        """The ids of the pages it holds now, many of them perhaps with others."""
        return list(self._held.pages) if self._held is not None else []

    # --- What it does ---

    def fork(self) -> "Branch":
        """Another branch that begins with the same tokens, on the same pages.

        Nothing is copied before one of the two writes, and then only the page that is not full.
        """
        self._need_open()
        return self._fork(self._token_ids)

    def extend(self, tokens: str | Sequence[int] | np.ndarray) -> None:
        """Appends tokens, or text, and computes them. Text goes on where the branch's ends: with no space between.

        Raises:
          RequestError: they do not fit, or are no tokens of this model. The branch is as it was.
        """
        self._need_open()
        self._compute(self._token_ids + self._encode(tokens))

    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Samples, and goes on from what was sampled: all tokens but a stop token at the end become the branch's, those
        of a stop string among them.

        Several branches together, as one batch: `llm.generate(branches)`. Forks with the same seed say the same.

        Raises:
          RequestError: for more than one sample (fork instead), or a branch that is as long as can be.
        """
        return self._llm.generate([self], params)[0]

    def logprobs(self, tokens: str | Sequence[int] | np.ndarray) -> list[float]:
        """The log-probability of each of the tokens, or those of a text, were they to follow, as in `extend`.

        The branch stays as it is.

        Raises:
          RequestError: they do not fit, or are no tokens of this model.
        """
        self._need_open()
        tokens = self._encode(tokens)
        if not tokens:
            return []
        request = self._request(self._token_ids + tokens, max_new_tokens=0, score_from=len(self._token_ids))
        (seq,) = request.sequences
        try:
            if self._held is not None:
                with self._llm._exclusively():
                    self._llm._scheduler.share(seq, self._held)
            self._llm._run([request])
        finally:  # what it still holds, had it no chance to run
            self._llm._abandoned.append(seq)
        return list(seq.scores)

    def close(self) -> None:
        """Gives its pages back. What the prefix tree has of them stays there until the room is needed."""
        if not self._is_closed:
            self._drop()
            self._is_closed = True

    def __repr__(self) -> str:
        return f"<Branch of {len(self.token_ids)} tokens>"

    def __enter__(self) -> "Branch":
        self._need_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Comes at any moment, and so leaves the pages to the engine's next call.
        if self._held is not None:
            self._llm._abandoned.append(self._held)

    # --- Parts, for those who run many branches at once ---

    def fork_with(self, token: int) -> "Branch":
        """A fork of what the branch was before its last token, with another one in its place."""
        self._need_open()
        (token,) = self._encode([token])
        twin = self._fork(self._token_ids[:-1])
        twin._token_ids.append(token)
        return twin

    def start(self, params: SamplingParams | None) -> Request:
        """A request that goes on from here, to be run by the engine and then given to `take`."""
        self._need_open()
        if params is not None and getattr(params, "n", 1) != 1:
            raise RequestError(f"n={params.n} samples on one branch; fork it, and generate from each")
        request = self._request(self._token_ids, params, held=True)
        self._hand_over(request)
        return request

    def take(self, request: Request) -> None:
        """Makes what a request of `start` gave part of the branch."""
        (seq,) = request.sequences
        if seq.finish_reason is None:  # nobody runs it any more
            self._llm._abandoned.append(request)
        self._token_ids = seq.tokens.tolist()
        if seq.finish_reason == "stop" and self._token_ids[-1] in request.stop_token_ids:
            self._token_ids.pop()

    # --- Inside ---

    def _fork(self, token_ids: list[int]) -> "Branch":
        """A branch on what is held for some of the first tokens."""
        twin = object.__new__(Branch)
        twin._llm, twin._namespace, twin._is_closed = self._llm, self._namespace, False
        twin._token_ids = list(token_ids)
        twin._held = self._request(token_ids, max_new_tokens=0, held=True).sequences[0]
        if self._held is not None:
            with self._llm._exclusively():
                self._llm._scheduler.share(twin._held, self._held)
        return twin

    def _compute(self, token_ids: list[int]) -> None:
        """Makes these its tokens, and computes them. Refused, it stays as it was."""
        request = self._request(token_ids, max_new_tokens=0, held=True)
        self._hand_over(request)
        self._token_ids = token_ids
        (self.computed,) = self._llm._run([request])

    def _hand_over(self, request: Request) -> None:
        """Gives the pages to the request's sequence, which holds them at its end."""
        (seq,) = request.sequences
        with self._llm._exclusively():
            if self._held is not None:
                self._llm._scheduler.adopt(seq, self._held)
            self._held = seq

    def _drop(self) -> None:
        with self._llm._exclusively():
            if self._held is not None:
                self._llm._scheduler.drop(self._held)
            self._held = None

    def _request(self, token_ids: list[int], params: SamplingParams | None = None, **options: Any) -> Request:
        return self._llm._intake.request(token_ids, params, self._namespace, **options)

    def _encode(self, tokens: str | Sequence[int] | np.ndarray) -> list[int]:
        return self._llm._intake.tokens(tokens, after=self._token_ids)

    def _need_open(self) -> None:
        if self._is_closed:
            raise RequestError("this branch is closed; fork it before closing, or prefill its tokens anew")
