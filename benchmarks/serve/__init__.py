"""The server under load, over loopback."""
