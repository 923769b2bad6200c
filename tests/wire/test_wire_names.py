"""What may be a sample id, a namespace and tags; anything else is refused with its code and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotstream.wire.errors import BadNamespace, BadSampleId, BadTags, SlotStreamError
from slotstream.wire.names import TAG_BYTES_MAX, TAGS_MAX, check_namespace, check_sample_id, check_tags

CHECKS = pytest.mark.parametrize(
    ("check", "error", "longest"), [(check_sample_id, BadSampleId, 128), (check_namespace, BadNamespace, 64)]
)
Check = Callable[[object], str]


@CHECKS
@pytest.mark.parametrize("name", ["a", "7", "Z", "a.b", "a-b_c.d", "cmpl-0b8f-0", "a..", "0-", "default"])
def test_names_that_are_fine(check: Check, error: type[SlotStreamError], longest: int, name: str) -> None:
    assert check(name) == name


@CHECKS
def test_the_longest_name(check: Check, error: type[SlotStreamError], longest: int) -> None:
    assert check("a" * longest) == "a" * longest
    with pytest.raises(error):
        check("a" * (longest + 1))


@CHECKS
@pytest.mark.parametrize(
    "name",
    # A hidden file, a path, an option of a command, a line break, other scripts' letters and digits, a NUL.
    ["", ".", "..", ".a", "-a", "_a", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "\na", "a\0", "ä", "٣", "a%2f", "ａ", "a:b"],
)
def test_names_that_are_refused(check: Check, error: type[SlotStreamError], longest: int, name: str) -> None:
    with pytest.raises(error) as caught:
        check(name)
    assert "\n" not in str(caught.value)


@CHECKS
@pytest.mark.parametrize("name", [None, 7, b"a", ["a"], {"a": "b"}, True])
def test_other_types_are_refused(check: Check, error: type[SlotStreamError], longest: int, name: object) -> None:
    with pytest.raises(error, match=f"a {type(name).__name__} "):
        check(name)


@CHECKS
@given(name=st.text(max_size=200))
def test_any_text_is_a_name_or_refused(check: Check, error: type[SlotStreamError], longest: int, name: str) -> None:
    allowed = re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name, re.ASCII) is not None and len(name) <= longest
    if allowed and not name.lower().startswith("catalog."):
        assert check(name) == name
    elif not allowed:
        with pytest.raises(error) as caught:
            check(name)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["catalog.sqlite", "catalog.sqlite-wal", "Catalog.X", "CATALOG.", "catalog.a"])
def test_names_of_the_stores_own_files_are_reserved(name: str) -> None:
    with pytest.raises(BadNamespace, match="reserved"):
        check_namespace(name)
    assert check_sample_id(name) == name


@pytest.mark.parametrize("name", ["catalog", "catalogue", "catalog-2", "my.catalog.x"])
def test_names_beside_the_reserved_ones_are_free(name: str) -> None:
    assert check_namespace(name) == name


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"a": ""},
        {"split": "train", "ключ": "значение", "with space": "a=b, c"},
        {str(i): "x" for i in range(TAGS_MAX)},
        {"k" * TAG_BYTES_MAX: "v" * TAG_BYTES_MAX},
        {"é" * (TAG_BYTES_MAX // 2): "é" * (TAG_BYTES_MAX // 2)},
    ],
)
def test_tags_that_are_fine(tags: dict[str, str]) -> None:
    checked = check_tags(tags)
    assert checked == tags
    assert checked is not tags


@pytest.mark.parametrize(
    "tags",
    [
        pytest.param({str(i): "x" for i in range(TAGS_MAX + 1)}, id="one too many"),
        pytest.param({"k" * (TAG_BYTES_MAX + 1): ""}, id="key too long"),
        pytest.param({"k": "v" * (TAG_BYTES_MAX + 1)}, id="value too long"),
        pytest.param({"k": "é" * (TAG_BYTES_MAX // 2) + "x"}, id="value too long in bytes"),
        pytest.param({"": "v"}, id="empty key"),
        pytest.param({"a\nb": ""}, id="line break in a key"),
        pytest.param({"k": "a\x1b[31m"}, id="terminal codes in a value"),
        pytest.param({"k": "\u202e"}, id="a change of writing direction"),
        pytest.param({"k": "\ud800"}, id="half a surrogate pair"),
        pytest.param({"k": "\0"}, id="NUL"),
        pytest.param({"k": 1}, id="number"),
        pytest.param({"k": None}, id="null"),
        pytest.param({1: "v"}, id="key that is a number"),
        pytest.param([("k", "v")], id="pairs"),
        pytest.param("k=v", id="text"),
        pytest.param(None, id="nothing"),
    ],
)
def test_tags_that_are_refused(tags: Any) -> None:
    with pytest.raises(BadTags) as caught:
        check_tags(tags)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=5))
def test_accepted_tags_are_printable_text(tags: dict[str, str]) -> None:
    try:
        checked = check_tags(tags)
    except BadTags:
        return
    assert "".join((*checked, *checked.values())).isprintable()
