"""What every process needs of its operating system: logs, lock files, parent death, private sockets, core sets."""
