"""`python -m fedeve` is the command line."""

from .cli import main

main()
