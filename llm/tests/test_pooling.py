"""Vectors, classes and scores of an offline encoder, beside those of transformers and sentence-transformers."""

from pathlib import Path

import pytest
import torch
import transformers

from funitel.llm import LLM, InvalidRequest, StartupError
from funitel.model_server.hub import resolve
from funitel.proto.errors import ContextTooLong, NotReady, WrongTask
from funitel_testing.tiny_encoders import save_tiny_encoder

TEXTS = ("the sea is deep", "a", "one two three " * 9, "the sea is deep", "birds fly over the sea")
PAIRS = (("the sea", "is deep"), ("a", "b c d"), ("one two three", "the sea is deep and wide"))


def tokens_of(folder: Path, *texts: str) -> dict[str, torch.Tensor]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    encoded = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)
    return {"input_ids": encoded["input_ids"], "token_type_ids": encoded["token_type_ids"]}


def classifier(folder: Path, **changes: object) -> transformers.PreTrainedModel:
    save_tiny_encoder("Bert", "ForSequenceClassification", folder, **changes)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    return model


def test_vectors_are_those_of_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer  # seconds to import

    name = "all-minilm-l6-v2"
    model = SentenceTransformer(str(resolve.resolve(name).folder), device="cpu")
    expected = torch.tensor(model.encode(list(TEXTS)))
    with LLM(name, device="cpu", num_threads=1, max_batch_prefill_tokens=16) as llm:  # several batches
        found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS)])
        assert torch.allclose(found, expected, atol=1e-4)
        several = llm.score(TEXTS[0], TEXTS)
        cosines = model.similarity(model.encode([TEXTS[0]]), model.encode(list(TEXTS)))[0]
        assert [each.outputs.score for each in several] == pytest.approx(cosines.tolist(), abs=1e-4)
        assert several[0].outputs.score == pytest.approx(1.0, abs=1e-5)
        (each,) = llm.score(["birds"], ["the sea"])
        assert -1 <= each.outputs.score <= 1
        (cut,) = llm.embed("the sea is deep", truncate_prompt_tokens=4)
        assert len(cut.prompt_token_ids) == 4
        with pytest.raises(WrongTask, match="this model does not classify"):
            llm.classify("a")
        with pytest.raises(WrongTask, match="does not generate text"):
            llm.generate("a")
    with pytest.raises(NotReady):
        llm.embed("a")


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_are_those_of_transformers(tmp_path: Path, num_labels: int) -> None:
    model = classifier(tmp_path, num_labels=num_labels)
    with LLM(tmp_path, device="cpu", num_threads=1) as llm:
        for given in (TEXTS, PAIRS):
            for text, output in zip(given, llm.classify(given), strict=True):
                inputs = tokens_of(tmp_path, *([text] if isinstance(text, str) else text))
                with torch.no_grad():
                    (logits,) = model(**inputs).logits
                expected = logits.sigmoid() if num_labels == 1 else logits.softmax(0)
                assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)
                assert output.outputs.num_classes == len(output.outputs.labels) == num_labels
                assert output.prompt_token_ids == tuple(inputs["input_ids"][0].tolist())
        if num_labels == 3:
            with pytest.raises(WrongTask, match="scores need a model with one class; this one has 3"):
                llm.score("a", "b")


def test_scores_of_a_cross_encoder_are_those_of_transformers(tmp_path: Path) -> None:
    model = classifier(tmp_path, num_labels=1)
    firsts, seconds = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]
    with LLM(tmp_path, device="cpu", num_threads=1) as llm:
        for given in (firsts, firsts[0]):
            pairs = zip(firsts if isinstance(given, list) else [given] * 3, seconds, strict=True)
            with torch.no_grad():
                expected = [model(**tokens_of(tmp_path, *pair)).logits.sigmoid().item() for pair in pairs]
            found = [output.outputs.score for output in llm.score(given, seconds)]
            assert found == pytest.approx(expected, abs=1e-4)
        with pytest.raises(InvalidRequest, match="data_1 must have one text or as many as data_2, given 2 and 3"):
            llm.score(firsts[:2], seconds)
        with pytest.raises(WrongTask, match="this model does not embed"):
            llm.embed("a")
        assert llm.classify([]) == []


def test_wrong_texts_are_named(tmp_path: Path) -> None:
    save_tiny_encoder("Bert", "Model", tmp_path)
    with LLM(tmp_path, device="cpu", num_threads=1) as llm:
        for given, message in (
            (3, "prompts must be a text or a list of texts, given 3"),
            (["a", ""], "prompt 1 must be a text, given ''"),
            ([None], "prompt 0 must be a text, given None"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                llm.embed(given)  # type: ignore[arg-type]
            assert caught.value.message == message
        with pytest.raises(ContextTooLong, match="prompt 1 must have at most [0-9]+ tokens, given [0-9]+"):
            llm.embed(["a", "a " * 2000])
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be an integer within 1"):
            llm.embed("a", truncate_prompt_tokens=0)
    with pytest.raises(StartupError, match="num_shard must be 1 for an encoder, given 2"):
        LLM(tmp_path, num_shard=2)


def test_a_model_that_generates_gives_no_vectors(llm: LLM) -> None:
    for call in (llm.embed, llm.classify, lambda text: llm.score(text, text)):
        with pytest.raises(WrongTask, match="this model generates text; it gives no"):
            call("a")
