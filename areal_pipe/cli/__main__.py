"""`python -m areal_pipe.cli`."""

from areal_pipe.cli import main

main()
