"""Operating-system services of every process: logs, lock files, parent death, private sockets, core sets."""
