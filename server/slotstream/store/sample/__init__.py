"""One sample's file.

upload    a sample being written
remote    one that another process writes
reading   a committed sample being read
file      what the header says
row_hash  the hashes of its rows
ranges    which rows are there
"""
