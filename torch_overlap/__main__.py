"""`python -m torch_overlap`: the command line of torch_overlap.tools."""

from torch_overlap.tools.cli import main

if __name__ == "__main__":
    main()
