"""Generation in the calling process, without a server."""

from funitel.llm import LLM, Grammar, SamplingParams

with LLM("smollm2-135m-instruct", max_batch_total_tokens=4096) as llm:
    greedy = SamplingParams(temperature=0, max_tokens=8, stop=["."])
    for output in llm.generate(["The capital of France is", "1, 2, 3, 4,"], greedy):
        print(output.prompt, repr(output.outputs[0].text))
    yes_or_no = SamplingParams(temperature=0, grammar=Grammar.choice(["yes", "no"]))
    (answer,) = llm.chat([{"role": "user", "content": "Is Paris in France?"}], yes_or_no)
    print(answer.outputs[0].text)

# prints:
# The capital of France is ' Paris'
# 1, 2, 3, 4, ' 5, 6, 7'
# yes
