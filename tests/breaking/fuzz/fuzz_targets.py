"""Every target by its name. A new parser gets a line here, a corpus from `run.py --corpus NAME`, and nothing else."""

from __future__ import annotations

import fuzz_announced
import fuzz_config
import fuzz_disk
import fuzz_many
import fuzz_server
import fuzz_wire
from fuzz_harness import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (fuzz_wire, fuzz_config, fuzz_disk, fuzz_server, fuzz_many, fuzz_announced)
    for target in module.TARGETS
}
