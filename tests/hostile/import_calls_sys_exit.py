"""A candidate that is a script."""

import sys

sys.exit("usage: this is a script")
