"""The engine: requests in, tokens out, one jitted call a step.

add_request -> scheduler.plan -> step.run (on the device) -> scheduler.commit -> outputs
"""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_paged import audit
from jax_paged import cache as pages
from jax_paged.arguments import flag, function, integers
from jax_paged.beam import beam_search
from jax_paged.branch import Branch
from jax_paged.buckets import Buckets
from jax_paged.errors import RequestError
from jax_paged.intake import Intake, Prompt, prompt_list
from jax_paged.interrupts import uninterrupted
from jax_paged.ledger import Commands, StepPlan, StepResult
from jax_paged.memory import page_bytes, plan_pool, pool_format
from jax_paged.models.llama import Llama
from jax_paged.models.load import DTYPES, LoadedModel, load
from jax_paged.radix import CacheEvent, Policy, RadixTree
from jax_paged.request import CompletionOutput, Request, RequestOutput, SamplingParams, Sequence
from jax_paged.scheduler import Scheduler
from jax_paged.step import (
    Bucket,
    PageCommands,
    StepInputs,
    StepOutputs,
    apply_commands,
    num_programs,
    pack_commands,
    pack_inputs,
    programs_for,
    run_step,
    split_model,
    unpack,
)
from jax_paged.text import GrowingText
from jax_paged.tokenizer import Tokenizer

__all__ = ["LLM", "StreamEvent"]

_log = logging.getLogger("jax_paged")

# Decode steps that go in one call, while nobody waits and nobody watches.
_DECODE_STEPS = 8


@dataclass(frozen=True)
class StreamEvent:
    """What one more token brought. `text` may be empty while a character, or what may become a stop string, is
    incomplete; `output` is the whole so far.
    """

    text: str
    token_id: int | None
    output: RequestOutput


class LLM:
    """A model behind a paged cache and a prefix tree.

    Args:
      model: a built-in name, a Hugging Face directory, a .gguf file, what `load` made of one, or an `nnx.Module` of
        your own (see `jax_paged.nn`) with a `config` that has num_layers, num_kv_heads, head_dim, vocab_size and
        max_model_len.
      page_size: tokens a page.
      num_pages: pages in the pool; None sizes it from the memory there is.
      max_seqs: sequences running at once.
      max_model_len: tokens of the longest sequence; None: the model's, or what the pool holds.
      max_batch_tokens: tokens a step, prefill and decode together.
      prefix_cache: reuse the pages of prefixes seen before.
      partial_hits: reuse also a page that agrees in part, by copying it.
      eviction_policy: which cached prefixes go first when pages run short, see `RadixTree`: "lru", "lfu" or "fifo".
      schedule: "lpm", "fcfs" or "dfs", see `Scheduler`.
      wait_for_prefix: let a request wait while a running one computes a prefix that the two share.
      decode_steps_per_call: tokens that each sequence gets in one call, while all decode, nobody waits and no stream is
        open; None: 8, but 1 in `step`, whose caller may watch each.
      exact: give each request the same bits whatever else runs, however it is cut into chunks, cached, preempted or
        laid out in pages: every token goes through one program of `max_seqs` rows, a row each. Long prompts take
        several times as long.
      on_cache_event: told of pages stored, evicted and reused, see `CacheEvent`.
      dtype: "bfloat16" or "float32", of weights, computation and cache; None: bfloat16 for a model that is loaded here,
        the weights' own for one that is. For an `nnx.Module` it is that of the cache.
      debug_checks: after every step check all books and fill what must not be read with NaN. Slow.
      seed: for requests that bring none.
      tokenizer: for a model of your own.
      clock: seconds, for the times in outputs.
      progress: called with (bytes loaded, bytes in all).

    Raises:
      ModelError: the model cannot be loaded.
      ValueError: a size that cannot be.

    Example:
      >>> llm = LLM("smollm2-135m")
      >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel | nnx.Module = "smollm2-135m",
        *,
        page_size: int = 16,
        num_pages: int | None = None,
        max_seqs: int = 64,
        max_model_len: int | None = None,
        max_batch_tokens: int = 512,
        prefix_cache: bool = True,
        partial_hits: bool = True,
        eviction_policy: Policy = "lru",
        schedule: str = "lpm",
        wait_for_prefix: bool = True,
        decode_steps_per_call: int | None = None,
        exact: bool = False,
        on_cache_event: Callable[[CacheEvent], object] | None = None,
        dtype: str | None = None,
        debug_checks: bool = False,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if dtype not in (None, *DTYPES):
            raise ValueError(f"{dtype=} must be one of {', '.join(DTYPES)}, or None")
        page_size, max_seqs, max_batch_tokens = integers(
            1, page_size=page_size, max_seqs=max_seqs, max_batch_tokens=max_batch_tokens
        )
        num_pages, max_model_len, decode_steps_per_call = integers(
            1,
            or_none=True,
            num_pages=num_pages,
            max_model_len=max_model_len,
            decode_steps_per_call=decode_steps_per_call,
        )
        (seed,) = integers(0, seed=seed)
        flag(prefix_cache=prefix_cache, partial_hits=partial_hits, wait_for_prefix=wait_for_prefix)
        flag(exact=exact, debug_checks=debug_checks)
        function(on_cache_event=on_cache_event, clock=clock, progress=progress)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"{tokenizer=} must be a jax_paged Tokenizer, or None")
        if isinstance(model, str | os.PathLike):
            model = load(os.fspath(model), dtype or "bfloat16", progress)
        if isinstance(model, LoadedModel):
            tokenizer = tokenizer or model.tokenizer
            loaded_in = model.weights["embed"].dtype.name
            if dtype not in (None, loaded_in):
                raise ValueError(
                    f"{dtype=} of a model that was loaded in {loaded_in}; leave it out, or load it in {dtype}"
                )
            model = Llama(model.config, model.weights)
        if not isinstance(model, nnx.Module):
            raise ValueError(f"{model=} must be a model's name or path, what `load` made of one, or an nnx.Module")
        self.config: Any = model.config  # type: ignore[attr-defined]
        self.tokenizer = tokenizer
        self.spec, self.max_model_len = plan_pool(
            self.config,
            page_size=page_size,
            num_pages=num_pages,
            max_seqs=max_seqs,
            max_model_len=max_model_len,
            dtype=jnp.dtype(dtype or _dtype_of(model)),
        )
        self._shape, self._weights = split_model(model)
        self._pool_format = pool_format(jax.devices()[0])
        self._run_step, self._apply_commands = run_step, apply_commands
        if self._pool_format is not None:
            self._run_step, self._apply_commands = programs_for(self._pool_format)
        self._cache = pages.init_cache(self.spec, self._pool_format)
        tree = RadixTree(page_size, policy=eviction_policy, on_event=on_cache_event)
        self._tree = tree if prefix_cache else None
        if on_cache_event is not None and not prefix_cache:
            raise ValueError(
                "on_cache_event with prefix_cache=False: there would be no events; leave one of the two out"
            )
        self._buckets = Buckets(
            self.spec, max_batch_tokens, decode_steps=decode_steps_per_call or _DECODE_STEPS, exact=exact
        )
        self._scheduler = Scheduler(
            num_pages=self.spec.num_pages,
            page_size=page_size,
            max_seqs=max_seqs,
            max_batch_tokens=self._buckets.most_tokens,
            tree=self._tree,
            schedule=schedule,
            partial_hits=partial_hits,
            wait_for_prefix=wait_for_prefix,
        )
        _log.info(self.describe_pool())
        self._decode_steps = decode_steps_per_call
        # Enough for the pages of one long sequence and of a full batch; more than that goes in several calls.
        self._capacity = self.spec.max_pages_per_seq + self._buckets.most_tokens + max_seqs
        self._num_compilations = 0
        self.compile_s = 0.0  # of wall time since the start, for these
        self._debug_checks, self._clock = debug_checks, clock
        self._intake = Intake(
            self.config, tokenizer, self.spec, self.max_model_len, exact=exact, seed=seed, clock=clock
        )
        self._requests: dict[int, Request] = {}
        self._texts: dict[Sequence, GrowingText] = {}
        self._undelivered: dict[int, RequestOutput] = {}
        self._awaited: set[int] = set()  # requests of which only the last output is read, and not by `step`
        self._streams: dict[int, deque[RequestOutput]] = {}
        self._is_busy = False
        self._has_lost_pool = False
        # What branches hold that nobody refers to any more, and streams' requests likewise.
        self._abandoned: deque[Sequence | Request] = deque()

    # --- One call for everything ---

    def generate(
        self,
        prompts: Prompt | Branch | AnySequence[Prompt | Branch],
        params: SamplingParams | AnySequence[SamplingParams | None] | None = None,
        *,
        namespace: Hashable = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their end, together.

        Args:
          prompts: one or several, each a string, token ids, or a branch, which grows as in `Branch.generate`.
          params: one for all, or one each; None is `SamplingParams()`.
          namespace: only prompts of the same namespace share cached prefixes. A branch has its own.

        Returns:
          One output a prompt, in their order.

        Raises:
          RequestError: one of them can never run; then none has been started.
        """
        prompts = prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        elif not isinstance(params, AnySequence):
            raise RequestError(f"{params=} must be SamplingParams, a list of them, or None for their defaults")
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} SamplingParams for {len(prompts)} prompts; give one, or one a prompt")
        branches = [prompt for prompt in prompts if isinstance(prompt, Branch)]
        if len(set(branches)) < len(branches):
            raise RequestError("a branch stands twice among the prompts; fork it, and generate from each")
        if any(branch._llm is not self for branch in branches):
            raise RequestError("a branch of another LLM, whose pages are not here; prefill its token_ids")
        requests: list[Request] = []
        try:
            for prompt, p in zip(prompts, params):
                if isinstance(prompt, Branch):
                    requests.append(prompt.start(p))
                else:
                    requests.append(self._intake.request(prompt, p, namespace))
            return self._run(requests)
        finally:  # interrupted, branches keep what there is
            for prompt, request in zip(prompts, requests):
                if isinstance(prompt, Branch):
                    prompt.take(request)

    def _run(self, requests: AnySequence[Request]) -> list[RequestOutput]:
        """Runs requests to their end; the outputs of others go where they are waited for."""
        done: dict[int, RequestOutput] = {}
        own = {request.request_id for request in requests}
        try:
            self._awaited |= own
            for request in requests:
                self._enqueue(request)
                if request.finished:
                    done[request.request_id] = self._end(request)
            while len(done) < len(requests):
                self._advance(1 if self._streams else self._decode_steps or _DECODE_STEPS)
                done |= {request_id: self._undelivered.pop(request_id) for request_id in own & self._undelivered.keys()}
        finally:
            with uninterrupted():  # another Ctrl-C, too, waits until all are given up
                self._awaited -= own
                self._give_up([request for request in requests if request.request_id not in done])
        return [done[request.request_id] for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: Hashable = None
    ) -> Iterator[StreamEvent]:
        """Runs one prompt and yields each token as it comes. Closing the iterator early ends the request.

        Raises:
          RequestError: it can never run.
        """
        request = self._intake.request(prompt, params, namespace)
        if len(request.sequences) > 1:
            raise RequestError(f"n={len(request.sequences)} samples in one stream; open one each, or use generate")
        return self._stream(request)

    # The argument outlives this module, which an iterator that is still open at exit may find empty.
    def _stream(self, request: Request, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> Iterator[StreamEvent]:
        # Nothing is queued before the first event is asked for: closing a generator that never ran runs no `finally`.
        num_chars = num_tokens = 0
        finished = False
        try:
            outputs = self._streams[request.request_id] = deque()
            self._enqueue(request)
            while not finished:
                while not outputs:
                    self._advance(1)
                output = outputs.popleft()
                sample, finished = output.outputs[0], output.finished
                is_token = len(sample.token_ids) > num_tokens  # not if it has been aborted
                yield StreamEvent(sample.text[num_chars:], sample.token_ids[-1] if is_token else None, output)
                num_chars, num_tokens = len(sample.text), len(sample.token_ids)
        finally:
            self._streams.pop(request.request_id, None)
            if not is_finalizing():  # there is nothing left to free, and half of what it would take is gone
                self._give_up([request])

    def chat(
        self,
        messages: AnySequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Answers a conversation: a list of {"role": ..., "content": ...}, through the model's own chat template.

        `template_options` are as in `render_chat`, the rest as in `generate`.
        """
        return self.generate([self.render_chat(messages, **template_options)], params, namespace=namespace)[0]

    def render_chat(self, messages: AnySequence[dict[str, Any]], **template_options: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        Args:
          messages: each {"role": "system", "user" or "assistant", "content": a text}, and what else the template reads.
          template_options: what the model's template reads beside the messages, such as `tools` or
            `add_generation_prompt=False`.

        Raises:
          RequestError: they are not such messages.
        """
        tokenizer = self._intake.need_tokenizer("chat")
        is_list = not isinstance(messages, (str, bytes, Mapping)) and isinstance(messages, Iterable)
        messages = list(messages) if is_list else []
        if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise RequestError(
                'messages must be a list of {"role": "user", "content": "..."}, one for each turn; for plain text use '
                "generate"
            )
        # The template writes the special tokens itself.
        text = tokenizer.apply_chat_template(list(messages), **template_options)
        return tokenizer.encode(text, add_bos=False)

    # --- Branches ---

    def prefill(self, prompt: Prompt, *, namespace: Hashable = None) -> Branch:
        """Computes a prompt and keeps its pages, to be forked, extended, scored and generated from.

        Args:
          prompt: a string or token ids.
          namespace: as in `generate`.

        Returns:
          A handle. Close it, or use it in a `with`, to give its pages back.

        Raises:
          RequestError: it can never run.

        Example:
          >>> with llm.prefill("Roses are red,") as root:
          ...     a, b = root.fork(), root.fork()
          ...     a.extend(" violets"); b.extend(" lilies")
          ...     print(a.generate().outputs[0].text, b.logprobs(" are"))
        """
        return Branch(self, self._intake.encode(prompt), namespace)

    def beam_search(
        self,
        prompts: Prompt | AnySequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 32,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        namespace: Hashable = None,
    ) -> list[RequestOutput]:
        """Finds likely continuations by beam search; see `jax_paged.beam.beam_search`, whose arguments these are."""
        return beam_search(
            self,
            [self._intake.encode(prompt) for prompt in prompt_list(prompts)],
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            ignore_eos=ignore_eos,
            namespace=namespace,
        )

    # --- Driving it yourself ---

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
    ) -> int:
        """Queues a prompt; `step` runs it.

        Args:
          prompt: a string or token ids.
          params: how to sample.
          namespace: as in `generate`.
          priority: lower goes first.

        Returns:
          The request's id.

        Raises:
          RequestError: it can never run, and why. The queue goes on without it.
        """
        request = self._intake.request(prompt, params, namespace, priority)
        self._enqueue(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the requests that changed; `finished` says which are done."""
        self._advance(1 if self._streams else self._decode_steps or 1)
        ids = [request_id for request_id in self._undelivered if request_id not in self._awaited]
        return [self._undelivered.pop(request_id) for request_id in ids]

    def abort(self, request_id: int) -> None:
        """Ends a request, wherever it is; its last output comes with the next `step`. One that has ended stays as
        it is.
        """
        with self._exclusively(), self._starting_over():
            request = self._requests.get(request_id)
            if request is not None:
                self._scheduler.abort(request)
                self._deliver([self._end(request)])

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to tell."""
        return self._scheduler.has_work() or not self._undelivered.keys() <= self._awaited

    # --- The books ---

    def stats(self) -> dict[str, int]:
        """Counters since the start, where the pages are now (`free_pages + tree_pages + private_pages` make
        `num_pages`), and how many sequences are `running`, `waiting` or `held` by branches.
        """
        free = self._scheduler.ledger.num_free
        tree = self._tree.num_pages if self._tree is not None else 0
        return {
            "num_pages": self.spec.num_pages,
            "free_pages": free,
            "tree_pages": tree,
            "private_pages": self.spec.num_pages - free - tree,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "held": len(self._scheduler.held),
            **self._scheduler.counts,
            "compilations": self._num_compilations,
        }

    def describe_pool(self) -> str:
        """Such as "KV pool: 1,024 pages of 16 tokens (16,384 tokens, 360 MiB), up to 8 sequences of 2,048"."""
        spec = self.spec
        pool_bytes = spec.num_pages * page_bytes(spec, jax.default_backend())
        return (
            f"KV pool: {spec.num_pages:,} pages of {spec.page_size} tokens "
            f"({spec.num_pages * spec.page_size:,} tokens, {pool_bytes / 2**20:,.0f} MiB), "
            f"up to {spec.max_seqs} sequences of {self.max_model_len:,}"
        )

    @property
    def tree(self) -> RadixTree | None:
        """The prefix tree, to look at."""
        return self._tree

    def update_weights(self, model: LoadedModel | nnx.Module) -> None:
        """Goes on with other weights of the same model, as in reinforcement learning. Nothing is compiled anew; cached
        prefixes are forgotten.

        Args:
          model: as in `LLM`, of the same sizes and dtypes.

        Raises:
          ValueError: it is another model.
          RequestError: sequences run, or branches are open.
        """
        shape, weights = split_model(Llama(model.config, model.weights) if isinstance(model, LoadedModel) else model)
        old, new = ([(w.shape, w.dtype.name) for w in each] for each in (self._weights, weights))
        if shape != self._shape or old != new:
            odd = next((pair for pair in zip(old, new) if pair[0] != pair[1]), None)
            what = "its structure is another" if odd is None else f"{odd[1]} stands where {odd[0]} did"
            raise ValueError(f"these are no weights for this engine's model: {what}; make another LLM for them")
        if not self.reset_prefix_cache():
            raise RequestError("weights cannot change while sequences run or branches are open; let them end first")
        self._weights = weights

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing has changed, while pages are in use."""
        with self._exclusively():
            return self._scheduler.reset_tree()

    def check(self) -> None:
        """Raises `InvariantError`, naming pages, unless device, scheduler and tree agree about every page."""
        with self._exclusively():
            self._check()

    def _check(self) -> None:
        self._flush(self._scheduler.commands)
        self._scheduler.commands = Commands()
        audit.check_books(self._cache, self._scheduler)

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the programs of all buckets, so that nothing compiles later."""
        with self._exclusively():
            self._check()
            self._cache = self._apply_commands(self._cache, self._pack(Commands()))
        buckets = self._buckets.all()
        for i, bucket in enumerate(buckets):
            with self._exclusively():
                self._dispatch(StepPlan([], [], Commands()), bucket)
            if progress is not None:
                progress(i + 1, len(buckets))

    def close(self) -> None:
        """Ends all requests, takes all pages from branches and forgets the cached prefixes. What is used all the same
        afterwards is computed anew.
        """
        for request_id in list(self._requests):
            self.abort(request_id)
        self._undelivered.clear()
        with self._exclusively():
            for seq in list(self._scheduler.held):
                self._scheduler.drop(seq)
        self.reset_prefix_cache()

    def __repr__(self) -> str:
        return f"<LLM: {self.describe_pool()}>"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- Inside ---

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Where the books change: Ctrl-C waits for the end, and calls from inside are refused."""
        if self._is_busy:
            raise RequestError(
                "the engine is in the middle of a step: on_cache_event, clock and progress must not call it, nor may "
                "another thread; give each thread its own turn"
            )
        with uninterrupted():
            self._is_busy = True
            try:
                if self._has_lost_pool:
                    self._cache = pages.init_cache(self.spec, self._pool_format)
                    self._has_lost_pool = False
                self._free_abandoned()
                yield
            finally:
                self._is_busy = False

    def _free_abandoned(self) -> None:
        with self._starting_over():
            while self._abandoned:
                left = self._abandoned.popleft()
                if isinstance(left, Sequence):
                    self._scheduler.drop(left)
                elif left.request_id in self._requests:
                    self._scheduler.abort(left)
                    self._end(left)

    def _give_up(self, requests: list[Request]) -> None:
        """Ends requests that nobody waits for any more: all of them, with this call or, at the latest, the next."""
        self._abandoned.extend(requests)
        # If it is busy, the garbage collector closes a stream in the middle of a step, or another thread has it.
        if requests and not self._is_busy:
            with self._exclusively():
                pass  # it has freed them
        for request in requests:
            self._undelivered.pop(request.request_id, None)

    @contextmanager
    def _starting_over(self) -> Iterator[None]:
        """Where something breaks off inside, nobody knows how far it came, on the device or in the books: those of an
        empty pool take their place, and what is not done waits again.
        """
        try:
            yield
        except BaseException:
            requests = list(self._requests.values())
            self._scheduler.start_over(requests)
            # There may be no room for two: the next call makes another, or fails to, and leaves it to the next.
            for array in jax.tree.leaves(self._cache):
                array.delete()
            self._has_lost_pool = True
            self._deliver([self._end(request) for request in requests if request.finished])
            raise

    def _enqueue(self, request: Request) -> None:
        with self._exclusively():
            stops, prompt = request.params.stop, request.prompt_token_ids
            texts = {seq: GrowingText(self.tokenizer, stops, after=prompt) for seq in request.sequences}
            for seq, text in texts.items():
                seq.add_text = text.add
            self._texts |= texts
            self._requests[request.request_id] = request
            self._scheduler.add(request)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Puts outputs where they are waited for: by an open stream, or by the next `step`."""
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)
            else:
                self._undelivered[output.request_id] = output

    def _advance(self, max_steps: int) -> None:
        """Runs a step, or several in one call, and delivers what came of it."""
        with self._exclusively(), self._starting_over():
            self._deliver(self._step(max_steps))

    def _step(self, max_steps: int) -> list[RequestOutput]:
        most_tokens = self._buckets.tokens_of_next(self._scheduler.num_pending, len(self._scheduler.running))
        plan = self._scheduler.plan(most_tokens, max_steps)
        if plan is None:
            return []
        now = self._clock()
        for row in plan.rows:
            request = row.seq.request
            if request.times.first_scheduled_s is None:
                request.times = replace(request.times, first_scheduled_s=now)
        result = self._dispatch(plan, self._buckets.choose(plan))
        changed = self._scheduler.commit(plan, result)
        if self._debug_checks:
            self._check()
            self._poison()
        return self._report(changed)

    def _dispatch(self, plan: StepPlan, bucket: Bucket) -> StepResult:
        *early, last = plan.commands.split(self._capacity)
        for commands in early:
            self._flush(commands)
        inputs = pack_inputs(plan, self._pack(last), bucket, self.spec.max_seqs)
        assert plan.num_steps <= bucket.max_steps, f"{plan.num_steps} steps planned for a program of {bucket.max_steps}"
        result = unpack(self._run_on_device(inputs, bucket), plan, bucket)
        assert not result.oom, "a planned step ran out of pages"
        return result

    def _run_on_device(self, inputs: StepInputs, bucket: Bucket) -> StepOutputs:
        """The step itself, waited for: a transfer would wait just as long."""
        self._buckets.note_use(bucket)
        compiled_before, start = num_programs(self._run_step), time.monotonic()
        self._cache, outputs = self._run_step(self._shape, self._weights, self._cache, inputs, bucket)
        if num_compiled := num_programs(self._run_step) - compiled_before:
            self._num_compilations += num_compiled
            self.compile_s += time.monotonic() - start
        outputs.packed.block_until_ready()
        return outputs

    def _flush(self, commands: Commands) -> None:
        for piece in commands.split(self._capacity) if commands else ():
            self._cache = self._apply_commands(self._cache, self._pack(piece))

    def _pack(self, commands: Commands) -> PageCommands:
        return pack_commands(commands, self._capacity, self.spec.num_pages, self.spec.max_seqs)

    def _poison(self) -> None:
        self._cache = audit.poison(self._cache, self._scheduler)
        if self._pool_format is not None:
            self._cache = self._cache.replace(kv_pages=jax.device_put(self._cache.kv_pages, self._pool_format))

    def _report(self, changed: list[Sequence]) -> list[RequestOutput]:
        now = self._clock()
        requests: dict[int, Request] = {}
        for seq in changed:
            request = seq.request
            requests[request.request_id] = request
            if request.times.first_token_s is None:
                request.times = replace(request.times, first_token_s=now)
        # An output before the last is a copy of all there is: made for `step` and streams alone.
        return [
            self._end(request) if request.finished else self._output(request)
            for request in requests.values()
            if request.finished or request.request_id not in self._awaited
        ]

    def _end(self, request: Request) -> RequestOutput:
        """The last output of a request, which is then forgotten."""
        request.times = replace(request.times, finished_s=self._clock())
        output = self._output(request)
        del self._requests[request.request_id]
        for seq in request.sequences:
            del self._texts[seq]
        return output

    def _output(self, request: Request) -> RequestOutput:
        first, params = request.sequences[0], request.params
        scored = params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(seq) for seq in request.sequences],
            num_cached_tokens=first.num_cached_tokens,
            finished=request.finished,
            times=request.times,
            why_not_cached=first.why_not_cached,
            prompt_logprobs=[None, *first.scores] if scored else None,
            prompt_top_logprobs=[None, *first.top_scores] if scored and params.prompt_logprobs else None,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        wanted = seq.request.params.logprobs
        return CompletionOutput(
            index=seq.sample_index,
            text=self._texts[seq].text(final=seq.finish_reason is not None),
            token_ids=seq.output_token_ids,
            logprobs=None if wanted is None else list(seq.logprobs),
            cumulative_logprob=None if wanted is None else seq.cumulative_logprob,
            finish_reason=seq.finish_reason,
            top_logprobs=list(seq.top_logprobs) if wanted else None,
        )


def _dtype_of(model: nnx.Module) -> str:
    """That of a model's weights, the widest if there are several."""
    names = {x.dtype.name for x in jax.tree.leaves(nnx.state(model)) if jnp.issubdtype(x.dtype, jnp.floating)}
    if not names or not names <= set(DTYPES):
        raise ValueError(
            f"a model with weights in {', '.join(names) or 'no dtype'} needs dtype=, one of {', '.join(DTYPES)}"
        )
    return max(names, key=lambda name: DTYPES[name].itemsize)
