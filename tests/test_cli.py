"""The command line, as processes that a person would start."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_paged import cli
from jax_paged.cli import main
from jax_paged.request import CompletionOutput, RequestOutput, RequestTimes


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for compiled programs, so that only the first run here compiles."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(plain_env: dict[str, str], cache_home: Path):
    def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "jax_paged.cli", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=600,
            env={**plain_env, "XDG_CACHE_HOME": str(cache_home)},
        )

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Runs a command that is to fail, in this process, which has imported jax already. Returns its one line."""

    def refused(*args: str | bytes) -> str:
        assert main([os.fsdecode(arg) for arg in args]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch(r"jax-paged: .*\n", captured.err), captured.err
        return captured.err

    return refused


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_generate_answers_paris_and_says_how_fast(run, cache_home: Path):
    result = run("generate", "The capital of France is", "--max-tokens", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris.")
    assert re.search(
        r"KV pool: [\d,]+ pages of 16 tokens \([\d,]+ tokens, [\d,]+ MiB\), up to 2 sequences of 2,048", result.stderr
    )
    assert re.search(r"4 tokens, \d+\.\d tok/s, prompt \d+ tok/s, 0 of 5 prompt tokens from the cache", result.stderr)
    assert list((cache_home / "jax-paged").rglob("*run_step*")), "compiled programs are kept"


def test_json_gives_an_object_a_line_from_standard_input_and_a_file(run, tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("The capital of France is\n\n")
    options = ["--file", str(tmp_path / "prompts.txt"), "--json", "--max-tokens", "3"]
    result = run("generate", "-", *options, stdin="Water boils at\n")
    assert result.returncode == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["prompt"] == "Water boils at"
    assert first["token_ids"] == [216, 33, 32]
    assert second["text"].startswith(" Paris")
    assert (second["prompt_tokens"], second["cached_tokens"], second["finish_reason"]) == (5, 0, "length")


def test_chat_keeps_its_history_on_the_tree(run):
    turns = "Hi, who are you?\nAnd again?\n/tree\n/stats\n/nonsense\n/reset\n/quit\n"
    result = run("chat", "--max-tokens", "4", stdin=turns)
    assert result.returncode == 0, result.stderr
    cached = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens from the cache", result.stderr)]
    assert len(cached) == 2
    assert cached[1] > cached[0]
    assert "tokens" in result.stdout
    assert re.search(r"hit_tokens +\d+", result.stdout)
    assert "there is no command /nonsense" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--model", "smollm"], r"there is no model 'smollm'.*smollm2-135m"),
        (["generate", "x", "--page-size", "0"], r"--page-size=0 must be at least 1"),
        (["generate", ""], r"the prompt is empty"),
        (["generate"], r"no prompt: give one"),
        (["generate", "x", "--temperature", "-1"], r"temperature=-1.0 must be >= 0; use 0 for greedy"),
        (
            ["generate", "x", "--file", "nowhere.txt"],
            r"--file=nowhere.txt cannot be read \(No such file.*name a file with a prompt a line",
        ),
        (["generate", "x", "--num-pages", "99999999"], r"at most num_pages=[\d,]+ fit"),
        (["generate", "x", "--max-tokens", "6", "y", "--page-size", "0"], r"--page-size=0 must be at least 1"),
        (["generate", b"caf\xe9"], r"the text cannot be encoded: .* at 3 is no character; give text in UTF-8"),
    ],
)
def test_a_callers_mistake_is_one_line_and_exit_code_2(refused, args: list[str], message: str):
    assert re.search(message, refused(*args))


def test_texts_that_ended_with_an_error_are_one_line_and_exit_code_2(refused, monkeypatch: pytest.MonkeyPatch):
    def generate(args: argparse.Namespace) -> None:
        times = RequestTimes(0.0)
        ends = ["length", "error:the model's logits are not numbers (NaN)"]
        samples = [CompletionOutput(i, "", [], None, None, end) for i, end in enumerate(ends)]
        cli._check_ends([RequestOutput(0, [1], samples, 0, True, times)], 16)

    monkeypatch.setattr(cli, "_generate", generate)
    assert "1 of 2 texts ended early: the model's logits are not numbers (NaN); try" in refused("generate", "x")


def test_texts_that_ended_for_want_of_room_are_told_of(capsys: pytest.CaptureFixture[str]):
    ends = [([1] * 4, "length"), ([1] * 3, "length"), ([1] * 3, "stop")]
    samples = [CompletionOutput(i, "", ids, None, None, end) for i, (ids, end) in enumerate(ends)]
    output = RequestOutput(0, [1], samples, 0, True, RequestTimes(0.0))
    cli._check_ends([output], max_tokens=3)
    assert capsys.readouterr().err == ""
    cli._check_ends([output], max_tokens=4)
    assert "1 of 3 texts ended before --max-tokens=4," in capsys.readouterr().err


def test_a_mistake_ends_the_process_with_exit_code_2(run):
    result = run("generate", "")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"jax-paged: the prompt is empty.*\n", result.stderr), result.stderr


def test_a_reader_that_goes_away_is_no_error(plain_env: dict[str, str]):
    env = {name: value for name, value in plain_env.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "jax_paged.cli", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(), errors) == (0, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a\xff", r"prompts.txt is not text in UTF-8 \(.* at byte 1\)"), (b" \n", r"prompts.txt has no line")],
)
def test_a_file_without_prompts_in_it_is_refused(refused, tmp_path: Path, content: bytes, message: str):
    (tmp_path / "prompts.txt").write_bytes(content)
    assert re.search(message, refused("generate", "--file", str(tmp_path / "prompts.txt")))


def test_env_says_which_kernel_runs_and_why(run):
    result = run("env")
    assert result.returncode == 0, result.stderr
    assert re.search(r"attention xla: no kernel is written for platform 'cpu'", result.stdout)
    assert re.search(r"jax +\d+\.\d+", result.stdout)


def test_help_does_not_import_jax_and_the_package_starts_no_backend():
    ask_for_help = """
import jax_paged.cli
for command in ([], ["generate"], ["chat"], ["bench"], ["kernels"], ["env"]):
    try:
        jax_paged.cli.main([*command, "--help"])
    except SystemExit:
        pass
"""
    has_jax = "import sys; print('jax' in sys.modules)"
    printed = python(ask_for_help + has_jax)
    assert printed.count("usage: jax-paged") == 6
    assert printed.splitlines()[-1] == "False"
    assert python(f"import jax_paged as jp; jp.RadixTree; jp.SamplingParams; {has_jax}") == "False\n"
    has_backend = "from jax._src import xla_bridge as b; print(b.backends_are_initialized())"
    assert python(f"import jax_paged as jp; jp.LLM; {has_backend}") == "False\n"
