"""The disk: every system call of the store that names a file is made here.

files           the operations, which tests make fail
retrying        reads that fail are tried again
confined_paths  no link below the data directory is followed
directory       the data directory is still the one that was opened; new directories are durable
clock           times that never go back
"""
