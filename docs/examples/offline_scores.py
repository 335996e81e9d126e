"""Vectors of texts in the calling process, and how near texts are to one."""

from funitel.llm import LLM

with LLM("all-minilm-l6-v2") as llm:
    (output,) = llm.embed("The sea is deep.")
    print(len(output.outputs.embedding))
    texts = ["The ocean is very deep.", "Two and two is four."]
    scores = [output.outputs.score for output in llm.score("The sea is deep.", texts)]
    print(scores[0] > 0.7, scores[1] < 0.3)

# prints:
# 384
# True True
