"""Hostile answers, names and headers: nothing that a model or a client says becomes a script of the page."""

import itertools
import json
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from funitel_testing.browsing import MODEL, OpenPage, ask, chunk, say
from funitel_testing.fleet import Fleet
from funitel_testing.servers import PLAIN

MARK = "globalThis.wasHit=1"
CORPUS = json.loads((Path(__file__).parent / "hostile.json").read_text().replace("@MARK@", MARK))
SINGLE: list[str] = CORPUS["single"]


def payloads() -> list[str]:
    """At least five hundred."""
    pairs = list(itertools.product(CORPUS["tags"], CORPUS["events"]))
    by_events = [f"<{tag} src=x {event}={MARK} autofocus open>" for tag, event in pairs]
    quoted = [f'<{tag} {event}="{MARK}" style="animation-name:x">x</{tag}>' for tag, event in pairs]
    targets = [scheme.format(MARK) for scheme in CORPUS["schemes"]]
    by_schemes = [place.format(target) for place, target in itertools.product(CORPUS["places"], targets)]
    return [*SINGLE, *by_events, *quoted, *by_schemes]


HARMLESS = re.compile(r"^(?:https?|mailto):", re.IGNORECASE)


def test_no_answer_becomes_a_script(open_page: OpenPage) -> None:
    page = open_page(is_hostile=True)
    corpus = payloads()
    assert len(corpus) >= 500
    page.evaluate("document.body.append(Object.assign(document.createElement('div'), { id: 'probe' }))")
    found = page.evaluate(
        """async (corpus) => {
          const { safeHtml } = await import("./markdown.js");
          const probe = document.getElementById("probe");
          const left = [];
          for (const payload of corpus) {
            probe.innerHTML = safeHtml(payload);
            for (const node of probe.querySelectorAll("*")) {
              for (const { name, value } of node.attributes) left.push([payload, node.tagName, name, value]);
            }
          }
          return left;
        }""",
        corpus,
    )
    for payload, tag, name, value in found:
        assert tag in ("A", "TD", "TH", "OL"), payload
        assert name in ("href", "target", "rel", "align", "start"), payload
        assert name != "href" or HARMLESS.match(value), payload
    page.wait_for_timeout(300)
    assert page.evaluate("globalThis.wasHit") is None


def test_a_hostile_answer_is_shown_and_does_nothing(open_page: OpenPage) -> None:
    page = open_page(is_hostile=True)
    content = "\n\n".join(SINGLE)
    token = {"token": f"<img src=x onerror={MARK}>", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    say(
        page,
        chunk({"content": content, "reasoning_content": content}, logprobs={"content": [token]}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": SINGLE[0], "arguments": SINGLE[1]}}]}),
    )
    ask(page, f"<img src=x onerror={MARK}>")
    page.get_by_role("button", name="Probabilities").click()
    page.get_by_role("button", name="Probabilities").click()
    page.get_by_role("button", name="Export").click()
    page.wait_for_timeout(300)
    assert page.evaluate("globalThis.wasHit") is None
    assert page.locator("main script, main img, main iframe, main style, main form:not(.ask)").count() == 0


def test_hostile_names_are_text(open_page: OpenPage, fleet: Fleet) -> None:
    name = f"<img src=x onerror={MARK}>"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    fleet.post("/v1/chat/completions", body)
    page = open_page("none")
    entry = {**fleet.models()[0], "id": name, "name": name, "error": name, "state": "failed", "model_id": name}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [entry]}))
    record = {**fleet.get("/v1/console/requests")["requests"][0], "error": name, "model": name, "key": name}
    page.route("**/v1/console/requests", lambda route: route.fulfill(json={"requests": [record]}))
    page.route(
        "**/v1/models/*/events",
        lambda route: route.fulfill(json={"events": [{"at": 0, "stage": name, "message": name}]}),
    )
    for link in ("Models", "Requests", "Chat"):
        page.get_by_role("link", name=link).click()
        expect(page.get_by_role("link", name=link)).to_have_attribute("aria-current", "page")
        page.get_by_text(name).first.wait_for(state="attached")
        if link == "Models":
            page.get_by_role("button", name="Events").click()
            page.get_by_label("Close").click()
    page.wait_for_timeout(300)
    assert page.evaluate("globalThis.wasHit") is None


@pytest.mark.parametrize("path", ["/ui/", "/ui/app.js", "/ui/vendor/purify.js", "/ui/style.css"])
def test_headers_keep_a_page_to_this_server(fleet: Fleet, path: str) -> None:
    headers = httpx.get(fleet.url + path, verify=PLAIN).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "vendor/../../assets.py", "/etc/passwd", "vendor", "", "%00"],
)
def test_no_other_file_is_served(fleet: Fleet, path: str) -> None:
    answer = httpx.get(f"{fleet.url}/ui/" + (path or "nothing"), verify=PLAIN)
    assert answer.status_code in (400, 404)
    assert "import" not in json.dumps(answer.text)


def test_another_site_cannot_use_the_server(fleet: Fleet) -> None:
    headers = {"origin": "http://evil.example", "content-type": "text/plain"}
    launch = httpx.post(f"{fleet.url}/v1/models", content=json.dumps({"model": MODEL}), headers=headers, verify=PLAIN)
    assert launch.status_code in (400, 403, 415)
    asked = httpx.get(f"{fleet.url}/v1/models", headers={"origin": "http://evil.example"}, verify=PLAIN)
    assert "access-control-allow-origin" not in asked.headers
