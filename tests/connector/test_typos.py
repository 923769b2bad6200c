"""Keys beside ours in `kv_transfer_params`: what looks like a typo is said once, and what others use never."""

from __future__ import annotations

import random

import pytest

from slotstream.connector.planning.typos import Typos, misspelt, warning_of

OTHERS = """
    do_remote_prefill do_remote_decode remote_engine_id remote_request_id remote_block_ids remote_host remote_port
    remote_notify_port remote_handshake_port transfer_id tp_size pp_size dcp_size remote_num_tokens remote_bootstrap_addr
    max_offload_tokens max_load_tokens include_output_tokens hidden_states_path disagg_spec is_request_leader lmcache
"""


@pytest.mark.parametrize(
    "key",
    ["slotstrem", "slotsream", "slotstreams", "slot_stream", "slot-stream", "SlotStream", "slotsrteam", "slotstr", "slotstre"],
)
def test_a_key_within_two_edits_is_said(key: str) -> None:
    assert (misspelt({key: {}}) == [key]) == (key != "slotstr")


def test_edits_are_counted_as_they_were_made() -> None:
    rng = random.Random(3)
    for edits in [1, 2] * 200:
        key = list("slotstream")
        for _ in range(edits):
            at = rng.randrange(len(key))
            how = rng.randrange(3)
            if how == 0:
                key.insert(at, "x")
            elif how == 1:
                del key[at]
            else:
                key[at] = "y"
        assert misspelt({"".join(key): 1}) == ["".join(key)] or "".join(key) == "slotstream"  # The second undid the first.


def test_what_others_use_and_what_is_right_is_never_said() -> None:
    assert misspelt(dict.fromkeys([*OTHERS.split(), "slotstream", "stream", "slots", "", "x" * 10_000])) == []
    assert misspelt(None) == []
    assert misspelt({5: "x", None: "y"}) == []  # type: ignore[dict-item]
    assert warning_of({"slotstream": {}}) is None


def test_each_key_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    typos = Typos()
    for _ in range(3):
        typos.look({"slotstrem": {"sample_id": "a prompt"}, "slotstream": {}})
        typos.look({"slotstreem": {}})
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "the key 'slotstrem', which nobody reads: slotstream is the key" in caplog.records[0].getMessage()
    assert "a prompt" not in caplog.text


def test_the_number_of_warnings_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    typos = Typos()
    for number in range(2000):
        typos.look({"slotstrea" + chr(0x4E00 + number): {}})
    assert len(caplog.records) == 1024
