"""Offline inference from Python, without a server: `LLM(...).generate([...], SamplingParams(...))`.

It runs the executor, scheduler and engine of the server in this process. See docs/offline.md.
"""

from funitel.proto.errors import FunitelError, InvalidRequest, StartupError
from funitel.proto.extras import requiring
from funitel.router.core.grammar import Grammar

with requiring("server", "funitel.llm"):
    from funitel.llm.async_llm import AsyncLLM
    from funitel.llm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from funitel.llm.handle import RequestHandle
    from funitel.llm.llm import LLM
    from funitel.llm.lora import LoRARequest
    from funitel.llm.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ScoringRequestOutput,
    )
    from funitel.llm.results import RequestState
    from funitel.llm.sampling import RequestOutputKind, SamplingParams
    from funitel.llm.steps import QueryResult, StepQueries

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "FunitelError",
    "Grammar",
    "InvalidRequest",
    "LoRARequest",
    "Logprob",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestState",
    "SamplingParams",
    "ScoringRequestOutput",
    "StartupError",
    "StepQueries",
    "QueryResult",
]
