"""A chat on its way to the pool, and its answers taken apart: what chats, responses and messages have in common."""

from __future__ import annotations

from typing import Any

from allspark_client.chat import ChatOptions
from allspark_client.config import GenerateConfig
from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, ModelInfo
from allspark_server.chat import Content, Event, Reasoning, ToolCallBegin, chat_format

from .call import Call
from .choices import Choice, Choices
from .errors import bad_value
from .pool import Answer


def chat_spec(model: str, messages: list[dict[str, Any]], config: GenerateConfig, **options: Any) -> RequestSpec:
    """A request for the answer to messages in OpenAI's form. `options`: of ChatOptions; None: not given. Raises
    ApiError.
    """
    try:
        chat = ChatOptions(**{name: value for name, value in options.items() if value is not None}).check()
    except (ValueError, TypeError) as error:
        raise bad_value(str(error).split("[")[0].split("=")[0].split(" ")[0].split(".")[0], str(error)) from None
    return RequestSpec(model, messages=messages, chat=chat, config=config, want_text=True)


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """An effort of reasoning, by the names that templates have for it."""
    return {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}


class Talk:
    """One choice of a chat's answer: what of its text is for the user, what the model told itself, what it calls."""

    def __init__(self, answer: Answer, info: ModelInfo, choice: Choice):
        options = answer.spec.chat or ChatOptions()
        self.choice = choice
        self._format = chat_format(options.chat_format or info.chat_format)
        self._opened = answer.opened
        self._parser = self._format.parser(options.tools, options.tool_choice, self._opened)
        self._named = isinstance(options.tool_choice, dict)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []
        self._begun: list[ToolCallBegin] = []

    def feed(self, text: str) -> list[Event]:
        """What further text brings."""
        return self._note(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """What the end of the text brings."""
        return self._note(self._parser.finish())

    def _note(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallBegin):
                self._begun.append(event)
                self._arguments.append([])
            else:
                self._arguments[event.index].append(event.delta)
        return events

    @property
    def content(self) -> str:
        """For the user."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """For the model itself."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Of tools, in OpenAI's form."""
        return [{"id": begun.id, "type": "function",
                 "function": {"name": begun.name, "arguments": "".join(arguments)}}
                for begun, arguments in zip(self._begun, self._arguments)]

    def finish_reason(self, choices: Choices, of_named: str = "stop") -> str:
        """Why the choice ended, in OpenAI's words: one that had to call a named function "stops"."""
        reason = choices.finish_reason(self.choice)
        return reason if reason != "stop" or not self._begun else of_named if self._named else "tool_calls"

    async def reasoning_tokens(self, call: Call, info: ModelInfo) -> int:
        """How many of the choice's tokens are reasoning, with what closes it."""
        if not self._reasoning:
            return 0
        ends = [end.encode() for _, end in self._parser.REASONING]
        known = await call.pool.token_bytes(info, set(self.choice.ids))
        text = b""
        for count, i in enumerate(self.choice.ids, 1):
            text = text[-64:] + known[i]
            if any(end in text for end in ends):
                return count
        return len(self.choice.ids)


class Talks:
    """All choices of an answer to a chat."""

    def __init__(self, call: Call, answer: Answer, info: ModelInfo):
        self._call, self.info = call, info
        self.choices = Choices(answer, info)
        self.all = [Talk(answer, info, choice) for choice in self.choices.all]

    def take(self, elements: GeneratedElements) -> tuple[Talk, list[Event]]:
        """Notes what has come; returns whose it is and what it brings."""
        talk = self.all[elements.sample_index]
        self.choices.take(elements)
        return talk, talk.feed(elements.text) if elements.text else []

    async def collect(self) -> Talks:
        """Waits for all of it."""
        async for elements in self.choices.answer:
            self.take(elements)
        for talk in self.all:
            talk.finish()
        return self

    async def reasoning_tokens(self) -> int:
        """Of all choices."""
        return sum([await talk.reasoning_tokens(self._call, self.info) for talk in self.all])
