"""Tools of chat requests, and the sum of a chat parser's events."""
from __future__ import annotations

import json

import jsonschema

from allspark_server.chat import Content, Reasoning, ToolCallArguments, ToolCallBegin

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"], "additionalProperties": False}}}
TIME = {"type": "function", "function": {"name": "now", "parameters": {
    "type": "object", "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"],
    "additionalProperties": False, "$defs": {"zone": {"enum": ["UTC", "CET"]}}}}}
TOOLS = [WEATHER, TIME]


def joined(events):
    """(content, reasoning, [(name, arguments)]) of events."""
    content, reasoning, calls = "", "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, ToolCallBegin):
            assert event.index == len(calls) and event.id
            calls.append([event.name, ""])
        else:
            assert isinstance(event, ToolCallArguments) and event.index == len(calls) - 1 and event.delta
            calls[event.index][1] += event.delta
    return content, reasoning, [tuple(call) for call in calls]


def check_calls(calls, tools=TOOLS):
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])
