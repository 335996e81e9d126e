"""The class `LLM`: a model in this process that generates completions and chat answers, from any thread."""

import os
import re
import sys
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from funitel.llm.beam_search import BeamSearchOutput, BeamSearchParams, beam_requests, search_beams
from funitel.llm.calls import CompletionJob, run_jobs
from funitel.llm.handle import RequestHandle, StartedRequest
from funitel.llm.loaded import LoadedModel
from funitel.llm.outputs import RequestOutput
from funitel.llm.progress import CompletionProgress
from funitel.llm.prompts import EncodedPrompt, Message, Prompt, PromptEncoder
from funitel.llm.results import RequestResults
from funitel.llm.sampling import SamplingParams, is_int, params_for
from funitel.model_server.hub import resolve
from funitel.model_server.settings import DEVICES, DTYPES, QUANTIZATIONS, ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError, StartupError
from funitel.router.settings import RouterSettings
from funitel.router.text.model_files import read_recommended

DEFAULT_PREFILL_TOKENS = RouterSettings().max_batch_prefill_tokens


class LLM:
    """One model and its KV pool, until `close`, the end of a `with`, or garbage collection.

    The prompts of a call, and the calls of several threads, are batched as the requests of a server are. The engine
    runs in its own thread, so an event loop of the caller, as in a notebook, does not matter.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        device: str = "auto",
        dtype: str | None = None,
        quantize: str | None = None,
        num_shard: int = 1,
        num_threads: int | None = None,
        block_size: int = 16,
        cuda_memory_fraction: float | None = None,
        max_total_tokens: int | None = None,
        max_batch_prefill_tokens: int | None = None,
        max_batch_total_tokens: int | None = None,
        max_batch_size: int | None = None,
        chat_special_tokens: bool = False,
    ) -> None:
        """Fetch or convert the model if necessary, load it and size its pool. None means the server's default.

        Args:
            model: catalogue name, hub repository, GGUF of one (owner/name:Q4_K_M or owner/name/file.gguf), local
                folder, or path of a .gguf file.
            revision: of a hub repository.
            cache_dir: folder for fetched and converted models; FUNITEL_CACHE or ~/.cache/funitel when not given.
            device: auto, cpu or cuda.
            dtype: precision of weights and KV: float32, float16 or bfloat16.
            quantize: quantisation of the checkpoint's weights.
            num_shard: only 1 here; a server splits a model over several processes.
            num_threads: of compute threads.
            block_size: tokens per KV block.
            cuda_memory_fraction: of the GPU's memory, or on a CPU of half of the available memory.
            max_total_tokens: maximum of tokens in a prompt and its completion.
            max_batch_prefill_tokens: maximum of prompt tokens in one step.
            max_batch_total_tokens: size of the KV pool in tokens.
            max_batch_size: maximum of running sequences.
            chat_special_tokens: whether control tokens in the texts of a conversation are control tokens.

        Raises:
            StartupError: an argument is invalid for the model or the machine.
        """
        if num_shard != 1:
            raise SettingsError(f"num_shard must be 1 in one process, given {num_shard!r}: start a server for more")
        _check_choice("device", device, DEVICES)
        _check_choice("dtype", dtype, (None, *DTYPES))
        _check_choice("quantize", quantize, (None, *QUANTIZATIONS))
        _check_integers(
            num_threads=num_threads,
            block_size=block_size,
            max_total_tokens=max_total_tokens,
            max_batch_prefill_tokens=max_batch_prefill_tokens,
            max_batch_total_tokens=max_batch_total_tokens,
            max_batch_size=max_batch_size,
        )
        try:
            cache_dir = cache_dir or os.environ.get("FUNITEL_CACHE")
            folder = resolve.resolve(str(model), revision=revision, cache_dir=cache_dir).folder
            self._model = LoadedModel(
                folder,
                ModelServerSettings(
                    model_id=str(folder),
                    device=device,
                    dtype=dtype,
                    quantize=quantize,
                    block_size=block_size,
                    cuda_memory_fraction=cuda_memory_fraction,
                    num_threads=num_threads,
                ),
                RouterSettings(
                    max_total_tokens=max_total_tokens,
                    max_batch_prefill_tokens=max_batch_prefill_tokens
                    or min(DEFAULT_PREFILL_TOKENS, max_batch_total_tokens or DEFAULT_PREFILL_TOKENS),
                    max_batch_total_tokens=max_batch_total_tokens,
                    max_batch_size=max_batch_size,
                    max_concurrent_requests=sys.maxsize,  # callers wait for their own calls
                ),
            )
        except StartupError as error:
            raise type(error)(_with_argument_names(error.message)) from error
        self._encoder = PromptEncoder(folder, self._model.vocab_size, chat_special_tokens=chat_special_tokens)
        self._default_params = _recommended(folder)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or several.

        Args:
            prompts: a text, token ids, or a list of these.
            sampling_params: for all prompts, or one for each; the model's recommended sampling when not given.
            use_tqdm: whether to show a progress bar.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidRequest: a prompt or parameter is invalid; the message names it, and nothing was computed.
            FunitelError: a step failed, or the LLM was closed.
        """
        return self._run(self._encoder.prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of messages with `role` and `content`.

        The model's chat template makes the prompts. A conversation that ends with the assistant is continued.
        Otherwise as `generate`.
        """
        return self._run(self._encoder.chats(messages), sampling_params, use_tqdm)

    def start_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestHandle:
        """Begin to complete one prompt, and return at once.

        Args:
            prompt: a text or token ids.
            sampling_params: the model's recommended sampling when not given.
            request_id: of the outputs; a random one when not given.

        Raises:
            InvalidRequest: the prompt or a parameter is invalid.
            NotReady: the LLM was closed.
        """
        prompts = self._encoder.prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequest(f"prompt must be one text or its token ids, given {len(prompts)} prompts", "prompt")
        (job,) = self._jobs(prompts, sampling_params)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        results = RequestResults(job, request_id)
        started = StartedRequest(job, results)
        handle = RequestHandle(request_id, started, results, self._model.loop, self._model)
        engine = self._model.engine
        self._model.loop.post(lambda: started.begin(engine))
        return handle

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search the likeliest completions of one prompt or several, `beam_width` of each.

        Args:
            prompts: a text, token ids, or a list of these.
            params: how beams are searched.

        Returns:
            One output for each prompt, in their order, with its completions, best first.

        Raises:
            InvalidRequest: a prompt or parameter is invalid; the message names it, and nothing was computed.
            FunitelError: a step failed, or the LLM was closed.
        """
        model = self._model
        requests = beam_requests(self._encoder.prompts(prompts), params, model.limits)
        return model.loop.run(search_beams(model.engine, requests, self._encoder.tokenizer))

    def close(self) -> None:
        """Cancel the calls of other threads and free the memory; idempotent."""
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        model = self._model
        jobs = self._jobs(prompts, sampling_params)
        with CompletionProgress(sum(job.params.n for job in jobs), is_shown=use_tqdm) as progress:
            return model.loop.run(run_jobs(model.engine, jobs, progress), progress.show)

    def _jobs(
        self, prompts: Sequence[EncodedPrompt], sampling_params: SamplingParams | Iterable[SamplingParams] | None
    ) -> list[CompletionJob]:
        """Pair prompts with their parameters and check them."""
        each = params_for(self._default_params if sampling_params is None else sampling_params, len(prompts))
        model = self._model
        return [
            CompletionJob.of(
                index, prompt, params, model.limits, model.vocab_size, self._encoder.banned_tokens(params.bad_words)
            )
            for index, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]


def _recommended(folder: Path) -> SamplingParams:
    recommended = asdict(read_recommended(folder))
    return SamplingParams(**{name: value for name, value in recommended.items() if value is not None})


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(map(str, choices))}, given {value!r}")


def _check_integers(**values: object) -> None:
    for name, value in values.items():
        if value is not None and not is_int(value, 1):
            raise SettingsError(f"{name} must be an integer >= 1, given {value!r}")


def _with_argument_names(message: str) -> str:
    """Replace flags by argument names: `--block-size` becomes `block_size`."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), message)
