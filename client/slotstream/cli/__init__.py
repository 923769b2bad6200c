"""The command line, `slotstream <command>`: a module a command."""
