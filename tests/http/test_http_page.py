"""The HTTP server's page, operated in a headless browser. $ALLSPARK_SCREENSHOTS names a folder for screenshots."""

from __future__ import annotations

import os
import shutil

import pytest

from support.http_helpers import KEYS, MODEL, STORY


def test_pool(http_server):
    with http_server.client(KEYS["read"]) as reader:
        found = reader.get("/pool").json()
    member, = found["members"]
    assert member["address"] == http_server.group and member["connected"] and member["ranks"] == 1
    assert member["placement"][0].startswith("rank 0: NUMA node")
    model, = found["models"]
    assert model["name"] == MODEL and model["max_length"] == 1024 and model["stat"]["total_token"] > 0


def test_page_is_whole(http_server, http_client):
    """The page needs no key, and loads nothing from elsewhere."""
    import httpx
    answer = httpx.get(http_server.url + "/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "").replace("\n//", "")
    assert httpx.get(http_server.url + "/pool").status_code == 401


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"there is no browser: {error.message.splitlines()[0]}")
        yield found
        found.close()


def shoot(page, name):
    if folder := os.environ.get("ALLSPARK_SCREENSHOTS"):
        page.screenshot(path=os.path.join(folder, f"{name}.png"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_click_through(http_server, browser, scheme):
    expect = pytest.importorskip("playwright.sync_api").expect
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 800})
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if http_server.address not in request.url else None)
    page.goto(http_server.url)
    page.get_by_text("You didn't provide an API key").wait_for()
    page.get_by_label("Key").fill(KEYS["generate"])
    page.get_by_label("Key").press("Tab")
    expect(page.locator("#model")).to_have_value(MODEL)

    page.get_by_label("Most tokens").fill("40")
    page.get_by_label("Message", exact=True).fill(STORY[0]["content"])
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_text("40 generated").wait_for()
    answer = page.locator(".message.assistant").first.inner_text()
    assert "Once upon a time" in answer
    shoot(page, f"chat-{scheme}")

    # An answer of a given form, a forced call, and what is wrong about a request.
    page.get_by_label("Answer's schema (JSON)").fill('{"type": "object", "properties": {"fox": {"enum": ["red"]}}, '
                                                     '"required": ["fox"], "additionalProperties": false}')
    page.get_by_label("Message", exact=True).fill("Which one?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message.assistant").nth(1)).to_contain_text("tokens/s")
    assert '"red"' in page.locator(".message.assistant").nth(1).inner_text()
    page.get_by_label("Answer's schema (JSON)").fill("{")
    page.get_by_label("Message", exact=True).fill("And now?")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("The schema is no JSON").wait_for()
    page.get_by_label("Answer's schema (JSON)").fill("")
    page.get_by_label("Tools (JSON)").fill(
        '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": '
        '{"at": {"enum": ["fox"]}}, "required": ["at"], "additionalProperties": false}}}]')
    page.get_by_label("Tool choice").select_option("required")
    page.get_by_label("Message", exact=True).fill("Look.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".call")).to_contain_text('{"at": "fox"}')
    shoot(page, f"tools-{scheme}")
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".message").count() == 0

    # A stopped answer keeps what has come.
    page.get_by_label("Tools (JSON)").fill("")
    page.get_by_label("Most tokens").fill("900")
    page.get_by_label("Temperature").fill("2")
    page.get_by_label("Message", exact=True).fill(STORY[0]["content"])
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message.assistant > div").nth(1)).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#send")).to_be_enabled()

    page.get_by_role("tab", name="Chat").press("ArrowRight")
    page.locator("#models").get_by_text("cache in use").wait_for()
    page.locator("#members").get_by_text("rank 0: NUMA node").wait_for()
    shoot(page, f"pool-{scheme}")
    page.set_viewport_size({"width": 400, "height": 800})
    page.get_by_role("tab", name="Chat").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    shoot(page, f"narrow-{scheme}")
    assert not errors
    context.close()


def test_what_readers_of_screens_hear(http_server, browser):
    """Every control has a name for screen readers."""
    page = browser.new_page()
    page.goto(http_server.url)
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, select, textarea')]
        .filter(control => !(control.labels?.length || control.getAttribute('aria-label') || control.innerText.trim()))
        .map(control => control.id)""")
    assert nameless == []
    page.close()
