"""Which files a directory holds, while somebody else removes some of them."""

import os
from pathlib import Path


def files_below(directory: Path, suffix: str) -> list[Path]:
    """Returns the files anywhere below `directory` whose names end with `suffix`, sorted.

    A directory that goes away meanwhile counts as empty: `Path.rglob` raises FileNotFoundError for one.
    """
    found = (Path(path, name) for path, _, names in os.walk(directory) for name in names if name.endswith(suffix))
    return sorted(found)
