"""Bytes with a lifetime: files that are mapped or read, memory, and what is made on first use.

`base` says what a storage is, `files` has that of a file, `ranges` parts of
others; `reading` brings files into memory by large reads, `opening` makes a
storage of what users call a path.
"""
