"""`python -m llava_consensus.cli`."""

import sys

from llava_consensus.cli import main

if __name__ == "__main__":
    sys.exit(main())
