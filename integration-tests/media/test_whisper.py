"""Whisper through the whole server: texts, languages and times equal those of transformers."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from funitel_testing.clients import client_of
from funitel_testing.servers import PLAIN, Server
from funitel_testing.sound_files import fields_of, flac, silent_mp3, wav
from funitel_testing.soundness import refusal_of
from funitel_testing.whisper_models import LANGUAGE_NAMES, RATE, Heard, WhisperOracle, save_tiny_whisper, sound

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
UNTIMED = ("json", "text")  # formats for which a sound of one window is written down without times
TIME_ERROR = 0.011  # seconds, by which times may differ: they are written with two or three digits
SHORT = [sound(4, 0), sound(3, 1), sound(12, 2), sound(3, 3)]
WINDOW = sound(30, 1)
LONG = sound(47, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Whisper."""
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def oracle_of(model: Path) -> WhisperOracle:
    """What transformers makes of sounds."""
    return WhisperOracle(model)


@pytest.fixture
def server(launch: Any, model: Path) -> Server:
    running: Server = launch("--model-id", str(model), "--dtype", "float32")
    return running


def ask(
    server: Server, samples: np.ndarray | bytes, task: str = "transcriptions", name: str = "sound.wav", **fields: Any
) -> httpx.Response:
    """Send a sound as clients do."""
    content = samples if isinstance(samples, bytes) else wav(samples)
    return httpx.post(
        f"{server.url}/v1/audio/{task}",
        files={"file": (name, content, "application/octet-stream")},
        data={"model": "any"} | fields_of(**fields),
        timeout=300,
        verify=PLAIN,
    )


def answer_of(server: Server, samples: np.ndarray | bytes, task: str = "transcriptions", **fields: Any) -> Any:
    """The record that came back."""
    answer = ask(server, samples, task, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    return answer.json()


def text_of(server: Server, samples: np.ndarray | bytes, task: str = "transcriptions", **fields: Any) -> str:
    """The text that came back, without the space it may begin with."""
    text: str = answer_of(server, samples, task, **fields)["text"]
    return text.strip()


def times_of(heard: Heard) -> list[tuple[float, float, str]]:
    """Segments that say something."""
    return [(begin, end, text.strip()) for begin, end, text in heard.segments if text.strip()]


def assert_segments(found: list[tuple[float, float, str]], expected: list[tuple[float, float, str]]) -> None:
    assert [text for _, _, text in found] == [text for _, _, text in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=TIME_ERROR)


def segments_of(answer: dict[str, Any]) -> list[tuple[float, float, str]]:
    """Those of a verbose answer that say something."""
    found = [(each["start"], each["end"], each["text"].strip()) for each in answer["segments"]]
    return [each for each in found if each[2]]


# Equal to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", [None, "de", "fr"])
def test_one_window(language: str | None, server: Server, oracle_of: WhisperOracle) -> None:
    fields = {} if language is None else {"language": language}
    expected = [oracle_of.hear(each, language=language, is_timed=False).text.strip() for each in SHORT]
    assert len(set(expected)) == len(SHORT), "the oracle hears no difference"
    assert [text_of(server, each, **fields) for each in SHORT] == expected


def test_one_window_with_times(server: Server, oracle_of: WhisperOracle) -> None:
    heard = oracle_of.hear(WINDOW)
    answer = answer_of(server, WINDOW, response_format="verbose_json")
    assert answer["text"].strip() == heard.text.strip()
    assert_segments(segments_of(answer), times_of(heard))


@pytest.mark.parametrize(("seconds", "seed"), [(47, 2), (75, 5)])
def test_several_windows(seconds: int, seed: int, server: Server, oracle_of: WhisperOracle) -> None:
    samples = sound(seconds, seed)
    heard = oracle_of.hear(samples)
    assert heard.text.strip()
    assert max(begin for begin, _, _ in heard.segments) > 30, "the second window says nothing"
    assert text_of(server, samples) == heard.text.strip()
    answer = answer_of(server, samples, response_format="verbose_json")
    assert answer["text"].strip() == heard.text.strip()
    assert_segments(segments_of(answer), times_of(heard))
    assert answer["duration"] == pytest.approx(seconds, abs=0.1)


def test_languages_are_detected(server: Server, oracle_of: WhisperOracle) -> None:
    expected = [oracle_of.hear(each, is_timed=False).language for each in SHORT]
    assert len(set(expected)) > 1, "the oracle hears one language"
    for samples, code in zip(SHORT, expected, strict=True):
        found = answer_of(server, samples, response_format="verbose_json")["language"]
        assert found in (code, LANGUAGE_NAMES[code])


def test_a_language_may_be_given_by_code_or_name(server: Server) -> None:
    german = text_of(server, SHORT[0], language="de")
    assert german != text_of(server, SHORT[0], language="zh")
    by_name = ask(server, SHORT[0], language="german")
    if by_name.status_code == 200:
        assert by_name.json()["text"].strip() == german
    else:
        assert "language" in refusal_of(by_name)
    verbose = answer_of(server, SHORT[0], language="de", response_format="verbose_json")
    assert verbose["language"] in ("de", "german")


def test_translations(server: Server, oracle_of: WhisperOracle) -> None:
    for samples in (SHORT[0], SHORT[2]):
        expected = oracle_of.hear(samples, task="translate", is_timed=False).text.strip()
        assert text_of(server, samples, "translations") == expected
    heard = oracle_of.hear(LONG, task="translate")
    assert text_of(server, LONG, "translations") == heard.text.strip()
    verbose = answer_of(server, LONG, "translations", response_format="verbose_json")
    assert_segments(segments_of(verbose), times_of(heard))
    assert verbose.get("task", "translate") == "translate"


def test_a_prompt_comes_before(server: Server, oracle_of: WhisperOracle) -> None:
    heard = oracle_of.hear(SHORT[0], language="en", is_timed=False, prompt="hello there")
    without = oracle_of.hear(SHORT[0], language="en", is_timed=False)
    assert heard.text != without.text, "the oracle takes no notice"
    assert text_of(server, SHORT[0], language="en", prompt="hello there") == heard.text.strip()


async def test_sounds_at_once_are_as_alone(server: Server) -> None:
    sounds = [*SHORT, LONG, WINDOW]
    alone = [text_of(server, each) for each in sounds]
    async with client_of(server.url) as client:

        async def one(samples: np.ndarray) -> str:
            files = {"file": ("sound.wav", wav(samples), "audio/wav")}
            answer = await client.post("/v1/audio/transcriptions", files=files, data={"model": "any"})
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["text"]
            return text.strip()

        assert await asyncio.gather(*map(one, sounds * 2)) == alone * 2


# Files ------------------------------------------------------------------------------------------------------------


def test_the_same_samples_in_other_files(server: Server) -> None:
    samples = SHORT[0]
    expected = text_of(server, samples)
    files = {
        "flac": flac(samples),
        "int24": wav(samples, kind="int24"),
        "float32": wav(samples, kind="float32"),
        "two channels": wav(np.stack([samples, samples], 1)),
    }
    for name, content in files.items():
        assert text_of(server, content) == expected, name
    assert text_of(server, files["flac"], language="de") == text_of(server, samples, language="de")
    assert ask(server, files["flac"], name="misnamed.mp3").json()["text"].strip() == expected


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate: int, server: Server) -> None:
    samples = np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate).astype(np.float32) * 0.5
    answer = answer_of(server, wav(samples, rate), response_format="verbose_json")
    assert answer["duration"] == pytest.approx(2, abs=0.05)


def test_silence_of_an_mp3(server: Server, oracle_of: WhisperOracle) -> None:
    silence = np.zeros(RATE, np.float32)
    expected = oracle_of.hear(silence, is_timed=False).text.strip()
    assert text_of(server, silence) == text_of(server, silent_mp3(42)) == expected


@pytest.mark.parametrize("samples", [1, 100, 479999, 480000, 480001])
def test_lengths_at_the_edges_of_a_window(samples: int, server: Server) -> None:
    answer = answer_of(server, sound(31, 9)[:samples], response_format="verbose_json")
    assert answer["duration"] == pytest.approx(samples / RATE, abs=0.02)
    assert isinstance(answer["text"], str)


# Forms of the answer ----------------------------------------------------------------------------------------------


def test_json_and_text(server: Server) -> None:
    record = answer_of(server, SHORT[0], response_format="json")
    plain = ask(server, SHORT[0], response_format="text")
    assert plain.status_code == 200, plain.text
    assert plain.headers["content-type"].startswith("text/plain")
    assert plain.text.strip() == record["text"].strip() == text_of(server, SHORT[0])


@pytest.mark.parametrize("samples", [WINDOW, LONG, SHORT[2]], ids=["window", "long", "short"])
def test_verbose_json(samples: np.ndarray, server: Server) -> None:
    answer = answer_of(server, samples, response_format="verbose_json", timestamp_granularities=["segment"])
    assert answer.get("task", "transcribe") == "transcribe"
    assert answer["duration"] == pytest.approx(len(samples) / RATE, abs=0.05)
    segments = answer["segments"]
    assert segments
    assert [each["id"] for each in segments] == list(range(len(segments)))
    previous = 0.0
    for each in segments:
        assert previous - TIME_ERROR <= each["start"] <= each["end"] + TIME_ERROR
        previous = each["start"]
        assert each["seek"] >= 0
        assert all(isinstance(token, int) for token in each["tokens"])
        assert each["temperature"] == 0
        assert each["avg_logprob"] <= 0
        assert each["compression_ratio"] > 0
        assert 0 <= each["no_speech_prob"] <= 1
    assert "".join(each["text"] for each in segments).strip() == answer["text"].strip()


CLOCK = r"(?:(\d\d):)?(\d\d):(\d\d)[.,](\d\d\d)"  # WebVTT, as OpenAI writes it, has hours only where there are some
CUE = re.compile(rf"{CLOCK} --> {CLOCK}")


def seconds_of(hours: str | None, minutes: str, seconds: str, thousandths: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + int(thousandths) / 1000


def cues_of(text: str) -> list[tuple[float, float, str]]:
    """Cues of subtitles; of SRT their numbers are looked at."""
    cues = []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0] == "WEBVTT":
            continue
        if lines[0].isdigit():
            assert int(lines.pop(0)) == len(cues) + 1
        match = CUE.fullmatch(lines[0])
        assert match, lines[0]
        cues.append((seconds_of(*match.groups()[:4]), seconds_of(*match.groups()[4:]), "\n".join(lines[1:]).strip()))
    return cues


@pytest.mark.parametrize("samples", [WINDOW, LONG], ids=["window", "long"])
@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles(kind: str, samples: np.ndarray, server: Server) -> None:
    answer = ask(server, samples, response_format=kind)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/")
    if kind == "vtt":
        assert answer.text.startswith("WEBVTT\n\n")
        assert not re.search(r"\d\d:\d\d,\d\d\d", answer.text)
    else:
        assert re.match(r"1\n\d\d:\d\d:\d\d,\d\d\d --> ", answer.text), answer.text[:80]
    verbose = answer_of(server, samples, response_format="verbose_json")
    assert_segments([cue for cue in cues_of(answer.text) if cue[2]], segments_of(verbose))


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Events of a stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("samples", [SHORT[0], LONG], ids=["short", "long"])
@pytest.mark.parametrize("task", ["transcriptions", "translations"])
def test_streams(task: str, samples: np.ndarray, server: Server) -> None:
    whole = answer_of(server, samples, task)["text"]
    events = events_of(ask(server, samples, task, stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "transcript.text.delta"]
    least = 2 if samples is LONG else 4  # pieces: segments of a sound of several windows, tokens of a short one
    assert len(deltas) >= least, "it came in one piece"
    assert events[-1]["type"] == "transcript.text.done"
    assert {event["type"] for event in events[:-1]} == {"transcript.text.delta"}
    assert "".join(deltas).strip() == events[-1]["text"].strip() == whole.strip()
    assert not re.search(r"<\|[^|]*\|>", whole), "a control token is shown"


# What goes wrong --------------------------------------------------------------------------------------------------


async def test_a_killed_shard_changes_nothing(server: Server) -> None:
    sounds = [sound(150, 4), sound(150, 5), LONG, WINDOW]
    expected = [text_of(server, each) for each in sounds]
    returns = server.metrics().get("funitel_replica_returns_total", 0)
    async with client_of(server.url) as client:

        async def one(samples: np.ndarray) -> str:
            files = {"file": ("sound.wav", wav(samples), "audio/wav")}
            answer = await client.post("/v1/audio/transcriptions", files=files, data={"model": "any"})
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["text"]
            return text.strip()

        asking = [asyncio.create_task(one(each)) for each in sounds]
        await asyncio.to_thread(server.wait_steps, 10)
        os.kill(server.shard_pids()[0], signal.SIGKILL)
        assert not all(task.done() for task in asking), "it was killed too late"
        assert await asyncio.gather(*asking) == expected
    assert server.metrics()["funitel_replica_returns_total"] == returns + 1


WRONG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "language": ({"language": "tlh"}, "language"),
    "language of another kind": ({"language": "<|de|>"}, "language"),
    "form": ({"response_format": "xml"}, "response_format"),
    "temperature below 0": ({"temperature": -1}, "temperature"),
    "temperature that is no number": ({"temperature": "hot"}, "temperature"),
    "infinite temperature": ({"temperature": "inf"}, "temperature"),
    "granularity": ({"response_format": "verbose_json", "timestamp_granularities": ["letter"]}, "timestamp_granular"),
    "stream": ({"stream": "maybe"}, "stream"),
    "long prompt": ({"prompt": "word " * 100_000}, "prompt"),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_wrong_fields(name: str, server: Server) -> None:
    fields, word = WRONG_FIELDS[name]
    answer = ask(server, SHORT[0], **fields)
    if name == "long prompt" and answer.status_code == 200:
        return  # OpenAI's own takes the end of it
    assert word in refusal_of(answer)


def test_wrong_files(server: Server) -> None:
    for content in (b"", b"RIFF", b"no sound at all" * 100, wav(SHORT[0])[:30]):
        assert "file" in refusal_of(ask(server, content)), content[:20]
    url = f"{server.url}/v1/audio/transcriptions"
    assert "file" in refusal_of(httpx.post(url, data={"model": "any"}, timeout=30, verify=PLAIN))
    as_json = httpx.post(url, json={"model": "any", "file": "a.wav"}, timeout=30, verify=PLAIN)
    assert as_json.status_code == 415
    assert "multipart/form-data, with the field `file`" in refusal_of(as_json)
    broken = {"content-type": "multipart/form-data; boundary=x"}
    refusal_of(httpx.post(url, content=b"--x\r\nnonsense", headers=broken, timeout=30, verify=PLAIN))
    refusal_of(httpx.post(url, content=b"", headers={"content-type": "multipart/form-data"}, timeout=30, verify=PLAIN))
    assert text_of(server, SHORT[0])
    assert "Traceback" not in server.log.read_text()


def test_what_a_whisper_does_not_do(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}),
        ("/generate_stream", {"inputs": "Hi"}),
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        ("/v1/messages", chat | {"model": "m"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ]
    for path, body in requests:
        line = refusal_of(httpx.post(f"{server.url}{path}", json=body, timeout=30, verify=PLAIN))
        assert re.search("audio|transcri|sound|model", line), (path, line)
    (listed,) = httpx.get(f"{server.url}/v1/models", timeout=30, verify=PLAIN).json()["data"]
    assert listed["id"]
    assert "Traceback" not in server.log.read_text()


def test_what_a_model_of_texts_does_not_do(launch: Any, tiny_model: Path) -> None:
    server: Server = launch("--model-id", str(tiny_model), "--dtype", "float32", "--max-batch-total-tokens", "4096")
    for task in ("transcriptions", "translations"):
        for fields in ({}, {"stream": True}, {"response_format": "srt"}):
            line = refusal_of(ask(server, SHORT[0], task, **fields))
            assert re.search("audio|transcri|sound|model", line), line
    answer = httpx.post(f"{server.url}/", content=wav(SHORT[0]), headers={"content-type": "audio/wav"}, verify=PLAIN)
    refusal_of(answer)
    assert "Traceback" not in server.log.read_text()
