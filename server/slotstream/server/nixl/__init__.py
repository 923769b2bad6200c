"""Rows read over NIXL, by processes of their own."""
