"""`python -m interp` is the `interp` command."""

from interp.cli import main

if __name__ == "__main__":
    main()
