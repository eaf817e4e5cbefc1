"""`python -m localllm` runs the command line."""

import sys

from localllm.cli.main import main

sys.exit(main())
