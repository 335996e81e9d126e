"""The console of a server with users: login, keys, quotas, usage, and the pages of an admin."""

import os
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import openai
import pytest
from playwright.sync_api import Browser, Error, Page, expect

from funitel_testing.browsing import MODEL, ask, set_most_tokens
from funitel_testing.tenants import PASSWORD, Plane, users_fleet

WIDTHS = (360, 768, 1440)
OpenAs = Callable[..., Page]


@pytest.fixture(scope="module")
def plane(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A server with users and one model."""
    with users_fleet(tmp_path_factory.mktemp("console-users"), endless_model, MODEL) as running:
        yield running


@pytest.fixture
def open_as(browser: Browser, plane: Plane) -> Iterator[OpenAs]:
    """`open_as(user, page)` opens a page of the console and logs in there, by the dialog."""
    contexts, complaints = [], []

    def failed(error: Error) -> None:
        complaints.append(str(error))

    def open_one(user: str, name: str = "access", *, width: int = 1440, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", failed)
        page.goto(f"{plane.url}/ui/#{name}")
        page.get_by_role("button", name="Log in").click()
        page.get_by_label("Name", exact=True).fill(user)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("dialog").get_by_role("button", name="Log in").click()
        expect(page.get_by_role("button", name=f"Log out {user}")).to_be_visible()
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


def make_key(page: Page, name: str, **limits: int) -> str:
    """Make a key on its page; returns its text."""
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill(name)
    for label, value in limits.items():
        dialog.get_by_label(label.replace("_", " "), exact=True).fill(str(value))
    dialog.get_by_role("button", name="Make the key").click()
    text = page.get_by_role("dialog", name="The key").locator("code.key").inner_text()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    return text


def test_a_key_is_made_used_exhausted_and_revoked(open_as: OpenAs, plane: Plane) -> None:
    plane.user("eve")
    page = open_as("eve")
    key = make_key(page, "laptop", Requests_a_month=2)
    row = page.get_by_role("region", name="Keys").get_by_role("row", name=re.compile("laptop"))
    expect(row).to_contain_text("Requests a month: 2")
    assert key not in page.content()
    with openai.OpenAI(base_url=f"{plane.url}/v1", api_key=key, max_retries=0) as client:

        def used() -> int:
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
            assert answer.usage is not None
            return answer.usage.completion_tokens

        assert [used(), used()] == [4, 4]
        with pytest.raises(openai.RateLimitError, match="at most 2 requests a month") as refusal:
            used()
        assert refusal.value.code == "insufficient_quota"
        usage = page.get_by_role("region", name="Usage").get_by_role("row", name=re.compile("laptop"))
        expect(usage).to_contain_text(MODEL, timeout=20_000)
        expect(usage.get_by_role("cell").nth(4)).to_have_text("2", timeout=20_000)
        expect(usage.get_by_role("cell").nth(6)).to_have_text("8", timeout=20_000)
        row.get_by_role("button", name="Change laptop").click()
        page.get_by_role("dialog").get_by_label("Requests a month", exact=True).fill("3")
        page.get_by_role("dialog").get_by_role("button", name="Change").click()
        expect(row).to_contain_text("Requests a month: 3")
        assert used() == 4
        row.get_by_role("button", name="Revoke laptop").click()
        expect(row).to_contain_text("revoked")
        with pytest.raises(openai.AuthenticationError):
            used()


def test_a_bad_login_and_a_bad_key_are_one_line(open_as: OpenAs, plane: Plane, browser: Browser) -> None:
    plane.user("fay")
    page = open_as("fay")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("x")
    dialog.get_by_label("Expires").fill("2020-01-31")
    dialog.get_by_role("button", name="Make the key").click()
    expect(dialog.get_by_role("alert")).to_have_text(re.compile("expires.* must be in the future"))
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Log out fay").click()
    page.get_by_role("button", name="Log in").click()
    page.get_by_label("Name", exact=True).fill("fay")
    page.get_by_label("Password").fill("wrong password")
    page.get_by_role("dialog").get_by_role("button", name="Log in").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()


def test_a_session_chats_and_ends(open_as: OpenAs, plane: Plane) -> None:
    plane.user("gil")
    page = open_as("gil", "chat")
    set_most_tokens(page, 4)
    ask(page, "Hello")
    expect(page.locator(".facts")).to_have_text(re.compile("4 tokens"))
    page.reload()
    expect(page.get_by_role("button", name="Log out gil")).to_be_visible()
    page.get_by_role("button", name="Log out gil").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    page.get_by_role("link", name="Keys").click()
    expect(page.get_by_text("Log in to see your keys")).to_be_visible()


def test_a_user_sees_nothing_of_an_admin(open_as: OpenAs, plane: Plane) -> None:
    plane.user("hal")
    page = open_as("hal")
    expect(page.get_by_role("heading", name="Usage", exact=True)).to_be_visible()
    for name in ("Users", "Prices", "Audit"):
        expect(page.get_by_role("heading", name=name, exact=True)).to_have_count(0)


def test_an_admin_adds_users_prices_and_reads_the_audit(open_as: OpenAs, plane: Plane) -> None:
    page = open_as("root")
    page.get_by_role("button", name="New user").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("ivy")
    dialog.get_by_label("Role").select_option("operator")
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_role("button", name="Add").click()
    users = page.get_by_role("region", name="Users")
    expect(users.get_by_role("row", name=re.compile("ivy"))).to_contain_text("operator")
    page.get_by_label("Model", exact=True).fill(MODEL)
    page.get_by_label("Prompt", exact=True).fill("2")
    page.get_by_label("Completion", exact=True).fill("5")
    page.get_by_role("button", name="Set the price").click()
    expect(page.get_by_role("table", name="Prices")).to_contain_text(MODEL)
    audit = page.get_by_role("region", name="Audit")
    expect(audit.get_by_role("row", name=re.compile("ivy")).first).to_contain_text("root", timeout=20_000)
    users.get_by_role("button", name="Disable ivy").click()
    expect(users.get_by_role("row", name=re.compile("ivy"))).to_contain_text("disabled")
    users.get_by_role("button", name="Delete ivy").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(users.get_by_role("row", name=re.compile("ivy"))).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_keys_fits_and_is_accessible(open_as: OpenAs, plane: Plane, width: int, scheme: str) -> None:
    if not any(each["name"] == "shown" for each in plane.ask("GET", "/v1/keys")["keys"]):
        plane.key("root", "shown", limits={"tokens_per_month": 5_000_000, "requests_per_minute": 60})
    page = open_as("root", width=width, color_scheme=scheme, bypass_csp=True)
    expect(page.get_by_role("region", name="Keys").get_by_role("row", name=re.compile("shown"))).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    folder = os.environ.get("FUNITEL_SCREENSHOTS")
    if folder and (width, scheme) == (1440, "light"):
        page.screenshot(path=Path(folder) / "console-access.png", clip={"x": 0, "y": 0, "width": width, "height": 600})
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    for opened in ("", "New key", "New user"):
        if opened:
            page.get_by_role("button", name=opened).click()
        found = page.evaluate("axe.run()")["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == [], opened
        page.keyboard.press("Escape")
