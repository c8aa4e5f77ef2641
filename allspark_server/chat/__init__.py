"""Chat formats: how families of models write tool calls and reasoning into the text of their answers.

Each family has a module with its grammar and its parser. Rank 0 renders a chat's prompt and, for a forced tool call,
constrains the answer to the format's grammar. Parsing an answer works in any process and needs no engine:

    options = {"messages": [...], "tools": [...], "tool_choice": "auto", ...}     # see allspark_client.chat.ChatOptions
    _, handle, queue = engine.start_request(model, options, config)
    parser = chat_format(engine.get_model_info(model).chat_format).parser(tools, tool_choice, queue.opened)
    for elements in queue:                                  # one parser for each sample
        for event in parser.feed(elements.text): ...        # Content, Reasoning, ToolCallBegin, ToolCallArguments
    for event in parser.finish(): ...

`options` must have at least one key besides messages (say, "tool_choice": "auto"): only then does the text contain the
special tokens that mark calls.
"""

from .events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from .format import FORMATS, ChatFormat, ReasoningMarks, chat_format
from .formats import chat_format_of, has_unknown_calls

__all__ = ["FORMATS", "ChatFormat", "Content", "Event", "Reasoning", "ReasoningMarks", "ToolCallArguments",
           "ToolCallBegin", "chat_format", "chat_format_of", "has_unknown_calls"]
