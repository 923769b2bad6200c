"""The table of a sample's phases, and its drawing on the design page."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from slotstream.connector.sending.phases import MOVES, Event, Phase

_PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()


def test_the_design_page_tables_these_moves() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| ([A-Z_]+) \| (.+) \|$", _PAGE, re.M)
    assert rows == [(phase.name, event.name, move.to.name, move.does) for (phase, event), move in MOVES.items()]


def test_the_design_page_draws_these_moves() -> None:
    drawing = re.search(r"```mermaid\nstateDiagram-v2\n    \[\*\] --> WAITING\n(.*?)```", _PAGE, re.S)
    assert drawing
    drawn = {
        (source, event, target)
        for source, target, events in re.findall(r"^ *(\w+) --> (\w+): (.+)$", drawing[1], re.M)
        for event in events.split(", ")
    }
    assert drawn == {(phase.name, event.name, move.to.name) for (phase, event), move in MOVES.items()}


def test_every_phase_but_the_last_has_a_way_out_and_a_broken_link_is_no_surprise() -> None:
    for phase in Phase:
        moves = [event for start, event in MOVES if start is phase]
        assert bool(moves) is (phase is not Phase.OVER)
        assert Event.LINK_DOWN in moves or phase is Phase.OVER


def test_who_is_on_the_stream_gets_every_verdict() -> None:
    verdicts = (Event.STORED, Event.FAILED, Event.NOT_NOW)
    for phase, verdict in product(Phase, verdicts):
        assert ((phase, verdict) in MOVES) is phase.on_stream
