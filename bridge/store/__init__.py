"""The store: where tickets, complete groups and heartbeats meet."""
