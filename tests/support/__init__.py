"""Helpers that tests of several parts share: synthetic samples, a raw sender, a server to talk to."""
