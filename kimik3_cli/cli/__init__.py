"""The command line: Typer commands and the one exit."""
