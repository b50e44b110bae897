"""`python -m dtft.cli` is the command `dtft`."""

import sys

from dtft.cli.dispatch import main

if __name__ == "__main__":
    sys.exit(main())
