"""slotstream inside other projects: a folder each. Nothing of slotstream imports them."""
