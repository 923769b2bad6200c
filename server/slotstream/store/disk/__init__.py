"""The disk: every system call of the store that names a file is made here."""
