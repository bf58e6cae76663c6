"""`python -m kernelband` is the command `kernelband`."""

from kernelband.cli import main

main()
