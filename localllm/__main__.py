"""`python -m localllm` is the command line."""

import sys

from localllm.cli.main import main

sys.exit(main())
