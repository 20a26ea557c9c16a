"""What any room may use: whole files, tables on the terminal, exit codes, processes, packages that are extras."""
