"""`python -m gqaconvert` is the command line."""

from gqaconvert.cli.main import main

main()
