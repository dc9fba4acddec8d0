"""The command line: `jax-paged generate | chat | bench | kernels | env`.

Nothing here imports jax until a command needs it. What a person asked for goes to standard output, all else to
standard error. A mistake of the caller's is one line there and exit code 2.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_paged import kernels_report

if TYPE_CHECKING:
    from jax_paged.engine import LLM
    from jax_paged.models.load import LoadedModel
    from jax_paged.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["main"]

_DEFAULT_MODEL = "smollm2-135m"
_BENCHES = {
    "floor": "steps against the least they could take",
    "few-shot": "requests with a common start, with and without the prefix cache",
    "branching": "pages that samples and beams share; the host's part of a step",
    "exact": "what exact mode costs",
    "radix": "the prefix tree alone",
}
# Sequences get at least this many tokens, so that short prompts of all lengths share their compiled programs.
_MIN_MODEL_LEN = 2048
# Where one sequence runs at a time: its own pages, and as many for what it may find again. A large pool takes time to
# allocate.
_STREAM_SEQS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not any(word.startswith("-") for word in rest) and isinstance(getattr(args, "prompt", None), list):
        args.prompt += rest  # prompts after an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}; see jax-paged {argv[0]} --help")
    # Until the engine is there: all that the imports make stays, and looking for garbage in it takes a sixth of their
    # time.
    gc.disable()
    try:
        status = args.command(args) or 0
        sys.stdout.flush()  # here, where a reader that has gone is no surprise
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, NotImplementedError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("JAX_PAGED_TRACEBACK"):
            raise
        print(f"jax-paged: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    finally:
        gc.enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax-paged", description="Language models in JAX on a paged KV pool and a prefix tree."
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("jax-paged"))
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue one or several prompts")
    generate.add_argument("prompt", nargs="*", help="a text, or - for standard input, less its last line break")
    generate.add_argument("--file", type=Path, help="a file with a prompt a line")
    generate.add_argument("--json", action="store_true", help="an object a sample, a line each")
    generate.add_argument("-n", type=int, default=1, help="samples a prompt, which share its pages")
    _add_model_options(generate)
    _add_sampling_options(generate, max_tokens=64)
    generate.set_defaults(command=_generate)

    chat = commands.add_parser("chat", help="talk; /reset, /tree, /stats, /quit")
    chat.add_argument("--system", help="what the model is told first")
    _add_model_options(chat)
    _add_sampling_options(chat, max_tokens=512)
    chat.set_defaults(command=_chat)

    bench = commands.add_parser("bench", help="measure, as ratios")
    bench.add_argument("name", choices=sorted(_BENCHES), help="; ".join(f"{n}: {t}" for n, t in _BENCHES.items()))
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")
    bench.add_argument("--model", default=_DEFAULT_MODEL)
    bench.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    bench.set_defaults(command=_bench)

    kernels = commands.add_parser("kernels", help="compile the TPU kernel for chips that are not here, and count")
    kernels_report.add_arguments(kernels)
    kernels.set_defaults(command=kernels_report.main)

    env = commands.add_parser("env", help="versions, devices, and which kernel runs")
    env.set_defaults(command=_env)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=_DEFAULT_MODEL, help="a built-in name, a Hugging Face directory or a .gguf file"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of weights and pool (%(default)s)",
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (%(default)s)")
    parser.add_argument(
        "--num-pages",
        type=int,
        help="pages in the pool; by default enough for --max-seqs of --max-model-len, as far as the memory allows",
    )
    parser.add_argument(
        "--max-model-len", type=int, help="tokens of the longest sequence; by default 2048, or what the prompts need"
    )
    parser.add_argument(
        "--max-seqs", type=int, help="sequences running at once; by default 2 for one text, else 8 to 64"
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its start")


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="tokens of a text at most (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token; more varies"
    )
    parser.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest tokens of this total probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="only tokens this likely, beside the likeliest")
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
    parser.add_argument("--seed", type=int, help="makes the samples repeatable")


# --- generate ---


def _generate(args: argparse.Namespace) -> None:
    prompts = _prompts(args)
    params = _sampling_params(args)
    loaded = _load(args)
    tokenizer = _need_tokenizer(loaded)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    longest = max(map(len, ids)) + args.max_tokens
    is_streamed = len(ids) == 1 and params.n == 1 and not args.json
    max_seqs = args.max_seqs or (_STREAM_SEQS if is_streamed else min(64, max(8, len(prompts))))
    llm = _make_llm(args, loaded, longest, max_seqs, is_streamed)
    started = time.monotonic()
    if args.json:
        outputs = llm.generate(ids, params)
        for prompt, output in zip(prompts, outputs):
            for sample in output.outputs:
                print(json.dumps(_as_json(prompt, output, sample), ensure_ascii=False))
    elif is_streamed:
        output, *compile_s = _stream(llm, ids[0], params)
        _note(_closing_line_of_stream(output, *compile_s))
        _check_ends([output], args.max_tokens)
        return
    else:
        outputs = llm.generate(ids, params)
        for prompt, output in zip(prompts, outputs):
            for sample in output.outputs:
                print(f"{prompt}{sample.text}\n")
    _note(_closing_line(outputs, time.monotonic() - started - llm.compile_s))
    _check_ends(outputs, args.max_tokens)


def _check_ends(outputs: "list[RequestOutput]", max_tokens: int) -> None:
    """Says so if a text ended for want of room, and raises RuntimeError if one ended with an error."""
    samples = [sample for output in outputs for sample in output.outputs]
    errors = [end.removeprefix("error:") for s in samples if (end := s.finish_reason or "").startswith("error:")]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(samples)} texts ended early: {errors[0]}; try --dtype float32")
    if full := sum(s.finish_reason == "length" and len(s.token_ids) < max_tokens for s in samples):
        _note(
            f"{full} of {len(samples)} texts ended before --max-tokens={max_tokens}, for want of room for longer "
            "sequences; raise --max-model-len or --num-pages, if the model allows it"
        )


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in args.prompt]
    if args.file is not None:
        prompts += _lines(args.file)
    if not prompts:
        raise ValueError('no prompt: give one, as in jax-paged generate "The capital of France is", or - or --file')
    if any(not prompt for prompt in prompts):
        raise ValueError("the prompt is empty; give at least one character")
    return prompts


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except OSError as error:
        raise ValueError(f"--file={file} cannot be read ({error.strerror}); name a file with a prompt a line") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 ({error.reason} at byte {error.start}); convert it") from None
    lines = [line.removesuffix("\r") for line in lines]
    if not lines:
        raise ValueError(f"{file} has no line with a prompt in it")
    return lines


def _stream(llm: "LLM", ids: list[int], params: "SamplingParams") -> tuple["RequestOutput", float, float]:
    """Prints a text as it comes.

    Returns:
      The last output, and the seconds that went into compiling before the first token and after it.
    """
    before = llm.compile_s
    with _Progress("reading the prompt" if before else "compiling"):
        events = llm.stream(ids, params)
        event = next(events)
    at_first = llm.compile_s
    print(event.text, end="", flush=True)
    for event in events:
        print(event.text, end="", flush=True)
    print()
    return event.output, at_first - before, llm.compile_s - at_first


def _as_json(prompt: str, output: "RequestOutput", sample: "CompletionOutput") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }


def _closing_line(outputs: Sequence["RequestOutput"], elapsed_s: float) -> str:
    """Such as "2,048 tokens, 310.0 tok/s over 32 prompts, 448 of 512 prompt tokens from the cache"."""
    generated = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return f"{generated:,} tokens, {generated / elapsed_s:.1f} tok/s over {_count(outputs)}, {_cache_use(outputs)}"


def _closing_line_of_stream(output: "RequestOutput", compile_before_s: float, compile_after_s: float) -> str:
    """Such as "64 tokens, 31.0 tok/s, prompt 903 tok/s, 448 of 512 prompt tokens from the cache"."""
    times, generated = output.times, len(output.outputs[0].token_ids)
    start, first, last = times.first_scheduled_s, times.first_token_s, times.finished_s
    assert start is not None
    assert first is not None
    assert last is not None
    decode = f"{(generated - 1) / (last - first - compile_after_s):.1f} tok/s, " if generated > 1 else ""
    computed = len(output.prompt_token_ids) - output.num_cached_tokens
    prefill = f"prompt {computed / (first - start - compile_before_s):.0f} tok/s"
    return f"{generated:,} tokens, {decode}{prefill}, {_cache_use([output])}"


def _count(outputs: Sequence["RequestOutput"]) -> str:
    return "1 prompt" if len(outputs) == 1 else f"{len(outputs):,} prompts"


def _cache_use(outputs: Sequence["RequestOutput"]) -> str:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return f"{cached:,} of {prompt:,} prompt tokens from the cache"


# --- chat ---

_CHAT_COMMANDS = "/reset starts anew, /tree shows the prefix tree, /stats the counters, /quit ends"


def _chat(args: argparse.Namespace) -> None:
    params = _sampling_params(args)
    loaded = _load(args)
    _need_tokenizer(loaded)
    llm = _make_llm(args, loaded, _MIN_MODEL_LEN, args.max_seqs or _STREAM_SEQS, is_streamed=True)
    history = [{"role": "system", "content": args.system}] if args.system else []
    start = len(history)
    _note(_CHAT_COMMANDS)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/quit":
            return
        if text == "/help":
            _note(_CHAT_COMMANDS)
        elif text == "/reset":
            del history[start:]
            _note("a new conversation; what was computed for the last one stays cached")
        elif text == "/tree":
            print(_render_tree(llm))
        elif text == "/stats":
            print("\n".join(f"{name:>24} {value:,}" for name, value in llm.stats().items()))
        elif text.startswith("/"):
            _note(f"there is no command {text}; {_CHAT_COMMANDS}")
        elif text:
            _answer(llm, history, text, params)


def _answer(llm: "LLM", history: list[dict[str, str]], text: str, params: "SamplingParams") -> None:
    history.append({"role": "user", "content": text})
    try:
        output, *compile_s = _stream(llm, llm.render_chat(history), params)
    except ValueError as error:  # too long by now
        history.pop()
        _note(f"jax-paged: {error}; /reset starts anew")
        return
    history.append({"role": "assistant", "content": output.outputs[0].text})
    _note(_closing_line_of_stream(output, *compile_s))


def _render_tree(llm: "LLM") -> str:
    if llm.tree is None:
        return "the prefix cache is off"
    return llm.tree.render(decode=llm.tokenizer.decode if llm.tokenizer is not None else None)


# --- bench and env ---


def _bench(args: argparse.Namespace) -> None:
    bench = importlib.import_module(f"jax_paged.bench.{args.name.replace('-', '_')}")
    if args.name == "radix":  # needs no model
        bench.main(as_json=args.json)
        return
    loaded = _load(args)
    _configure_jax()
    bench.main(loaded, as_json=args.json)


def _env(args: argparse.Namespace) -> None:
    import jax

    from jax_paged.kernels import IMPLEMENTATIONS, AttentionCall, choose_implementation
    from jax_paged.kernels.api import why_not

    for package in ("jax-paged", "jax", "jaxlib", "flax", "numpy", "gguf", "tokenizers", "libtpu"):
        try:
            print(f"{package:>12} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package:>12} not installed")
    print(f"{'python':>12} {sys.version.split()[0]}")
    for device in jax.devices():
        print(f"{'device':>12} {device.platform} {device.device_kind}")
    call = AttentionCall(
        max_tokens=8, num_q_heads=32, num_kv_heads=8, head_dim=128, q_dtype="bfloat16", kv_dtype="bfloat16",
        num_pages=1024, page_size=16, max_seqs=8, pages_per_seq=128,
    )  # fmt: skip
    name, reason = choose_implementation(call)
    print(f"{'attention':>12} {name}: {reason}")
    for other in IMPLEMENTATIONS:
        if other != name:
            able = "could run it, if asked for by name" + (" and interpreted" if other.startswith("pallas") else "")
            print(f"{'':>12} {other}: {why_not(other, call) or able}")


# --- Shared ---


def _load(args: argparse.Namespace) -> "LoadedModel":
    """Reads the model, which is checked before jax, the slowest import, is waited for."""
    _check_sizes(args)
    from jax_paged.models.load import load

    with _Progress(f"loading {args.model}") as progress:
        return load(args.model, args.dtype, progress)


def _check_sizes(args: argparse.Namespace) -> None:
    """What is wrong whatever the model, before anyone waits for it."""
    for name in ("page_size", "num_pages", "max_model_len", "max_seqs"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be at least 1")


def _make_llm(args: argparse.Namespace, loaded: "LoadedModel", longest: int, max_seqs: int, is_streamed: bool) -> "LLM":
    _configure_jax()
    from jax_paged.engine import LLM

    room = max(_MIN_MODEL_LEN, 1 << (longest - 1).bit_length())
    llm = LLM(
        loaded,
        page_size=args.page_size,
        num_pages=args.num_pages,
        max_seqs=max_seqs,
        max_model_len=args.max_model_len
        or (min(room, loaded.config.max_model_len) if args.num_pages is None else None),
        prefix_cache=not args.no_prefix_cache,
        # A program of several steps takes a third longer to compile, and a stream wants each token by itself.
        decode_steps_per_call=1 if is_streamed else None,
        dtype=args.dtype,
    )
    gc.freeze()
    gc.enable()
    _note(llm.describe_pool())
    return llm


def _configure_jax() -> None:
    """Keeps compiled programs in the user's cache folder, so that only the first run compiles them."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jax-paged" / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _need_tokenizer(loaded: "LoadedModel") -> Any:
    if loaded.tokenizer is None:
        raise ValueError(
            f"{loaded.name} has no tokenizer (tokenizer.json beside its weights); text cannot be read without"
        )
    return loaded.tokenizer


def _sampling_params(args: argparse.Namespace) -> "SamplingParams":
    from jax_paged.request import SamplingParams

    return SamplingParams(
        n=getattr(args, "n", 1),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Progress:
    """A bar on standard error, if a person is there to see it. Called with (done, in all), if anyone knows."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None

    def __enter__(self) -> Callable[[int, int], None]:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._label, total=None)
            try:
                self._bar.start()
            except BaseException:  # Ctrl-C: the terminal gets its cursor back
                self._bar.stop()
                raise
        return self._update

    def _update(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    sys.exit(main())
