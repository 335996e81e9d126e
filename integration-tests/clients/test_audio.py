"""Speech by OpenAI's and Hugging Face's Python clients, as they are."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from funitel_testing.servers import Server, serving
from funitel_testing.tiny_whisper import RATE, save_tiny_whisper, sound

openai = pytest.importorskip("openai", reason="install the extra `clients`")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="install the extra `clients`")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ONCE = {"logprob_threshold": -1000.0, "compression_ratio_threshold": 1000.0}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_tiny_whisper(tmp_path_factory.mktemp("whisper"))
    with serving(tmp_path_factory.mktemp("server"), "--model-id", str(folder), "--device", "cpu") as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


@pytest.fixture
def audio_client(whisper: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0) as client:
        yield client.audio


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("sound") / "speech.flac"
    soundfile.write(found, sound(6.0), RATE)
    return found


@pytest.mark.parametrize(("name", "encoding"), [("speech.m4a", "alac"), ("speech.webm", "libopus")])
def test_openai_transcription_of_what_phones_and_browsers_record(
    audio_client: Any, path: Path, tmp_path: Path, name: str, encoding: str
) -> None:
    recorded = tmp_path / name
    with av.open(recorded, "w") as file:
        stream = file.add_stream(encoding, rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.repeat(sound(6.0), 3)[None], format="fltp", layout="mono")
        frame.rate = 48_000
        file.mux([*stream.encode(frame), *stream.encode(None)])
    with recorded.open("rb") as content:
        answer = audio_client.transcriptions.create(file=content, model="whisper-1", language="en", extra_body=ONCE)
    assert answer.text
    assert answer.usage.seconds == 6


def test_openai_transcription_in_every_format(audio_client: Any, path: Path) -> None:
    with path.open("rb") as file:
        answer = audio_client.transcriptions.create(file=file, model="whisper-1", language="en", extra_body=ONCE)
    assert answer.text
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 6)
    verbose = audio_client.transcriptions.create(
        file=path,
        model="whisper-1",
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.0,
        extra_body=ONCE,
    )
    assert (verbose.language, verbose.duration) == ("english", 6.0)
    assert verbose.segments[0].start >= 0.0
    assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
    for kind in ("text", "srt", "vtt"):
        text = audio_client.transcriptions.create(
            file=path, model="whisper-1", language="en", response_format=kind, extra_body=ONCE
        )
        assert isinstance(text, str)
        assert text.strip()


def test_openai_translation_of_bytes(audio_client: Any) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound(3.0), RATE, format="WAV")
    answer = audio_client.translations.create(
        file=("speech.wav", buffer.getvalue()), model="whisper-1", prompt="A speech.", extra_body=ONCE
    )
    assert answer.text


def test_openai_streamed(audio_client: Any, path: Path) -> None:
    whole = audio_client.transcriptions.create(file=path, model="whisper-1", language="en", extra_body=ONCE)
    events = list(audio_client.transcriptions.create(file=path, model="whisper-1", language="en", stream=True))
    *deltas, done = events
    assert [event.type for event in events] == [*["transcript.text.delta"] * len(deltas), "transcript.text.done"]
    assert "".join(event.delta for event in deltas) == done.text == whole.text
    assert len(deltas) > 3


def test_openai_errors(audio_client: Any, path: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="word is not supported"):
        audio_client.transcriptions.create(
            file=path, model="whisper-1", response_format="verbose_json", timestamp_granularities=["word"]
        )
    with pytest.raises(openai.BadRequestError, match="must be a file in one of the formats"):
        audio_client.transcriptions.create(file=("a.wav", b"hello"), model="whisper-1")


def test_huggingface_hub_recognition(whisper: Server, path: Path) -> None:
    client = huggingface_hub.InferenceClient(model=whisper.url, timeout=60)
    answer = client.automatic_speech_recognition(path)
    assert answer.text
    assert client.automatic_speech_recognition(path.read_bytes()).text == answer.text
    assert client.automatic_speech_recognition(str(path)).text == answer.text
    timed = client.automatic_speech_recognition(path, extra_body={"return_timestamps": True})
    assert timed.text
    assert timed.chunks
