"""The class `AsyncLLM`: a model in this process that starts, pauses, stops and aborts requests."""

import asyncio
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Self

from funitel.llm.handle import RequestHandle
from funitel.llm.llm import LLM
from funitel.llm.lora import LoRARequest
from funitel.llm.outputs import RequestOutput
from funitel.llm.prompts import Prompt
from funitel.llm.sampling import SamplingParams
from funitel.proto.errors import InvalidRequest, NotReady

NOT_STARTED = "this AsyncLLM was not started: call `start`, or use `with` or `async with`"


class AsyncLLM:
    """One model, from `start` to `close`. Every method may be called from any thread, and beside any event loop.

    It runs the engine of an `LLM`, on that engine's thread: requests of both are batched together.
    """

    def __init__(self, model: Any = "smollm2-135m-instruct", **arguments: Any) -> None:
        """Take the arguments of `LLM`, or an `LLM` that is there already; nothing is loaded yet.

        Args:
            model: as `LLM` takes it; or an `LLM`, which `close` then leaves open.
            arguments: those of `LLM`.
        """
        if isinstance(model, LLM) and arguments:
            raise InvalidRequest(f"an LLM that is there takes no arguments, given {', '.join(arguments)}")
        self._llm: LLM | None = model if isinstance(model, LLM) else None
        self._is_shared = self._llm is not None
        self._make = partial(LLM, model, **arguments)
        self._starting = threading.Lock()
        self._is_closed = False
        # A handle that its caller has dropped is not kept here: dropping it aborts its request.
        self._handles: weakref.WeakValueDictionary[str, RequestHandle] = weakref.WeakValueDictionary()

    # Life

    def start(self) -> None:
        """Load the model, unless that was done.

        Raises:
            StartupError: an argument is invalid for the model or the machine.
            NotReady: it was closed.
        """
        with self._starting:
            if self._is_closed:
                raise NotReady("this AsyncLLM is closed")
            if self._llm is None:
                self._llm = self._make()

    def close(self) -> None:
        """Abort what runs and free the memory; idempotent. An `LLM` that was given stays open."""
        with self._starting:
            self._is_closed = True
            for handle in self.handles:
                handle.abort()
            if self._llm is not None and not self._is_shared:
                self._llm.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def llm(self) -> LLM:
        """The `LLM` that computes.

        Raises:
            NotReady: it was not started, or is closed.
        """
        if self._llm is None or self._is_closed:
            raise NotReady("this AsyncLLM is closed" if self._is_closed else NOT_STARTED)
        return self._llm

    # Requests

    def start_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestHandle:
        """Begin to complete a prompt, and return at once.

        Args:
            prompt: a text or token ids.
            sampling_params: the model's recommended sampling when not given; `output_kind` says what outputs have.
            request_id: a random one when not given.
            lora_request: the adapter that the prompt is completed with; None for none.

        Raises:
            InvalidRequest: the prompt or a parameter is invalid, or a request of this id has not ended.
            NotReady: the model is not loaded, or was closed.
        """
        request_id = uuid.uuid4().hex if request_id is None else request_id
        running = self._handles.get(request_id)
        if running is not None and not running.is_finished:
            raise InvalidRequest(f"request_id must be new, given {request_id!r} of a request that runs", "request_id")
        handle = self.llm.start_request(prompt, sampling_params, request_id=request_id, lora_request=lora_request)
        self._handles[request_id] = handle
        return handle

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; yield outputs as `output_kind` says, the last one with `finished`.

        Leaving early aborts the request. Raises as `start_request`, and what ended the request.
        """
        handle = await asyncio.to_thread(
            self.start_request, prompt, sampling_params, request_id=request_id, lora_request=lora_request
        )
        try:
            async for output in handle:
                yield output
        finally:
            handle.release()

    @property
    def handles(self) -> list[RequestHandle]:
        """The requests with a handle that is still referenced."""
        return list(self._handles.values())

    def abort(self, request_id: str) -> bool:
        """Abort a request by its id; whether there was one that had not ended."""
        handle = self._handles.get(request_id)
        if handle is None or handle.is_finished:
            return False
        handle.abort()
        return True

    def sync(self, handle: RequestHandle | None = None, timeout: float | None = None) -> bool:
        """Wait until a request, or every one, has ended or is paused; whether it is so within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        handles = self.handles if handle is None else [handle]
        return all(each.sync(None if deadline is None else max(0.0, deadline - time.monotonic())) for each in handles)
