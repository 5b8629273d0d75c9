"""`python -m launch` is `pretrain-launch`."""

import sys

from launch.cli import main

sys.exit(main())
