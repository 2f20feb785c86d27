"""Published experiments run again: one command each, their figures beside ours, and what differs."""
