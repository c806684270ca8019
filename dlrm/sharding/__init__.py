"""The sharding plan, and the model spread over ranks by it."""
