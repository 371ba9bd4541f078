"""`python -m gqaconvert.training RECIPE`: one process of a run that something else launched."""

from __future__ import annotations

import sys

from gqaconvert.cli.main import main

if __name__ == "__main__":
    main(["uptrain", "--launched", *sys.argv[1:]])
