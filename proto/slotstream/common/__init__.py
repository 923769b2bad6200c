"""Small tools that every part may use. Imports nothing of slotstream."""
