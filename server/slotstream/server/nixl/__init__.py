"""Rows read over NIXL, by processes of their own.

readers         all that a server reads with: samples are dealt out among them
reader          one of them, as the server sees it
reader_process  the process itself, which alone speaks NIXL
pool            the memory that it reads into
"""
