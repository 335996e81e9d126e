"""Whisper served: the transcripts that transformers writes, on every audio route, whoever comes, goes or dies."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
import torch
from tokenizers import Tokenizer

from funitel_testing.clients import client_of
from funitel_testing.servers import Server, serving, wait_until
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_whisper import END, RATE, load_whisper, mel_of, save_tiny_whisper, sound

ROUTE = "/v1/audio/transcriptions"
# Random weights are sure of nothing: no transcript of theirs would pass the thresholds.
ONCE = {"logprob_threshold": "-1000", "compression_ratio_threshold": "1000"}
LONG_SECONDS = 71.7


def file_of(seconds: float, seed: int = 0, container: str = "WAV", rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    encoding = "FLOAT" if container == "WAV" else None
    soundfile.write(buffer, sound(seconds, seed), rate, format=container, subtype=encoding)
    return buffer.getvalue()


async def post(
    client: httpx.AsyncClient, content: bytes, route: str = ROUTE, *, path: str = "sound.wav", **fields: Any
) -> httpx.Response:
    return await client.post(route, files={"file": (path, content)}, data={"model": "whisper-1", **fields}, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model-id", str(folder), "--device", "cpu", "--num-shard", "2", "--max-audio-seconds", "300")
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


@pytest.fixture(scope="module")
def text_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = save_tiny("llama", tmp_path_factory.mktemp("text-model"))
    with serving(tmp_path_factory.mktemp("text"), "--model-id", str(model), "--device", "cpu") as running:
        yield running


def text_of(folder: Path, ids: list[int]) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(tokenizer.decode([each for each in ids if each < END]))


def by_transformers(folder: Path, seconds: float, seed: int = 0, **how: Any) -> list[dict[str, Any]]:
    """The segments of a sound of any length: tokens, start and end."""
    model = load_whisper(folder)
    is_long = seconds > 30
    mel = mel_of(folder, sound(seconds, seed), **({"truncation": False, "padding": "longest"} if is_long else {}))
    with torch.inference_mode():
        found = model.generate(
            mel,
            attention_mask=torch.ones(1, mel.shape[-1], dtype=torch.long),
            do_sample=False,
            num_beams=1,
            return_timestamps=True,
            return_segments=True,
            **how,
        )
    return [
        {"start": float(each["start"]), "end": float(each["end"]), "tokens": each["tokens"].tolist()}
        for each in found["segments"][0]
    ]


@pytest.mark.parametrize("how", [{"language": "de"}, {}])
async def test_long_files_are_written_as_transformers_writes_them(
    server: Server, folder: Path, how: dict[str, Any]
) -> None:
    expected = by_transformers(folder, LONG_SECONDS, task="transcribe", **how)
    assert len(expected) > 5
    async with client_of(server.url) as client:
        answer = await post(client, file_of(LONG_SECONDS), response_format="verbose_json", **ONCE, **how)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["duration"] == pytest.approx(LONG_SECONDS, abs=0.001)
    assert found["usage"] == {"type": "duration", "seconds": 72}
    assert found["task"] == "transcribe"
    assert len(found["segments"]) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found["segments"], expected, strict=True)):
        assert ours["id"] == number
        assert ours["tokens"] == theirs["tokens"][: len(ours["tokens"])]
        assert len(theirs["tokens"]) - len(ours["tokens"]) <= 1
        assert (ours["start"], ours["end"]) == pytest.approx((theirs["start"], theirs["end"]), abs=0.011)
        assert ours["text"] == text_of(folder, ours["tokens"])
        assert 0 <= ours["no_speech_prob"] <= 1
        assert ours["avg_logprob"] < 0
    assert found["text"] == "".join(each["text"] for each in found["segments"]).strip()


async def test_short_files_in_every_format_and_container(server: Server, folder: Path) -> None:
    model = load_whisper(folder)
    mel = mel_of(folder, sound(7.3))
    with torch.inference_mode():
        ids = model.generate(mel, do_sample=False, num_beams=1, language="de", task="transcribe")[0].tolist()
    expected = text_of(folder, ids).strip()
    async with client_of(server.url) as client:
        answers = [await post(client, file_of(7.3), language="German", **ONCE)]
        answers.append(await post(client, file_of(7.3), language="de", response_format="text", **ONCE))
        assert [each.status_code for each in answers] == [200, 200], answers[0].text
        assert answers[0].json() == {"text": expected, "usage": {"type": "duration", "seconds": 8}}
        assert answers[1].text == f"{expected}\n"
        assert answers[1].headers["content-type"].startswith("text/plain")
        flac = await post(client, file_of(7.3, container="FLAC"), path="a.bin", language="de", **ONCE)
        assert flac.status_code == 200
        for container in ("OGG", "MP3"):
            answer = await post(client, file_of(7.3, container=container), language="de", **ONCE)
            assert answer.status_code == 200
            assert answer.json()["text"]
        times = {
            kind: (await post(client, file_of(7.3), language="de", response_format=kind, **ONCE)).text
            for kind in ("srt", "vtt")
        }
    # Transformers goes on in the silence behind a short sound.
    segments = [each for each in by_transformers(folder, 7.3, language="de", task="transcribe") if each["start"] < 24.1]
    assert times["srt"].count(" --> ") == times["vtt"].count(" --> ") == len(segments)
    assert times["srt"].startswith("1\n00:00:")
    assert times["vtt"].startswith("WEBVTT\n\n00:")


async def test_the_prompt_and_the_task_reach_the_decoder(server: Server, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.token_to_id("<|startofprev|>"), *tokenizer.encode(" red fox").ids])
    with torch.inference_mode():
        model, mel = load_whisper(folder), mel_of(folder, sound(5.0))
        how: dict[str, Any] = {"do_sample": False, "num_beams": 1, "language": "fr"}
        prompted = model.generate(mel, task="transcribe", prompt_ids=prompt, **how)[0].tolist()
        translated = model.generate(mel, task="translate", **how)[0].tolist()
        plain = model.generate(mel, task="transcribe", **how)[0].tolist()
    async with client_of(server.url) as client:
        asked = {"language": "fr", **ONCE}
        answers = [
            (await post(client, file_of(5.0), prompt="red fox", **asked)).json()["text"],
            (await post(client, file_of(5.0), **asked)).json()["text"],
        ]
        english = await post(client, file_of(5.0), "/v1/audio/translations", response_format="verbose_json", **ONCE)
    assert answers[0] in text_of(folder, prompted)
    assert answers[1] == text_of(folder, plain).strip()
    assert answers[0] != answers[1]
    assert english.json()["task"] == "translate"
    assert text_of(folder, translated).strip()  # in the language that it was told, ours detects its own
    assert english.json()["language"] in ("english", "german", "french")


async def test_streams_say_what_whole_answers_say(server: Server) -> None:
    async with client_of(server.url) as client:
        for seconds in (7.3, LONG_SECONDS):
            whole = (await post(client, file_of(seconds), language="de", **ONCE)).json()
            events = await stream(client, file_of(seconds))
            *deltas, done = events
            assert len(deltas) > 3
            assert {each["type"] for each in deltas} == {"transcript.text.delta"}
            assert done == {"type": "transcript.text.done", "text": whole["text"], "usage": whole["usage"]}
            assert "".join(each["delta"] for each in deltas) == whole["text"]


async def test_a_stream_that_lost_its_client_is_followed_again(server: Server) -> None:
    form = {"files": {"file": ("a.wav", file_of(LONG_SECONDS))}, "data": {"language": "de", "stream": "true"}}
    headers = {"x-resume-seconds": "60", "x-request-id": "sound"}
    async with client_of(server.url) as client:
        whole = await stream(client, file_of(LONG_SECONDS))
        async with client.stream("POST", "/v1/audio/transcriptions", headers=headers, **form) as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines), (await anext(lines))[:6]] == ["id: 1", "data: "]
        text = (await client.get("/v1/requests/sound/stream", headers={"last-event-id": "1"})).text
    events = [event.partition("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    assert [number for number, _, _ in events] == [f"id: {number}" for number in range(2, len(whole) + 1)]
    assert [json.loads(event[6:]) for _, _, event in events] == whole[1:]


async def stream(client: httpx.AsyncClient, content: bytes, **fields: Any) -> list[dict[str, Any]]:
    answer = await post(client, content, language="de", stream="true", **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


async def test_company_changes_nothing(server: Server) -> None:
    async with client_of(server.url) as client:
        sounds = [(3.0 + 4 * number, number) for number in range(10)]

        async def one(seconds: float, seed: int) -> str:
            answer = await post(client, file_of(seconds, seed), language="fr", **ONCE)
            return str(answer.json()["text"])

        alone = [await one(*each) for each in sounds[:4]]
        together = await asyncio.gather(*(one(*each) for each in sounds))
    assert together[:4] == alone
    assert len(set(together)) == len(together)


async def test_temperatures_are_tried_until_a_transcript_passes(server: Server) -> None:
    async with client_of(server.url) as client:
        fails = await post(client, file_of(4.0), language="de", response_format="verbose_json", no_speech_threshold="1")
        silent = await post(
            client, file_of(4.0), language="de", no_speech_threshold="0", logprob_threshold="0", response_format="srt"
        )
        warm = await post(
            client, file_of(4.0), language="de", temperature="0.6", response_format="verbose_json", **ONCE
        )
    assert {each["temperature"] for each in fails.json()["segments"]} == {1.0}  # random weights pass at none
    assert (silent.status_code, silent.text) == (200, "")
    assert {each["temperature"] for each in warm.json()["segments"]} == {0.6}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "klingon"}, "language", "`language` must be one of the model's languages: de, en, fr"),
        ({"temperature": "2"}, "temperature", "temperature: must be less than or equal to 1. Given: '2'"),
        ({"temperature": "hot"}, "temperature", "temperature: must be a valid number"),
        ({"response_format": "docx"}, "response_format", "response_format: must be 'json', 'text'"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "word is not supported, segment is"),
        ({"timestamp_granularities[]": "segment"}, "response_format", "needs `response_format` verbose_json"),
        ({"include[]": "logprobs"}, "include", "include: is not supported: use `verbose_json`"),
        (
            {"chunking_strategy": '{"type": "server_vad"}'},
            "chunking_strategy",
            "long files are cut by their timestamps",
        ),
        ({"stream": "true", "response_format": "srt"}, "stream", "`stream` needs `response_format` json"),
        ({"stream": "true", "logprob_threshold": "-1"}, "stream", "`stream` takes no thresholds"),
    ],
)
async def test_bad_fields_are_refused_in_one_line(
    server: Server, fields: dict[str, str], param: str, message: str
) -> None:
    async with client_of(server.url) as client:
        answer = await post(client, file_of(1.0), **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


async def test_bad_files_are_refused_in_one_line(server: Server) -> None:
    async with client_of(server.url) as client:
        for content, message in (
            (b"no sound", "`file` must be a file in one of the formats WAV, FLAC"),
            (b"", "file: must not be empty"),
            (file_of(301.0), "`file` must be at most 300 s long (--max-audio-seconds)"),
            (file_of(1.0)[:40], "`file` "),
        ):
            answer = await post(client, content)
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "file"
        large = await post(client, bytes(25_100_000))
        assert large.status_code == 413
        assert "--max-audio-bytes" in large.json()["error"]["message"]
        missing = await client.post(ROUTE, files={"other": b""}, data={"model": "x"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
        assert (await post(client, file_of(1.0), language="de", **ONCE)).status_code == 200


async def test_models_of_other_tasks_say_so(server: Server, text_server: Server) -> None:
    async with client_of(server.url) as client:
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        for route, body in (("/generate", {"inputs": "x"}), ("/v1/chat/completions", chat), ("/v1/messages", chat)):
            answer = await client.post(route, json=body)
            assert 400 <= answer.status_code < 500
            assert "transcribes audio: send a file to /v1/audio/transcriptions" in answer.text
    async with client_of(text_server.url) as client:
        for route in (ROUTE, "/v1/audio/translations"):
            answer = await post(client, file_of(1.0), route)
            assert answer.status_code == 400
            assert "the model served here does not transcribe: it takes no audio files" in answer.text


async def test_a_file_alone_is_recognised_on_the_bare_address(server: Server, folder: Path) -> None:
    with torch.inference_mode():
        model, mel = load_whisper(folder), mel_of(folder, sound(5.0))
        ids = model.generate(mel, do_sample=False, num_beams=1, task="transcribe")[0].tolist()
    async with client_of(server.url) as client:
        for headers in ({}, {"content-type": "audio/wav"}, {"content-type": "application/octet-stream"}):
            answer = await client.post("/", content=file_of(5.0), headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"] == text_of(folder, ids).strip()
        refused = await client.post("/", json={"inputs": "no base64!"})
        assert refused.status_code == 422
        assert "`inputs` must be an audio file in base64" in refused.text


async def test_streams_and_long_files_survive_the_death_of_a_shard(folder: Path, tmp_path: Path) -> None:
    flags = ("--model-id", str(folder), "--device", "cpu", "--num-replicas", "2", "--max-batch-size", "4")
    with serving(tmp_path, *flags) as server:
        async with client_of(server.url) as client:
            contents = [file_of(100.0 + 10 * seed, seed) for seed in range(4)]
            expected = [(await stream(client, content))[-1]["text"] for content in contents]
            for attempt in range(4):  # until one runs a step there just then, and waits for no encoder
                tasks = [asyncio.create_task(stream(client, content)) for content in contents]
                await asyncio.sleep(0.6 + 0.3 * attempt)
                os.kill(server.shard_pids()[0], signal.SIGKILL)
                events = await asyncio.gather(*tasks)
                assert [each[-1].get("text") for each in events] == expected
                if server.metrics()["funitel_moved_total"]:
                    break
                wait_until(lambda: server.metrics()['funitel_replicas{state="serving"}'] == 2, 60)
        assert server.metrics()["funitel_moved_total"] > 0, "nothing ran on what died"
