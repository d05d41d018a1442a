"""`python -m tcomp` is the `tcomp` command."""

from tcomp.cli import main

if __name__ == "__main__":
    main()
