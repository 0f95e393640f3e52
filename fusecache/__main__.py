"""`python -m fusecache`: the command line."""

import sys

from fusecache.cli.main import main

sys.exit(main())
