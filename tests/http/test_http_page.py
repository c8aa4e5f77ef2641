"""The HTTP server's page, operated in a headless browser. $ALLSPARK_SCREENSHOTS names a folder for screenshots."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from allspark_client import AsModelConfig, ClientEngine
from support.fake_service import serving
from support.http_helpers import KEYS, MODEL, STORY, http_server_for, token_file
from support.pictures import base64_of, decoded, encoded, pixels
from support.script_engine import ScriptEngine

ADDRESS = re.compile(r"^http://127\.0\.0\.1:\d+/")
LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"enum": ["fox"]}}, "required": ["at"], "additionalProperties": False}}}
FOX = {"type": "object", "properties": {"fox": {"enum": ["red"]}}, "required": ["fox"], "additionalProperties": False}


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
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "//" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "").replace("\n//", "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", answer.text)
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


@pytest.fixture()
def expect(browser):
    return pytest.importorskip("playwright.sync_api").expect


@contextmanager
def opened(browser, url, key="", **options):
    """The page at `url` in a tab of its own, with this key. It has no errors, and asks nobody else."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    page, errors = context.new_page(), []
    page.set_default_timeout(15_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda request: None if ADDRESS.match(request.url) and "?" not in request.url
            else errors.append(request.url))
    page.goto(url)
    if key:
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_label("Key", exact=True).press("Tab")
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    assert not errors
    context.close()


def shoot(page, name):
    if folder := os.environ.get("ALLSPARK_SCREENSHOTS"):
        page.screenshot(path=os.path.join(folder, f"{name}.png"))


def send(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def bodies(page):
    """The bodies of the chats that the page sends from now on."""
    found = []
    page.on("request", lambda request: found.append(json.loads(request.post_data))
            if request.url.endswith("/chat/completions") else None)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_click_through(http_server, browser, expect, scheme):
    with opened(browser, http_server.url, KEYS["generate"], color_scheme=scheme) as page:
        expect(page.locator("#model")).to_have_value(MODEL)
        page.get_by_label("Most tokens").fill("40")
        page.get_by_label("Message", exact=True).fill(STORY[0]["content"])
        page.get_by_label("Message", exact=True).press("Enter")
        page.get_by_text("40 generated").wait_for()
        assert "Once upon a time" in page.locator(".message.assistant").first.inner_text()
        shoot(page, f"chat-{scheme}")

        # An answer of a given form, a forced call, and what is wrong about a request.
        answers = page.locator(".message.assistant")
        page.get_by_label("Answer's schema (JSON)").fill(json.dumps(FOX))
        send(page, "Which one?")
        expect(answers.nth(1)).to_contain_text("The answer matches the schema")
        assert '"red"' in answers.nth(1).inner_text()
        page.get_by_label("Most tokens").fill("2")
        send(page, "Which one?")
        expect(answers.nth(2).locator(".verdict.wrong")).to_contain_text("it is no JSON")
        expect(answers.nth(2)).to_contain_text("ended by length")
        shoot(page, f"schema-{scheme}")
        page.get_by_label("Answer's schema (JSON)").fill("{")
        expect(page.locator("#schema-hint")).to_contain_text("The schema is no JSON")
        expect(page.get_by_label("Answer's schema (JSON)")).to_have_attribute("aria-invalid", "true")
        send(page, "And now?")
        expect(page.locator("#log .wrong").last).to_contain_text("The schema is no JSON")
        assert answers.count() == 3
        page.get_by_label("Answer's schema (JSON)").fill("")
        page.get_by_label("Most tokens").fill("40")
        page.get_by_label("Tools (JSON)").fill(json.dumps([LOOK]))
        expect(page.locator("#tools-hint")).to_have_text("Tools: look")
        page.get_by_label("Tool choice").select_option("look")
        asked = bodies(page)
        send(page, "Look.")
        expect(page.locator(".call")).to_contain_text('{"at": "fox"}')
        expect(page.locator(".call")).to_contain_text("The call matches its parameters")
        assert asked[0]["tool_choice"] == {"type": "function", "function": {"name": "look"}}
        shoot(page, f"tools-{scheme}")
        page.get_by_role("button", name="Clear").click()
        assert page.locator(".message").count() == 0

        page.get_by_role("tab", name="Chat").press("End")
        page.locator("#models").get_by_text("cache in use").wait_for()
        page.locator("#members").get_by_text("rank 0: NUMA node").wait_for()
        expect(page.locator("#health")).to_have_text("The pool takes requests.")
        shoot(page, f"pool-{scheme}")
        page.set_viewport_size({"width": 400, "height": 800})
        for tab in ("Chat", "Texts", "Times", "Pool"):
            page.get_by_role("tab", name=tab).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, tab
            shoot(page, f"narrow-{tab.lower()}-{scheme}")


def test_times(http_server, browser, expect):
    """The parts of each request's time add up to its time, and the table names the request as the server's logs do."""
    with opened(browser, http_server.url, KEYS["generate"]) as page:
        ids = []
        page.on("response", lambda answer: ids.append(answer.headers["x-request-id"])
                if answer.url.endswith("/chat/completions") else None)
        page.get_by_label("Most tokens").fill("30")
        for number in range(2):
            send(page, STORY[0]["content"])
            expect(page.locator(".message .trace")).to_have_count(number + 1)
        page.get_by_role("tab", name="Times").click()
        rows = page.locator("#traces tr")
        expect(rows).to_have_count(2)
        assert [row.inner_text() for row in page.locator("#traces th").all()] == ids[::-1]
        expect(rows.first).to_contain_text(MODEL)
        label = rows.first.get_by_role("img").get_attribute("aria-label")
        parts = "outside the engine T, waiting T, prompt T, generation T"
        assert re.fullmatch(parts.replace("T", r"[\d.]+ m?s"), label)
        kept = page.evaluate("requests.map(({ answer, parts, took }) => ({ ...answer.timings, ...parts, took }))")
        for times in kept:
            parts = [times[part] for part in ("before", "queue", "prompt", "predicted")]
            assert min(parts) > 0 and sum(parts) == pytest.approx(times["took"])
            assert times["predicted_n"] == 30
        longest = max(kept, key=lambda times: times["took"])
        widths = [bar.evaluate("bar => bar.getBoundingClientRect().width") for bar in rows.get_by_role("img").all()]
        assert widths[kept.index(longest)] == max(widths)
        shoot(page, "times")


@pytest.fixture(scope="module")
def slow():
    """An HTTP server whose model "m" repeats the last message, 50 characters a second."""
    with serving(core=ScriptEngine("hermes", 0.02)) as (_, group), http_server_for(group, insecure=True) as address:
        yield f"http://{address}"


def test_a_stopped_answer_keeps_what_has_come(slow, browser, expect):
    with opened(browser, slow) as page:
        send(page, "one two three " * 40)
        expect(page.locator(".message.assistant")).to_contain_text("one two")
        expect(page.locator("#send")).to_be_disabled()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator(".message.assistant")).to_contain_text("stopped")
        assert page.evaluate("messages.length") == 2 and "one two" in page.evaluate("messages[1].content")


def test_tools_and_their_results(scripted, browser, expect):
    """Calls are shown as they are parsed and checked; their results go back, and no text becomes markup."""
    address, _ = scripted["hermes"]
    with opened(browser, f"http://{address}") as page:
        page.get_by_label("Tools (JSON)").fill(json.dumps([LOOK]))
        asked = bodies(page)
        calls = "".join(f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'
                        for name, arguments in (("look", {"at": "fox"}), ("look", {"at": "owl", "far": True})))
        send(page, calls)
        shown = page.locator(".call")
        expect(shown).to_have_count(2)
        expect(shown.first.locator(".verdict.right")).to_be_visible()
        expect(shown.nth(1).locator("li")).to_have_text(['$.at is none of ["fox"]', "$.far is not allowed"])
        markup = "<img src=x onerror=\"document.title='run'\"><b>red</b>"
        results = page.get_by_label("Result of look")
        results.first.fill("nothing")
        results.nth(1).fill(markup)
        shoot(page, "results")
        page.get_by_role("button", name="Send results").press("Enter")
        expect(page.locator(".message.assistant").nth(1)).to_contain_text(markup)
        assert page.locator("#log img, #log b").count() == 0 and page.title() == "allspark"
        user, assistant, first, second = asked[1]["messages"]
        assert user["content"] == calls and asked[1]["tools"] == [LOOK]
        assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["look", "look"]
        assert [json.loads(call["function"]["arguments"]) for call in assistant["tool_calls"]][1]["far"]
        assert [first, second] == [
            {"role": "tool", "tool_call_id": call["id"], "content": content}
            for call, content in zip(assistant["tool_calls"], ("nothing", markup))]
        expect(results.first).to_be_disabled()


def test_browsers_make_no_markup_of_text(http_server, browser):
    """The policy refuses it, also to code that the page does not have."""
    with opened(browser, http_server.url, KEYS["read"]) as page:
        for code in ("document.body.innerHTML = '<b>x</b>'", "document.body.setAttribute('onclick', 'alert(1)')",
                     "document.head.append(Object.assign(document.createElement('script'), { text: 'alert(1)' }))"):
            assert page.evaluate(f"() => {{ try {{ {code}; }} catch (error) {{ return error.name; }} }}") == "TypeError"


CASES = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
     [{"a": 1}, {"a": 1.0}, {"a": 1.5}, {"a": True}, {}, {"a": 1, "b": 2}, [], None, {"constructor": 1, "a": 1}]),
    ({"type": ["string", "null"], "minLength": 2, "maxLength": 3, "pattern": "^[a-z\U0001F600]+$"},
     [None, "ab", "a", "abcd", "AB", "\U0001F600\U0001F600\U0001F600", 5]),
    ({"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 10, "multipleOf": 0.5},
      "minItems": 1, "maxItems": 3, "uniqueItems": True},
     [[], [1], [0], [10], [10.5], [2.5], [0.3], [1, 1.0], [1, 2, 3, 4]]),
    ({"prefixItems": [{"const": 1}, {"enum": ["x", {"b": 1, "a": [2]}]}], "items": False},
     [[1], [1, "x"], [1, {"a": [2], "b": 1}], [2], [1, "x", 3], [True]]),
    ({"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "of/it": {"type": "null"}},
                         "additionalProperties": {"$ref": "#/$defs/tree/properties/of~1it"}}}, "$ref": "#/$defs/tree"},
     [{}, {"left": {"left": {}}}, {"left": {"left": 1}}, {"right": None}, {"right": {}}]),
    ({"anyOf": [{"type": "string"}, {"minimum": 5, "type": "number"}], "not": {"const": "no"}},
     ["a", "no", 5, 4, None]),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "allOf": [{"type": "integer"}, {"exclusiveMaximum": 12}]},
     [2, 3, 6, 12, 5, 2.5]),
    ({"patternProperties": {"^x": {"type": "boolean"}}, "propertyNames": {"maxLength": 3}, "minProperties": 1,
      "maxProperties": 2, "additionalProperties": {"type": "string"}},
     [{}, {"x": True}, {"x1": 1}, {"y": 1}, {"y": "1"}, {"long": "1"}, {"a": "", "b": "", "c": ""}]),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
     [{}, {"a": 1}, {"a": 1, "b": 1}, {"c": 1}]),
    ({"properties": {"__proto__": {"type": "string"}, "toString": False}}, [{}, {"toString": 1}, {"x": 1}]),
    (True, [1]), (False, [1]),
]


def test_schemas_are_checked_as_jsonschema_does(slow, browser):
    jsonschema = pytest.importorskip("jsonschema")
    with opened(browser, slow) as page:
        for schema, values in CASES:
            right = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in values]
            found = page.evaluate("""texts => { const [schema, values] = texts.map(JSON.parse), unknown = new Set();
                return [values.map(value => mismatches(value, schema, unknown).length === 0), [...unknown]]; }""",
                                  [json.dumps(schema), json.dumps(values)])
            assert found == [right, []], schema
        unknown = """schema => { const unknown = new Set(); mismatches({}, schema, unknown); return [...unknown]; }"""
        assert page.evaluate(unknown, {"format": "date", "title": "x", "$ref": "other.json", "type": "object"}) == \
            ["format", "$ref other.json"]
        assert page.evaluate(unknown, {"$ref": "#"}) == ["schemas nested more than 200 deep"]


class _OnDemand(ScriptEngine):
    """An engine with the model "m" and one, "a", that is loaded on demand."""

    def __init__(self):
        super().__init__("hermes")
        self.install_model(AsModelConfig("a", "/none", on_demand=True, aliases=["gpt-a"]))
        self.start_model("a")


def test_models_are_loaded_and_unloaded(tmp_path, browser, expect):
    with serving(core=_OnDemand()) as (engine, group), \
            http_server_for(group, token_file=token_file(tmp_path)) as address, \
            opened(browser, f"http://{address}", KEYS["generate"]) as page:
        assert page.locator("#model option").all_inner_texts() == ["m", "a (not loaded)", "gpt-a (not loaded)"]
        page.get_by_role("tab", name="Pool").click()
        rows = page.locator("#offered tr")
        expect(rows).to_have_count(3)
        row = rows.nth(1)
        expect(row).to_contain_text("known once loaded")
        load = page.get_by_role("button", name="Load a", exact=True)
        load.click()
        expect(page.locator("#acted")).to_contain_text("could not be loaded: This API key may only do what the role")
        page.get_by_label("Key", exact=True).fill(KEYS["admin"])
        page.get_by_label("Key", exact=True).press("Tab")

        engine._group.loaded = threading.Event()
        load.press("Enter")
        expect(row).to_contain_text("is being loaded")
        expect(load).to_have_attribute("aria-disabled", "true")
        shoot(page, "loading")
        engine._group.loaded.set()
        unload = page.get_by_role("button", name="Unload a", exact=True)
        expect(unload).to_be_focused()      # the row was not made anew
        expect(page.locator("#acted")).to_have_text("a is loaded.")
        expect(row).to_contain_text("generate")
        assert any(state.name == "a" and state.running for state in engine.list_models())
        expect(rows.nth(2)).to_contain_text("a name of a, or an adapter")
        expect(page.locator("#model option").nth(1)).to_have_text("a")

        unload.press("Enter")
        expect(page.locator("#acted")).to_have_text("a is unloaded.")
        expect(row).to_contain_text("not loaded")
        assert not any(state.name == "a" and state.running for state in engine.list_models())
        expect(rows.nth(0)).to_contain_text("loaded")
        expect(rows.nth(0).get_by_role("button")).to_have_count(0)      # "m" is not installed with on_demand

        # A chat loads its model, and says so meanwhile.
        page.get_by_role("tab", name="Chat").click()
        page.locator("#model").select_option("a")
        engine._group.loaded = threading.Event()
        send(page, "hello")
        expect(page.locator(".message.assistant")).to_contain_text("the model is being loaded, 50 %")
        engine._group.loaded.set()
        expect(page.locator(".message.assistant")).to_contain_text("ended by stop")
        expect(page.locator(".message.assistant")).not_to_contain_text("being loaded")
        expect(page.locator("#model option").nth(1)).to_have_text("a")


def test_states_of_groups(slow, browser, expect):
    """A group that drains and one that cannot be reached say so; names are text."""
    model = {"name": "m<i>", "running": True, "on_demand": False, "load": 3}
    member = {"version": "1", "ranks": 2, "placement": ["rank 0: here"], "connected": True, "models": [model]}
    members = [{**member, "address": "one", "draining": False}, {**member, "address": "two", "draining": True},
               {**member, "address": "<b>three</b>", "draining": False, "connected": False, "models": []}]
    with opened(browser, slow) as page:
        page.route("**/pool", lambda route: route.fulfill(json={"members": members, "models": []}))
        page.route("**/health", lambda route: route.fulfill(
            status=503, json={"status": "unavailable", "reason": "the pool is draining"}))
        page.get_by_role("tab", name="Pool").click()
        cards = page.locator("#members article")
        expect(cards).to_have_count(3)
        assert [card.locator(".state").inner_text() for card in cards.all()] == \
            ["serves", "drains: it takes no new requests", "cannot be reached"]
        expect(cards.first).to_contain_text("load 3")
        expect(cards.nth(2).locator("h2")).to_have_text("<b>three</b>")
        expect(page.locator("#health")).to_have_text("Not ready: the pool is draining")
        shoot(page, "groups")
        page.route("**/pool", lambda route: route.fulfill(status=503, json={"error": {"message": "no group <i>"}}))
        expect(page.locator("#trouble")).to_have_text("no group <i>")
        expect(cards).to_have_count(0)


def test_keys_stay_in_the_tab(http_server, browser, expect):
    """A key is in the storage of its tab and in a header; a reload keeps it, and Forget removes it."""
    with opened(browser, http_server.url, KEYS["read"]) as page:
        page.reload()
        field = page.get_by_label("Key", exact=True)
        expect(field).to_have_value(KEYS["read"])
        expect(page.locator("#model")).to_have_value(MODEL)
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        assert field.get_attribute("type") == "password" and KEYS["read"] not in page.url
        other = page.context.new_page()
        other.goto(http_server.url)
        other.get_by_text("You didn't provide an API key").wait_for()
        other.close()
        page.get_by_role("button", name="Forget the key").click()
        page.get_by_text("You didn't provide an API key").wait_for()
        expect(field).to_have_value("")
        expect(field).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0 and page.locator("#model option").count() == 0


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """The address of an HTTP server with an embedder, a reranker and a classifier, and a client of its group."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from allspark_launch.group.background import background_group
    from support.encoders import install_encoders

    folder = tmp_path_factory.mktemp("models")
    with background_group(["--numa-nodes", "0"], timeout=60.0) as group, ClientEngine(group.addresses[0]) as engine:
        install_encoders(engine, folder, "CPU:0")
        with http_server_for(group.addresses[0], insecure=True) as address:
            yield f"http://{address}", engine


@pytest.fixture(scope="module")
def seeing():
    """The URL of a server whose model "m" sees, and repeats the last message; and its engine."""
    with serving(core=ScriptEngine("hermes", sees_images=True)) as (core, group), \
            http_server_for(group, insecure=True) as address:
        yield f"http://{address}", core


#: gives files to the element of a selector as an event of this kind has them
GIVE = """([selector, kind, files]) => {
  const data = new DataTransfer();
  for (const [name, base64] of files)
    data.items.add(new File([Uint8Array.from(atob(base64), c => c.charCodeAt(0))], name, { type: "image/png" }));
  const made = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, cancelable: true, bubbles: true })
    : new DragEvent(kind, { dataTransfer: data, cancelable: true, bubbles: true });
  return document.querySelector(selector).dispatchEvent(made);
}"""


def test_images(seeing, browser, expect):
    """Chosen, dropped and pasted ones are shown, can be removed, and are sent as they are."""
    url, core = seeing
    files = [encoded(pixels(30, 40)) for _ in range(4)]
    with opened(browser, url) as page:
        waiting = page.get_by_role("group", name="Images of the message")
        page.locator("#files").set_input_files(
            [{"name": f"{i}.png", "mimeType": "image/png", "buffer": files[i]} for i in (0, 1)])
        expect(waiting.get_by_role("img")).to_have_count(2)
        assert not page.evaluate(GIVE, ["#talk", "dragover", [["2.png", base64_of(files[2])]]])
        expect(page.locator("#talk")).to_have_class("dropping")
        assert not page.evaluate(GIVE, ["#talk", "drop", [["2.png", base64_of(files[2])]]])
        expect(page.locator("#talk")).not_to_have_class("dropping")
        assert not page.evaluate(GIVE, ["#text", "paste", [["3.png", base64_of(files[3])]]])
        expect(waiting.get_by_role("img", name="3.png")).to_be_visible()
        drawn = waiting.get_by_role("img", name="2.png").evaluate(
            "one => [one.width, one.height, ...one.getContext('2d').getImageData(0, 0, 40, 30).data]")
        assert drawn[:2] == [40, 30]
        assert np.array_equal(np.array(drawn[2:]).reshape(30, 40, 4)[..., :3], decoded(files[2]))
        waiting.get_by_role("button", name="Remove 1.png").click()
        expect(waiting.get_by_role("img")).to_have_count(3)
        expect(page.get_by_role("button", name="Images", exact=True)).to_be_focused()
        shoot(page, "images")
        send(page, "what are these?")
        expect(page.locator(".message.assistant")).to_contain_text("<image><image><image>what are these?")
        assert [image.content for image in core.submitted[-1].images] == [files[0], files[2], files[3]]
        expect(page.locator(".message.user").get_by_role("img")).to_have_count(3)
        expect(waiting.get_by_role("img")).to_have_count(0)
        shoot(page, "images-sent")
        send(page, "and now?")      # earlier images are a part of the chat
        expect(page.locator(".message.assistant").nth(1)).to_contain_text("and now?")
        assert len(core.submitted[-1].images) == 3
        page.evaluate(GIVE, ["#talk", "drop", [["x.png", base64_of(b"none")]]])
        expect(page.locator("#log .wrong")).to_have_text("x.png is no image that this browser can show.")


def test_no_images_for_models_that_see_none(slow, browser, expect):
    with opened(browser, slow) as page:
        expect(page.get_by_role("button", name="Images", exact=True)).to_be_hidden()
        assert not page.evaluate(GIVE, ["#talk", "drop", [["x.png", base64_of(encoded(pixels()))]]])
        expect(page.locator("#log .wrong")).to_have_text("m sees no images.")


def test_texts(readers, browser, expect):
    url, engine = readers
    lines = ["the red house", "what is a cat?", "the dog sat on the mat"]
    with opened(browser, url) as page:
        model, found = page.locator("#model"), page.locator("#found")
        model.select_option("embedder")
        expect(page.locator("#unfit")).to_contain_text("embedder generates no text: it embeds texts")
        expect(page.locator("#send")).to_be_disabled()
        page.get_by_role("tab", name="Texts").click()
        page.get_by_label("Texts, one a line").fill("\n".join([*lines, "", "  "]))
        page.get_by_role("button", name="Embed").click()
        vectors = engine.embed("embedder", lines)
        expect(found.locator("caption")).to_have_text("Similarities (cosine) of 3 texts by embedder")
        rows = [row.locator("td").all_inner_texts() for row in found.locator("tbody tr").all()]
        assert [[float(cell) for cell in row] for row in rows] == pytest.approx(vectors @ vectors.T, abs=6e-4)
        expect(found.locator("summary").first).to_have_text(f"1. {lines[0]}: {vectors.shape[1]} values")
        shoot(page, "embed")

        page.get_by_role("button", name="Rank").click()
        expect(found).to_have_text("Ranking needs a query.")
        page.get_by_label("Query").fill("what is red?")
        for name in ("embedder", "reranker"):
            model.select_option(name)
            page.get_by_role("button", name="Rank").click()
            expect(found.locator("caption")).to_have_text(f"Ranked by {name} for: what is red?")
            scores = engine.rerank(name, "what is red?", lines)
            order = sorted(range(3), key=lambda i: -scores[i])
            expect(found.locator("tbody th")).to_have_text([lines[i] for i in order])
            shown = [float(text) for text in found.locator("tbody td:nth-child(3)").all_inner_texts()]
            assert shown == pytest.approx([float(scores[i]) for i in order], abs=6e-5)
        shoot(page, "rank")
        expect(page.get_by_role("button", name="Embed")).to_be_hidden()

        model.select_option("classifier")
        expect(page.get_by_label("Query")).to_be_hidden()
        page.get_by_role("button", name="Classify").click()
        expect(found.locator("caption")).to_have_text("Most likely labels by classifier")
        labels = engine.get_model_info("classifier").labels
        for label, best, probs in (row.locator("td").all_inner_texts() for row in found.locator("tbody tr").all()):
            probs = [float(p) for p in probs.split(", ")]
            assert len(probs) == len(labels) and label == labels[probs.index(max(probs))] and float(best) == max(probs)


def test_what_readers_of_screens_hear(http_server, browser, expect):
    """Every control and every region has a name, tables have headers, and the arrow keys go through the views."""
    with opened(browser, http_server.url, KEYS["read"]) as page:
        nameless = page.evaluate("""() => [...document.querySelectorAll(
                'button, input, select, textarea, table, [role=region], [role=img], [role=group], [tabindex="0"]')]
            .filter(one => !(one.labels?.length || one.ariaLabel || one.innerText.trim() || one.caption
                || one.getAttribute('aria-labelledby')))
            .map(one => one.outerHTML)""")
        assert nameless == []
        assert page.locator("th:not([scope])").count() == 0
        twice = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
        assert len(set(twice)) == len(twice)
        page.get_by_role("tab", name="Chat").focus()
        for key, name in (("ArrowRight", "Texts"), ("ArrowRight", "Times"), ("ArrowRight", "Pool"),
                          ("ArrowRight", "Chat"), ("ArrowLeft", "Pool"), ("Home", "Chat"), ("End", "Pool")):
            page.keyboard.press(key)
            tab = page.get_by_role("tab", name=name)
            expect(tab).to_be_focused()
            expect(tab).to_have_attribute("aria-selected", "true")
            expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
            assert page.get_by_role("tabpanel").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(slow, browser, scheme):
    """Texts have a contrast of at least 4.5, and parts of bars of 3 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    with opened(browser, slow, color_scheme=scheme) as page:
        colors = page.evaluate("""names => { const style = getComputedStyle(document.documentElement);
            return Object.fromEntries(names.map(name => [name, style.getPropertyValue(`--${name}`).trim()])); }""",
                               ["ink", "soft", "paper", "card", "accent", "accent-ink", "wrong", "right", "mine",
                                "before", "queue", "prompt", "predicted"])

    def light(name):
        digits = colors[name][1:]
        digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
        parts = [int(digits[i:i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one, other):
        bright, dark = sorted((light(one), light(other)), reverse=True)
        return (bright + 0.05) / (dark + 0.05)

    for text, ground in (("ink", "paper"), ("ink", "card"), ("ink", "mine"), ("soft", "paper"), ("soft", "card"),
                         ("soft", "mine"), ("accent", "card"), ("accent-ink", "accent"), ("wrong", "card"),
                         ("wrong", "paper"), ("right", "card"), ("right", "paper")):
        assert contrast(text, ground) >= 4.5, (text, ground)
    for part in ("before", "queue", "prompt", "predicted"):
        assert contrast(part, "card") >= 3 and contrast(part, "paper") >= 3, part
