"""The commands of this package beside ``kvd run``; each asks a daemon, or only calculates."""
