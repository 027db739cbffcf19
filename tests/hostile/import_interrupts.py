"""A candidate that raises KeyboardInterrupt while it is imported."""

raise KeyboardInterrupt
