"""``python -m concertina``: runs a program with concertina as its allocator."""

import sys

from concertina import program

program.run(sys.argv[1:])
