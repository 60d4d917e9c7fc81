import sys

from ab_runs.cli import main

sys.exit(main())
