"""`python -m fuel_core` is the `fuel` command."""

import sys

from fuel_core.cli import main

sys.exit(main())
