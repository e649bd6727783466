"""The views of ``kvd-stat``: tables, live, check and explain. The command itself is `kvd.commands.stat`."""
