"""`python -m fusecache`: the command line."""

import sys

from fusecache.cli import main

sys.exit(main())
