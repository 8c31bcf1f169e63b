"""Remote snapshots: download of a version from any source into a local file, and the server that provides it."""
