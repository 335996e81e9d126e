"""Fields of chats and completions that would change the answer and are refused: OpenAI's, and other servers'."""

from funitel.router.api.common.field_policy import NOTHING, Unsupported

SAMPLING: dict[str, Unsupported] = {
    # vLLM's.
    "truncation_side": Unsupported("prompts keep their last tokens", (*NOTHING, "left")),
    "logits_processors": Unsupported("code of clients is not run"),
    "logprob_token_ids": Unsupported("use `logprobs`"),
    "prompt_embeds": Unsupported("prompts are text or token ids"),
    "mm_processor_kwargs": Unsupported("prompts are text"),
    "media_io_kwargs": Unsupported("prompts are text"),
    "watermarking": Unsupported("use `watermark` of `/generate`"),
    "repetition_detection": Unsupported("use `repetition_penalty`"),
    "thinking_token_budget": Unsupported("use `thinking_budget` of chats", (*NOTHING, -1)),
    "kv_transfer_params": Unsupported("each replica computes its own prompts"),
    "return_tokens_as_token_ids": Unsupported("use `return_token_ids`"),
    # Those of llama.cpp, SGLang and others.
    "mirostat_mode": Unsupported("use `mirostat`", (*NOTHING, 0)),
    "tfs": Unsupported("use `tfs_z`", (*NOTHING, 1.0)),
    "nsigma": Unsupported("use `top_n_sigma`", (*NOTHING, -1)),
    "top_a": Unsupported("there is no such sampler here", (*NOTHING, 0)),
    "num_beams": Unsupported("use `n` with `use_beam_search`", (*NOTHING, 1)),
    "custom_logit_processor": Unsupported("code of clients is not run"),
    "ebnf": Unsupported("use `structured_outputs`"),
    "lora_path": Unsupported("give the name of an adapter as `model`"),
    "adapter_id": Unsupported("give the name of an adapter as `model`"),
}

CHAT: dict[str, Unsupported] = SAMPLING | {
    # OpenAI's.
    "modalities": Unsupported("answers are text", (*NOTHING, ["text"])),
    "audio": Unsupported("answers are text"),
    "web_search_options": Unsupported("nothing is searched here", ()),
    "moderation": Unsupported("answers are not moderated here"),
    # vLLM's.
    "echo": Unsupported("a chat's answer never begins with its messages"),
    "documents": Unsupported("send them in `messages`"),
    "chat_template": Unsupported("templates of clients are not run; start the server with another"),
}
