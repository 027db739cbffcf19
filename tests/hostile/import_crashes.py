"""A candidate that crashes while it is imported."""

import ctypes

print("importing")  # noqa: T201 - the point of it
ctypes.string_at(0)
