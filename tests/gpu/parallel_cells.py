"""The engines of tests/gpu/parallel.py: over which ranks each is spread, what it serves, and which rank of it is killed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import engines
from support.workload import FINAL_ID, LAYER_IDS

from slotstream.truth import model as truth_model

LAYERS = [0, *LAYER_IDS]


class Layout(NamedTuple):
    """An engine over tensor * pipeline * data ranks, one a GPU. `title` names it in the record.

    `experts`: vLLM's expert parallel. With tensor and data parallel beside it the tokens of a step are then split between the
    ranks of a layer's experts, and where all layers have experts, between those of the whole model.
    """

    title: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False
    in_each_layer: bool = False  # Experts, and not only in two layers.
    only_final: bool = False
    may_refuse: bool = False
    more: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def flags(self) -> list[str]:
        """Of `vllm serve`."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        said = [f"--{name}-parallel-size={size}" for name, size in sizes.items() if size > 1]
        return [*said, *(["--enable-expert-parallel"] if self.experts else []), *self.more]

    def worker(self, rank: int) -> str:
        """How the name of that rank's process begins."""
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        parts = (("DP", self.data, data), ("PP", self.pipeline, pipeline), ("TP", self.tensor, tensor))
        return "VLLM::Worker" + "".join(f"_{name}{at}" for name, size, at in parts if size > 1)


_SEQUENCE = '--compilation-config={"pass_config": {"enable_sp": true}}'
_EACH = ", experts in each layer"
LAYOUTS = {
    "tensor": Layout("tensor 2", tensor=2),
    "data": Layout("data 2", data=2),
    "pipeline": Layout("pipeline 2", pipeline=2),
    "pipeline-final": Layout("pipeline 2, only `final`", pipeline=2, only_final=True),  # Nothing to relay.
    "sequence": Layout("tensor 2, sequence-parallel pass", tensor=2, may_refuse=True, more=(_SEQUENCE,)),
    "tensor-experts": Layout("tensor 2, expert parallel" + _EACH, tensor=2, experts=True, in_each_layer=True),
    "data-experts": Layout("data 2, expert parallel" + _EACH, data=2, experts=True, in_each_layer=True),
    "tensor4": Layout("tensor 4", tensor=4),
    "tensor2-pipeline2": Layout("tensor 2, pipeline 2", tensor=2, pipeline=2),
    "tensor2-pipeline2-final": Layout("tensor 2, pipeline 2, only `final`", tensor=2, pipeline=2, only_final=True),
    "tensor2-data2-experts": Layout("tensor 2, data 2, expert parallel", tensor=2, data=2, experts=True, may_refuse=True),
    "tensor2-data2-experts-each": Layout(
        "tensor 2, data 2, expert parallel" + _EACH, tensor=2, data=2, experts=True, in_each_layer=True, may_refuse=True
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Which engine. `how` is of LAYOUTS; `runner` is vLLM's model runner, 1 or 2; `killed`: the rank that dies at the end."""

    how: str
    runner: int
    kind: truth_model.Kind
    killed: int | None = None

    @property
    def name(self) -> str:
        """Also the namespace of its samples."""
        return f"{self.how}-V{self.runner}-{self.kind}" + ("" if self.killed is None else f"-killed{self.killed}")

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.how]

    @property
    def layers(self) -> list[int]:
        """The ids of what it captures, `final` last."""
        return [FINAL_ID] if self.layout.only_final else [*LAYERS, FINAL_ID]

    @property
    def prompts(self) -> int:
        """Over four GPUs more, for there are fewer engines."""
        return 90 if self.layout.gpus == 2 else 120

    @property
    def may_refuse(self) -> bool:
        """Whether it is right, or refused at start: vLLM relays not every model's layers along a pipeline."""
        return self.layout.may_refuse or (self.how, self.kind) == ("pipeline", "gdn")

    @property
    def key(self) -> tuple[str, ...]:
        """What tells its row of the table from others: the first columns."""
        killed = "" if self.killed is None else f", rank {self.killed} killed"
        return self.layout.title + killed, self.kind, f"V{self.runner}"


_KINDS: tuple[truth_model.Kind, ...] = ("gdn", "swa", "dense")  # The slowest to start first.


def cells(only: Sequence[str], *, gpus: int | None = None, on_cpu: bool = False) -> list[Cell]:
    """Those for 2 or 4 GPUs, or all of them; in the order in which they begin."""
    if on_cpu:
        every = [Cell(how, 1, "dense") for how in ("tensor", "data")]
        every += [Cell("tensor", 1, "dense", killed=rank) for rank in (0, 1)]
    else:
        every = _over_two() + _over_four()
    here = [cell for cell in every if gpus in (None, cell.layout.gpus)]
    return [cell for cell in here if engines.is_chosen(cell.name, only)]


def _over_two() -> list[Cell]:
    found = [Cell(how, runner, kind) for kind, how, runner in itertools.product(_KINDS, ("tensor", "data"), (2, 1))]
    found += [Cell(how, 2, "gdn") for how in ("tensor-experts", "data-experts")]
    found += [Cell("pipeline", 2, kind) for kind in _KINDS]  # V1 relays no auxiliary states.
    found += [Cell("pipeline-final", 2, "gdn")]
    found += [Cell("tensor", runner, "dense", killed=rank) for runner, rank in itertools.product((2, 1), (0, 1))]
    return [*found, Cell("pipeline", 2, "dense", killed=0), Cell("sequence", 2, "dense")]


def _over_four() -> list[Cell]:
    experts = ("tensor2-data2-experts-each", "tensor2-data2-experts")
    found = [Cell("tensor4", runner, "gdn") for runner in (2, 1)]
    found += [Cell(how, runner, "gdn") for how, runner in itertools.product(experts, (2, 1))]
    found += [Cell("tensor2-pipeline2-final", 2, "gdn")]
    found += [Cell("tensor4", runner, kind) for kind, runner in itertools.product(_KINDS[1:], (2, 1))]
    found += [Cell("tensor2-pipeline2", 2, kind) for kind in _KINDS[1:]]
    found += [Cell("tensor4", runner, "dense", killed=rank) for runner, rank in ((2, 0), (2, 2), (1, 2))]
    return [*found, Cell("tensor2-pipeline2", 2, "dense", killed=1), Cell(experts[0], 2, "gdn", killed=3)]
