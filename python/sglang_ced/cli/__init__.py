"""The `ced` command: one file per subcommand."""
