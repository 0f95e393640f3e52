"""Entry point of `python -m fusecache`."""

import sys

from fusecache.cli.main import main

sys.exit(main())
