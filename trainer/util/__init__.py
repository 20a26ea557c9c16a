"""What any room may use: files written whole, tables on the terminal, exit codes, packages that are extras."""
