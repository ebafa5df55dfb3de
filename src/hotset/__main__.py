"""`python -m hotset` is the `hotset` command."""

from hotset.cli.app import main

if __name__ == "__main__":
    main()
