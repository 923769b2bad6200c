"""One sample's file: written, hashed and read."""
