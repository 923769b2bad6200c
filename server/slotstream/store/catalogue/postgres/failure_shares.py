"""How many failed samples a peer may still leave in the catalogue. See `store/catalogue/attempts.py`."""

from __future__ import annotations

import psycopg

from slotstream.wire.hashing import to_hex, xxh3

_NS = 1_000_000_000
_FORGET = (
    "DELETE FROM failure_shares WHERE peer IN "
    "(SELECT peer FROM failure_shares WHERE at_unix_ns < %s ORDER BY at_unix_ns LIMIT 100 FOR UPDATE SKIP LOCKED)"
)


def take(db: psycopg.Connection, peer: str, wanted: int, most: int, per_s: float, now_unix_ns: int) -> int:
    """In a transaction that writes. How many of `wanted` there were: of `most` at first, and `per_s` more each second."""
    name = to_hex(xxh3(peer.encode("utf-8", "surrogatepass")))
    full_again_ns = round(most / per_s * _NS)
    db.execute(_FORGET, (now_unix_ns - full_again_ns,))  # Who was forgotten has all of it.
    db.execute("INSERT INTO failure_shares VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (name, most, now_unix_ns))
    row = db.execute("SELECT remaining, at_unix_ns FROM failure_shares WHERE peer = %s FOR UPDATE", (name,)).fetchone()
    assert row is not None, "it was put there, and who removes it has to lock it"
    remaining = min(float(most), row[0] + max(0, now_unix_ns - row[1]) / _NS * per_s)
    taken = min(wanted, int(remaining))
    db.execute(
        "UPDATE failure_shares SET remaining = %s, at_unix_ns = %s WHERE peer = %s",
        (remaining - taken, max(now_unix_ns, row[1]), name),
    )
    return taken
