"""The class `LLM`: a model in this process that generates completions and chat answers, from any thread."""

import os
import re
import sys
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from funitel.llm.beam_search import BeamSearchOutput, BeamSearchParams, beam_requests, search_beams
from funitel.llm.calls import CompletionJob, run_jobs
from funitel.llm.handle import RequestHandle, StartedRequest
from funitel.llm.loaded import LoadedModel
from funitel.llm.lora import LoRARequest, adapter_of
from funitel.llm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from funitel.llm.pooling import LoadedEncoder
from funitel.llm.progress import CompletionProgress
from funitel.llm.prompts import EncodedPrompt, Message, Prompt, PromptEncoder
from funitel.llm.results import RequestResults
from funitel.llm.sampling import SamplingParams, is_int, params_for
from funitel.model_server.hub import resolve
from funitel.model_server.loading.encoder import holds_encoder
from funitel.model_server.settings import DEVICES, DTYPES, QUANTIZATIONS, ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError, StartupError, WrongTask
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
        enable_lora: bool = False,
        max_loras: int = 8,
        max_lora_rank: int = 64,
        speculate: int | None = None,
        draft_model: str | Path | None = None,
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
            num_shard: processes that the model is split over; with 1 it runs in this one.
            num_threads: of compute threads.
            block_size: tokens per KV block.
            cuda_memory_fraction: of the GPU's memory, or on a CPU of half of the available memory.
            max_total_tokens: maximum of tokens in a prompt and its completion.
            max_batch_prefill_tokens: maximum of prompt tokens in one step.
            max_batch_total_tokens: size of the KV pool in tokens.
            max_batch_size: maximum of running sequences.
            chat_special_tokens: whether control tokens in the texts of a conversation are control tokens.
            enable_lora: whether calls may name LoRA adapters.
            max_loras: maximum of adapters in memory, for which the KV pool leaves room.
            max_lora_rank: maximum of the rank of an adapter.
            speculate: maximum of draft tokens that a step verifies for each sequence; texts stay the same.
            draft_model: makes them, given as `model`; else the model's own MTP layer, or the sequence's own n-grams.

        Raises:
            StartupError: an argument is invalid for the model or the machine.
        """
        _check_choice("device", device, DEVICES)
        _check_choice("dtype", dtype, (None, *DTYPES))
        _check_choice("quantize", quantize, (None, *QUANTIZATIONS))
        _check_integers(
            num_shard=num_shard,
            num_threads=num_threads,
            block_size=block_size,
            max_total_tokens=max_total_tokens,
            max_batch_prefill_tokens=max_batch_prefill_tokens,
            max_batch_total_tokens=max_batch_total_tokens,
            max_batch_size=max_batch_size,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            speculate=speculate,
        )
        self._takes_adapters = enable_lora
        try:
            cache_dir = cache_dir or os.environ.get("FUNITEL_CACHE")
            folder = resolve.resolve(str(model), revision=revision, cache_dir=cache_dir).folder
            if draft_model is not None:
                draft_model = resolve.resolve(str(draft_model), cache_dir=cache_dir).folder
            shard = ModelServerSettings(
                model_id=str(folder),
                device=device,
                dtype=dtype,
                quantize=quantize,
                block_size=block_size,
                cuda_memory_fraction=cuda_memory_fraction,
                num_threads=num_threads,
                max_lora_rank=max_lora_rank if enable_lora else 0,
                reserved_loras=max_loras if enable_lora else 0,
                speculate=speculate,
                draft_model=None if draft_model is None else str(draft_model),
            )
            router = RouterSettings(
                max_total_tokens=max_total_tokens,
                max_batch_prefill_tokens=max_batch_prefill_tokens
                or min(DEFAULT_PREFILL_TOKENS, max_batch_total_tokens or DEFAULT_PREFILL_TOKENS),
                max_batch_total_tokens=max_batch_total_tokens,
                max_batch_size=max_batch_size,
                max_loras=max_loras,
                max_concurrent_requests=sys.maxsize,  # callers wait for their own calls
            )
            self._pooling: LoadedEncoder | None = None
            if holds_encoder(folder):
                if num_shard != 1:
                    raise SettingsError(f"num_shard must be 1 for an encoder, given {num_shard}")
                if speculate is not None:
                    raise SettingsError(f"speculate must be None for an encoder, given {speculate}")
                self._pooling = LoadedEncoder(folder, shard, router.max_batch_prefill_tokens)
                return
            shard = replace(shard, enable_prefill_logprobs=True)
            self._model = LoadedModel(folder, shard, router, num_shard, os.environ)
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
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several.

        Args:
            prompts: a text, token ids, or a list of these.
            sampling_params: for all prompts, or one for each; the model's recommended sampling when not given.
            use_tqdm: whether to show a progress bar.
            lora_request: the adapter that all prompts are completed with; None for none.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidRequest: a prompt or parameter is invalid; the message names it, and nothing was computed.
            FunitelError: a step failed, or the LLM was closed.
        """
        self._check_generates()
        return self._run(self._encoder.prompts(prompts), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of messages with `role` and `content`.

        The model's chat template makes the prompts. A conversation that ends with the assistant is continued.
        Otherwise as `generate`.
        """
        self._check_generates()
        return self._run(self._encoder.chats(messages), sampling_params, use_tqdm, lora_request)

    def start_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestHandle:
        """Begin to complete one prompt, and return at once.

        Args:
            prompt: a text or token ids.
            sampling_params: the model's recommended sampling when not given.
            request_id: of the outputs; a random one when not given.
            lora_request: the adapter that the prompt is completed with; None for none.

        Raises:
            InvalidRequest: the prompt or a parameter is invalid.
            NotReady: the LLM was closed.
        """
        job = self.prepared(prompt, sampling_params, lora_request)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        results = RequestResults(job, request_id)
        started = StartedRequest(job, results)
        handle = RequestHandle(request_id, started, results, self._model.loop, self._model)
        engine = self._model.engine
        self._model.loop.post(lambda: started.begin(engine))
        return handle

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest completions of one prompt or several, `beam_width` of each.

        Args:
            prompts: a text, token ids, or a list of these.
            params: how beams are searched.
            lora_request: the adapter that all prompts are completed with; None for none.

        Returns:
            One output for each prompt, in their order, with its completions, best first.

        Raises:
            InvalidRequest: a prompt or parameter is invalid; the message names it, and nothing was computed.
            FunitelError: a step failed, or the LLM was closed.
        """
        self._check_generates()
        adapter = adapter_of(lora_request, is_enabled=self._takes_adapters)
        requests = beam_requests(self._encoder.prompts(prompts), params, self._model.limits, adapter)
        return self._model.run(lambda engine: search_beams(engine, requests, self._encoder.tokenizer))

    # For the classes beside it

    def prepared(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> CompletionJob:
        """Check one prompt and its parameters; raises as `start_request`."""
        self._check_generates()
        prompts = self._encoder.prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequest(f"prompt must be one text or its token ids, given {len(prompts)} prompts", "prompt")
        (job,) = self._jobs(prompts, sampling_params, lora_request)
        return job

    @property
    def loaded(self) -> LoadedModel:
        """The model, its engine and its limits."""
        return self._model

    def close(self) -> None:
        """Cancel the calls of other threads and free the memory; idempotent."""
        if self._pooling is not None:
            self._pooling.close()
        else:
            self._model.close()

    # Encoders

    def embed(
        self, prompts: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each text, of length 1.

        Args:
            prompts: a text or several.
            truncate_prompt_tokens: what is longer is cut on the right; None: it is an error.

        Raises:
            WrongTask: the model gives no vectors.
            InvalidRequest: a text is too long or empty.
        """
        return self._encodes("embeddings").embed(_texts(prompts), truncate_prompt_tokens)

    def classify(
        self,
        prompts: str | Sequence[str | tuple[str, str]],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the classes of each text, or pair of texts.

        Raises: as `embed`.
        """
        return self._encodes("classes").classify(_texts(prompts), truncate_prompt_tokens)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts go together: one with each of several, or the first of either list, and so on.

        That is the score of a cross-encoder, or the cosine of the vectors of an embedding model.

        Raises:
            InvalidRequest: two lists differ in length; and as `embed`.
        """
        first, second = _texts(data_1), _texts(data_2)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"data_1 must have one text or as many as data_2, given {len(first)} and {len(second)}", "data_1"
            )
        return self._encodes("scores").score(list(zip(first, second, strict=True)), truncate_prompt_tokens)

    def _encodes(self, what: str) -> LoadedEncoder:
        if self._pooling is None:
            raise WrongTask(f"this model generates text; it gives no {what}")
        return self._pooling

    def _check_generates(self) -> None:
        if self._pooling is not None:
            raise WrongTask("this model does not generate text: it is an encoder")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | None,
    ) -> list[RequestOutput]:
        model = self._model
        jobs = self._jobs(prompts, sampling_params, lora_request)
        with CompletionProgress(sum(job.params.n for job in jobs), is_shown=use_tqdm) as progress:
            return model.loop.run(run_jobs(model.engine, jobs, progress), progress.show)

    def _jobs(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        lora_request: LoRARequest | None,
    ) -> list[CompletionJob]:
        """Pair prompts with their parameters and check them."""
        each = params_for(self._default_params if sampling_params is None else sampling_params, len(prompts))
        adapter = adapter_of(lora_request, is_enabled=self._takes_adapters)
        limits, vocab_size, banned = self._model.limits, self._model.vocab_size, self._encoder.banned_tokens
        return [
            CompletionJob.of(index, prompt, params, limits, vocab_size, banned(params.bad_words), adapter)
            for index, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]


def _texts(given: Any) -> list[Any]:
    """A list of texts or pairs; a single one becomes a list of one."""
    texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else None
    if texts is None:
        raise InvalidRequest(f"prompts must be a text or a list of texts, given {given!r}", "prompts")
    for place, text in enumerate(texts):
        is_pair = isinstance(text, tuple) and len(text) == 2 and all(isinstance(each, str) for each in text)
        if not (isinstance(text, str) and text) and not is_pair:
            raise InvalidRequest(f"prompt {place} must be a text, given {text!r}", "prompts")
    return texts


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
