"""Taking heads away, and what that changes."""
