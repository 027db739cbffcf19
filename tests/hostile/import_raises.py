"""A candidate whose import fails."""

raise RuntimeError("no such accelerator")
