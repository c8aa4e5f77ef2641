"""The most rows that a rank's steps have."""

from __future__ import annotations

from dataclasses import dataclass

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.runtime.native import native_library
from allspark_server.runtime.plan import MAX_STEP_DRAFTS, MAX_STEP_PROBES
from allspark_server.runtime.rank_model import RankModel


@dataclass(frozen=True)
class StepSizes:
    """The most rows of a step, of these the most that have outputs, and the same of a step of a draft model or of a
    layer of a draft head.
    """

    rows: int
    outputs: int
    draft_rows: int
    draft_outputs: int

    def check(self, config: AsModelConfig, most: int, drafts: bool) -> None:
        """Raises AllSparkError if a step of a device that takes at most `most` rows cannot have so many. drafts: they
        are made by a model or head.
        """
        rows = self.draft_rows if drafts else self.rows
        if rows > most:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"a step of {rows} tokens (max_step_tokens, else engine_max_prefill_length + "
                                f"engine_max_batch) is too long: compute_unit={config.compute_unit!r} takes at most "
                                f"{most}; longer prompts are computed in several steps")


def step_sizes(config: AsModelConfig, model: RankModel, default: int, image_rows: int = 0) -> StepSizes:
    """The sizes of a model's steps: by default with room for a prompt chunk and one token of every running request.

    default: rows of a step if the configuration names none. image_rows: those of the largest image if a step must have
    all of them, otherwise 0. Raises AllSparkError if the configuration leaves no room for such an image.
    """
    batch = config.engine_max_batch
    least = image_rows + batch if image_rows else 0     # and a row of every other request
    if model.graph.whole_texts:
        rows = config.max_step_tokens or max(default, config.engine_max_length)
    elif config.max_step_tokens:
        rows = config.max_step_tokens
    elif config.engine_max_prefill_length:
        rows = max(config.engine_max_prefill_length + batch, least)
    else:
        rows = max(default, 2 * batch, least)
    if rows < least:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"max_step_tokens={config.max_step_tokens} of model {config.model_name!r}: a step has all "
                            f"{image_rows} rows of an image, and a row of each other request "
                            f"(engine_max_batch={batch}); set it to at least {least}")
    # Grammars make drafts even without speculation.
    outputs = min(rows, batch + MAX_STEP_DRAFTS + MAX_STEP_PROBES)
    # One more row a sequence: its last draft, if all were accepted. One output a sequence is needed. GPUs replay steps
    # of two rows a sequence as graphs, in which each row has one, up to so many more rows than sequences.
    draft_rows, layers = rows + batch, model.draft_layers
    if layers > 1:
        draft_rows = max(draft_rows, native_library().draft_rows(rows, batch, layers))
    return StepSizes(rows, outputs, draft_rows, batch + min(batch, MAX_STEP_DRAFTS) if config.on_gpus else batch)
