"""The first things to do with jax_paged: generate, stream, and see what the cache holds afterwards.

The demo model, SmolLM2-135M-Instruct, comes with the `models` extra and runs on a CPU.
"""

import jax_paged as jp

print("loading the model and compiling")
# Steps of at most 64 tokens need three programs, two for prefill and one for decode. A server has more.
llm = jp.LLM("smollm2-135m", max_seqs=8, max_batch_tokens=64, num_pages=256)
greedy = jp.SamplingParams(temperature=0, max_tokens=20)

# Prompts given together run as one batch.
prompts = ["The capital of France is", "The largest planet of the solar system is"]
outputs = llm.generate(prompts, greedy)
for prompt, output in zip(prompts, outputs):
    print(f"{prompt}{output.outputs[0].text}\n")

# A conversation, through the model's own template, token by token as they come.
messages = [{"role": "user", "content": "Name three colours, please, and say what each of them makes you think of."}]
print("assistant: ", end="")
for event in llm.stream(llm.render_chat(messages), greedy):
    print(event.text, end="", flush=True)
print()

# Its next turn begins with what has been computed already, and only the rest is new.
question = "Which of these colours do you like most, and why?"
messages.append({"role": "assistant", "content": event.output.outputs[0].text})
messages.append({"role": "user", "content": question})
turn = llm.chat(messages, greedy)
print(f"user: {question}\nassistant: {turn.outputs[0].text}")
print(f"[{turn.num_cached_tokens} of {len(turn.prompt_token_ids)} prompt tokens from the cache]")

# Nothing runs any more: every page is free, or held by the prefix tree for whoever comes next.
stats = llm.stats()
print(f"\n{stats['num_pages']} pages: {stats['free_pages']} free, {stats['tree_pages']} in the prefix tree")
llm.check()  # raises unless device, scheduler and tree agree about every page
assert "Paris" in outputs[0].outputs[0].text
assert turn.num_cached_tokens >= len(event.output.prompt_token_ids) // 16 * 16  # every whole page of the first turn
assert stats["free_pages"] + stats["tree_pages"] == stats["num_pages"]
