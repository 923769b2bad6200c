"""Generates the code of proto/slotstream/v1, or with --check says whether the committed code is what it would be."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = Path("slotstream/v1")
# What is called through stubs: the client's calls, and those between a server's processes. Ingest is raw bytes on both ends.
WITH_STUBS = ("samples.proto", "workers.proto")


def generate(out: Path) -> list[Path]:
    """Write the generated modules below `out`; returns their paths relative to it. Raises RuntimeError."""
    sources = sorted(str(p.relative_to(PROTO_ROOT)) for p in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    _run_protoc(f"--python_out={out}", f"--pyi_out={out}", *sources)
    _run_protoc(f"--grpc_python_out={out}", *(str(PACKAGE / name) for name in WITH_STUBS))
    return sorted(p.relative_to(out) for p in (out / PACKAGE).iterdir() if p.suffix in (".py", ".pyi"))


def _run_protoc(*arguments: str) -> None:
    status = protoc.main(["protoc", f"-I{PROTO_ROOT}", *arguments])
    if status != 0:
        raise RuntimeError(f"protoc exited with {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when something would change")
    if not parser.parse_args().check:
        generate(PROTO_ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        committed = sorted(p.relative_to(PROTO_ROOT) for p in (PROTO_ROOT / PACKAGE).iterdir() if p.suffix in (".py", ".pyi"))
        stale = sorted(
            {
                str(p)
                for p in {*fresh, *committed}
                if p not in fresh or p not in committed or (Path(scratch) / p).read_bytes() != (PROTO_ROOT / p).read_bytes()
            }
        )
    if stale:
        print(f"generated code is stale ({', '.join(stale)}): run `make proto` and commit it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
