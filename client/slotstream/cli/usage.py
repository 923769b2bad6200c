"""`slotstream stat` without an id: what the server holds by namespace, its rules, free space, quarantine and scrubbing."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from typing import TYPE_CHECKING

from slotstream.cli.common import open_client, print_json, print_table, shown, size_text
from slotstream.cli.namespaces import check_known, naming_others

if TYPE_CHECKING:
    from slotstream.client import Usage


def run_usage(arguments: argparse.Namespace) -> int:
    namespace = arguments.namespace
    with open_client(arguments) as client, naming_others(client, namespace):
        usage = client.usage(namespace=namespace)
        if not any(space.samples or space.failed for space in usage.namespaces):
            check_known(client, namespace)
    if arguments.json:
        print_json(dataclasses.asdict(usage))
        return 0
    _print_namespaces(usage)
    if namespace is None:
        print(("\n" if usage.namespaces else "") + "\n".join(_facts(usage)))
    return 0


def _print_namespaces(usage: Usage) -> None:
    if not usage.namespaces:
        return
    rows = []
    for space in usage.namespaces:
        rules = " ".join(f"{name}={shown(value)}" for name, value in sorted(space.limits.items()))
        rows.append((space.namespace, str(space.samples), size_text(space.bytes), str(space.failed), rules or "-"))
    print_table(("NAMESPACE", "SAMPLES", "SIZE", "FAILED", "RULES"), rows, right=("SAMPLES", "SIZE", "FAILED"))


def _facts(usage: Usage) -> list[str]:
    if usage.free_bytes is None or usage.quarantined_bytes is None:
        return [f"{name:<10}  -  (needs admin of every namespace)" for name in ("free", "quarantine", "scrubbing")]
    if usage.scrub_every_s is None:
        scrubbing = "off"
    elif usage.scrub_begun_unix_ns and usage.scrub_begun_unix_ns > (usage.scrub_ended_unix_ns or 0):
        scrubbing = f"under way since {_moment(usage.scrub_begun_unix_ns)}"
    else:
        scrubbing = "idle"
    if usage.scrub_samples:
        scrubbing += f", {usage.scrub_samples} samples checked, {usage.scrub_damaged} damaged"
    target = f" (target {size_text(usage.free_bytes_target)})" if usage.free_bytes_target else ""
    return [
        f"free        {size_text(usage.free_bytes)}{target}",
        f"quarantine  {usage.quarantined_files} files, {size_text(usage.quarantined_bytes)}",
        f"scrubbing   {scrubbing}",
        *_rules(usage),
        *_clock(usage),
    ]


def _rules(usage: Usage) -> list[str]:
    told = []
    if usage.rules_wait_s:
        told.append(f"they changed, and delete nothing for another {usage.rules_wait_s:.0f} s")
    if usage.rules_held:
        held = ", ".join(usage.rules_held)
        told.append(f"they would delete more than half of {held}: nothing is deleted there (slotstream retention --accept)")
    return [f"rules       {shown(text)}" for text in told]


def _clock(usage: Usage) -> list[str]:
    if not usage.clock:
        return []
    held = f"; nothing is deleted by age in {', '.join(usage.age_held)} (serve --accept-clock)" if usage.age_held else ""
    return [f"clock       {shown(usage.clock)}{shown(held)}"]


def _moment(unix_ns: int) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_ns // 1_000_000_000, datetime.UTC):%Y-%m-%dT%H:%M:%S}Z"
