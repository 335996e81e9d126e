"""Claims of the contract, and complaints about TGI, that tests of their own show: which ones."""

from dataclasses import dataclass

_API = "router/tests/api/native/test_generate.py::"
_OPS = "router/tests/api/test_operators.py::"
_PLATFORMS = "router/tests/api/platforms/test_sagemaker_vertex.py::"
_SSE = "router/tests/transport/test_sse.py::"
_ENGINE = "router/tests/engine/test_engine.py::"
_OPENAI = "router/tests/api/openai/test_chat.py::"
_SHARD = "model_server/tests/rpc/test_servicer.py::"
_EXECUTOR = "model_server/tests/executor/test_executor.py::"
_SAMPLER = "model_server/tests/sampling/test_sampler.py::"


@dataclass(frozen=True)
class Pointer:
    """A claim and the tests that show it, as `path::name`."""

    section: str
    claim: str
    tests: tuple[str, ...]


def _at(section: str, claim: str, *tests: str) -> Pointer:
    return Pointer(section, claim, tests)


# What no request to a sound, idle server shows.
ELSEWHERE = (
    _at("5.3", "best_of takes the highest mean logprob", f"{_API}test_best_of_returns_the_likeliest_and_the_others"),
    _at("5.7", "424 generation", f"{_API}test_an_error_before_the_first_token_has_its_own_status"),
    _at(
        "5.7",
        "429 overloaded",
        f"{_API}test_too_many_requests",
        f"{_ENGINE}test_too_many_requests_are_refused_and_room_comes_back",
    ),
    _at(
        "5.7",
        "503 healthcheck",
        f"{_OPS}test_while_starting_everything_is_503",
        f"{_OPS}test_health_is_that_of_the_shards",
    ),
    _at("5.8", "a keep-alive comment after 15 s", f"{_SSE}test_keep_alive_comments_fill_silence"),
    _at(
        "5.8", "an error in a stream is its last event", f"{_API}test_an_error_after_the_first_token_is_the_last_event"
    ),
    _at("5.10", "all permits or none", "router/tests/serving/test_prepare.py::test_collect_all_runs_all_or_none"),
    _at("7.5", "a failed step fails what ran", f"{_ENGINE}test_a_failed_step_fails_what_ran_and_nothing_later"),
    _at(
        "8.2",
        "penalties and warpers",
        f"{_SAMPLER}test_warpers_equal_transformers",
        f"{_SAMPLER}test_repetition_penalty_equals_transformers",
    ),
    _at("8.2", "watermark", f"{_SAMPLER}test_watermark_equals_transformers_and_follows_the_last_token"),
    _at("8.3", "prompt logprobs", f"{_EXECUTOR}test_prompt_logprobs_equal_transformers_however_chunked"),
    _at(
        "8.5",
        "whole characters in a stream",
        "model_server/tests/sequence/test_detokenizer.py::test_pieces_join_to_the_text_and_hold_whole_characters",
    ),
    _at("10.1", "why a batch joined", f"{_ENGINE}test_why_a_sequence_joins_running_ones_is_counted"),
    _at("10.1", "failures by cause", "router/tests/telemetry/test_metrics.py::test_failures_are_counted_by_kind"),
    _at("12", "the OpenAPI file", "router/tests/api/test_openapi.py::test_the_document_is_a_superset_of_tgis"),
)

# Contract 13 (by its number), and what the contract marks as a defect: the test of what we do instead.
COMPLAINTS = (
    _at("13.1", "health is not readiness", f"{_OPS}test_liveness_is_not_readiness"),
    _at("13.1", "nothing listens while loading", f"{_OPS}test_while_starting_everything_is_503"),
    _at("13.1", "health waits for the model thread", f"{_SHARD}test_health_answers_during_a_long_step"),
    _at(
        "13.2",
        "leaving does not cancel before a token",
        f"{_API}test_a_client_that_leaves_before_the_first_token_ends_its_sequence",
    ),
    _at("13.2", "cancellations are not counted", f"{_ENGINE}test_cancellations_are_counted"),
    _at("13.5", "one error kills everything", f"{_SHARD}test_an_exception_in_a_step_is_aborted_and_the_shard_lives_on"),
    _at("13.5", "health sees the last shard alone", f"{_ENGINE}test_health_reflects_every_rank"),
    _at("13.6", "hangs after a step that never ends", f"{_ENGINE}test_a_step_that_never_ends_is_a_failure"),
    _at(
        "13.12", "stop strings are missed between tokens", f"{_EXECUTOR}test_a_stop_across_tokens_is_found_and_located"
    ),
    _at("13.12", "the stop is in OpenAI's answers", f"{_OPENAI}test_the_stop_is_cut_and_never_shown_in_part"),
    _at("13.14", "stream errors arrive as 200", f"{_API}test_an_error_before_the_first_token_has_its_own_status"),
    _at("13.15", "logit_bias is unused", f"{_SAMPLER}test_logit_bias_equals_transformers"),
    _at(
        "13.16",
        "more tokens than asked for",
        "router/tests/serving/test_validation.py::test_a_long_answer_is_as_long_as_asked",
    ),
    _at(
        "13.17",
        "seeds depend on company",
        "integration-tests/test_seeds.py::test_seeded_samples_do_not_depend_on_company",
    ),
    _at("13.21", "keys are compared loosely and cover few routes", f"{_OPS}test_a_key_is_asked_for_where_work_is_done"),
    _at("13.22", "no metrics of statuses", f"{_OPS}test_answers_are_counted_by_route_and_status"),
    _at("13.24", "memory grows", "integration-tests/test_disconnects.py::test_two_hundred_clients_leave_nothing"),
    _at("13.25", "shards never become ready", f"{_ENGINE}test_shards_that_never_come_are_given_up"),
    _at(
        "5.3",
        "an incomplete character empties the text",
        "model_server/tests/sequence/test_detokenizer.py::test_an_incomplete_character_comes_out_at_the_end",
    ),
    _at(
        "5.7",
        "Vertex AI hides every cause",
        f"{_PLATFORMS}test_a_wrong_prediction_says_why",
        f"{_PLATFORMS}test_a_failed_prediction_keeps_its_status",
    ),
    _at("5.12", "Vertex AI ignores parameters", f"{_PLATFORMS}test_vertex_honours_every_parameter"),
    _at("7.5", "a failure reaches unrelated requests", f"{_ENGINE}test_a_refused_newcomer_costs_the_others_nothing"),
    _at("8.2", "padding counts as seen", f"{_EXECUTOR}test_company_does_not_change_the_tokens"),
    _at("10.1", "requests are counted twice", f"{_PLATFORMS}test_an_invocation_counts_once"),
    _at("10.1", "the pool's size never appears", "router/tests/telemetry/test_metrics.py::test_state"),
)
