"""Images in prompts: what steps are given of them, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.proto.errors import InvalidRequest, WrongState
from funitel.proto.step import MediaSpan, SequenceStart, WarmupLimits
from funitel_testing.executors import chunk, decode, load_executor, prefill, run_alone, start
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_vision import IMAGE_TOKEN, TINY_VISION, media_of

TEXT = list(range(40, 60))


class Recorder:
    """A decoder that keeps the spans of its steps."""

    def __init__(self, executor: Executor) -> None:
        self.spans: list[RowSpan] = []
        self._decoder = executor.runner.decoder
        executor.runner.decoder = self

    def __call__(self, batch: ForwardBatch, cache: Any) -> torch.Tensor | None:
        self.spans += batch.rows
        return self._decoder(batch, cache)


def served(folder: Path, name: str, *num_features: int, **settings: Any) -> tuple[Executor, Recorder]:
    """An executor of a family, with an image of each of some numbers of features encoded, keys `image 0`, `image 1`."""
    tiny = TINY_VISION[name]
    tiny.write(folder)
    executor = load_executor(folder, **settings)
    for seed, count in enumerate(num_features):
        executor.encode_media(media_of(tiny, count, seed)).result()
    return executor, Recorder(executor)


def spans_of(tokens: Sequence[int], name: str = "qwen2_vl") -> tuple[MediaSpan, ...]:
    """The images of a prompt, one for each run of placeholders."""
    edges = np.flatnonzero(np.diff(np.array(tokens) == IMAGE_TOKEN, prepend=0, append=0)).reshape(-1, 2).tolist()
    grid = TINY_VISION[name].grid
    return tuple(MediaSpan(b"image %d" % i, first, last - first, grid) for i, (first, last) in enumerate(edges))


def with_images(request_id: int, tokens: list[int], name: str = "qwen2_vl", **fields: Any) -> SequenceStart:
    return start(request_id, tokens, media=spans_of(tokens, name), **fields)


PROMPT = [*TEXT[:5], *[IMAGE_TOKEN] * 6, *TEXT[:3], *[IMAGE_TOKEN] * 6, *TEXT[:2]]


def positions_in_transformers(tokens: list[int], grids: Sequence[Sequence[int]]) -> tuple[np.ndarray, int]:
    model = TINY_VISION["qwen2_vl"].model().model
    ids = torch.tensor([tokens])
    positions, delta = model.get_rope_index(
        ids, (ids == IMAGE_TOKEN).int(), image_grid_thw=torch.tensor([[t, 2 * h, 2 * w] for t, h, w in grids])
    )
    return positions[:, 0].numpy(), int(delta)


def test_a_step_has_features_and_positions_of_three_axes(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen2_vl", 6, 6)
    assert executor.media is not None
    result = prefill(executor, 1, [with_images(1, PROMPT)])
    assert result.batch is not None
    decode(executor, [result.batch])
    first, second = recorder.spans
    positions, delta = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    assert first.rotary is not None
    assert second.rotary is not None
    assert first.rotary.tolist() == positions.tolist()
    assert second.rotary.tolist() == [[len(PROMPT) + delta]] * 3
    assert delta < 0
    assert [item.places.tolist() for item in first.media] == [list(range(5, 11)), list(range(14, 20))]
    for seed, item in enumerate(first.media):
        assert torch.equal(item.features, executor.media.features(b"image %d" % seed).features)
    assert (first.whole_spans, second.media) == ((), ())


def test_a_chunk_has_the_features_of_its_tokens_alone(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen3_vl", 6, 6)
    assert executor.media is not None
    result = prefill(executor, 1, [with_images(1, PROMPT, "qwen3_vl", chunk_len=8)])
    executor.drop_media([b"image 0", b"image 1"])  # a row keeps what it needs
    for count in (3, 1, 5, 5):
        assert result.batch is not None
        result = decode(executor, [result.batch], [chunk(1, count)])
    positions, _ = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    assert np.concatenate([span.rotary for span in recorder.spans], axis=1).tolist() == positions.tolist()
    places = [[item.places.tolist() for item in span.media] for span in recorder.spans]
    assert places == [[[5, 6, 7]], [[0, 1, 2]], [], [[2, 3, 4]], [[0, 1, 2]]]
    items = [item for span in recorder.spans for item in span.media]
    executor.encode_media(media_of(TINY_VISION["qwen3_vl"], 6, 0)).result()
    whole = executor.media.features(b"image 0")
    assert torch.equal(torch.cat([item.features for item in items[:2]]), whole.features)
    for layer, deep in enumerate(whole.deep):
        assert torch.equal(torch.cat([item.deep[layer] for item in items[:2]]), deep)
    rows = executor.batches.rows_of(1)
    assert rows[0].media is not None
    assert decode(executor, [result.batch]) if result.batch else False
    assert [item.features for item in rows[0].media.items] == [None, None]


def test_positions_of_a_resumed_sequence_go_on(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen2_vl", 6, 6)
    prefill(executor, 1, [with_images(1, PROMPT, output_ids=(50, 51, 52))])
    _, delta = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    (span,) = recorder.spans
    assert span.rotary is not None
    assert span.rotary[:, len(PROMPT) :].tolist() == [[len(PROMPT) + delta + i for i in range(3)]] * 3


def test_rows_with_states_have_media_too(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen3_5", 6, 6)
    prefill(executor, 1, [with_images(1, PROMPT, "qwen3_5", state_slot=2)])
    (span,) = recorder.spans
    positions, _ = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    assert span.rotary is not None
    assert (span.state_slot, span.rotary.tolist()) == (2, positions.tolist())
    assert [item.places.tolist() for item in span.media] == [list(range(5, 11)), list(range(14, 20))]


def test_text_alone_has_its_plain_positions(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen2_vl")
    prefill(executor, 1, [start(1, TEXT)])
    (span,) = recorder.spans
    assert (span.rotary, span.media, span.whole_spans) == (None, (), ())


def test_drafts_have_positions_too(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen2_vl", 6, 6, speculate=3)
    _, delta = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    run_alone(executor, with_images(1, PROMPT, speculate=3, max_new_tokens=40))
    assert any(len(span.tokens) > 1 for span in recorder.spans[1:])
    for span in recorder.spans[1:]:
        assert span.rotary is not None
        assert span.rotary.tolist() == [list(range(span.start + delta, span.end + delta))] * 3


def test_scored_prompts_in_pieces_have_media_in_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.model_server.executor.prompt_scores.max_scored_tokens", lambda vocab_size: 8)
    executor, recorder = served(tmp_path, "qwen2_vl", 6, 6)
    prefill(executor, 1, [with_images(1, PROMPT, prefill_logprobs=True)])
    places = [[item.places.tolist() for item in span.media] for span in recorder.spans]
    assert places == [[[5, 6, 7]], [[0, 1, 2], [6, 7]], [[0, 1, 2, 3]]]
    positions, _ = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    assert np.concatenate([span.rotary for span in recorder.spans], axis=1).tolist() == positions.tolist()


@pytest.mark.parametrize(("most", "ends"), [(8, [3, 11, 14]), (12, [12, 14]), (2, [2, 3, 11, 13, 14])])
def test_pieces_of_scored_prompts_cut_no_whole_span(
    most: int, ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.model_server.executor.prompt_scores.max_scored_tokens", lambda vocab_size: most)
    executor, recorder = served(tmp_path, "gemma3", 8)
    tokens = [*TEXT[:3], *[IMAGE_TOKEN] * 8, *TEXT[:3]]
    prefill(executor, 1, [start(1, tokens, media=(MediaSpan(b"image 0", 3, 8),), prefill_logprobs=True)])
    assert [span.end for span in recorder.spans] == ends
    assert [span.whole_spans for span in recorder.spans if span.media] == [((3, 11),)]


def test_whole_spans_are_runs_of_placeholders(tmp_path: Path) -> None:
    """Of Gemma 3, where one image may be several runs with text between them."""
    executor, recorder = served(tmp_path, "gemma3", 8)
    tokens = [*TEXT[:3], *[IMAGE_TOKEN] * 4, 50, 51, *[IMAGE_TOKEN] * 4, *TEXT[:3]]
    sequence = start(1, tokens, media=(MediaSpan(b"image 0", 3, 10),))
    result = prefill(executor, 1, [replace(sequence, chunk_len=8)])
    assert result.batch is not None
    decode(executor, [result.batch], [chunk(1, 5)])
    first, second = recorder.spans
    assert (first.whole_spans, second.whole_spans) == (((3, 7),), ((9, 13),))
    assert [item.places.tolist() for item in (*first.media, *second.media)] == [[3, 4, 5, 6], [1, 2, 3, 4]]
    assert first.rotary is None


def test_a_step_that_ends_within_a_whole_span_is_refused(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "gemma3", 8)
    tokens = [*TEXT[:3], *[IMAGE_TOKEN] * 8, *TEXT[:3]]
    sequence = start(1, tokens, media=(MediaSpan(b"image 0", 3, 8),))
    message = r"^request 1 has a step that ends at token 6, within the media tokens 3..10, which are computed together$"
    with pytest.raises(InvalidRequest, match=message):
        prefill(executor, 1, [replace(sequence, chunk_len=6)])
    result = prefill(executor, 1, [replace(sequence, chunk_len=3)])
    assert result.batch is not None
    with pytest.raises(InvalidRequest, match=message):
        decode(executor, [result.batch], [chunk(1, 3)])
    decode(executor, [result.batch], [chunk(1, 8)])
    assert [(span.start, span.end) for span in recorder.spans] == [(0, 3), (3, 11)]


def test_features_of_cached_tokens_are_not_needed(tmp_path: Path) -> None:
    executor, recorder = served(tmp_path, "qwen2_vl", 6, 6, prefix_caching=True)
    sequence = with_images(1, PROMPT)
    prefill(executor, 1, [sequence])
    executor.clear(1)
    executor.drop_media([b"image 0"])
    prefill(executor, 1, [replace(sequence, cache_len=12)])
    span = recorder.spans[-1]
    positions, _ = positions_in_transformers(PROMPT, [(1, 3, 2), (1, 3, 2)])
    assert span.rotary is not None
    assert span.rotary.tolist() == positions[:, 12:].tolist()
    assert [item.places.tolist() for item in span.media] == [[2, 3, 4, 5, 6, 7]]
    executor.clear(1)
    with pytest.raises(InvalidRequest, match="^media key 696d6167652030 is not encoded$"):
        prefill(executor, 1, [replace(sequence, cache_len=8)])


SPAN = MediaSpan(b"image 0", 5, 6, (1, 3, 2))
BAD: dict[str, tuple[tuple[MediaSpan, ...], str]] = {
    "outside": ((replace(SPAN, position=18),), "media at position 18 has 6 tokens, the prompt has 22"),
    "empty": ((replace(SPAN, length=0),), "media at position 5 has 0 tokens, the prompt has 22"),
    "text": ((replace(SPAN, position=11, length=3),), "media at position 11 has no placeholder token"),
    "part": (
        (replace(SPAN, length=4, grid=(1, 2, 2)),),
        "media at position 5 has 4 placeholder tokens, and 6 features",
    ),
    "overlap": (
        (SPAN, replace(SPAN, position=10, length=10)),
        "media at position 10 begins before the end 11 of the one before it",
    ),
    "order": ((replace(SPAN, position=14), SPAN), "media at position 5 begins before the end 20 of the one before it"),
    "grid": ((replace(SPAN, grid=(1, 3, 3)),), r"media at position 5 has the grid \[1, 3, 3\], and 6 tokens"),
    "no grid": ((replace(SPAN, grid=()),), r"media at position 5 has the grid \[\], and 6 tokens"),
    "unknown": ((replace(SPAN, key=b"\1\2"),), "media key 0102 is not encoded"),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return served(tmp_path_factory.mktemp("qwen"), "qwen2_vl", 6)[0]


@pytest.mark.parametrize("case", BAD)
def test_spans_that_do_not_fit_are_refused(case: str, qwen: Executor) -> None:
    media, message = BAD[case]
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        prefill(qwen, 1, [start(1, PROMPT, media=media)])
    assert len(qwen.batches.table) == 0
    prefill(qwen, 1, [start(1, PROMPT, media=(SPAN,))])
    qwen.clear()


def test_a_model_of_text_takes_no_media(tmp_path: Path) -> None:
    executor = load_executor(save_tiny("llama", tmp_path))
    with pytest.raises(InvalidRequest, match=r"^request 1 has media, this model takes text alone$"):
        prefill(executor, 1, [start(1, TEXT, media=(MediaSpan(b"x", 0, 2),))])
    with pytest.raises(InvalidRequest, match=r"^media: this model takes text alone$"):
        executor.encode_media(media_of(TINY_VISION["llava"], 16))
    executor.drop_media([b"x"])


def test_a_shard_that_sleeps_has_no_features(tmp_path: Path) -> None:
    executor, _ = served(tmp_path, "qwen2_vl", 6)
    assert executor.media is not None
    executor.sleep(1)
    assert len(executor.media.cache) == 0
    with pytest.raises(WrongState, match="the shard sleeps"):
        executor.encode_media(media_of(TINY_VISION["qwen2_vl"], 6))
    executor.wake()
    executor.encode_media(media_of(TINY_VISION["qwen2_vl"], 6)).result()
    assert len(executor.media.cache) == 1


def test_warmup_drops_features_for_a_router_that_begins_anew(tmp_path: Path) -> None:
    """It knows of none, and would never make room of them."""
    executor, _ = served(tmp_path, "qwen2_vl", 6, 6)
    assert executor.media is not None
    assert executor.media.cache.used_bytes
    executor.warmup([start(0, TEXT)], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=400))
    assert (len(executor.media.cache), executor.media.cache.used_bytes) == (0, 0)
