"""Made tests/golden/files, once. It refuses to do so again: see golden_kit.py.

python tests/golden/make_golden.py      (from the repository's root, with PYTHONPATH=tests)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from golden.golden_kit import DATA, FILES, OWNER, SPOOL, write_data, write_spool


def main() -> None:
    if FILES.exists():
        sys.exit("the golden files exist: they show what earlier versions wrote, and are never made again")
    write_data(DATA)
    (DATA / ".lock").unlink()
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(write_spool(Path(scratch) / "spool"), SPOOL / OWNER)


if __name__ == "__main__":
    main()
