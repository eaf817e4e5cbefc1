"""`python -m localllm` is the command line."""

from localllm.cli.main import main

main()
