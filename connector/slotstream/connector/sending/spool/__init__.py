"""Samples on the engine's own disk while the server cannot take them."""
