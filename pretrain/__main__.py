"""`python -m pretrain` is the command `pretrain`."""

import sys

from pretrain.cli import main

sys.exit(main())
