"""The contracts between rooms: feature spec, rows, and one class for each file format."""
