"""A candidate whose import does not end."""

while True:
    pass
