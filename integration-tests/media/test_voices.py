"""Sounds in prompts, through the whole server: answers equal those of transformers, for every family."""

import asyncio
import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from funitel_testing.clients import client_of
from funitel_testing.servers import serving
from funitel_testing.sound_files import flac, silent_mp3
from funitel_testing.vision_models import IDS, VisionOracle, picture, save_vision, template_of
from funitel_testing.vision_requests import content_of as image_content
from funitel_testing.voice_models import VOICE_FAMILIES, Part, VoiceOracle, base64_of, content_of, save_voice
from funitel_testing.whisper_models import sound

MAX_TOKENS = 10
FLAGS = ("--dtype", "float32", "--max-batch-total-tokens", "8192", "--max-input-tokens", "2000", "--max-total-tokens")
QUESTIONS: list[list[Part]] = [
    ["What is said? ", sound(2.3)],
    [sound(1.15, 1), "between ", sound(3.0, 2), " and behind"],
    ["No sound at all."],
    ["Twice: ", sound(2.3), sound(2.3)],
]


@pytest.fixture(params=list(VOICE_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(family: str, tmp_path: Path) -> Path:
    """Folder of the small model of the family."""
    save_voice(family, tmp_path / "model")
    return tmp_path / "model"


async def ask(client: httpx.AsyncClient, content: list[dict[str, Any]], max_tokens: int = MAX_TOKENS) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "temperature": 0}
    return await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})


async def chat(client: httpx.AsyncClient, content: list[dict[str, Any]], num_prompt: int | None = None) -> list[int]:
    """Token ids of a greedy answer; the prompt has `num_prompt` tokens."""
    answer = await ask(client, content)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if num_prompt is not None:
        assert found["usage"]["prompt_tokens"] == num_prompt
    ids: list[int] = found["choices"][0]["token_ids"]
    return ids


async def test_answers_equal_transformers(family: str, model: Path, tmp_path: Path) -> None:
    """Alone and in company, twice: the second time from the caches."""
    oracle = VoiceOracle(family, model)
    expected = [oracle.generate(parts, MAX_TOKENS) for parts in QUESTIONS]
    assert len({tuple(ids) for ids in expected}) == len(expected)
    contents = [content_of(parts) for parts in QUESTIONS]
    counts = [oracle.inputs(parts)["input_ids"].shape[1] for parts in QUESTIONS]
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "2500") as server:
        async with client_of(server.url) as client:
            assert (await client.get("/info")).json()["modalities"] == ["text", "audio"]
            for content, count, ids in zip(contents, counts, expected, strict=True):
                assert await chat(client, content, count) == ids
            assert await asyncio.gather(*(chat(client, content) for content in contents)) == expected
            await check_notations(client, expected[0])
            await check_refusals(client, family)
            assert await chat(client, contents[1]) == expected[1]


async def check_notations(client: httpx.AsyncClient, expected: list[int]) -> None:
    """vLLM's parts, and other formats of the same samples."""
    text, samples = QUESTIONS[0]
    assert isinstance(text, str)
    assert not isinstance(samples, str)
    written = [f"data:audio/wav;base64,{base64_of(samples)}"]
    written.append(f"data:audio/flac;base64,{base64.b64encode(flac(samples)).decode()}")
    for url in written:
        for part in ({"url": url}, url):
            content = [{"type": "text", "text": text}, {"type": "audio_url", "audio_url": part}]
            assert await chat(client, content) == expected
    mp3 = {"data": base64.b64encode(silent_mp3()).decode(), "format": "mp3"}
    await chat(client, [{"type": "input_audio", "input_audio": mp3}])


async def check_refusals(client: httpx.AsyncClient, family: str) -> None:
    """One line that names the field, for each."""
    good = base64.b64decode(base64_of(sound(1.0)))
    bad: list[tuple[bytes, str]] = [
        (b"hello", "must be a file in one of the formats WAV, FLAC, OGG (Vorbis or Opus), MP3"),
        (b"", "must be a file in one of the formats"),
        (good[:44], "has no samples"),
        (good[:20], "cannot be decoded as WAV"),
    ]
    if family in ("qwen2_audio", "gemma4"):
        bad.append((base64.b64decode(base64_of(sound(30.1))), "must be at most 30 s long"))
        bad.append((base64.b64decode(base64_of(sound(0.01))), "has 160 samples at 16 kHz: too few for a feature"))
    for data, reason in bad:
        part = {"data": base64.b64encode(data).decode(), "format": "wav"}
        answer = await ask(client, [{"type": "text", "text": "?"}, {"type": "input_audio", "input_audio": part}])
        assert answer.status_code in (400, 422), answer.text
        message = answer.json()["error"]["message"]
        assert f"`messages.0.content.1.input_audio` {reason}" in message
        assert "\n" not in message
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    answer = await ask(client, [image])
    assert answer.status_code in (400, 422)
    assert "takes no images, only text and sounds" in answer.json()["error"]["message"]
    far = {"type": "audio_url", "audio_url": {"url": "http://localhost/a.wav"}}
    assert (await ask(client, [far])).status_code in (400, 422)


@pytest.mark.parametrize("family", ["voxtral"], indirect=True)
async def test_on_two_ranks_in_small_chunks(family: str, model: Path, tmp_path: Path) -> None:
    oracle = VoiceOracle(family, model)
    parts: list[Part] = ["Long: ", sound(31.0), " and short ", sound(1.0, 1)]
    chunks = ("--max-batch-prefill-tokens", "48", "--num-shard", "2")
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "2500", *chunks) as server:
        async with client_of(server.url) as client:
            expected = oracle.generate(parts, MAX_TOKENS)
            assert await chat(client, content_of(parts)) == expected
            small = content_of(QUESTIONS[0])
            assert await asyncio.gather(chat(client, content_of(parts)), chat(client, small)) == [
                expected,
                oracle.generate(QUESTIONS[0], MAX_TOKENS),
            ]


@pytest.mark.parametrize("family", ["qwen2_audio"], indirect=True)
async def test_preempted_and_killed_streams_say_the_same(family: str, model: Path, tmp_path: Path) -> None:
    tight = ("--max-batch-total-tokens", "700", "--max-input-tokens", "400", "--max-total-tokens", "500")
    contents = [content_of(parts) for parts in QUESTIONS]

    async def long(client: httpx.AsyncClient, content: list[dict[str, Any]]) -> list[int]:
        answer = await ask(client, content, 100)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    with serving(tmp_path, "--model-id", str(model), "--dtype", "float32", *tight) as server:
        async with client_of(server.url) as client:
            alone = [await long(client, content) for content in contents]
            asking = [asyncio.create_task(long(client, content)) for content in contents * 2]
            await asyncio.to_thread(server.wait_steps, 10)
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            assert await asyncio.gather(*asking) == alone * 2
            metrics = server.metrics()
        assert metrics["funitel_replica_returns_total"] == 1


async def test_gemma_4_takes_images_and_sounds_in_one_message(tmp_path: Path) -> None:
    tower = {**VOICE_FAMILIES["gemma4"].tower, "model_type": "gemma4_audio"}
    folder = save_vision("gemma4", tmp_path / "model", config={"audio_config": tower})
    template = template_of("<|image|>{% elif part.type == 'audio' %}<|audio|>")
    (folder / "chat_template.jinja").write_text(template)
    extractor = transformers.Gemma4AudioFeatureExtractor()
    settings = json.loads((folder / "processor_config.json").read_text())
    own = {"feature_size": extractor.feature_size, "sampling_rate": extractor.sampling_rate}
    (folder / "processor_config.json").write_text(json.dumps(settings | {"feature_extractor": own}))
    image, samples = picture(60, 40, 7), sound(1.3)
    heard = extractor([samples], return_tensors="pt")
    num_features = -(-int(heard["input_features_mask"].sum()) // 4)
    oracle = VisionOracle("gemma4", folder)
    run = f"<|audio>{'[IMG]' * num_features}<audio|>"  # its processor, which has no extractor here, refuses <|audio|>
    inputs = oracle.inputs(f"[user] See <|image|> and hear {run} well\n[assistant]", [image])
    inputs["input_ids"][inputs["input_ids"] == IDS["[IMG]"]] = IDS["<|audio|>"]
    inputs |= {name: heard[name] for name in ("input_features", "input_features_mask")}
    with torch.inference_mode():
        found = oracle.model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=256)
    expected = [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]
    content = [*image_content(["See ", image]), *content_of([" and hear ", samples, " well"])]
    with serving(tmp_path, "--model-id", str(folder), *FLAGS, "2500") as server:
        async with client_of(server.url) as client:
            assert (await client.get("/info")).json()["modalities"] == ["text", "image", "audio"]
            assert await chat(client, content, inputs["input_ids"].shape[1]) == expected
            assert await chat(client, content) == expected
            assert await chat(client, content[:2]) != expected
