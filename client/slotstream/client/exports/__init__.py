"""Samples as the files that trainers read: `slotstream export`."""
