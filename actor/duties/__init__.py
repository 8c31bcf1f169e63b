"""What an actor does beside its loop, one coroutine a duty."""
