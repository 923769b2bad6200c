"""`slotstream capture`: a file of prompts in, their samples out, each stored once."""
