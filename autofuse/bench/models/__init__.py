"""`autofuse bench models`: layers of models end to end, compiled in every way that a user has."""
