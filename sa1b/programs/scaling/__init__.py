"""How training scales from one rank to several on this machine, and what limits it."""
