"""Pipeline schedules as data: templates, search, validation, simulation, and the program of each rank."""
