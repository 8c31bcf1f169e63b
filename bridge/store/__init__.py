"""Store of a run: tickets, complete groups, heartbeats and announcements."""
