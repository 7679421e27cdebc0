"""`python -m meshd` is the `meshd` command."""

from meshd.cli import main

if __name__ == "__main__":
    main()
