"""How tests are run: light and heavy cases, other processes, and calls and runs that several folders share."""
