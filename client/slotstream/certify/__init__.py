"""`slotstream certify`: an engine with the user's own flags, and the truth model in it, whose every row is compared."""
