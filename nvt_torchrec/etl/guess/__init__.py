"""A first feature spec from the head of a file."""
