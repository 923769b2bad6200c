"""The Samples service: samples are read, listed, checked and deleted."""
