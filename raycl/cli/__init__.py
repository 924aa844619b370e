"""The command line: `raycl COMMAND`, each command in a module that is imported when it is used."""
