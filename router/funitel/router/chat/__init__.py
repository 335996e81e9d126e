"""The chat core: turn one conversation into typed parts of its answers. Knows no API's wire shapes.

OpenAI's chat and responses and Anthropic's messages are thin adapters over it:

1. The adapter turns its body into a `ChatCall` of `ChatMessage`s, `Tool`s, a `ToolChoice` and a `SamplingRequest`.
2. `run.prepare_chat(service, call, stream=..., arrived=...)` renders the template, checks and tokenizes the prompt, and
   gives a `PreparedChat`. Errors are raised here as a FunitelError, before anything is sent.
3. Either `await prepared.stream(take)`, which calls `take(index, part)` as parts come, where `index` is the choice (0
   unless `call.n` > 1) and a part is one of `Started`, `TextDelta`, `ReasoningDelta`, `ToolCallStart`,
   `ToolCallArguments`, `Finished`; or `await prepared.run()`, which gives the same parts assembled: a `ChatAnswer` for
   each choice.

Each choice begins with `Started`, at its first token, and ends with `Finished`. Streamed and whole answers are made
of the same parts. `count_prompt_tokens(service, call)` renders and counts without generating.
"""
