"""Start and stop a rank: process group, run state, check of a custom model, SIGTERM."""
