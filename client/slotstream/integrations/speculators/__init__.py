"""speculators trains on rows that stay in the store: `python -m slotstream.integrations.speculators train ...`."""
