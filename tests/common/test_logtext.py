"""What a log may say of a failure."""

from __future__ import annotations

import pytest

from slotstream.common.logtext import log_text
from slotstream.wire.errors import BadTags, StoreFull
from slotstream.wire.names import check_tags


def test_a_failure_of_ours_is_told_whole() -> None:
    assert log_text(StoreFull.code, "the disk is full") == "STORE_FULL: the disk is full"


def test_what_quotes_the_request_is_told_by_its_code() -> None:
    with pytest.raises(BadTags, match="my secret prompt") as caught:
        check_tags({"my secret prompt\n": "x"})
    assert log_text(caught.value.code, str(caught.value)) == "BAD_TAGS"


def test_a_peers_words_make_one_short_line() -> None:
    assert log_text("ABORTED", "a\nb\x1b[31mc\u2028d") == "ABORTED: a?b?[31mc?d"
    assert len(log_text("ABORTED", "x" * 10_000)) < 600
