"""The first things to do with jax_paged: generate, stream, and see what the cache holds afterwards.

The demo model, SmolLM2-135M-Instruct, comes with the `models` extra and runs on a CPU.
"""

import jax_paged as jp

print("loading the model; the first step of each kind is compiled, some seconds each")
# Steps of at most 64 tokens, and as many sequences: then two programs do, one for prefill and one for decode.
llm = jp.LLM("smollm2-135m", max_seqs=64, max_batch_tokens=64, num_pages=256)
greedy = jp.SamplingParams(temperature=0, max_tokens=24)

# Several prompts run as one batch.
prompts = ["The capital of France is", "The largest planet of the solar system is", "Water boils at"]
outputs = llm.generate(prompts, greedy)
for prompt, output in zip(prompts, outputs):
    print(f"{prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")

# A chat, through the model's own template, token by token.
messages = [{"role": "user", "content": "Name three colours."}]
print("chat: ", end="")
for event in llm.stream(llm.render_chat(messages), greedy):
    print(event.text, end="", flush=True)
print()

# A prompt that begins like an earlier one, its answer included, finds those keys and values in the cache.
followed_up = prompts[0] + outputs[0].outputs[0].text + " And the capital of Italy is"
[output] = llm.generate([followed_up], greedy)
print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache")

# Nothing runs any more: every page is free, or held by the prefix tree for whoever comes next.
stats = llm.stats()
print(f"{stats['num_pages']} pages: {stats['free_pages']} free, {stats['tree_pages']} in the prefix tree")
llm.check()  # raises unless device, scheduler and tree agree about every page
assert "Paris" in outputs[0].outputs[0].text
assert output.num_cached_tokens >= 16  # a whole page
assert stats["free_pages"] + stats["tree_pages"] == stats["num_pages"]
