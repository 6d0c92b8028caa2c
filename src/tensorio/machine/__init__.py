"""What the pickle machine does in Python: a function per kind of name, by exact name, from frozen tables."""
