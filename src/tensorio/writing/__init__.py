"""Files that appear whole or not at all; docs/durability.md has the steps.

`output` writes one, `folders` a folder of several at once, `filesets` files
that one of them names; `temporaries` are what is there until it is renamed,
`carrying` brings over what others keep in a folder that is replaced.
"""
