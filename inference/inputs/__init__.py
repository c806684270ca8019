"""From Python values, frames and files to rows."""
