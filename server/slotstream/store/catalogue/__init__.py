"""The catalogue: a SQLite index of the sample files, which can be rebuilt from them."""
