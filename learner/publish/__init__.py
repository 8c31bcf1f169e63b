"""Weight publishing: export, snapshot commit, destinations and announcements."""
