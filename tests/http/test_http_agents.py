"""The HTTP server with libraries for agents and for structured answers, as they are released."""

from __future__ import annotations

import pytest

from support.fake_service import serving
from support.http_helpers import KEYS, MODEL, STORY, http_server_for
from support.script_engine import ScriptEngine

#: the scripted model repeats the last message: first this call, then what the tool has answered
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(core=ScriptEngine("hermes")) as (_, group), \
            http_server_for(group, insecure=True, store=str(tmp_path_factory.mktemp("kept") / "kept.db")) as address:
        yield f"http://{address}"


@pytest.fixture(scope="module")
def story(http_server):
    with http_server.client() as client:
        body = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 24}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_openai_agents(url, endpoint):
    agents = pytest.importorskip("agents")
    import asyncio

    import openai

    agents.set_tracing_disabled(True)
    calls = []

    @agents.function_tool(strict_mode=False)    # the scripted model has no grammar
    def add(a: int, b: int) -> str:
        """Adds."""
        calls.append((a, b))
        return f"the sum is {a + b}"

    kind = agents.OpenAIChatCompletionsModel if endpoint == "chat" else agents.OpenAIResponsesModel

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-")
        agent = agents.Agent(name="adder", instructions="Add.", tools=[add], model=kind("m", client))
        whole = await agents.Runner.run(agent, CALL)
        streamed = agents.Runner.run_streamed(agent, CALL)
        kinds = [event.type async for event in streamed.stream_events()]
        further = None
        if endpoint == "responses":
            further = await agents.Runner.run(agent, "and now?", previous_response_id=whole.last_response_id)
        await client.close()
        return whole, streamed, kinds, further

    whole, streamed, kinds, further = asyncio.run(run())
    assert whole.final_output == streamed.final_output == "the sum is 5" and calls == [(2, 3), (2, 3)]
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
    assert further is None or further.final_output == "and now?"


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_pydantic_ai(url, endpoint):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if endpoint == "chat" else OpenAIResponsesModel
    model = kind("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="-"))
    agent = pydantic_ai.Agent(model, instructions="Add.")
    calls = []

    @agent.tool_plain(strict=False)
    def add(a: int, b: int) -> str:
        """Adds."""
        calls.append((a, b))
        return f"the sum is {a + b}"

    first = agent.run_sync(CALL)
    assert first.output == "the sum is 5" and calls == [(2, 3)] and first.usage.output_tokens > 0
    assert agent.run_sync("and now?", message_history=first.all_messages()).output == "and now?"


def test_instructor(http_server):
    """Structured answers by a named tool and by a schema, which the grammar enforces."""
    instructor = pytest.importorskip("instructor")
    from enum import Enum

    import openai
    import pydantic

    class Animal(str, Enum):
        fox = "fox"
        bear = "bear"

    class Tale(pydantic.BaseModel):
        animal: Animal
        years: int = pydantic.Field(ge=1, le=9)

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{http_server.url}/v1", api_key=KEYS["generate"]),
                                        mode=mode)
        tale = client.chat.completions.create(model=MODEL, messages=STORY, response_model=Tale, max_tokens=100,
                                              temperature=0, max_retries=0)
        assert isinstance(tale, Tale) and 1 <= tale.years <= 9


def test_llama_index(http_server, story):
    like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    model = like.OpenAILike(model=MODEL, api_base=f"{http_server.url}/v1", api_key=KEYS["generate"], temperature=0,
                            max_tokens=24, is_chat_model=True)
    chat = [ChatMessage(**message) for message in STORY]
    assert model.chat(chat).message.content == story
    assert "".join(piece.delta for piece in model.stream_chat(chat)) == story


def test_dspy(http_server, story):
    dspy = pytest.importorskip("dspy")
    model = dspy.LM(f"openai/{MODEL}", api_base=f"{http_server.url}/v1", api_key=KEYS["generate"], temperature=0,
                    max_tokens=24, cache=False)
    found = model(messages=STORY)[0]
    assert (found if isinstance(found, str) else found["text"]) == story
