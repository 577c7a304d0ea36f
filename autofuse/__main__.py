"""`python -m autofuse`: the `autofuse` command."""

from autofuse.cli import main

if __name__ == "__main__":
    main()
