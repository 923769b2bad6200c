"""The sending half in a process of its own, beside the engine's worker."""
