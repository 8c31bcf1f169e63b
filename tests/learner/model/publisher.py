"""A publisher for trainers that are not asked to publish."""


class NoPublisher:
    def publish(self, params, *, step, is_awaited=False):
        del params, step, is_awaited
