"""The commands: each module reads its own arguments, and `main(argv)` returns the exit status."""
