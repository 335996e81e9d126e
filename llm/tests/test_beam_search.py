"""`LLM.beam_search` against transformers' own beam search."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from funitel.llm import LLM, BeamSearchParams, FunitelError, InvalidRequest, SamplingParams
from funitel_testing.beam_oracle import BeamOracle, some_prompts, with_ends
from funitel_testing.tiny import byte_tokenizer
from funitel_testing.zoo import ZOO

MAX_TOKENS, POOL_TOKENS = 12, 4000
PROMPTS = some_prompts(20, 200)
# A random model takes any token now and then: with so many that end, beams end early and late.
ENDS = list(range(100, 130))


def exactly(folder: Path, **options: Any) -> LLM:
    """As transformers computes it, in blocks so small that beams part within and between them."""
    chosen = {"num_threads": 1, "block_size": 4, "dtype": "float32", "max_batch_total_tokens": POOL_TOKENS}
    return LLM(folder, **(chosen | options))


@pytest.fixture(scope="module")
def ending_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_ends(model, tmp_path_factory.mktemp("ending") / "model", ENDS)


@pytest.fixture(scope="module")
def ending(ending_model: Path) -> Iterator[tuple[LLM, BeamOracle]]:
    with exactly(ending_model) as llm:
        yield llm, BeamOracle(ending_model)


def check(llm: LLM, oracle: BeamOracle, prompts: list[list[int]], params: BeamSearchParams) -> list[int]:
    """Compare all beams of all prompts; returns their lengths."""
    lengths = []
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        wanted = oracle.search(
            prompt,
            num_beams=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        assert [each.tokens[len(prompt) :] for each in output.sequences] == [each.ids for each in wanted]
        assert [each.score for each in output.sequences] == pytest.approx([each.score for each in wanted], abs=1e-4)
        lengths += [len(each.ids) for each in wanted]
    return lengths


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_those_of_transformers(
    ending: tuple[LLM, BeamOracle], width: int, length_penalty: float, early_stopping: Any
) -> None:
    lengths = check(
        *ending,
        PROMPTS,
        BeamSearchParams(
            beam_width=width, max_tokens=MAX_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping
        ),
    )
    assert len(set(lengths)) > 1


def test_beams_that_never_end_have_all_their_tokens(model: Path) -> None:
    with exactly(model) as llm:
        lengths = check(llm, BeamOracle(model), PROMPTS[:5], BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS))
    assert set(lengths) == {MAX_TOKENS}


def test_beams_that_ignore_the_end_token(ending: tuple[LLM, BeamOracle], model: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    check(ending[0], BeamOracle(model), PROMPTS[:5], params)


def test_beams_preempted_for_want_of_blocks_are_the_same(ending_model: Path, ending: tuple[LLM, BeamOracle]) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=40, length_penalty=2.0, early_stopping="never")
    prompts = some_prompts(6, 200, seed=2)
    with exactly(ending_model, max_total_tokens=64, max_batch_total_tokens=256, max_batch_prefill_tokens=64) as llm:
        check(llm, ending[1], prompts, params)
        scheduler = llm._model.engine._scheduler
        assert scheduler.num_preempted > 0
        assert scheduler.blocks.num_used == 0


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_beams_of_a_model_with_recurrent_layers(tmp_path: Path, name: str) -> None:
    ZOO[name].save(tmp_path / "zoo")
    byte_tokenizer().save(str(tmp_path / "zoo" / "tokenizer.json"))
    folder = with_ends(tmp_path / "zoo", tmp_path / "model", [5, 6])
    with exactly(folder) as llm:
        check(llm, BeamOracle(folder), PROMPTS[:6], BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS))
        states = llm._model.engine._scheduler.blocks.states
        assert states is not None
        assert states.num_used == 0


def test_company_changes_nothing(ending: tuple[LLM, BeamOracle]) -> None:
    llm, _ = ending
    sampling = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    alone = llm.generate(PROMPTS[:4], sampling, use_tqdm=False)
    params = BeamSearchParams(beam_width=4, max_tokens=30)
    searched = llm.beam_search(PROMPTS, params)
    with ThreadPoolExecutor(2) as threads:
        searching = threads.submit(llm.beam_search, PROMPTS, params)
        generating = threads.submit(llm.generate, PROMPTS[:4], sampling, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in generating.result()] == [
            each.outputs[0].token_ids for each in alone
        ]
        assert [[s.tokens for s in each.sequences] for each in searching.result()] == [
            [s.tokens for s in each.sequences] for each in searched
        ]


def test_a_completion_says_its_text_its_probability_and_why_it_ended(ending: tuple[LLM, BeamOracle]) -> None:
    llm, _ = ending
    [output] = llm.beam_search("Hi", BeamSearchParams(beam_width=2, max_tokens=5))
    best = output.sequences[0]
    assert best.text.startswith("Hi") or "Hi" in best.text
    assert best.cum_logprob == pytest.approx(sum(best.logprobs))
    assert best.score == pytest.approx(best.cum_logprob / len(best.logprobs))
    assert best.finish_reason == ("stop" if best.tokens[-1] in ENDS else "length")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"beam_width": 0}, "beam_width must be an integer >= 1, given 0"),
        ({"beam_width": True}, "beam_width must be an integer >= 1, given True"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, given 0"),
        ({"temperature": 0.5}, "temperature must be 0 in a beam search, given 0.5"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number from -100 to 100, given nan"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or 'never', given 'always'"),
        ({"ignore_eos": 1}, "ignore_eos must be a bool, given 1"),
    ],
)
def test_bad_parameters(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | values))
    assert raised.value.message == says
    assert raised.value.param == next(iter(values))


@pytest.mark.parametrize(
    ("prompt", "width", "says"),
    [
        ([1] * 100, 128, "prompt 0: beam_width 128 needs 12900 tokens of the KV pool, which has 4000"),
        ([1], 129, "beam_width must be <= 128, given 129"),
        ([1] * 300, 2, "prompt 0: the prompt must have at most 255 tokens, given 300"),
    ],
)
def test_what_can_never_fit_is_refused(
    ending: tuple[LLM, BeamOracle], prompt: list[int], width: int, says: str
) -> None:
    with pytest.raises(FunitelError) as raised:
        ending[0].beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=100))
    assert raised.value.message == says
