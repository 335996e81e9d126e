"""The texts of the completions that a beam search returns, as the shards make those of any other."""

from funitel.proto.detokenizer import Codec, Detokenizer, StopMatcher
from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens
from funitel.router.core.beam_group import BeamEnding
from funitel.router.core.beam_search import Hypothesis
from funitel.router.core.request import Request


def completions_of(ending: BeamEnding, request: Request, codec: Codec) -> list[list[Generation]]:
    """The completions of a beam search, best first, each as the generations that a stream of its tokens would bring."""
    completions = [_generations(hypothesis, ending.request_id, request, codec) for hypothesis in ending.hypotheses]
    for generations in completions:
        generations[0].prefill_tokens, generations[0].prompt_top = ending.prefill_tokens, ending.prompt_top
    return completions


def _generations(hypothesis: Hypothesis, request_id: int, request: Request, codec: Codec) -> list[Generation]:
    detokenizer = Detokenizer(codec, request.input_ids)
    pieces = [detokenizer.push(token_id) for token_id in hypothesis.ids]
    pieces[-1] += detokenizer.flush()
    generations = []
    places = zip(hypothesis.ids, hypothesis.logprobs, pieces, hypothesis.tops, strict=True)
    for token_id, logprob, piece, top in places:
        is_special = codec.special_text(token_id) is not None
        tops = (_first(top, request.top_n_tokens),) if request.top_n_tokens else ()
        tokens = Tokens((token_id,), (logprob,), (piece,), (is_special,))
        generations.append(Generation(request_id, tokens, tops))
    generations[-1].finished = _finished(hypothesis, request, codec, detokenizer.text, pieces[-1])
    return generations


def _first(top: Tokens, count: int) -> Tokens:
    return Tokens(top.ids[:count], top.logprobs[:count], top.texts[:count], top.is_special[:count])


def _finished(hypothesis: Hypothesis, request: Request, codec: Codec, text: str, last_piece: str) -> GeneratedText:
    """How a completion ended, as a shard says it: a stop that ended it ends its text."""
    count, reason, last = len(hypothesis.ids), hypothesis.finish_reason, hypothesis.ids[-1]
    match = StopMatcher(request.stopping.stop_sequences).search(text, codec.special_text(last))
    stop_start = None if match is None else match.start
    if match is not None and reason is FinishReason.STOP_SEQUENCE:
        text = text[: match.end]
    beams = request.beams
    if reason is FinishReason.EOS_TOKEN and beams is not None and last in beams.stop_token_ids:
        stop_start = len(text.removesuffix(last_piece))
    return GeneratedText(text, count, reason, None, None if match is None else match.index, stop_start)
