"""``kvd doctor``: looks at the host for what hurts the daemon, explains it, and changes what it may."""
