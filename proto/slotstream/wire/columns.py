"""The columns that a sample's file may hold: one table, and the row format of one sample.

Every sample has the default pair, `hidden_states` and `token_ids`. What else it has is named by its sender when it opens the
sample, and in the file's metadata. A column is added to the table here, and nowhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from slotstream.wire.dtypes import ELEMENT_BYTES, SAFETENSORS_BYTES
from slotstream.wire.errors import BadParams, TooLarge, UnsupportedFormat
from slotstream.wire.names import CONTROL_BYTES_MAX, MESSAGE_BYTES_MAX

HIDDEN_STATES, TOKEN_IDS, LOSS_MASK = "hidden_states", "token_ids", "loss_mask"
LAYERS, HIDDEN = "layers", "hidden"  # Dimensions that only a sample has.
_TOKEN_ID_WIRE_BYTES = 5  # Of a token id below 2**35 in a message.


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of a file: `dtype` [rows, *row_shape], in safetensors' spelling.

    In the table a dimension may be LAYERS or HIDDEN, and a `dtype` "" stands for that of the model's hidden states.
    late: it comes with the commit, whole. optional: rows mean the same without it, so a reader that does not know it gets
    the others.
    """

    name: str
    dtype: str
    row_shape: tuple[int | str, ...] = ()
    late: bool = False
    optional: bool = False

    @property
    def element_bytes(self) -> int:
        return SAFETENSORS_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of a sample's column, whose dimensions are numbers."""
        return self.element_bytes * math.prod(size for size in self.row_shape if isinstance(size, int))

    def shape(self, rows: int) -> list[int]:
        """Of the tensor with so many rows."""
        return [rows, *(size for size in self.row_shape if isinstance(size, int))]


# In no order: `RowFormat` puts columns in the file's.
COLUMNS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        Column(HIDDEN_STATES, "", (LAYERS, HIDDEN)),
        Column(TOKEN_IDS, "I64", late=True),
        Column("positions", "I64", late=True),  # Where in the request each row was, where rows were chosen.
        Column("scales", "F32", (LAYERS,)),  # What a layer's elements are to be multiplied with, where they are fp8.
        Column(LOSS_MASK, "U8", late=True, optional=True),  # 1 where a trainer's loss counts the token, else 0.
    )
}
_DEFAULT_PAIR = (HIDDEN_STATES, TOKEN_IDS)


def further_columns() -> list[str]:
    """What this version can read beside the default pair."""
    return [name for name in COLUMNS if name not in _DEFAULT_PAIR]


def taken_columns() -> list[str]:
    """What this version can take from a sender beside the pair: a column that arrives with the rows has no place yet."""
    return [name for name in further_columns() if COLUMNS[name].late]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a column lies: bytes [begin, end) behind the header."""

    column: Column
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class RowFormat:
    """The columns of one sample, in the file's order. Made by `of`; samples of one format share it, worked out once."""

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, dtype: str, num_layers: int, hidden_size: int, further: Iterable[str] = ()) -> RowFormat:
        """Rows of [num_layers, hidden_size] elements, with the columns named beside the default pair.

        Raises BadParams for a dtype that hidden states cannot have, or a column that is named twice; UnsupportedFormat for one
        that is not in the table.
        """
        if dtype not in ELEMENT_BYTES:
            raise BadParams(f"dtype {dtype!r} is not one of {sorted(ELEMENT_BYTES)}")
        names = (*_DEFAULT_PAIR, *further)
        if len(set(names)) != len(names):
            raise BadParams("a column is named twice")
        if unknown := [name for name in names if name not in COLUMNS]:
            raise UnsupportedFormat(f"column {unknown[0][:64]!r} is not one of {sorted(further_columns())}")
        return _of_sample(names, dtype, num_layers, hidden_size)

    @functools.cached_property
    def dtype(self) -> str:
        """Of hidden states."""
        return self.columns[0].dtype

    @functools.cached_property
    def num_layers(self) -> int:
        return self.columns[0].shape(0)[1]

    @functools.cached_property
    def hidden_size(self) -> int:
        return self.columns[0].shape(0)[2]

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states: what arrives of it before the commit."""
        return self.columns[0].row_bytes

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a row of hidden states."""
        return self.columns[0].element_bytes * self.hidden_size

    @functools.cached_property
    def late(self) -> tuple[Column, ...]:
        """What comes with the commit, token ids included."""
        return tuple(column for column in self.columns if column.late)

    @functools.cached_property
    def further(self) -> tuple[Column, ...]:
        """What there is beside the default pair."""
        return tuple(column for column in self.columns if column.name not in _DEFAULT_PAIR)

    @functools.cached_property
    def names(self) -> list[str]:
        """Of what there is beside the default pair: what messages and files call the format by."""
        return [column.name for column in self.further]

    def file_layout(self, rows: int) -> tuple[Place, ...]:
        """Where the columns of a sample of so many rows lie, without gaps."""
        places: list[Place] = []
        begin = 0
        for column, row_bytes in self._row_bytes:
            end = begin + rows * row_bytes
            places.append(Place(column, begin, end))
            begin = end
        return tuple(places)

    def data_bytes(self, rows: int) -> int:
        """Of all columns."""
        return rows * sum(row_bytes for _, row_bytes in self._row_bytes)

    @functools.cached_property
    def _row_bytes(self) -> list[tuple[Column, int]]:
        return [(column, column.row_bytes) for column in self.columns]

    def check_commit(self, rows_max: int) -> None:
        """Raises UnsupportedFormat where a column cannot come with a commit, and TooLarge where they are longer than a message.

        The default pair always fits: a sample may have as many rows as a commit can name token ids.
        """
        further = self.further
        if arriving := [column.name for column in further if not column.late]:
            raise UnsupportedFormat(f"column {arriving[0]!r} arrives with the rows, which this version cannot take")
        nbytes = rows_max * (_TOKEN_ID_WIRE_BYTES + sum(column.row_bytes for column in further))
        if further and nbytes > MESSAGE_BYTES_MAX - CONTROL_BYTES_MAX:
            raise TooLarge(f"a commit of {rows_max} rows with columns {self.names} is longer than {MESSAGE_BYTES_MAX} bytes")


@functools.lru_cache(maxsize=256)  # Most samples of a store have the same, and a reader of small ones asks several times each.
def _of_sample(names: tuple[str, ...], dtype: str, num_layers: int, hidden_size: int) -> RowFormat:
    """These columns of the table, hidden states first, with a sample's sizes."""
    sizes = {LAYERS: num_layers, HIDDEN: hidden_size}

    def sized(column: Column) -> Column:
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in column.row_shape)
        return replace(column, dtype=column.dtype or dtype, row_shape=shape)

    first, *others = (sized(COLUMNS[name]) for name in names)
    # By element size, so that all are aligned; of one size the default pair's comes first, and then by name.
    others.sort(key=lambda column: (-column.element_bytes, column.name != TOKEN_IDS, column.name))
    return RowFormat((first, *others))


class NamedData(Protocol):
    """A message `ColumnData`."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class LateColumns:
    """The late columns of one sample beside its token ids: name -> bytes [rows, *row_shape], row-major, little-endian.

    It goes as it is from the plan's `SampleFinish` through the commit and the spool to the file.
    """

    values: Mapping[str, bytes] = field(default_factory=dict)

    def check(self, row_format: RowFormat, rows: int) -> None:
        """Raises BadParams unless these are the columns of `row_format`, each of so many rows."""
        wanted = {c.name: rows * c.row_bytes for c in row_format.further if c.late}
        if {name: len(data) for name, data in self.values.items()} != wanted:
            raise BadParams(f"the commit's columns are not {wanted}, in bytes, as the sample was opened with")

    def to_wire(self) -> list[dict[str, str | bytes]]:
        """What a message's field of ColumnData is made of."""
        return [{"name": name, "data": data} for name, data in self.values.items()]

    @classmethod
    def from_wire(cls, columns: Iterable[NamedData]) -> LateColumns:
        """Raises BadParams where a column is there twice."""
        values: dict[str, bytes] = {}
        for column in columns:
            if column.name in values:
                raise BadParams("a commit has a column twice")
            values[column.name] = column.data
        return cls(values)


NO_COLUMNS: Final = LateColumns()
