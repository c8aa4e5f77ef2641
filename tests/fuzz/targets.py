"""All targets, in the order in which they run."""

from __future__ import annotations

from fuzz.bodies import Bodies
from fuzz.files import Config, Index, Safetensors, Serialized
from fuzz.plans import Plans
from fuzz.target import Target
from fuzz.text import TokenizerConfigs, Tokenizers
from fuzz.wire import Messages

TARGETS: tuple[type[Target], ...] = (
    Plans,
    Messages,
    Safetensors,
    Index,
    Config,
    Serialized,
    Tokenizers,
    TokenizerConfigs,
    Bodies,
)
