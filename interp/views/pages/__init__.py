"""Report pages: what stands on them, and the templates that render them."""
