"""Which names the pickles of a file refer to, and what such names can do; nothing is run, nothing is made."""
