"""One file for each analysis; none imports a sibling."""
