"""The console's pages in a browser, against a real server."""

import json
import re
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import expect

from funitel_testing.browsing import COMPLETIONS, MODEL, OpenPage, ask, chunk, say, set_most_tokens
from funitel_testing.fleet import Fleet
from funitel_testing.servers import PLAIN

SECONDS = 60_000  # milliseconds that a launch may take
# Chat -------------------------------------------------------------------------------------------------------


def test_a_chat_streams_and_says_how_fast(open_page: OpenPage) -> None:
    page = open_page()
    set_most_tokens(page, 40)
    ask(page, "Hello")
    answer = page.get_by_label("Answer", exact=True)
    expect(answer.locator(".facts")).to_have_text(
        re.compile(r"first token .* · [\d.]+ tokens/s · \d+ \+ 40 tokens .* cut at max tokens")
    )
    assert answer.locator(".markdown").inner_text().strip()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_stopped_chat_ends_on_the_server_too(open_page: OpenPage, fleet: Fleet) -> None:
    page = open_page()
    set_most_tokens(page, 7000)
    ask(page, "Tell a very long story")
    page.get_by_label("Answer", exact=True).wait_for()
    assert len(fleet.get("/v1/requests")["data"]) == 1
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".facts")).to_have_text(re.compile("stopped"))
    deadline = time.monotonic() + 5
    while fleet.get("/v1/requests")["data"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fleet.get("/v1/requests")["data"] == []


def test_a_question_can_be_edited_and_an_answer_made_again(open_page: OpenPage) -> None:
    page = open_page()
    set_most_tokens(page, 8)
    sent: list[dict[str, Any]] = []
    page.on("request", lambda each: sent.append(each.post_data_json) if each.method == "POST" else None)
    ask(page, "First")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    ask(page, "Second")
    expect(page.get_by_label("Answer", exact=True)).to_have_count(2)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_role("textbox", name="Question").fill("Other")
    page.get_by_role("button", name="Ask again").click()
    expect(page.get_by_label("Answer", exact=True)).to_have_count(1)
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    asked = [[each["content"] for each in body["messages"] if each["role"] == "user"] for body in sent]
    assert asked == [["First"], ["First"], ["First", "Second"], ["Other"]]


def test_settings_reach_the_server_and_bad_ones_are_named(open_page: OpenPage) -> None:
    page = open_page()
    set_most_tokens(page, 9)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop strings, one a line").fill("END\nSTOP")
    page.get_by_label("JSON schema of the answer").fill("{")
    ask(page, "Hi")
    expect(page.get_by_role("alert")).to_have_text(re.compile("^JSON schema: "))
    page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    with page.expect_request(COMPLETIONS) as request:
        ask(page, "Hi")
    body = request.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["seed"], body["max_tokens"], body["stop"]) == (0.5, 7, 9, ["END", "STOP"])
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    page.get_by_label("JSON schema of the answer").fill("")
    page.get_by_label("Temperature").fill("-3")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "Hi")
    expect(page.get_by_role("alert")).to_have_text(re.compile("temperature"))


def test_an_answer_is_exported_as_programs_that_run(open_page: OpenPage, fleet: Fleet, tmp_path: Path) -> None:
    page = open_page()
    set_most_tokens(page, 5)
    page.get_by_label("Seed").fill("3")
    ask(page, "It's 'quoted'")
    page.get_by_role("button", name="Export").click()
    curl, python = (each.inner_text() for each in page.locator("dialog pre").all())
    assert curl.startswith(f"curl {fleet.url}/v1/chat/completions")
    compile(python, "exported", "exec")
    body = json.loads(curl.split("-d '", 1)[1].rstrip().removesuffix("'").replace("'\\''", "'"))
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, verify=PLAIN).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_probabilities_of_tokens_and_their_alternatives(open_page: OpenPage) -> None:
    page = open_page()
    set_most_tokens(page, 6)
    page.get_by_label("Probabilities of tokens").check()
    ask(page, "Hello")
    page.get_by_role("button", name="Probabilities").click()
    expect(page.locator("button.token")).to_have_count(6)
    page.locator("button.token").nth(2).click()
    expect(page.get_by_role("table", name="Alternatives of token 3").get_by_role("row")).to_have_count(6)


def test_two_models_answer_side_by_side(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_role("button", name="Compare with another model").click()
    set_most_tokens(page, 6)
    ask(page, "Hello")
    expect(page.get_by_label("Answer", exact=True)).to_have_count(2)
    expect(page.locator(".facts")).to_have_count(2)
    page.get_by_role("button", name="Close this conversation").first.click()
    expect(page.get_by_label("Answer", exact=True)).to_have_count(1)
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_label("Answer", exact=True)).to_have_count(0)


def test_tools_code_and_reasoning_are_shown(open_page: OpenPage) -> None:
    page = open_page()
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    say(
        page,
        chunk({"role": "assistant", "reasoning_content": "Let me *think*."}),
        chunk({"content": "# Plan\n\n```python\nprint(1 < 2)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}, finish_reason="tool_calls"),
    )
    ask(page, "Weather?")
    expect(page.locator(".call")).to_have_text('weather({"city":"Rome"})')
    expect(page.locator(".markdown pre code")).to_have_text("print(1 < 2)\n")
    expect(page.locator(".markdown td")).to_have_text(["1", "2"])
    expect(page.locator("details summary", has_text="Reasoning")).to_be_visible()


def test_an_error_in_mid_stream_keeps_what_came(open_page: OpenPage) -> None:
    page = open_page()
    say(page, chunk({"content": "So far"}), 'data: {"error": {"message": "a shard was lost", "type": "x"}}\n\n')
    ask(page, "Hi")
    expect(page.get_by_role("alert")).to_have_text("a shard was lost")
    expect(page.locator(".markdown")).to_have_text("So far")


def test_the_keyboard_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    set_most_tokens(page, 5)
    page.keyboard.press("Tab")
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.get_by_text("Skip to content").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")  # the model
    page.keyboard.press("Tab")  # the messages, which scroll
    page.keyboard.press("Tab")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Question", exact=True)).to_have_text(re.compile("Hello\nthere"))
    expect(page.locator(".facts")).to_be_visible()


# Models -----------------------------------------------------------------------------------------------------


def test_a_model_is_launched_seen_used_and_terminated(open_page: OpenPage, fleet: Fleet, endless_model: Path) -> None:
    page = open_page("models")
    page.get_by_text("Launch a model", exact=True).click()
    page.get_by_label(re.compile("^Model: ")).fill(str(endless_model))
    page.get_by_label("Name for clients").fill("second")
    page.get_by_role("button", name="Check what fits").click()
    expect(page.get_by_role("table", name=re.compile("Ways to serve"))).to_contain_text("native", timeout=SECONDS)
    assert page.locator(".fit meter").count() > 0
    page.get_by_role("button", name="Launch", exact=True).click()
    card = page.locator(".card", has_text="second")
    expect(card.get_by_label("Progress of the launch")).to_be_visible()
    expect(card.locator(".state")).to_have_text("ready", timeout=SECONDS)
    card.get_by_role("button", name="Events").click()
    expect(page.get_by_label("Events", exact=True)).to_contain_text("ready")
    page.get_by_label("Close").click()
    card.get_by_role("button", name="Sleep").click()
    expect(card.locator(".state")).to_have_text("sleeping")
    card.get_by_role("button", name="Wake").click()
    expect(card.locator(".state")).to_have_text("ready", timeout=SECONDS)
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("combobox", name="Model", exact=True).select_option("second")
    set_most_tokens(page, 4)
    ask(page, "Hello")
    expect(page.locator(".facts")).to_have_text(re.compile("4 tokens"))
    page.get_by_role("link", name="Models").click()
    card.get_by_role("button", name="Terminate").click()
    page.get_by_role("dialog").get_by_role("button", name="Terminate").click()
    expect(card).to_have_count(0, timeout=SECONDS)
    assert [entry["name"] for entry in fleet.models()] == [MODEL]


def test_a_launch_that_fails_says_why(open_page: OpenPage, fleet: Fleet) -> None:
    page = open_page("models")
    page.get_by_text("Launch a model", exact=True).click()
    page.get_by_label(re.compile("^Model: ")).fill("/no/such/folder")
    page.get_by_label("Name for clients").fill("lost")
    page.get_by_role("button", name="Launch", exact=True).click()
    card = page.locator(".card", has_text="lost")
    expect(card.locator(".state")).to_have_text("failed", timeout=SECONDS)
    expect(card.locator(".problem")).to_have_text("no such folder or file: /no/such/folder")
    card.get_by_role("button", name="Terminate").click()
    page.get_by_role("dialog").get_by_role("button", name="Terminate").click()
    expect(card).to_have_count(0, timeout=SECONDS)


def test_a_launch_that_is_refused_says_why(open_page: OpenPage, endless_model: Path) -> None:
    page = open_page("models")
    page.get_by_text("Launch a model", exact=True).click()
    page.get_by_label(re.compile("^Model: ")).fill(str(endless_model))
    page.get_by_label("Name for clients").fill(MODEL)  # taken
    page.get_by_role("button", name="Launch", exact=True).click()
    expect(page.get_by_role("alert")).to_have_text(re.compile(MODEL))


# Live and requests ------------------------------------------------------------------------------------------


def test_live_numbers_are_those_of_the_metrics(open_page: OpenPage, fleet: Fleet) -> None:
    for _ in range(3):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
        httpx.post(f"{fleet.url}/v1/chat/completions", json=body, verify=PLAIN).raise_for_status()
    page = open_page("live")
    cells = page.locator("#totals tbody tr").get_by_role("cell")
    expect(cells).to_have_count(8)
    time.sleep(3)  # one more poll, after which nothing changes
    shown = [int(re.sub(r"[^\d]", "", text)) for text in cells.all_inner_texts()[:7]]
    metrics = fleet.metrics()

    def of(name: str, label: str = "") -> int:
        return round(sum(v for k, v in metrics.items() if re.split(r"[{ ]", k)[0] == name and label in k))

    assert shown == [
        of("tgi_request_count"),
        of("tgi_batch_current_size"),
        of("tgi_queue_size"),
        of("funitel_prefix_cache_queried_tokens_total"),
        of("funitel_prefix_cache_hit_tokens_total"),
        of("funitel_replica_generated_tokens_total"),
        of("tgi_batch_inference_duration_count"),
    ]
    assert shown[0] >= 3
    assert shown[5] >= 60
    expect(page.locator(".plot canvas")).to_have_count(6)


def test_a_running_request_is_seen_and_cancelled(open_page: OpenPage, fleet: Fleet) -> None:
    page, chat = open_page("live"), open_page("chat")
    set_most_tokens(chat, 7000)
    ask(chat, "A long one")
    button = page.get_by_role("button", name=re.compile("^Cancel "))
    button.click()
    expect(chat.locator(".facts")).to_have_text(re.compile("tokens/s"))
    expect(page.get_by_text("None.")).to_be_visible()
    assert fleet.get("/v1/requests")["data"] == []


def test_ended_requests_have_a_timeline(open_page: OpenPage, fleet: Fleet) -> None:
    good = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    headers = {"x-request-id": "seen-in-the-console"}
    httpx.post(f"{fleet.url}/v1/chat/completions", json=good, headers=headers, verify=PLAIN).raise_for_status()
    httpx.post(f"{fleet.url}/v1/chat/completions", json={**good, "temperature": -1}, verify=PLAIN)
    page = open_page("requests")
    page.get_by_label("Filter").fill("seen-in-the")
    row = page.get_by_role("row", name=re.compile("seen-in-the-console"))
    expect(row).to_contain_text("+ 20")
    assert row.locator("rect").count() >= 3
    page.get_by_label("Filter").fill("InvalidRequest")
    expect(page.locator("td.failed").first).to_be_visible()
    record = next(each for each in fleet.get("/v1/console/requests")["requests"] if each["id"] == "seen-in-the-console")
    parts = [record[f"{name}_seconds"] for name in ("arrival", "queue", "prefill", "decode")]
    assert 0 < sum(parts) <= record["total_seconds"]
    assert record["first_token_seconds"] <= sum(parts[:3]) + 1e-6


# Docs and the key -------------------------------------------------------------------------------------------


def test_a_route_is_tried(open_page: OpenPage) -> None:
    page = open_page("docs")
    page.get_by_label("Filter").fill("/generate")
    page.locator("summary", has_text="/generate").first.click()
    page.get_by_role("textbox", name="Body").fill('{"inputs": "Hi", "parameters": {"max_new_tokens": 3}}')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("Status 200")).to_be_visible()
    expect(page.get_by_label("Answer")).to_contain_text("generated_text")
    page.get_by_role("textbox", name="Body").fill("{")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_have_text(re.compile("not JSON"))


def test_the_page_of_the_routes_stands_alone(open_page: OpenPage, fleet: Fleet) -> None:
    page = open_page("docs", bypass_csp=True)
    page.goto(f"{fleet.url}/docs")
    page.get_by_label("Filter").fill("/generate")
    page.locator("summary", has_text="/generate").first.click()
    page.get_by_role("textbox", name="Body").fill('{"inputs": "Hi", "parameters": {"max_new_tokens": 3}}')
    with page.expect_request("**/generate") as sent:
        page.get_by_role("button", name="Send").click()
    assert sent.value.url == f"{fleet.url}/generate"
    expect(page.get_by_text("Status 200")).to_be_visible()
    assert page.get_by_role("link", name="/openapi.json").get_attribute("href") == f"{fleet.url}/openapi.json"
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    assert [each["id"] for each in page.evaluate("axe.run()")["violations"]] == []
    page.get_by_role("button", name="API key").click()
    page.get_by_label("Key", exact=True).fill("sk-secret")
    page.get_by_role("button", name="Use this key").click()
    with page.expect_request("**/generate") as request:
        page.get_by_role("button", name="Send").click()
    assert request.value.headers["authorization"] == "Bearer sk-secret"


def test_every_route_has_an_example_that_is_json(open_page: OpenPage) -> None:
    page = open_page("docs")
    page.locator(".route").first.wait_for()
    count = page.evaluate(
        """async () => {
          const { exampleOf } = await import("./explorer.js");
          const document = await (await fetch("../openapi.json")).json();
          let count = 0;
          for (const methods of Object.values(document.paths)) {
            for (const operation of Object.values(methods)) {
              const body = operation.requestBody?.content?.["application/json"];
              if (body) { JSON.stringify(exampleOf(document, body.schema)); count += 1; }
            }
          }
          return count;
        }"""
    )
    assert count > 20


def test_the_key_of_the_tab_is_sent_and_forgotten(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_role("button", name="API key").click()
    page.get_by_label("Key", exact=True).fill("sk-secret")
    page.get_by_role("button", name="Use this key").click()
    with page.expect_request(COMPLETIONS) as request:
        ask(page, "Hi")
    assert request.value.headers["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="Use this key").click()
    page.get_by_role("button", name="Stop").or_(page.get_by_role("button", name="Send")).wait_for()
    assert page.evaluate("sessionStorage.length") == 0
