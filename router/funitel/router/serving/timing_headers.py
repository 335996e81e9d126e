"""Response headers that say what an answer took."""

from collections.abc import Sequence

from funitel.router.core.request import Request
from funitel.router.serving.prepare import GenerationJob
from funitel.router.serving.run import Answer


def stream_headers(*jobs: GenerationJob) -> dict[str, str]:
    """Response headers of a streamed answer made by one job or several."""
    service = jobs[0].service
    return {
        "x-compute-type": service.settings.compute_type or service.engine.compute_type,
        "x-compute-characters": str(sum(len(request.inputs) for request in _distinct(jobs))),
    }


def answer_headers(job: GenerationJob, answer: Answer) -> dict[str, str]:
    """Response headers of a whole answer that one job gave, by TGI's definitions."""
    total = job.validation_seconds + answer.timings.queue_seconds + answer.timings.inference_seconds
    return {"x-compute-time": f"{total:.6f}"} | summed_headers([job], [answer])  # the one time in seconds


def summed_headers(jobs: Sequence[GenerationJob], answers: Sequence[Answer]) -> dict[str, str]:
    """Response headers of a whole answer made by several jobs: times in milliseconds and counts, summed over answers.

    The prompt of siblings counts once.
    """
    validation = sum(job.validation_seconds for job in jobs)
    queue = sum(answer.timings.queue_seconds for answer in answers)
    inference = sum(answer.timings.inference_seconds for answer in answers)
    num_tokens = sum(answer.finished.num_tokens for answer in answers)
    return stream_headers(*jobs) | {
        "x-total-time": _milliseconds(validation + queue + inference),
        "x-validation-time": _milliseconds(validation),
        "x-queue-time": _milliseconds(queue),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(num_tokens, 1)),
        "x-prompt-tokens": str(sum(len(request.input_ids) for request in _distinct(jobs))),
        "x-generated-tokens": str(num_tokens),
    }


def _distinct(jobs: Sequence[GenerationJob]) -> list[Request]:
    """One request for each prompt; siblings share theirs."""
    return list({id(job.request.input_ids): job.request for job in jobs}.values())


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
