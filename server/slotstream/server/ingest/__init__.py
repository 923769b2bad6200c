"""The Ingest service: samples come in."""
