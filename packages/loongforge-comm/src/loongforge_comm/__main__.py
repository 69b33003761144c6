"""Entry point of ``python -m loongforge_comm``."""

import sys

from loongforge_comm.cli import main

sys.exit(main())
