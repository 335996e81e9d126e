"""What several test suites share; never part of the wheel."""
