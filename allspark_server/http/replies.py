"""What chats, responses and messages share: a chat's request to the pool, and its parsed answer."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

from allspark_client.chat import ChatOptions
from allspark_client.config import GenerateConfig
from allspark_client.request import RequestSpec
from allspark_client.types import GeneratedElements, ModelInfo
from allspark_server.chat import Content, Event, Reasoning, ToolCallBegin, chat_format

from .call import Call
from .choices import Choice, Choices
from .errors import bad_value
from .logprobs import ItemLogprobs
from .pool import Answer


def chat_spec(model: str, messages: list[dict[str, Any]], config: GenerateConfig, **options: Any) -> RequestSpec:
    """A request to answer messages in OpenAI's form. `options`: fields of ChatOptions; None: not given.

    Raises ApiError naming the field that is wrong.
    """
    try:
        chat = ChatOptions(**{name: value for name, value in options.items() if value is not None}).check()
    except (ValueError, TypeError) as error:
        raise bad_value(str(error).split("[")[0].split("=")[0].split(" ")[0].split(".")[0], str(error)) from None
    return RequestSpec(model, messages=messages, chat=chat, config=config, want_text=True)


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form. `arguments`: JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_choice(name: str) -> dict[str, Any]:
    """OpenAI's tool_choice of a named function."""
    return {"type": "function", "function": {"name": name}}


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """A reasoning effort as variables of chat templates, by the names that these use."""
    return {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}


def template_kwargs(
    kwargs: dict[str, Any] | None, add_generation_prompt: bool | None = None, effort: str | None = None,
) -> dict[str, Any] | None:
    """Variables of the chat template by the fields of a request; its chat_template_kwargs take precedence."""
    own = {} if add_generation_prompt is None else {"add_generation_prompt": add_generation_prompt}
    return {**effort_kwargs(effort), **own, **(kwargs or {})} or None


class ChatReply:
    """One choice of a chat's answer, parsed into content, reasoning and tool calls."""

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
        """Parse new text; returns its events."""
        return self._note(self._parser.feed(text))

    def finish(self) -> list[Event]:
        """Parse the end of the text; returns its events."""
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
        """The text for the user."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning, which is not for the user."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, in OpenAI's form."""
        return [function_call(begun.id, begun.name, "".join(arguments))
                for begun, arguments in zip(self._begun, self._arguments)]

    def finish_reason(self, choices: Choices, of_named: str = "stop") -> str:
        """Why the choice ended, in OpenAI's words. `of_named`: the word for a call that tool_choice named."""
        reason = choices.finish_reason(self.choice)
        return reason if reason != "stop" or not self._begun else of_named if self._named else "tool_calls"

    async def reasoning_tokens(self, call: Call, info: ModelInfo) -> int:
        """The number of the choice's tokens that are reasoning, including its marks."""
        if not self._reasoning:
            return 0
        known = await call.pool.token_bytes(info, set(self.choice.ids))
        ends = list(itertools.accumulate(len(known[i]) for i in self.choice.ids))
        text = b"".join(known[i] for i in self.choice.ids).decode("latin-1")     # a character for each byte
        return sum(bisect.bisect_left(ends, end) - bisect.bisect_right(ends, begin) + 1
                   for begin, end in self._parser.reasoning_in(text))

    def logprobs(self) -> ItemLogprobs:
        """Finds the log probabilities of parts of the answer."""
        return ItemLogprobs(self._format.markers)


class ChatReplies:
    """All choices of an answer to a chat."""

    def __init__(self, call: Call, answer: Answer, info: ModelInfo, keep_logprobs: bool = False):
        """`keep_logprobs`: see Choices."""
        self._call, self.info = call, info
        self.choices = Choices(answer, info, keep_logprobs=keep_logprobs)
        call.generated.append(self.choices)
        self.all = [ChatReply(answer, info, choice) for choice in self.choices.all]

    def take(self, elements: GeneratedElements) -> tuple[ChatReply, list[Event]]:
        """Add new tokens; returns the choice that they belong to, and their events."""
        reply = self.all[elements.sample_index]
        self.choices.take(elements)
        return reply, reply.feed(elements.text) if elements.text else []

    async def collect(self) -> ChatReplies:
        """Read all tokens until the request ends; returns self."""
        async for elements in self.choices.answer:
            self.take(elements)
        for reply in self.all:
            reply.finish()
        return self

    async def reasoning_tokens(self) -> int:
        """The number of reasoning tokens of all choices."""
        return sum([await reply.reasoning_tokens(self._call, self.info) for reply in self.all])
