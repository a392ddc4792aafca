"""How a connection comes to be and lives."""
