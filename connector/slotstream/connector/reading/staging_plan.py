"""How staging is cut into slots: known from the options and vLLM's configuration, and checked before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slotstream.connector.sending.row_check import PAGE_WORDS, PART_WORDS, note_words
from slotstream.connector.sending.staging_pool import STEPS, StagingShape, default_staging_bytes
from slotstream.connector.vllm_config import ConnectorConfig
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import CHUNK_BYTES_MAX

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORD_BYTES = 8
_EXTRACTED_WORDS = 1  # Of scratch, for each row: its index.
_PAGED_WORDS = PART_WORDS + PAGE_WORDS  # At worst: a part and a page.
_SLOTS_MIN = 8
_READ_BACK_SLOTS = 8
_BATCH_BYTES_MAX = 64 << 20  # Of rows in one read: with extract_hidden_states the device memory that it takes.


def step_tokens_max(vllm_config: VllmConfig) -> int:
    """How many rows a step may compute. Twice the requests more: each may carry one draft token beside its own."""
    scheduler = vllm_config.scheduler_config
    return int(scheduler.max_num_batched_tokens + 2 * scheduler.max_num_seqs)


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """`shape`, the rows that a staging slot holds, those of one read at most, and the bytes that STEPS full steps want."""

    shape: StagingShape
    rows_per_slot: int
    rows_per_batch: int
    wanted_bytes: int

    @property
    def rows_per_part(self) -> int:
        """Rows of one sample that go into one slot."""
        return min(self.rows_per_slot, self.rows_per_batch)

    @classmethod
    def of(cls, config: ConnectorConfig, step_tokens_max: int, batch_bytes_max: int = _BATCH_BYTES_MAX) -> StagingPlan:
        """For steps of at most `step_tokens_max` tokens. Raises ConfigError where a row, or eight slots, have no room.

        A slot holds what a message carries. It also serves as scratch: for the words of a batch's rows, and with
        `extract_hidden_states` for a step's slot mapping, which is why a small `chunk_bytes` is not the whole truth there.
        """
        row_bytes = config.row_bytes
        if row_bytes > CHUNK_BYTES_MAX:
            raise ConfigError(f"a row takes {row_bytes} bytes, and a message {CHUNK_BYTES_MAX}: capture fewer layers")
        words = _PAGED_WORDS if config.direct else _EXTRACTED_WORDS
        least = WORD_BYTES * (words if config.direct else step_tokens_max)
        rows_per_slot = max(1, min(max(config.options.chunk_bytes, least), CHUNK_BYTES_MAX) // row_bytes)
        slot_bytes = _aligned(max(rows_per_slot * row_bytes, least))
        wanted_bytes = STEPS * step_tokens_max * row_bytes
        num_slots = (config.options.staging_bytes or default_staging_bytes(wanted_bytes)) // slot_bytes
        if num_slots < _SLOTS_MIN:
            raise ConfigError(
                f"connector option staging_bytes must be at least {_SLOTS_MIN * slot_bytes}: "
                f"{_SLOTS_MIN} chunks of {slot_bytes} bytes (a row takes {row_bytes})"
            )
        # Rows come back from the spool through slots of their own: a part of staging, whatever else is full.
        reserved = min(_READ_BACK_SLOTS, num_slots // _SLOTS_MIN) if config.options.spool_dir is not None else 0
        notes = note_words(len(config.layer_ids)) if config.direct else 0
        shape = StagingShape(num_slots - reserved, reserved, slot_bytes, row_bytes, notes)
        rows_per_batch = max(1, min(batch_bytes_max // row_bytes, slot_bytes // (WORD_BYTES * words)))
        return cls(shape, rows_per_slot, rows_per_batch, wanted_bytes)


def _aligned(nbytes: int) -> int:
    """The next multiple of a word: an index may begin where a slot does."""
    return -(-nbytes // WORD_BYTES) * WORD_BYTES
